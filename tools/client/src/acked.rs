//! What a bounded read must show at least: this client's own pushes.
//!
//! Invariants:
//! - an index is noted before the push it belongs to is settled: who hears that a push is acknowledged reads it;
//! - an index never falls within a recovery epoch. What was acknowledged before an unsafe recovery may be lost with it.
//!
//! Not here: who asks for it (`replica_call`).

use std::collections::HashMap;

use parking_lot::Mutex;

/// An index that no replica has: only the leader, which has all, may answer.
pub(crate) const ONLY_THE_LEADER: u64 = u64::MAX;

/// By group, the log index that holds every push of this client that was acknowledged.
#[derive(Debug, Default)]
pub(crate) struct AckedIndexes {
    indexes: Mutex<HashMap<u64, u64>>,
}

impl AckedIndexes {
    /// A push to `group` was acknowledged: by the entry at `index`, or, when that is 0, by an earlier one that the leader had
    /// applied at `applied_index`.
    pub(crate) fn note(&self, group: u64, index: u64, applied_index: u64) {
        let index = match (index, applied_index) {
            (0, 0) => ONLY_THE_LEADER,
            (0, applied) => applied,
            (index, _) => index,
        };
        let mut indexes = self.indexes.lock();
        let known = indexes.entry(group).or_default();
        *known = index.max(*known);
    }

    /// What a read of `group` must show at least; 0 when nothing was pushed.
    pub(crate) fn of(&self, group: u64) -> u64 {
        self.indexes.lock().get(&group).copied().unwrap_or(0)
    }

    /// The cluster went through an unsafe recovery.
    pub(crate) fn forget(&self) {
        self.indexes.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_index_counts_and_one_that_is_not_known_is_the_leaders() {
        let acked = AckedIndexes::default();
        assert_eq!(acked.of(1), 0);
        acked.note(1, 7, 9);
        assert_eq!(acked.of(1), 7, "what others pushed need not be waited for");
        acked.note(1, 5, 9);
        assert_eq!(acked.of(1), 7);
        acked.note(1, 0, 12);
        assert_eq!(acked.of(1), 12, "it was applied before");
        acked.note(2, 0, 0);
        assert_eq!(acked.of(2), ONLY_THE_LEADER, "a server that does not tell");
        acked.forget();
        assert_eq!((acked.of(1), acked.of(2)), (0, 0));
    }
}
