//! Rows that were used most come to memory first after a restart.

use std::collections::BTreeSet;

use evershard_proto::key::key_of;
use evershard_proto::push_body::Operation;

use super::harness::{Replica, apply, command, flush, pull};
use super::script::{one, schema};
use crate::model::KeyRange;
use crate::shard::hot_rows::{READ_AT_ONCE, ROWS_MAX};

/// Table 2 (SGD, one column) with ids 1 to `rows`, each its number, flushed.
fn flushed(rows: u64, budget: u64) -> Replica {
    let replica = Replica::with_budget(1, KeyRange::ALL, budget);
    apply(replica.machine(), command(1, schema(2, false)));
    for id in 1..=rows {
        apply(
            replica.machine(),
            command(id + 1, one(1, id, 2, Operation::Gradient, &[(id, &[-(id as f32)])])),
        );
    }
    flush(replica.machine());
    replica
}

fn in_memory(replica: &Replica, ids: impl IntoIterator<Item = u64>) -> BTreeSet<u64> {
    let set = replica.machine().rows().read();
    let table = set.table(2).expect("it is there");
    ids.into_iter().filter(|id| table.find_slot(key_of(2, *id)).is_some()).collect()
}

#[test]
fn the_hottest_rows_are_remembered_and_come_first() {
    let mut replica = flushed(100, 0);
    let hot: BTreeSet<u64> = [5, 17, 33, 64, 71, 90].into();
    for _ in 0..3 {
        hot.iter().for_each(|id| drop(pull(replica.machine(), 2, *id)));
    }
    replica.machine().rows().remember_hottest().expect("written");
    replica.crash();
    assert_eq!(in_memory(&replica, 1..=100), BTreeSet::new());
    replica.machine().rows().warm_hottest(&mut || true);
    let warm = in_memory(&replica, 1..=100);
    assert!(warm.is_superset(&hot) && warm.len() <= ROWS_MAX, "{warm:?}");
    for id in 1..=100 {
        assert_eq!(pull(replica.machine(), 2, id), (vec![id as f32], true));
    }
    // A replica that has just begun says nothing, and what was said stays.
    replica.crash();
    replica.machine().rows().remember_hottest().expect("nothing to write");
    replica.machine().rows().warm_hottest(&mut || true);
    assert_eq!(in_memory(&replica, 1..=100), warm);
}

#[test]
fn it_stops_when_told_and_where_there_is_no_file() {
    let mut replica = flushed(100, 0);
    replica.machine().rows().warm_hottest(&mut || true);
    (1..=100).for_each(|id| drop(pull(replica.machine(), 2, id)));
    replica.machine().rows().remember_hottest().expect("written");
    replica.crash();
    let mut batches = 0;
    replica.machine().rows().warm_hottest(&mut || {
        batches += 1;
        batches < 2
    });
    assert_eq!(in_memory(&replica, 1..=100).len(), READ_AT_ONCE);
}

#[test]
fn a_damaged_file_is_no_more_than_no_file() {
    let mut replica = flushed(10, 0);
    (1..=10).for_each(|id| drop(pull(replica.machine(), 2, id)));
    replica.machine().rows().remember_hottest().expect("written");
    let path = replica.machine().rows().hot_rows_path();
    let mut bytes = std::fs::read(&path).expect("it is there");
    bytes[30] ^= 1;
    std::fs::write(&path, &bytes).expect("written");
    replica.crash();
    replica.machine().rows().warm_hottest(&mut || true);
    assert_eq!(in_memory(&replica, 1..=10), BTreeSet::new());
    assert_eq!(pull(replica.machine(), 2, 7), (vec![7.0], true));
}

#[test]
fn of_many_rows_the_hottest_are_kept_and_come_before_the_others() {
    let mut replica = flushed(100, 0);
    let hot: BTreeSet<u64> = [3, 20, 41, 66].into();
    (1..=100).for_each(|id| drop(pull(replica.machine(), 2, id)));
    for id in hot.iter().cycle().take(2 * hot.len()) {
        pull(replica.machine(), 2, *id);
    }
    replica.machine().rows().remember_hottest().expect("written");
    replica.crash();
    let mut batches = 0;
    replica.machine().rows().warm_hottest(&mut || {
        batches += 1;
        batches < 2
    });
    assert_eq!(in_memory(&replica, 1..=100), hot, "the first batch");
    replica.machine().rows().warm_hottest(&mut || true);
    // Of those that were used as much, the ones that changed last.
    let all: BTreeSet<u64> = hot.into_iter().chain(97..=100).collect();
    assert_eq!((all.len(), in_memory(&replica, 1..=100)), (ROWS_MAX, all));
}
