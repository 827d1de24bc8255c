//! One replica of one group: the handle that the rest of the server holds.
//!
//! A command walks: [`Group::propose`] (bounded by bytes in flight) → the proposer task, in call order → openraft → log
//! and followers → commit → `applier` → the [`Answer`].
//!
//! Invariants:
//! - commands proposed one after the other by one caller enter the log in that order;
//! - what is in flight is bounded; what does not fit is refused at once, never queued;
//! - a replica that halted says why, and takes no other group with it.
//!
//! Not here: membership changes (`membership`), opening and closing (`bootstrap`, `group_registry`), purging the log
//! (`purge`), what it shows of itself (`status`), meaning of commands and answers.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use evershard_storage::log::GroupLog;
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::errors::{ClientWriteError, ForwardReason, ForwardToLeader};
use openraft::raft::ClientWriteResult;
use openraft::{Raft, ReadPolicy};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::applier::{Applier, ApplierState};
use crate::budget::Budget;
use crate::endpoint::Endpoint;
use crate::error::{GroupError, NotServing, ProposeError};
use crate::executor::{self, ApplyExecutor};
use crate::leadership::{LeaderWatch, Leadership};
use crate::options::RaftOptions;
use crate::reply::Reply;
use crate::snapshot::builder::LinkSource;
use crate::state_machine::StateMachine;
use crate::transport::Router;
use crate::type_config::{Command, Peer, Runtime, Tokio, TypeConfig};

pub(crate) type RaftOf<RT> = Raft<TypeConfig<RT>, Applier<RT>>;

/// The state machine's answer to a proposal, when it was applied here. Dropping it does not take the proposal back.
#[must_use = "the outcome of the proposal"]
pub struct Answer<RT: Runtime = Tokio> {
    receiver: oneshot::Receiver<ClientWriteResult<TypeConfig<RT>>>,
    state: Arc<ApplierState>,
}

impl<RT: Runtime> Future for Answer<RT> {
    type Output = Result<Bytes, ProposeError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.receiver).poll(cx).map(|received| match received {
            Ok(Ok(response)) => Ok(response.data),
            Ok(Err(error)) => Err(propose_error(error)),
            Err(_) => Err(stopped(&self.state)),
        })
    }
}

pub(crate) struct Proposal<RT: Runtime> {
    time_ms: Option<u64>,
    payload: Bytes,
    reply: Reply<ClientWriteResult<TypeConfig<RT>>>,
}

/// A cheap handle of a replica; see the module.
pub struct Group<RT: Runtime = Tokio> {
    pub(crate) inner: Arc<GroupInner<RT>>,
}

impl<RT: Runtime> Clone for Group<RT> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

pub(crate) struct GroupInner<RT: Runtime> {
    pub(crate) group: u64,
    pub(crate) replica: u64,
    pub(crate) raft: RaftOf<RT>,
    pub(crate) log: GroupLog,
    pub(crate) state_machine: Arc<dyn StateMachine>,
    pub(crate) state: Arc<ApplierState>,
    pub(crate) endpoint: Arc<Endpoint<RT>>,
    pub(crate) links: LinkSource,
    pub(crate) router: Arc<Router<RT>>,
    pub(crate) leader: Arc<LeaderWatch<RT>>,
    pub(crate) options: RaftOptions,
    pub(crate) executor: Arc<dyn ApplyExecutor>,
    pub(crate) flushed: Notify,
    pub(crate) stop: CancellationToken,
    pub(crate) tasks: Mutex<Vec<RT::JoinHandle<()>>>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) proposals: mpsc::Sender<Proposal<RT>>,
}

impl<RT: Runtime> Group<RT> {
    /// The group's id.
    #[must_use]
    pub fn group(&self) -> u64 {
        self.inner.group
    }

    /// This replica's id.
    #[must_use]
    pub fn replica(&self) -> u64 {
        self.inner.replica
    }

    /// Proposes a command, stamped with the leader's clock. Commands proposed one after the other enter the log in that
    /// order. The answer comes when it was applied here.
    ///
    /// # Errors
    /// At once: [`ProposeError::Exhausted`], [`ProposeError::TooLarge`], [`ProposeError::Stopped`],
    /// [`ProposeError::Halted`]. The others come with the answer.
    pub fn propose(&self, command: Bytes) -> Result<Answer<RT>, ProposeError> {
        self.submit(None, command)
    }

    /// The same, stamped with `time_ms` by the caller.
    ///
    /// # Errors
    /// As [`Group::propose`].
    pub fn propose_at(&self, time_ms: u64, command: Bytes) -> Result<Answer<RT>, ProposeError> {
        self.submit(Some(time_ms), command)
    }

    fn submit(&self, time_ms: Option<u64>, payload: Bytes) -> Result<Answer<RT>, ProposeError> {
        let inner = &*self.inner;
        let limit = inner.options.limits.command_bytes;
        if payload.len() > limit {
            return Err(ProposeError::TooLarge { bytes: payload.len(), limit });
        }
        if inner.stop.is_cancelled() || inner.state.is_halted() {
            return Err(stopped(&inner.state));
        }
        let exhausted = || ProposeError::Exhausted { in_flight_bytes: inner.budget.bytes() };
        let held = inner.budget.take(payload.len() as u64).ok_or_else(exhausted)?;
        let (reply, receiver) = Reply::pair(Some(held));
        match inner.proposals.try_send(Proposal { time_ms, payload, reply }) {
            Ok(()) => Ok(Answer { receiver, state: Arc::clone(&inner.state) }),
            Err(mpsc::error::TrySendError::Full(_)) => Err(exhausted()),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(stopped(&inner.state)),
        }
    }

    /// Whether this replica may answer a leader-consistent read now. Cheap: call it for every pull.
    ///
    /// # Errors
    /// [`NotServing`] with the leader, when it is another and known.
    pub fn serving_lease(&self) -> Result<(), NotServing> {
        self.inner.leader.check()
    }

    /// A linearizable read point: asks a quorum, waits until it is applied here, and answers with its index. Reads of
    /// the state machine after this see everything acknowledged before the call.
    ///
    /// # Errors
    /// [`NotServing`] when this replica does not lead or reaches no quorum.
    pub async fn read_index(&self) -> Result<u64, NotServing> {
        match self.inner.raft.ensure_linearizable(ReadPolicy::ReadIndex).await {
            Ok(read) => Ok(read.index()),
            Err(error) => Err(match self.serving_lease() {
                Err(reason) => reason,
                Ok(()) => {
                    tracing::debug!(group = self.group(), %error, "no read point");
                    NotServing::LeaseExpired { age: self.inner.leader.lease_age() }
                }
            }),
        }
    }

    /// The index of a linearizable read point, confirmed by a quorum after this was called, without waiting until it is
    /// applied. Whoever has applied it, here or on another node, has everything that was acknowledged before the call.
    ///
    /// # Errors
    /// [`NotServing`] when this replica does not lead or reaches no quorum.
    pub async fn read_point(&self) -> Result<u64, NotServing> {
        match self.inner.raft.get_read_linearizer(ReadPolicy::ReadIndex).await {
            Ok(point) => Ok(point.read_log_id().index()),
            Err(error) => Err(match self.serving_lease() {
                Err(reason) => reason,
                Ok(()) => {
                    tracing::debug!(group = self.group(), %error, "no read point");
                    NotServing::LeaseExpired { age: self.inner.leader.lease_age() }
                }
            }),
        }
    }

    /// Waits until the entry at `index` is applied here; false when it is not `within` that time.
    pub async fn wait_applied(&self, index: u64, within: Duration) -> bool {
        let wait = self.inner.raft.wait(Some(within));
        wait.applied_index_at_least(Some(index), "a read waits").await.is_ok()
    }

    /// Who leads, as this replica knows it.
    #[must_use]
    pub fn leadership(&self) -> Leadership {
        self.inner.leader.current()
    }

    /// The same, as it changes.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Leadership> {
        self.inner.leader.subscribe()
    }

    /// Tells the group that the state machine's flush advanced: [`StateMachine::snapshot_mark`] answers more than
    /// before. The log is then purged behind it, down to what is kept for followers. Cheap; the work is done elsewhere.
    pub fn flushed(&self) {
        self.inner.flushed.notify_one();
    }

    /// The group's part of the node's log.
    #[must_use]
    pub fn log(&self) -> &GroupLog {
        &self.inner.log
    }

    /// The state machine.
    #[must_use]
    pub fn state_machine(&self) -> &Arc<dyn StateMachine> {
        &self.inner.state_machine
    }

    /// Why the replica stopped for good, if it did: it must be replaced.
    #[must_use]
    pub fn halted(&self) -> Option<String> {
        let halted = self.inner.state.halted();
        halted.or_else(|| {
            let metrics = self.inner.raft.metrics();
            let fatal = metrics.borrow_watched().running_state.as_ref().err().map(ToString::to_string);
            fatal.filter(|_| !self.inner.stop.is_cancelled())
        })
    }

    /// Hands leadership to another voter, and waits until it leads or `within` is over. Reads and proposals are refused
    /// from the moment of the call until there is a new leader.
    ///
    /// # Errors
    /// [`GroupError::NotLeader`], or [`GroupError::Timeout`]: then an election will follow by itself.
    pub async fn transfer_leader(&self, to: u64, within: Duration) -> Result<(), GroupError> {
        let inner = &*self.inner;
        // Before serving ends: no other leader would come and begin it again.
        if to == inner.replica && self.leadership().is_self {
            return Err(GroupError::Membership { reason: "this replica leads already".to_owned() });
        }
        let closed = if to == inner.replica { None } else { inner.leader.close() };
        let Some(term) = closed else {
            return Err(GroupError::NotLeader { leader: self.leadership().leader });
        };
        inner.raft.trigger().transfer_leader(to).await.map_err(|_| self.gone())?;
        let wait = inner.raft.wait(Some(within));
        let moved = wait.metrics(
            |metrics| {
                metrics.current_term > term
                    && metrics.current_leader.is_some_and(|leader| leader != inner.replica)
            },
            "leadership moves",
        );
        match moved.await {
            Ok(_) => Ok(()),
            Err(_) => Err(GroupError::Timeout { what: "leadership to move", after: within }),
        }
    }

    /// Whether this replica stands for election when it hears of no leader. It votes either way.
    pub fn set_may_stand(&self, may_stand: bool) {
        self.inner.endpoint.set_may_stand(may_stand);
    }

    /// Whether this replica, when it leads, tells the others so: without it they elect another after the lease.
    pub fn set_heartbeats(&self, sends: bool) {
        self.inner.raft.runtime_config().heartbeat(sends);
    }

    /// Of the other voters whose nodes fit, the one with the longest log, as far as this leader knows.
    #[must_use]
    pub fn successor_among(&self, fits: impl Fn(&Peer) -> bool) -> Option<u64> {
        self.inner.leader.term_led_now()?;
        self.inner.leader.successor_among(fits)
    }

    /// The error for a group that does not run any more.
    pub(crate) fn gone(&self) -> GroupError {
        match self.halted() {
            Some(reason) => {
                GroupError::Halted { group: self.inner.group, replica: self.inner.replica, reason }
            }
            None => GroupError::Stopped,
        }
    }

    /// Stops the replica on this node and waits for its tasks; nothing is applied after it returns. Does not hand over
    /// leadership: see [`crate::group_registry::GroupRegistry::shutdown`].
    pub async fn shutdown(&self) {
        let inner = &*self.inner;
        inner.leader.close();
        inner.stop.cancel();
        inner.state.close();
        inner.router.remove(inner.replica);
        if let Err(error) = inner.raft.shutdown().await {
            tracing::error!(group = inner.group, replica = inner.replica, %error, "the group's core did not end well");
        }
        inner.links.clear();
        let tasks = std::mem::take(&mut *inner.tasks.lock());
        for task in tasks {
            if let Err(error) = task.await {
                tracing::error!(group = inner.group, replica = inner.replica, %error, "a task of the group panicked");
            }
        }
        // What was handed to the group's thread before is through when this is.
        let _ = executor::run(&*inner.executor, inner.group, || ()).await;
    }
}

/// Hands proposals to openraft in order.
pub(crate) async fn run_proposer<RT: Runtime>(
    raft: RaftOf<RT>,
    mut proposals: mpsc::Receiver<Proposal<RT>>,
    (mut clock, leader, state_machine): (LeaderClock<RT>, Arc<LeaderWatch<RT>>, Arc<dyn StateMachine>),
    stop: CancellationToken,
) {
    loop {
        let stopped = std::pin::pin!(stop.cancelled());
        let next = std::pin::pin!(proposals.recv());
        let futures_util::future::Either::Right((Some(proposal), _)) =
            futures_util::future::select(stopped, next).await
        else {
            return;
        };
        let replicated = leader.is_ready().then(|| state_machine.clock_ms());
        let time_ms = proposal.time_ms.unwrap_or_else(|| clock.now_ms(replicated));
        let command = Command { time_ms, payload: proposal.payload };
        if raft.client_write_ff(command, Some(proposal.reply)).await.is_err() {
            // openraft is gone; dropping the queue tells everyone who waits.
            return;
        }
    }
}

/// The leader's clock for entries: never behind what it gave out before, and ahead of the group's replicated clock, as it was
/// when this replica first led, by at most the time that passed since plus a second, whatever the wall clock says (design 14.11).
///
/// So the time while nobody leads the group does not pass, and the replicated clock may stay behind the wall's. Only a group
/// that has no time yet takes the wall's as it is.
pub(crate) struct LeaderClock<RT: Runtime> {
    wall: crate::options::WallClock,
    /// The replicated clock at some moment.
    base: Option<(u64, RT::Instant)>,
    last: u64,
}

impl<RT: Runtime> LeaderClock<RT> {
    pub(crate) fn new(wall: crate::options::WallClock) -> Self {
        Self { wall, base: None, last: 0 }
    }

    /// `replicated` is the group's clock, `None` while this replica has not applied what came before its term: what it gives out
    /// then moves no clock.
    fn now_ms(&mut self, replicated: Option<u64>) -> u64 {
        let wall = (self.wall)();
        let Some(replicated) = replicated else { return self.last };
        if replicated == 0 {
            // Nothing has happened in the group that could be long ago.
            self.last = wall.max(self.last);
            return self.last;
        }
        let now = <RT::Instant as openraft::Instant>::now();
        let latest = |(base, at): (u64, RT::Instant)| {
            let passed = u64::try_from((now - at).as_millis()).unwrap_or(u64::MAX);
            base.saturating_add(passed).saturating_add(1000)
        };
        // Not from one to the next: each would gain its second. What another leader gave out since is where this one goes on.
        if self.base.is_none_or(|base| replicated > latest(base)) {
            self.base = Some((replicated, now));
        }
        let latest = self.base.map_or(replicated, latest);
        self.last = wall.clamp(self.last, latest.max(self.last));
        self.last
    }
}

pub(crate) fn stopped(state: &ApplierState) -> ProposeError {
    match state.halted() {
        Some(reason) => ProposeError::Halted { reason },
        None => ProposeError::Stopped,
    }
}

fn propose_error<RT: Runtime>(error: ClientWriteError<TypeConfig<RT>>) -> ProposeError {
    match error {
        ClientWriteError::ForwardToLeader(forward) => match (forward.reason, leader_of(&forward)) {
            (ForwardReason::NotLeader, Some(leader)) => ProposeError::NotLeader { leader: Some(leader) },
            _ => ProposeError::Unavailable,
        },
        ClientWriteError::LogEntryDiscarded(forward) => {
            ProposeError::OutcomeUnknown { leader: leader_of(&forward) }
        }
        // Only membership changes get these, and they do not come this way.
        ClientWriteError::ChangeMembershipError(_) | ClientWriteError::PreconditionFailed(_) => {
            ProposeError::Unavailable
        }
    }
}

pub(crate) fn leader_of<RT: Runtime>(forward: &ForwardToLeader<TypeConfig<RT>>) -> Option<(u64, Peer)> {
    forward.leader_id.zip(forward.leader_node.clone())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::type_config::Tokio;

    const DAY: u64 = 86_400_000;
    const THEN: u64 = 5_000_000;
    /// A minute for a test to run.
    const MINUTE: u64 = 60_000;

    fn clock() -> (LeaderClock<Tokio>, Arc<AtomicU64>) {
        let wall = Arc::new(AtomicU64::new(THEN));
        let read = Arc::clone(&wall);
        (LeaderClock::new(Arc::new(move || read.load(Ordering::Relaxed))), wall)
    }

    #[test]
    fn a_clock_that_is_set_ahead_gains_a_second_in_all() {
        let (mut clock, wall) = clock();
        let mut replicated = 0;
        replicated = clock.now_ms(Some(replicated));
        assert_eq!(replicated, THEN);
        assert_eq!(clock.now_ms(Some(replicated)), THEN);
        wall.fetch_add(DAY, Ordering::Relaxed);
        for _ in 0..1000 {
            let now = clock.now_ms(Some(replicated));
            assert!(now >= replicated);
            replicated = now;
        }
        assert!(replicated < THEN + 1000 + MINUTE, "{replicated}");
        wall.store(1, Ordering::Relaxed);
        assert_eq!(clock.now_ms(Some(replicated)), replicated, "it never goes back");
    }

    /// A node that was started with a wrong clock, and leads from its first moment on.
    #[test]
    fn a_clock_that_was_always_ahead_gains_a_second_too() {
        let (mut clock, wall) = clock();
        wall.fetch_add(DAY, Ordering::Relaxed);
        assert_eq!(clock.now_ms(None), 0, "it does not know yet what time the group has");
        let first = clock.now_ms(Some(THEN));
        assert!((THEN..=THEN + 1000 + MINUTE).contains(&first), "{first}");
        // Another leader was further meanwhile: no reason to stay behind, nor to run ahead.
        let next = clock.now_ms(Some(THEN + DAY / 2));
        assert!((THEN + DAY / 2..=THEN + DAY / 2 + 1000 + MINUTE).contains(&next), "{next}");
    }
}
