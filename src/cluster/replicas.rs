//! The replicas that run on this node, and those that cannot.
//!
//! Invariants:
//! - one replica of a group at a time;
//! - a quarantined replica neither votes nor serves: it is listed here with its reason, and has no group. It may stand beside
//!   its successor until that has what it had.
//!
//! Not here: opening and closing them (`node.rs`), deciding which there should be (`agent.rs`).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::{ArcSwap, ArcSwapOption};
use evershard_proto::v1::ErrorKind;
use evershard_raft::Group;
use parking_lot::Mutex;

use super::identity::ListedReplica;
use crate::ingest::{SequenceDoor, StepBuffer};
use crate::meta::MetaMachine;
use crate::meta::state::META_GROUP;
use crate::read::Reader;
use crate::service::RequestError;
use crate::shard::ShardMachine;

/// A shard's replica on this node.
pub struct ShardReplica {
    /// Which.
    pub listed: ListedReplica,
    /// Its Raft group.
    pub raft: Group,
    /// Its state.
    pub machine: Arc<ShardMachine>,
    /// Its rows, for pulls.
    pub reader: Reader,
    /// The order of its sessions' pushes, when it leads.
    pub door: SequenceDoor,
    /// What workers contribute to their steps, when it leads.
    pub steps: StepBuffer,
    /// Bytes of its compaction that the node's metric has.
    pub counted_compaction: AtomicU64,
}

impl ShardReplica {
    /// Bytes that its compaction has written since this was last asked. A store that was replaced by a snapshot counts anew.
    pub(super) fn take_compacted_bytes(&self) -> u64 {
        let now = self.machine.store().metrics().compacted_bytes;
        let before = self.counted_compaction.swap(now, Ordering::Relaxed);
        if now >= before { now - before } else { now }
    }
}

/// The meta group's replica on this node.
pub struct MetaReplica {
    /// Which.
    pub listed: ListedReplica,
    /// Its Raft group.
    pub raft: Group,
    /// Its state.
    pub machine: Arc<MetaMachine>,
}

/// A replica that was found damaged or lost.
#[derive(Debug, Clone)]
pub struct Quarantined {
    /// Which.
    pub listed: ListedReplica,
    /// What was found.
    pub reason: String,
    /// What it holds is lost or damaged: a successor takes its place. Otherwise it is only stopped, and opened again after a while.
    pub is_lost: bool,
}

/// Everything that runs here.
#[derive(Default)]
pub struct Replicas {
    shards: ArcSwap<HashMap<u64, Arc<ShardReplica>>>,
    meta: ArcSwapOption<MetaReplica>,
    /// By replica id.
    quarantined: Mutex<HashMap<u64, Quarantined>>,
}

impl Replicas {
    /// The replica of a shard's group.
    ///
    /// # Errors
    /// UNKNOWN_GROUP: the group is not on this node, or its replica here is quarantined.
    pub fn shard(&self, group: u64) -> Result<Arc<ShardReplica>, RequestError> {
        if let Some(replica) = self.shards.load().get(&group) {
            return Ok(replica.clone());
        }
        let message = match self.quarantined.lock().values().find(|found| found.listed.group == group) {
            Some(found) => {
                format!("the replica of group {group} on this node is quarantined: {}", found.reason)
            }
            None => format!("group {group} is not on this node"),
        };
        Err(RequestError::new(ErrorKind::UnknownGroup, message).in_group(group).retry_soon())
    }

    /// Every shard replica that runs, by shard.
    #[must_use]
    pub fn shards(&self) -> Vec<Arc<ShardReplica>> {
        let mut all: Vec<_> = self.shards.load().values().cloned().collect();
        all.sort_by_key(|r| r.listed.shard);
        all
    }

    /// The meta group's replica, if this node has one.
    #[must_use]
    pub fn meta(&self) -> Option<Arc<MetaReplica>> {
        self.meta.load_full()
    }

    /// Replicas that cannot run.
    #[must_use]
    pub fn quarantined(&self) -> Vec<Quarantined> {
        let mut all: Vec<_> = self.quarantined.lock().values().cloned().collect();
        all.sort_by_key(|q| q.listed.group);
        all
    }

    /// The Raft group of any group here.
    #[must_use]
    pub fn raft(&self, group: u64) -> Option<Group> {
        if group == META_GROUP {
            return self.meta().map(|m| m.raft.clone());
        }
        self.shards.load().get(&group).map(|r| r.raft.clone())
    }

    pub(super) fn add_shard(&self, replica: ShardReplica) {
        let replica = Arc::new(replica);
        self.shards.rcu(|known| {
            let mut changed = HashMap::clone(known);
            changed.insert(replica.listed.group, replica.clone());
            changed
        });
    }

    pub(super) fn set_meta(&self, replica: MetaReplica) {
        self.meta.store(Some(Arc::new(replica)));
    }

    /// Takes a replica down. What was known already is not said again: true when it was news.
    pub(super) fn quarantine(&self, found: Quarantined) -> bool {
        let listed = found.listed;
        let is_news = self.quarantined.lock().get(&listed.replica).is_none_or(|known| {
            // A lost replica also halts: it stays lost.
            !known.is_lost && (found.is_lost || known.reason != found.reason)
        });
        if is_news {
            let becomes = if found.is_lost {
                "replica quarantined: it neither votes nor serves, and is replaced from its peers"
            } else {
                "replica stopped: it neither votes nor serves, and is opened again in a few seconds"
            };
            tracing::error!(group = listed.group, replica = listed.replica, reason = %found.reason, "{becomes}");
        }
        self.take_down(listed);
        let mut quarantined = self.quarantined.lock();
        // A lost replica also halts: it stays lost.
        if found.is_lost || !quarantined.get(&listed.replica).is_some_and(|known| known.is_lost) {
            quarantined.insert(listed.replica, found);
        }
        is_news
    }

    /// Forgets a replica that ended; another one of its group stays.
    pub(super) fn remove(&self, listed: ListedReplica) {
        self.take_down(listed);
        self.quarantined.lock().remove(&listed.replica);
    }

    fn take_down(&self, listed: ListedReplica) {
        if self.meta().is_some_and(|meta| meta.listed.replica == listed.replica) {
            self.meta.store(None);
        }
        self.shards.rcu(|known| {
            let mut changed = HashMap::clone(known);
            changed.retain(|_, replica| replica.listed.replica != listed.replica);
            changed
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarantine_is_said_once_for_each_change() {
        let listed = ListedReplica {
            group: 1,
            shard: 0,
            replica: 7,
            range_start: 0,
            range_end: u64::MAX,
            started: true,
            making: 1,
            damaged: false,
        };
        let replicas = Replicas::default();
        let found = |is_lost, reason: &str| Quarantined { listed, reason: reason.into(), is_lost };
        assert!(replicas.quarantine(found(false, "a full disk")));
        assert!(!replicas.quarantine(found(false, "a full disk")));
        assert!(replicas.quarantine(found(true, "a hole in the log")));
        assert!(
            !replicas.quarantine(found(true, "a hole in the log")),
            "not yet written down, and tried again"
        );
        assert!(!replicas.quarantine(found(false, "it halted")));
        assert!(replicas.quarantined()[0].is_lost);
    }
}
