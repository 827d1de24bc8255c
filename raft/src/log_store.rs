//! openraft's log, over a group's part of the node's log.
//!
//! An append hands entries to the node's writer, which makes them readable at once and calls back when one sync for all
//! groups has made them durable; payloads stay the `Bytes` they came as.
//!
//! Invariants:
//! - openraft hears of durability only after the bytes are durable, and in order;
//! - votes, truncations and purges are durable before their call returns; the committed position is lazily so, and
//!   counts after a restart only if the log holds the entry it names;
//! - reads of what is no longer in memory run on a blocking thread;
//! - entries for a follower are bounded by bytes, and there is always at least one.
//!
//! Layouts (version 1): vote: version u8, term, leader u64, committed u8; committed: version u8, log id.
//!
//! Not here: segments, group commit, recovery (`evershard_storage::log`), when to purge (`group`).

use std::fmt::Debug;
use std::io;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds, RangeInclusive};
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use evershard_storage::log::{Entry, EntryId, GroupLog};
use futures_util::{Stream, StreamExt};
use openraft::OptionalSend;
use openraft::storage::{IOFlushed, LogState, RaftLogReader, RaftLogStorage};
use tokio::sync::oneshot;

use crate::cursor::{DecodeError, Reader, put_log_id, put_vote};
use crate::executor::{self, ApplyExecutor};
use crate::options::RaftLimits;
use crate::state_machine::StateMachine;
use crate::transport::codec::{payload_of, payload_parts};
use crate::type_config::{LeaderId, LogId, Payload, RaftEntry, Runtime, TypeConfig, Vote};

const VERSION: u8 = 1;

/// See the module. Cloning gives another reader of the same log.
pub(crate) struct LogStore<RT> {
    log: GroupLog,
    executor: Arc<dyn ApplyExecutor>,
    state_machine: Arc<dyn StateMachine>,
    append_bytes: u64,
    apply_bytes: u64,
    _runtime: PhantomData<fn() -> RT>,
}

impl<RT> Clone for LogStore<RT> {
    fn clone(&self) -> Self {
        Self {
            log: self.log.clone(),
            executor: Arc::clone(&self.executor),
            state_machine: Arc::clone(&self.state_machine),
            append_bytes: self.append_bytes,
            apply_bytes: self.apply_bytes,
            _runtime: PhantomData,
        }
    }
}

impl<RT: Runtime> LogStore<RT> {
    pub(crate) fn new(
        log: GroupLog,
        executor: Arc<dyn ApplyExecutor>,
        state_machine: Arc<dyn StateMachine>,
        limits: &RaftLimits,
    ) -> Self {
        Self {
            log,
            executor,
            state_machine,
            append_bytes: limits.append_bytes as u64,
            apply_bytes: limits.apply_bytes as u64,
            _runtime: PhantomData,
        }
    }

    /// Whether nothing was ever written here: such a replica cannot have promised anything to anyone.
    pub(crate) fn is_pristine(&self) -> bool {
        self.log.vote().is_none() && self.log.state().last.is_none()
    }

    async fn read(&self, start: u64, end: u64, bytes_max: u64) -> io::Result<Vec<RaftEntry>> {
        self.read_or_replay(start, end, bytes_max, false).await
    }

    /// With `replay`, what is not in memory any more was appended by a process before this one, or long ago: its commands are
    /// announced to the state machine.
    async fn read_or_replay(
        &self,
        start: u64,
        end: u64,
        bytes_max: u64,
        replay: bool,
    ) -> io::Result<Vec<RaftEntry>> {
        if start >= end {
            return Ok(Vec::new());
        }
        let mut announce = false;
        let entries = match self.log.read_cached(start..end, bytes_max) {
            Some(entries) => entries,
            None => {
                announce = replay;
                let log = self.log.clone();
                let read = executor::read(&*self.executor, move || log.read(start..end, bytes_max)).await;
                read.map_err(io::Error::other)??
            }
        };
        let entries: Vec<RaftEntry> = entries.into_iter().map(raft_entry).collect::<io::Result<_>>()?;
        if announce {
            self.announce(&entries);
        }
        Ok(entries)
    }

    fn announce(&self, entries: &[RaftEntry]) {
        for entry in entries {
            if let Payload::Normal(command) = &entry.payload {
                self.state_machine.announced(&command.payload);
            }
        }
    }

    /// The part of a range that the log can hold.
    fn clamp(&self, range: &impl RangeBounds<u64>) -> (u64, u64) {
        let state = self.log.state();
        let next = state.last.map_or(0, |last| last.index.saturating_add(1));
        let start = match range.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(last) => last.saturating_add(1),
            Bound::Excluded(end) => *end,
            Bound::Unbounded => u64::MAX,
        };
        (start.max(state.first), end.min(next))
    }
}

impl<RT: Runtime> RaftLogReader<TypeConfig<RT>> for LogStore<RT> {
    async fn entries_stream<RB>(
        &mut self,
        range: RB,
    ) -> impl Stream<Item = Result<RaftEntry, io::Error>> + OptionalSend
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let (start, end) = self.clamp(&range);
        let reader = self.clone();
        // One bounded read at a time: a long replay never holds more than one batch.
        let batches = futures_util::stream::unfold(Some(start), move |next| {
            let reader = reader.clone();
            async move {
                let start = next.filter(|start| *start < end)?;
                match reader.read_or_replay(start, end, reader.apply_bytes, true).await {
                    Ok(entries) => {
                        let last = entries.last()?.log_id.index();
                        let items: Vec<_> = entries.into_iter().map(Ok).collect();
                        Some((items, Some(last.saturating_add(1))))
                    }
                    Err(error) => Some((vec![Err(error)], None)),
                }
            }
        });
        Box::pin(batches.flat_map(futures_util::stream::iter).fuse())
    }

    async fn try_get_log_entries<RB>(&mut self, range: RB) -> Result<Vec<RaftEntry>, io::Error>
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let (start, end) = self.clamp(&range);
        // openraft replays through this when it starts.
        self.read_or_replay(start, end, u64::MAX, true).await
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        self.log.vote().map(|bytes| decode_vote(bytes).map_err(unreadable)).transpose()
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> Result<Vec<RaftEntry>, io::Error> {
        self.read(start, end, self.append_bytes).await
    }

    async fn get_key_log_ids(&mut self, range: RangeInclusive<LogId>) -> Result<Vec<LogId>, io::Error> {
        // The last entry of each leader (the trait's text says the first; openraft and its suite mean the last). Leaders
        // only grow along a log, so it is found by bisection, without reading payloads.
        let last = *range.end();
        let mut key_ids = Vec::new();
        let mut current = *range.start();
        while current.committed_leader_id() != last.committed_leader_id() {
            let (mut low, mut high) = (current, last);
            while high.index() - low.index() > 1 {
                let middle = self.id_at(low.index() + (high.index() - low.index()) / 2)?;
                if middle.committed_leader_id() == current.committed_leader_id() {
                    low = middle;
                } else {
                    high = middle;
                }
            }
            key_ids.push(low);
            current = high;
        }
        key_ids.push(last);
        Ok(key_ids)
    }
}

impl<RT: Runtime> LogStore<RT> {
    fn id_at(&self, index: u64) -> io::Result<LogId> {
        self.log.entry_id(index).map(|id| log_id(&id)).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                format!("log entry {index} of {} is absent", self.log.key()),
            )
        })
    }
}

impl<RT: Runtime> RaftLogStorage<TypeConfig<RT>> for LogStore<RT> {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<TypeConfig<RT>>, io::Error> {
        let state = self.log.state();
        Ok(LogState {
            last_purged_log_id: state.last_purged.as_ref().map(log_id),
            last_log_id: state.last.as_ref().map(log_id),
        })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        let encoded = encode_vote(vote);
        durable(|callback| self.log.save_vote(encoded, callback)).await
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), io::Error> {
        if let Some(committed) = committed {
            self.log.save_committed(encode_committed(&committed));
        }
        Ok(())
    }

    /// Only a position this log proves. The record of it may have reached the disk before the entries it speaks of, or
    /// before the truncation that made room for them; openraft applies up to it by index, whatever lies there. Entries
    /// of one id have the same prefix everywhere, so holding the very entry is proof. What is not proven the leader
    /// says again.
    async fn read_committed(&mut self) -> Result<Option<LogId>, io::Error> {
        let Some(bytes) = self.log.committed() else { return Ok(None) };
        let committed = decode_committed(bytes).map_err(unreadable)?;
        let held = match self.log.state().last_purged {
            Some(purged) if purged.index == committed.index() => Some(purged),
            _ => self.log.entry_id(committed.index()),
        };
        Ok(held.is_some_and(|id| log_id(&id) == committed).then_some(committed))
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<TypeConfig<RT>>) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = RaftEntry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let entries: Vec<RaftEntry> = entries.into_iter().collect();
        self.log.admitted().await;
        self.announce(&entries);
        let entries = entries.iter().map(log_entry).collect();
        self.log.append(entries, Box::new(move |result| callback.io_completed(result)));
        Ok(())
    }

    async fn truncate_after(&mut self, last_log_id: Option<LogId>) -> Result<(), io::Error> {
        let from = last_log_id.map_or(0, |last| last.index().saturating_add(1));
        durable(|callback| self.log.truncate_from(from, callback)).await
    }

    async fn purge(&mut self, log_id: LogId) -> Result<(), io::Error> {
        let leader = log_id.committed_leader_id();
        let id = EntryId { index: log_id.index(), term: leader.term, leader: leader.node_id };
        durable(|callback| self.log.purge_through(id, callback)).await
    }
}

/// Starts an operation and waits until it is durable.
pub(crate) async fn durable(start: impl FnOnce(Box<dyn FnOnce(io::Result<()>) + Send>)) -> io::Result<()> {
    let (done, result) = oneshot::channel();
    start(Box::new(move |outcome| {
        let _ = done.send(outcome);
    }));
    result.await.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::BrokenPipe, "the log is closed")))
}

fn log_id(id: &EntryId) -> LogId {
    LogId::new(LeaderId { term: id.term, node_id: id.leader }, id.index)
}

fn log_entry(entry: &RaftEntry) -> Entry {
    let leader = entry.log_id.committed_leader_id();
    let (kind, time_ms, payload) = payload_parts(&entry.payload);
    Entry { index: entry.log_id.index(), term: leader.term, leader: leader.node_id, kind, time_ms, payload }
}

fn raft_entry(entry: Entry) -> io::Result<RaftEntry> {
    let log_id = log_id(&entry.id());
    let payload = payload_of(entry.kind, entry.time_ms, entry.payload).map_err(unreadable)?;
    Ok(RaftEntry { log_id, payload })
}

fn unreadable(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

pub(crate) fn encode_vote(vote: &Vote) -> Bytes {
    let mut out = BytesMut::with_capacity(18);
    out.put_u8(VERSION);
    put_vote(&mut out, vote);
    out.freeze()
}

pub(crate) fn decode_vote(bytes: Bytes) -> Result<Vote, DecodeError> {
    let mut reader = Reader::new(bytes);
    reader.version(VERSION, "vote record version")?;
    let vote = reader.vote("vote record")?;
    reader.end("vote record")?;
    Ok(vote)
}

pub(crate) fn encode_committed(committed: &LogId) -> Bytes {
    let mut out = BytesMut::with_capacity(25);
    out.put_u8(VERSION);
    put_log_id(&mut out, committed);
    out.freeze()
}

pub(crate) fn decode_committed(bytes: Bytes) -> Result<LogId, DecodeError> {
    let mut reader = Reader::new(bytes);
    reader.version(VERSION, "committed record version")?;
    let committed = reader.log_id("committed record")?;
    reader.end("committed record")?;
    Ok(committed)
}
