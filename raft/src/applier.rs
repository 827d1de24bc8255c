//! openraft's state machine, over ours: gathers committed entries into batches, has them applied on the group's thread,
//! and answers the proposers.
//!
//! Invariants:
//! - entries reach [`StateMachine::apply`] in order, each once, bounded by bytes and count per call;
//! - a [`crate::state_machine::Halt`] stops this group only, its reason is kept, and `applied` does not advance past it;
//! - `get_current_snapshot` always answers from [`StateMachine::snapshot_mark`], also right after an install.
//!
//! Not here: what entries mean, where the log is (`log_store`), how snapshots travel (`snapshot`).

use std::io;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use openraft::OptionalSend;
use openraft::entry::RaftEntry as _;
use openraft::storage::{ApplyResponder, EntryResponder, RaftSnapshotBuilder, RaftStateMachine, Snapshot};
use parking_lot::Mutex;

use crate::executor::{self, ApplyExecutor, WorkLost};
use crate::membership_codec;
use crate::options::RaftLimits;
use crate::snapshot::builder::LinkSource;
use crate::snapshot::installer::ReceivedSnapshot;
use crate::state_machine::{
    CommittedEntry, EntryContent, LogPosition, SnapshotError, SnapshotMark, StateMachine,
};
use crate::transport::codec::payload_bytes;
use crate::type_config::{
    LogId, Payload, RaftEntry, Runtime, SnapshotMeta, StoredMembership, TypeConfig, to_log_id, to_position,
};

/// What openraft hands around as "the snapshot".
pub(crate) enum SnapshotData {
    /// Nothing yet: links are taken from here when it is sent.
    Virtual(LinkSource),
    /// Files that were received and verified.
    Received(ReceivedSnapshot),
}

/// What a group shows of its state machine's side.
#[derive(Default)]
pub(crate) struct ApplierState {
    applied: Mutex<(Option<LogPosition>, StoredMembership)>,
    halted: Mutex<Option<String>>,
    is_halted: AtomicBool,
    closed: AtomicBool,
}

impl ApplierState {
    /// Why the replica stopped for good, if it did.
    pub(crate) fn halted(&self) -> Option<String> {
        self.halted.lock().clone()
    }

    /// Whether it stopped for good; cheap.
    pub(crate) fn is_halted(&self) -> bool {
        self.is_halted.load(Ordering::Acquire)
    }

    /// The group is being shut down: nothing more is applied, though openraft may still ask.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Stops the replica for good; the first reason stays.
    pub(crate) fn halt(&self, reason: String) {
        self.halted.lock().get_or_insert(reason);
        self.is_halted.store(true, Ordering::Release);
    }
}

/// See the module.
pub(crate) struct Applier<RT> {
    state_machine: Arc<dyn StateMachine>,
    executor: Arc<dyn ApplyExecutor>,
    lane: u64,
    state: Arc<ApplierState>,
    links: LinkSource,
    limits: RaftLimits,
    _runtime: PhantomData<fn() -> RT>,
}

/// Entries that are applied at once.
struct Batch<RT: Runtime> {
    entries: Vec<CommittedEntry>,
    responders: Vec<Option<ApplyResponder<TypeConfig<RT>>>>,
    membership: Option<StoredMembership>,
}

impl<RT: Runtime> Applier<RT> {
    /// Takes over a state machine, asking it what recovery found.
    pub(crate) async fn open(
        state_machine: Arc<dyn StateMachine>,
        executor: Arc<dyn ApplyExecutor>,
        lane: u64,
        links: LinkSource,
        limits: RaftLimits,
        state: Arc<ApplierState>,
    ) -> io::Result<Self> {
        let recovered = {
            let state_machine = Arc::clone(&state_machine);
            executor::run(&*executor, lane, move || state_machine.recovered()).await.map_err(lost)?
        };
        *state.applied.lock() = unpack(&recovered)?;
        Ok(Self { state_machine, executor, lane, state, links, limits, _runtime: PhantomData })
    }

    /// The entries that are applied at once; `None`: there are no more.
    async fn gather<S>(&self, entries: &mut S) -> io::Result<Option<Batch<RT>>>
    where
        S: Stream<Item = Result<EntryResponder<TypeConfig<RT>>, io::Error>> + Unpin,
    {
        let mut batch = Batch { entries: Vec::new(), responders: Vec::new(), membership: None };
        let mut bytes = 0;
        while bytes < self.limits.apply_bytes && batch.entries.len() < self.limits.apply_entries {
            let Some(item) = entries.next().await else { break };
            let (entry, responder) = item?;
            bytes += payload_bytes(&entry.payload);
            if let Payload::Membership(set) = &entry.payload {
                batch.membership = Some(StoredMembership::new(Some(entry.log_id()), set.clone()));
            }
            batch.entries.push(committed(entry));
            batch.responders.push(responder);
        }
        Ok((!batch.entries.is_empty()).then_some(batch))
    }

    async fn apply_batch(&self, batch: Batch<RT>) -> io::Result<()> {
        let Batch { entries: batch, responders, membership } = batch;
        let Some(last) = batch.last().map(|entry| entry.position) else { return Ok(()) };
        self.check_open()?;
        let expected = batch.len();
        let state_machine = Arc::clone(&self.state_machine);
        let outcome = executor::run(&*self.executor, self.lane, move || state_machine.apply(&batch)).await;
        let answers = match outcome {
            Ok(Ok(answers)) if answers.len() == expected => answers,
            Ok(Ok(answers)) => {
                return Err(self.fail(format!(
                    "the state machine answered {} of {expected} entries up to index {}",
                    answers.len(),
                    last.index
                )));
            }
            Ok(Err(halt)) => return Err(self.fail(halt.to_string())),
            Err(WorkLost) => {
                return Err(self.fail(format!("applying entries up to index {} panicked", last.index)));
            }
        };
        {
            let mut applied = self.state.applied.lock();
            applied.0 = Some(last);
            if let Some(membership) = membership {
                applied.1 = membership;
            }
        }
        for (answer, responder) in answers.into_iter().zip(responders) {
            if let Some(responder) = responder {
                responder.send(answer);
            }
        }
        Ok(())
    }

    fn check_open(&self) -> io::Result<()> {
        if self.state.closed.load(Ordering::Acquire) {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "the group is shut down"));
        }
        Ok(())
    }

    fn fail(&self, reason: String) -> io::Error {
        tracing::error!(%reason, "a replica halts");
        self.state.halt(reason.clone());
        io::Error::other(reason)
    }

    async fn mark(&self) -> io::Result<SnapshotMark> {
        mark_of(&self.links).await
    }
}

async fn mark_of(links: &LinkSource) -> io::Result<SnapshotMark> {
    let state_machine = Arc::clone(&links.state_machine);
    executor::run(&*links.executor, links.lane, move || state_machine.snapshot_mark()).await.map_err(lost)
}

impl<RT: Runtime> RaftStateMachine<TypeConfig<RT>> for Applier<RT> {
    type SnapshotData = SnapshotData;
    type SnapshotBuilder = MarkReader;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        let applied = self.state.applied.lock();
        Ok((applied.0.map(to_log_id), applied.1.clone()))
    }

    async fn apply<S>(&mut self, entries: S) -> Result<(), io::Error>
    where
        S: Stream<Item = Result<EntryResponder<TypeConfig<RT>>, io::Error>> + Unpin + OptionalSend,
    {
        let mut entries = entries.fuse();
        let mut gathered = self.gather(&mut entries).await?;
        // The next batch is read, and announced, while this one is applied.
        while let Some(batch) = gathered {
            let (applied, next) = tokio::join!(self.apply_batch(batch), self.gather(&mut entries));
            applied?;
            gathered = next?;
        }
        Ok(())
    }

    async fn try_create_snapshot_builder(&mut self, _force: bool) -> Option<Self::SnapshotBuilder> {
        Some(MarkReader { links: self.links.clone() })
    }

    async fn get_snapshot_builder(&mut self) -> Self::SnapshotBuilder {
        MarkReader { links: self.links.clone() }
    }

    async fn install_snapshot(
        &mut self,
        _meta: &SnapshotMeta,
        snapshot: SnapshotData,
    ) -> Result<(), io::Error> {
        let (mark, directory, _guard): (_, _, Box<dyn Send>) = match snapshot {
            SnapshotData::Received(received) => {
                (received.mark().clone(), received.directory().to_owned(), Box::new(received))
            }
            SnapshotData::Virtual(source) => {
                let linked = source.link(0).await.map_err(io::Error::other)?;
                (linked.mark.clone(), linked.directory().to_owned(), Box::new(linked))
            }
        };
        let installed = unpack(&mark)?;
        self.check_open()?;
        let state_machine = Arc::clone(&self.state_machine);
        // This group applies nothing until it is done, openraft sees to that; the others of its thread must not wait.
        let outcome = executor::run_long(&*self.executor, move || -> Result<(), SnapshotError> {
            fail::fail_point!("snapshot::before_install");
            fail::fail_point!("snapshot::install_error", |_| {
                Err(SnapshotError::Invalid("a failpoint says so".to_owned()))
            });
            state_machine.install_snapshot(&mark, &directory)?;
            fail::fail_point!("snapshot::after_install");
            Ok(())
        })
        .await;
        match outcome {
            Ok(Ok(())) => {
                *self.state.applied.lock() = installed;
                // They are of the state that is gone.
                self.links.clear();
                Ok(())
            }
            Ok(Err(error)) => Err(self.fail(format!("installing a snapshot: {error}"))),
            Err(WorkLost) => Err(self.fail("installing a snapshot panicked".to_owned())),
        }
    }

    async fn get_current_snapshot(
        &mut self,
    ) -> Result<Option<openraft::alias::SnapshotOf<TypeConfig<RT>, SnapshotData>>, io::Error> {
        // What is being sent already, when that will do: a receiver whose connection broke goes on with the same files.
        let mark = match self.links.fresh() {
            Some(linked) => linked.mark.clone(),
            None => self.mark().await?,
        };
        let meta = meta_of(&mark)?;
        // Before the first flush there is nothing to send but the log, which is then whole.
        Ok(meta
            .last_log_id
            .is_some()
            .then(|| Snapshot { meta, snapshot: SnapshotData::Virtual(self.links.clone()) }))
    }
}

/// "Builds" a snapshot: asks how far the flush is.
pub(crate) struct MarkReader {
    links: LinkSource,
}

impl<RT: Runtime> RaftSnapshotBuilder<TypeConfig<RT>> for MarkReader {
    type SnapshotData = SnapshotData;

    async fn build_snapshot(
        &mut self,
    ) -> Result<openraft::alias::SnapshotOf<TypeConfig<RT>, SnapshotData>, io::Error> {
        let meta = meta_of(&mark_of(&self.links).await?)?;
        Ok(Snapshot { meta, snapshot: SnapshotData::Virtual(self.links.clone()) })
    }
}

/// openraft's words for a mark.
pub(crate) fn meta_of(mark: &SnapshotMark) -> io::Result<SnapshotMeta> {
    let (position, last_membership) = unpack(mark)?;
    Ok(SnapshotMeta { last_log_id: position.map(to_log_id), last_membership })
}

fn unpack(mark: &SnapshotMark) -> io::Result<(Option<LogPosition>, StoredMembership)> {
    let membership = membership_codec::decode(mark.membership.clone())
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok((mark.position, membership))
}

fn committed(entry: RaftEntry) -> CommittedEntry {
    let position = to_position(&entry.log_id);
    let content = match entry.payload {
        Payload::Blank => EntryContent::Blank,
        Payload::Normal(command) => {
            EntryContent::Command { time_ms: command.time_ms, command: command.payload }
        }
        Payload::Membership(membership) => {
            let encoded: Bytes = membership_codec::encode(Some(&entry.log_id), &membership);
            EntryContent::Membership(encoded)
        }
    };
    CommittedEntry { position, content }
}

fn lost(lost: WorkLost) -> io::Error {
    io::Error::other(lost)
}
