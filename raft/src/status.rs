//! What a replica shows of itself: role, positions, members, lease, why it stopped.
//!
//! Invariant: openraft's metrics are borrowed once, and last: a second borrow could wait for openraft, which waits for
//! the first.
//!
//! Not here: rendering (`src`'s admin service), following changes (`leadership`).

use std::collections::BTreeMap;
use std::time::Duration;

use openraft::ServerState;
use openraft::async_runtime::watch::WatchReceiver as _;

use crate::group::Group;
use crate::membership_codec::Members;
use crate::state_machine::LogPosition;
use crate::type_config::{Peer, Runtime, to_position};

/// A replica's role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Receives, does not vote.
    Learner,
    /// Votes.
    Follower,
    /// Stands for election.
    Candidate,
    /// Leads.
    Leader,
    /// Was shut down, or halted.
    Stopped,
}

/// What a replica shows of itself.
#[derive(Debug, Clone)]
pub struct GroupStatus {
    /// The group.
    pub group: u64,
    /// The replica.
    pub replica: u64,
    /// Its role.
    pub role: Role,
    /// Its term.
    pub term: u64,
    /// The leader and where it is, when known.
    pub leader: Option<(u64, Peer)>,
    /// The last entry of its log.
    pub last_index: Option<u64>,
    /// The last entry that is durable here.
    pub durable_index: Option<u64>,
    /// The last entry that is committed, as far as it knows.
    pub committed: Option<u64>,
    /// The last entry that it applied.
    pub applied: Option<LogPosition>,
    /// How far the state machine's flush is, as openraft was told.
    pub snapshot: Option<u64>,
    /// The last entry that was purged from the log.
    pub purged: Option<u64>,
    /// Voters and learners.
    pub members: Members,
    /// On the leader: the last entry that each other member has; `None` before the first answer.
    pub replicated: BTreeMap<u64, Option<u64>>,
    /// On the leader: time since a quorum last acknowledged it.
    pub lease_age: Option<Duration>,
    /// Bytes proposed here and not yet answered.
    pub in_flight_bytes: u64,
    /// Why it stopped for good.
    pub halted: Option<String>,
}

impl<RT: Runtime> Group<RT> {
    /// Everything there is to show.
    #[must_use]
    pub fn status(&self) -> GroupStatus {
        let inner = &*self.inner;
        let log = inner.log.state();
        let leadership = self.leadership();
        let lease_age = inner.leader.lease_age();
        let halted = self.halted();
        let metrics = inner.raft.metrics();
        let metrics = metrics.borrow_watched();
        let role = match metrics.state {
            _ if metrics.running_state.is_err() => Role::Stopped,
            ServerState::Learner => Role::Learner,
            ServerState::Follower => Role::Follower,
            ServerState::Candidate => Role::Candidate,
            ServerState::Leader => Role::Leader,
            ServerState::Shutdown => Role::Stopped,
        };
        let replication = metrics.replication.iter().flatten();
        GroupStatus {
            group: inner.group,
            replica: inner.replica,
            role,
            term: metrics.current_term,
            leader: leadership.leader,
            last_index: log.last.map(|id| id.index),
            durable_index: log.durable_index,
            committed: metrics.cluster_committed.as_ref().map(|id| id.index()),
            applied: metrics.last_applied.as_ref().map(to_position),
            snapshot: metrics.snapshot.as_ref().map(|id| id.index()),
            purged: log.last_purged.map(|id| id.index),
            members: Members::of(metrics.membership_config.membership()),
            replicated: replication
                .filter(|(replica, _)| **replica != inner.replica)
                .map(|(replica, matched)| (*replica, matched.as_ref().map(|id| id.index())))
                .collect(),
            lease_age,
            in_flight_bytes: inner.budget.bytes(),
            halted,
        }
    }
}
