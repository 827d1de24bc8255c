//! Who leads, and whether this replica may answer leader-consistent reads now.
//!
//! A read needs three things: this replica leads its term; it has applied everything up to its own first entry of that
//! term (found out once per term by a linearizable read, then remembered); and a quorum acknowledged it within the
//! lease, counted from when it sent what was acknowledged. The check borrows openraft's metrics and reads two atomics:
//! no channel, no allocation.
//!
//! Invariants:
//! - the lease is shorter than the time for which a quorum refuses to vote, by a margin for clocks;
//! - serving ends before leadership is given away, and does not resume in that term;
//! - a new term starts not serving.
//!
//! Not here: elections and the lease itself (openraft), what restarted replicas may not do (`endpoint`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use openraft::alias::WatchReceiverOf;
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::metrics::RaftServerMetrics;
use openraft::{Instant as _, Raft, RaftMetrics, ReadPolicy, ServerState};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::applier::{Applier, ApplierState};
use crate::error::NotServing;
use crate::options::RaftTiming;
use crate::type_config::{Peer, Runtime, StoredMembership, TypeConfig, Vote};

/// Who leads a group, as this replica knows it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Leadership {
    /// The term.
    pub term: u64,
    /// The leader and where it is.
    pub leader: Option<(u64, Peer)>,
    /// This replica leads.
    pub is_self: bool,
    /// It leads and has applied everything that came before its term: it serves while its lease holds.
    pub is_ready: bool,
}

/// See the module.
pub(crate) struct LeaderWatch<RT: Runtime> {
    replica: u64,
    metrics: WatchReceiverOf<TypeConfig<RT>, RaftMetrics<TypeConfig<RT>>>,
    server: WatchReceiverOf<TypeConfig<RT>, RaftServerMetrics<TypeConfig<RT>>>,
    state: Arc<ApplierState>,
    serve_within: Duration,
    /// One above the term that is ready; 0: none.
    ready: AtomicU64,
    /// One above the term whose leadership is being given away; 0: none.
    closed: AtomicU64,
    changes: watch::Sender<Leadership>,
}

impl<RT: Runtime> LeaderWatch<RT> {
    pub(crate) fn new(
        replica: u64,
        raft: &Raft<TypeConfig<RT>, Applier<RT>>,
        state: Arc<ApplierState>,
        timing: &RaftTiming,
    ) -> Self {
        Self {
            replica,
            metrics: raft.metrics(),
            server: raft.server_metrics(),
            state,
            serve_within: timing.election_max.saturating_sub(timing.lease_margin),
            ready: AtomicU64::new(0),
            closed: AtomicU64::new(0),
            changes: watch::Sender::new(Leadership::default()),
        }
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Leadership> {
        self.changes.subscribe()
    }

    /// See [`crate::group::Group::serving_lease`].
    pub(crate) fn check(&self) -> Result<(), NotServing> {
        if self.state.is_halted() {
            // Before openraft says so.
            return Err(NotServing::Halted { reason: self.state.halted().unwrap_or_default() });
        }
        let metrics = self.metrics.borrow_watched();
        if let Err(fatal) = &metrics.running_state {
            let reason = self.state.halted().unwrap_or_else(|| fatal.to_string());
            return Err(NotServing::Halted { reason });
        }
        let Some(term) = self.led_term(&metrics.vote, metrics.state) else {
            let leader = self.other(metrics.current_leader, &metrics.membership_config);
            return Err(NotServing::NotLeader { leader });
        };
        if self.closed.load(Ordering::Acquire) == term + 1 {
            return Err(NotServing::Transferring);
        }
        if self.ready.load(Ordering::Acquire) != term + 1 {
            return Err(NotServing::Recovering);
        }
        let acked = metrics.last_quorum_acked.as_ref().map(|at| **at);
        let age = acked.map(|at| RT::Instant::now().saturating_duration_since(at));
        if age.is_some_and(|age| age < self.serve_within) || self.is_alone(&metrics.membership_config) {
            return Ok(());
        }
        Err(NotServing::LeaseExpired { age })
    }

    /// Whether this replica leads and has applied everything that came before its term.
    pub(crate) fn is_ready(&self) -> bool {
        self.term_led_now().is_some_and(|term| self.ready.load(Ordering::Acquire) == term + 1)
    }

    /// Time since a quorum last acknowledged this leader.
    pub(crate) fn lease_age(&self) -> Option<Duration> {
        let metrics = self.metrics.borrow_watched();
        self.led_term(&metrics.vote, metrics.state)?;
        if self.is_alone(&metrics.membership_config) {
            return Some(Duration::ZERO);
        }
        let acked = metrics.last_quorum_acked.as_ref().map(|at| **at)?;
        Some(RT::Instant::now().saturating_duration_since(acked))
    }

    /// Stops serving for the rest of the term that this replica leads; answers with the term.
    pub(crate) fn close(&self) -> Option<u64> {
        let term = self.term_led_now()?;
        self.closed.store(term + 1, Ordering::Release);
        Some(term)
    }

    /// The term that this replica leads, if it does.
    pub(crate) fn term_led_now(&self) -> Option<u64> {
        let server = self.server.borrow_watched();
        self.led_term(&server.vote, server.state)
    }

    fn led_term(&self, vote: &Vote, state: ServerState) -> Option<u64> {
        let leads = state == ServerState::Leader && vote.committed && vote.leader_id.node_id == self.replica;
        leads.then_some(vote.leader_id.term)
    }

    fn is_alone(&self, membership: &StoredMembership) -> bool {
        membership.voter_ids().eq(std::iter::once(self.replica))
    }

    fn other(&self, leader: Option<u64>, membership: &StoredMembership) -> Option<(u64, Peer)> {
        let leader = leader.filter(|leader| *leader != self.replica)?;
        Some((leader, membership.get_node(&leader)?.clone()))
    }

    /// The leader as known now, this replica included.
    pub(crate) fn current(&self) -> Leadership {
        let server = self.server.borrow_watched();
        let membership = &server.membership_config;
        let led = self.led_term(&server.vote, server.state);
        let leader = match led {
            Some(_) => membership.get_node(&self.replica).map(|peer| (self.replica, peer.clone())),
            None => self.other(server.current_leader, membership),
        };
        let is_ready = led.is_some_and(|term| self.ready.load(Ordering::Acquire) == term + 1);
        Leadership { term: server.vote.leader_id.term, leader, is_self: led.is_some(), is_ready }
    }

    fn publish(&self) {
        let current = self.current();
        self.changes.send_if_modified(|known| {
            let changed = *known != current;
            *known = current;
            changed
        });
    }

    /// Follows leadership until stopped: publishes changes, makes a new term ready, steps down when removed.
    pub(crate) async fn follow(
        self: Arc<Self>,
        raft: Raft<TypeConfig<RT>, Applier<RT>>,
        retry: Duration,
        stop: CancellationToken,
    ) {
        let mut server = self.server.clone();
        loop {
            server.borrow_and_update();
            self.publish();
            let led = self.term_led_now();
            let step = async {
                match led {
                    Some(term) if self.ready.load(Ordering::Acquire) != term + 1 => {
                        self.make_ready(term, &raft, retry).await;
                        true
                    }
                    Some(_) if self.is_removed() => {
                        self.step_down(&raft, retry).await;
                        true
                    }
                    _ => server.changed().await.is_ok(),
                }
            };
            let step = std::pin::pin!(step);
            let stopped = std::pin::pin!(stop.cancelled());
            match futures_util::future::select(stopped, step).await {
                futures_util::future::Either::Right((true, _)) => {}
                // Stopped, or openraft is gone: nobody leads as far as this replica is concerned.
                _ => {
                    self.changes.send_modify(|known| {
                        *known = Leadership { term: known.term, ..Leadership::default() };
                    });
                    return;
                }
            }
        }
    }

    /// One linearizable read: when it is through, everything up to this term's first entry is applied.
    async fn make_ready(&self, term: u64, raft: &Raft<TypeConfig<RT>, Applier<RT>>, retry: Duration) {
        match raft.ensure_linearizable(ReadPolicy::ReadIndex).await {
            Ok(_) if self.term_led_now() == Some(term) => {
                tracing::info!(replica = self.replica, term, "leads and serves");
                self.ready.store(term + 1, Ordering::Release);
            }
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(replica = self.replica, term, %error, "the new term is not ready yet");
                RT::sleep(retry).await;
            }
        }
    }

    fn is_removed(&self) -> bool {
        let server = self.server.borrow_watched();
        let committed = &server.committed_membership_config;
        committed.log_id().is_some() && !committed.voter_ids().any(|voter| voter == self.replica)
    }

    /// A leader that was voted out hands over to the voter that has most, and becomes a learner.
    async fn step_down(&self, raft: &Raft<TypeConfig<RT>, Applier<RT>>, wait: Duration) {
        self.close();
        if let Some(to) = self.best_successor()
            && let Err(error) = raft.trigger().transfer_leader(to).await
        {
            tracing::debug!(replica = self.replica, %error, "not handed over");
        }
        RT::sleep(wait).await;
        let (vote, membership) = {
            let server = self.server.borrow_watched();
            (server.vote, *server.membership_config.log_id())
        };
        if let Err(error) = raft.trigger().refresh_server_state(Some(vote), membership).await {
            tracing::debug!(replica = self.replica, %error, "not stepped down");
        }
    }

    /// The other voter with the longest log, as far as this leader knows.
    pub(crate) fn best_successor(&self) -> Option<u64> {
        self.successor_among(|_| true)
    }

    /// The same among those whose nodes fit.
    pub(crate) fn successor_among(&self, fits: impl Fn(&Peer) -> bool) -> Option<u64> {
        let metrics = self.metrics.borrow_watched();
        let replication = metrics.replication.as_ref()?;
        let membership = &metrics.membership_config;
        membership
            .voter_ids()
            .filter(|voter| *voter != self.replica && membership.get_node(voter).is_some_and(&fits))
            .max_by_key(|voter| replication.get(voter).copied().flatten().map(|matched| matched.index() + 1))
    }
}
