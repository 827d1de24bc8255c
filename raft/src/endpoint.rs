//! A replica's receiving side: what it answers to the frames of its peers.
//!
//! Invariants:
//! - a replica that restarted neither votes nor says how it would vote, nor stands for election, for one leader lease:
//!   before the restart it may have promised the leader not to, and openraft does not remember leases (design 14.9);
//! - a received snapshot is given to openraft with the mark that was sent;
//! - on a full disk entries are refused before openraft has them, which would take them for kept: votes and heartbeats go
//!   on, and nothing piles up in memory.
//!
//! Not here: order and pipelining of appends (`transport::router`), deciding anything (openraft).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use evershard_storage::log::GroupLog;
use openraft::Raft;
use openraft::errors::Fatal;
use openraft::raft::AppendEntriesRequest;
use openraft::storage::Snapshot;

use crate::applier::{Applier, ApplierState, SnapshotData, meta_of};
use crate::cursor::DecodeError;
use crate::executor::{self, ApplyExecutor};
use crate::snapshot::installer::{Installer, ReceiveError};
use crate::snapshot::message::{self, Begin, Begun, Chunk, Finish, Forget};
use crate::transport::{FrameKind, Refusal, codec};
use crate::type_config::{Payload, Runtime, TypeConfig, Vote};

/// See the module.
pub(crate) struct Endpoint<RT: Runtime> {
    group: u64,
    replica: u64,
    raft: Raft<TypeConfig<RT>, Applier<RT>>,
    state: Arc<ApplierState>,
    installer: Arc<Installer>,
    executor: Arc<dyn ApplyExecutor>,
    log: GroupLog,
    door_open: AtomicBool,
    may_stand: AtomicBool,
}

impl<RT: Runtime> Endpoint<RT> {
    pub(crate) fn new(
        group: u64,
        replica: u64,
        raft: Raft<TypeConfig<RT>, Applier<RT>>,
        state: Arc<ApplierState>,
        installer: Arc<Installer>,
        executor: Arc<dyn ApplyExecutor>,
        log: GroupLog,
    ) -> Self {
        Self {
            group,
            replica,
            raft,
            state,
            installer,
            executor,
            log,
            door_open: AtomicBool::new(false),
            may_stand: AtomicBool::new(true),
        }
    }

    pub(crate) fn group(&self) -> u64 {
        self.group
    }

    pub(crate) fn replica(&self) -> u64 {
        self.replica
    }

    pub(crate) fn raft(&self) -> &Raft<TypeConfig<RT>, Applier<RT>> {
        &self.raft
    }

    /// The leader lease since the start is over: vote, and stand for election.
    pub(crate) fn open_door(&self) {
        self.door_open.store(true, Ordering::Release);
        self.raft.runtime_config().elect(self.may_stand.load(Ordering::Acquire));
    }

    /// Whether to stand for election when the door is open. Votes are granted either way.
    pub(crate) fn set_may_stand(&self, may_stand: bool) {
        self.may_stand.store(may_stand, Ordering::Release);
        self.raft.runtime_config().elect(may_stand && self.is_door_open());
    }

    /// Whether the log takes these entries now.
    pub(crate) fn has_room(&self, request: &AppendEntriesRequest<TypeConfig<RT>>) -> bool {
        let is_command = |payload: &Payload| matches!(payload, Payload::Normal(_));
        let is_essential = !request.entries.iter().any(|entry| is_command(&entry.payload));
        request.entries.is_empty() || self.log.has_room(codec::append_bytes(request) as u64, is_essential)
    }

    pub(crate) fn is_door_open(&self) -> bool {
        self.door_open.load(Ordering::Acquire)
    }

    fn check_door(&self) -> Result<(), Refusal> {
        if self.is_door_open() { Ok(()) } else { Err(Refusal::DoorShut) }
    }

    /// Answers one frame. Appends that come this way (heartbeats) are not pipelined.
    pub(crate) async fn answer(&self, kind: FrameKind, body: Bytes) -> Result<Bytes, Refusal> {
        match kind {
            FrameKind::Append => self.append(body).await,
            FrameKind::Vote => {
                self.check_door()?;
                let request = codec::decode_vote::<RT>(body).map_err(unreadable)?;
                let reply = self.raft.vote(request).await.map_err(|error| self.stopped(&error))?;
                Ok(codec::encode_vote_reply::<RT>(&reply))
            }
            FrameKind::PreVote => {
                self.check_door()?;
                let request = codec::decode_vote::<RT>(body).map_err(unreadable)?;
                let reply = self.raft.pre_vote(request).await.map_err(|error| self.stopped(&error))?;
                Ok(codec::encode_vote_reply::<RT>(&reply))
            }
            FrameKind::TransferLeader => {
                self.check_door()?;
                let request = codec::decode_transfer::<RT>(body).map_err(unreadable)?;
                if let Err(reason) =
                    self.raft.handle_transfer_leader(request).await.map_err(|error| self.stopped(&error))?
                {
                    tracing::info!(group = self.group, replica = self.replica, %reason, "leadership not taken");
                }
                Ok(codec::encode_done())
            }
            FrameKind::SnapshotBegin => {
                let begin = Begin::decode(body).map_err(unreadable)?;
                if self.knows_higher_vote(&begin.vote) {
                    return Err(Refusal::Snapshot("the sender no longer leads".to_owned()));
                }
                if let Some(vote) = self.vote_if_applied(&begin) {
                    return Ok(Begun::Unneeded(vote).encode());
                }
                let kept = self.receive(move |installer| installer.begin(begin)).await?;
                Ok(Begun::Send(kept).encode())
            }
            FrameKind::SnapshotChunk => {
                let chunk = Chunk::decode(body).map_err(unreadable)?;
                self.receive(move |installer| installer.chunk(&chunk)).await?;
                Ok(codec::encode_done())
            }
            FrameKind::SnapshotForget => {
                let forget = Forget::decode(body).map_err(unreadable)?;
                self.receive(move |installer| installer.forget(&forget)).await?;
                Ok(codec::encode_done())
            }
            FrameKind::SnapshotFinish => self.install(Finish::decode(body).map_err(unreadable)?).await,
            FrameKind::SnapshotAbort => {
                let transfer = message::decode_abort(body).map_err(unreadable)?;
                self.receive(move |installer| {
                    installer.abort(transfer);
                    Ok(())
                })
                .await?;
                Ok(codec::encode_done())
            }
            FrameKind::Reply | FrameKind::Refused => {
                Err(Refusal::Unreadable("an answer to nothing".to_owned()))
            }
        }
    }

    async fn append(&self, body: Bytes) -> Result<Bytes, Refusal> {
        let request = codec::decode_append::<RT>(body).map_err(unreadable)?;
        if !self.has_room(&request) {
            return Err(Refusal::NoRoom);
        }
        let previous = request.prev_log_id;
        let last = request.entries.last().map(|entry| entry.log_id).or(previous);
        let reply = self.raft.append_entries(request).await.map_err(|error| self.stopped(&error))?;
        if reply.is_conflict() && previous.is_none() {
            return Err(Refusal::Unreadable("nothing cannot conflict".to_owned()));
        }
        Ok(codec::encode_append_reply::<RT>(&reply.into_stream_result(previous, last)))
    }

    fn knows_higher_vote(&self, vote: &Vote) -> bool {
        let metrics = self.raft.server_metrics();
        let known = openraft::async_runtime::watch::WatchReceiver::borrow_watched(&metrics).vote;
        known.partial_cmp(vote) == Some(std::cmp::Ordering::Greater)
    }

    /// This replica's vote, when it has applied everything that the snapshot holds: an answer was lost on the way.
    fn vote_if_applied(&self, begin: &Begin) -> Option<Vote> {
        let metrics = self.raft.metrics();
        let metrics = openraft::async_runtime::watch::WatchReceiver::borrow_watched(&metrics);
        let applied = metrics.last_applied.as_ref()?.index();
        (begin.mark.position?.index <= applied).then_some(metrics.vote)
    }

    async fn install(&self, finish: Finish) -> Result<Bytes, Refusal> {
        let vote = finish.vote;
        let received = self.receive(move |installer| installer.finish(&finish)).await?;
        let meta = meta_of(received.mark()).map_err(|error| Refusal::Snapshot(error.to_string()))?;
        // openraft takes both for granted.
        match &meta.last_log_id {
            None => return Err(Refusal::Snapshot("it holds nothing".to_owned())),
            Some(last) if *last.committed_leader_id() > vote.leader_id => {
                return Err(Refusal::Snapshot("it is of a later leader than its sender".to_owned()));
            }
            Some(_) => {}
        }
        tracing::info!(group = self.group, replica = self.replica, %meta, "installing a snapshot");
        let snapshot = Snapshot { meta, snapshot: SnapshotData::Received(received) };
        let reply =
            self.raft.install_full_snapshot(vote, snapshot).await.map_err(|error| self.stopped_by(&error))?;
        self.installer.count_installed();
        Ok(message::encode_finished(&reply.vote))
    }

    /// Runs file work of the installer on a blocking thread.
    async fn receive<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Installer) -> Result<T, ReceiveError> + Send + 'static,
    ) -> Result<T, Refusal> {
        let installer = Arc::clone(&self.installer);
        match executor::file(&*self.executor, move || work(&installer)).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(error)) => Err(error.into_refusal()),
            Err(error) => Err(Refusal::Snapshot(error.to_string())),
        }
    }

    fn stopped(&self, error: &impl std::fmt::Display) -> Refusal {
        Refusal::Stopped(self.state.halted().unwrap_or_else(|| error.to_string()))
    }

    fn stopped_by(&self, error: &Fatal<TypeConfig<RT>>) -> Refusal {
        self.stopped(error)
    }
}

fn unreadable(error: DecodeError) -> Refusal {
    Refusal::Unreadable(error.to_string())
}
