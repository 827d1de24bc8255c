//! How current a copy of a tensor is.
//!
//! A shard's log index says it all: what was pulled reflects every entry up to the index that came with it, and a block that none
//! of the later entries changed is still the same, whoever leads the shard. So a version is an index a group.
//!
//! It means nothing to other groups (a shard that was restored or split has new ones), and nothing after an unsafe recovery, which
//! gives up a part of the log and uses its indexes again: then everything is pulled.
//!
//! Invariant: a group's index is the lowest that any of its replies came with.

use std::collections::BTreeMap;

use crate::pull::Pulled;
use crate::routing_cache::RoutingTable;

/// As of when a tensor was pulled: for the next [`Tensor::pull_if_newer`](crate::Tensor::pull_if_newer) of the same tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorVersion {
    table: u32,
    recovery_epoch: u64,
    /// Group, first key of its range, log index (0: not asked).
    groups: Vec<(u64, u64, u64)>,
    changed: usize,
}

impl TensorVersion {
    /// After a pull, which began with the blocks of `since`, if any.
    pub(super) fn new(
        table: u32,
        recovery_epoch: u64,
        routing: &RoutingTable,
        since: Option<&TensorVersion>,
        pulled: Pulled,
    ) -> Self {
        let before = since.map(TensorVersion::indexes).unwrap_or_default();
        let index = |group: u64| {
            let known = pulled.indexes.get(&group).or_else(|| before.get(&group));
            known.copied().unwrap_or_default()
        };
        let groups = routing.shards.iter().map(|shard| (shard.group, shard.range_start, index(shard.group)));
        TensorVersion { table, recovery_epoch, groups: groups.collect(), changed: pulled.rows }
    }

    /// Blocks that travelled with the pull that gave this version: none when nothing was changed since the version before.
    #[must_use]
    pub fn changed_blocks(&self) -> usize {
        self.changed
    }

    /// Whether the indexes mean what they meant.
    pub(super) fn is_of(&self, table: u32, recovery_epoch: u64, routing: &RoutingTable) -> bool {
        let now = routing.shards.iter().map(|shard| (shard.group, shard.range_start));
        self.table == table
            && self.recovery_epoch == recovery_epoch
            && self.groups.iter().map(|(group, range_start, _)| (*group, *range_start)).eq(now)
    }

    /// By group.
    pub(super) fn indexes(&self) -> BTreeMap<u64, u64> {
        self.groups.iter().map(|(group, _, index)| (*group, *index)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing_cache::table_for_tests;

    fn pulled(indexes: &[(u64, u64)]) -> Pulled {
        Pulled { indexes: indexes.iter().copied().collect(), rows: 3, ..Pulled::default() }
    }

    #[test]
    fn a_version_is_of_one_table_one_history_and_one_set_of_groups() {
        let routing = table_for_tests(2);
        let version = TensorVersion::new(7, 1, &routing, None, pulled(&[(1, 10), (2, 20)]));
        assert_eq!(version.changed_blocks(), 3);
        assert!(version.is_of(7, 1, &routing));
        assert!(!version.is_of(8, 1, &routing), "another table");
        assert!(!version.is_of(7, 2, &routing), "indexes are used again");
        assert!(!version.is_of(7, 1, &table_for_tests(3)), "blocks may be elsewhere");
        assert_eq!(version.indexes(), BTreeMap::from([(1, 10), (2, 20)]));
    }

    #[test]
    fn a_group_that_was_not_asked_keeps_its_index() {
        let routing = table_for_tests(2);
        let first = TensorVersion::new(7, 0, &routing, None, pulled(&[(1, 10)]));
        assert_eq!(first.indexes(), BTreeMap::from([(1, 10), (2, 0)]));
        let second = TensorVersion::new(7, 0, &routing, Some(&first), pulled(&[(2, 5)]));
        assert_eq!(second.indexes(), BTreeMap::from([(1, 10), (2, 5)]));
    }
}
