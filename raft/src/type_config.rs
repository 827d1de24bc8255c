//! The types openraft is built from: what an entry carries, who a member is, which runtime runs it.
//!
//! [`TypeConfig`] is generic over the asynchronous runtime, so that the simulation runs the same log store, applier and
//! group as production does.
//!
//! Invariants:
//! - a replica id is never reused, so it can be openraft's node id;
//! - a membership in the log carries addresses ([`Peer`]), so a node that only has its log can reach the others.
//!
//! Not here: how these are written to disk or wire (`log_store`, `membership`, `transport::codec`).

use std::cmp::Ordering;
use std::fmt;
use std::marker::PhantomData;

use bytes::Bytes;
use openraft::alias::{CommittedLeaderIdOf, LogIdOf, SnapshotMetaOf, StoredMembershipOf, VoteOf};
use openraft::impls::leader_id_adv;

use crate::reply::Reply;
use crate::state_machine::LogPosition;

/// The asynchronous runtime that drives groups: tokio in production, openraft's simulator in tests.
pub use openraft::AsyncRuntime as Runtime;
/// The production runtime.
pub use openraft_rt_tokio::TokioRuntime as Tokio;

/// openraft's knobs, over runtime `RT`.
pub(crate) struct TypeConfig<RT>(PhantomData<fn() -> RT>);

/// A proposed command with the leader's clock.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Command {
    /// The leader's clock when it proposed, in milliseconds since 1970.
    pub time_ms: u64,
    /// Opaque here.
    pub payload: Bytes,
}

/// A member as the log knows it: the process that holds the replica, and where it listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Peer {
    /// The node's id.
    pub node: u64,
    /// `http://host:port`.
    pub address: String,
}

pub(crate) type LeaderId = leader_id_adv::LeaderId<u64, u64>;
pub(crate) type Vote = openraft::impls::Vote<LeaderId>;
pub(crate) type LogId = openraft::LogId<LeaderId>;
pub(crate) type Payload = openraft::EntryPayload<Command, u64, Peer>;
pub(crate) type RaftEntry = openraft::Entry<LeaderId, Payload>;
pub(crate) type Membership = openraft::Membership<u64, Peer>;
pub(crate) type StoredMembership = openraft::StoredMembership<LeaderId, u64, Peer>;
pub(crate) type SnapshotMeta = openraft::storage::SnapshotMeta<LeaderId, u64, Peer>;

impl<RT: Runtime> openraft::RaftTypeConfig for TypeConfig<RT> {
    type D = Command;
    type R = Bytes;
    type NodeId = u64;
    type Node = Peer;
    type Term = u64;
    type LeaderId = LeaderId;
    type Vote = Vote;
    type Payload = Payload;
    type Entry = RaftEntry;
    type AsyncRuntime = RT;
    type Responder<T>
        = Reply<T>
    where
        T: openraft::OptionalSend + 'static;
    type Batch<T>
        = openraft::impls::InlineBatch<T>
    where
        T: openraft::OptionalSend + 'static;
    type ErrorSource = openraft::impls::BoxedErrorSource;
}

/// Proves at compile time that the short names above are openraft's own for every runtime.
#[allow(dead_code)]
fn same_types<RT: Runtime>(
    vote: VoteOf<TypeConfig<RT>>,
    log_id: LogIdOf<TypeConfig<RT>>,
    leader: CommittedLeaderIdOf<TypeConfig<RT>>,
    membership: StoredMembershipOf<TypeConfig<RT>>,
    meta: SnapshotMetaOf<TypeConfig<RT>>,
) -> (Vote, LogId, LeaderId, StoredMembership, SnapshotMeta) {
    (vote, log_id, leader, membership, meta)
}

/// openraft's log id of a position.
pub(crate) fn to_log_id(position: LogPosition) -> LogId {
    LogId::new(LeaderId { term: position.term, node_id: position.leader }, position.index)
}

/// The position of openraft's log id.
pub(crate) fn to_position(log_id: &LogId) -> LogPosition {
    let leader = log_id.committed_leader_id();
    LogPosition { term: leader.term, leader: leader.node_id, index: log_id.index() }
}

impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Command({} bytes at {})", self.payload.len(), self.time_ms)
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {} at {}", self.node, self.address)
    }
}

// By hand: derives would ask the same of `RT`, which only names types.
impl<RT> fmt::Debug for TypeConfig<RT> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TypeConfig")
    }
}

impl<RT> Clone for TypeConfig<RT> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<RT> Copy for TypeConfig<RT> {}

impl<RT> Default for TypeConfig<RT> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<RT> PartialEq for TypeConfig<RT> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<RT> Eq for TypeConfig<RT> {}

impl<RT> PartialOrd for TypeConfig<RT> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<RT> Ord for TypeConfig<RT> {
    fn cmp(&self, _: &Self) -> Ordering {
        Ordering::Equal
    }
}
