//! Who a replica's store belongs to, and how far it reaches.
//!
//! Not here: how that is written (`meta_record`).

use bytes::Bytes;

use super::error::StoreError;
use std::path::Path;

/// Whose replica a folder holds. A folder is only opened for the identity written in it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReplicaIdentity {
    /// The cluster's id.
    pub cluster: String,
    /// The node (server process).
    pub node: u64,
    /// The Raft group; never reused.
    pub group: u64,
    /// The shard.
    pub shard: u32,
    /// The replica; never reused.
    pub replica: u64,
}

impl ReplicaIdentity {
    /// Compares what must be equal on this node.
    pub(super) fn expect(&self, found: &Self, path: &Path) -> Result<(), StoreError> {
        self.expect_same_group(found, path)?;
        same(path, "node", &self.node, &found.node)?;
        same(path, "replica", &self.replica, &found.replica)
    }

    /// Compares what must be equal in all replicas of a group.
    pub(super) fn expect_same_group(&self, found: &Self, path: &Path) -> Result<(), StoreError> {
        same(path, "cluster", &self.cluster, &found.cluster)?;
        same(path, "group", &self.group, &found.group)?;
        same(path, "shard", &self.shard, &found.shard)
    }
}

fn same<T: PartialEq + ToString>(
    path: &Path,
    field: &'static str,
    expected: &T,
    found: &T,
) -> Result<(), StoreError> {
    if expected == found {
        return Ok(());
    }
    Err(StoreError::IdentityMismatch {
        path: path.to_owned(),
        field,
        expected: expected.to_string(),
        found: found.to_string(),
    })
}

/// A place in a group's log, with the leader that proposed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Position {
    /// The leader's term.
    pub term: u64,
    /// The leader's replica id.
    pub leader: u64,
    /// The entry's index, from 0.
    pub index: u64,
}

/// What a store holds besides rows, and how its rows relate to the log.
///
/// Every change up to and including `replay_from` is in the rows. Rows may also hold changes behind it (the flush is fuzzy),
/// none of them behind `complete_at`: so a replica replays from `replay_from + 1`, skips what rows have already, and serves
/// once it has applied `complete_at`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FlushedState {
    /// The last entry that the rows and the small state hold entirely; `None` before the first flush.
    pub replay_from: Option<Position>,
    /// No row has a version above this.
    pub complete_at: u64,
    /// The membership as of `replay_from`; encoded by the raft crate.
    pub membership: Bytes,
    /// Sessions, schemas and the like as of `replay_from`; encoded by the server.
    pub small_state: Bytes,
    /// Some table admits or evicts rows: there may be counting records and notes, which builds before took for damage.
    pub has_row_rules: bool,
}

impl FlushedState {
    /// The index of `replay_from`; 0 before the first flush.
    #[must_use]
    pub fn replayed_to(&self) -> u64 {
        self.replay_from.map_or(0, |position| position.index)
    }
}
