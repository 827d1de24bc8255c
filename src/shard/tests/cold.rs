//! Rows that are on disk only: read on use, brought to memory if they are still what was read, counted without being read.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::BytesMut;
use evershard_proto::key::key_of;
use evershard_proto::push_body::Operation;
use evershard_raft::state_machine::StateMachine;
use evershard_storage::rocks::{FlushedState, ReplicaStore, RocksOptions, RocksShared};
use evershard_storage::table::RowHeader;

use super::harness::{Replica, apply, command, flush, pull};
use super::script::{one, schema};
use crate::memory::MemoryBudget;
use crate::model::KeyRange;
use crate::read::ReadError;
use crate::shard::{Fetched, OnDamage, Prefetcher, ShardMachine, ShardOptions};

/// Table 2 (SGD, one column) with ids 1 to `rows`, each its number, flushed.
fn flushed(rows: u64, budget: u64) -> Replica {
    let replica = Replica::with_budget(1, KeyRange::ALL, budget);
    apply(replica.machine(), command(1, schema(2, false)));
    for id in 1..=rows {
        let row = [-(id as f32)];
        apply(replica.machine(), command(id + 1, one(1, id, 2, Operation::Gradient, &[(id, &row)])));
        if id.is_multiple_of(8) {
            flush(replica.machine());
        }
    }
    flush(replica.machine());
    replica
}

fn resident(replica: &Replica) -> u64 {
    replica.machine().status().tables[0].resident
}

#[test]
fn a_restarted_replica_reads_rows_on_use() {
    let mut replica = flushed(20, 0);
    replica.crash();
    assert_eq!((resident(&replica), replica.machine().status().tables[0].is_counted), (0, false));
    assert_eq!(pull(replica.machine(), 2, 7), (vec![7.0], true));
    assert_eq!(pull(replica.machine(), 2, 99), (vec![0.0], false));
    assert_eq!(resident(&replica), 1, "what was read stays, what is absent takes nothing");
    // A push to a row on disk adds to it; a push to an absent one begins it.
    let body = one(1, 21, 2, Operation::Gradient, &[(8, &[-1.0]), (100, &[-1.0])]);
    apply(replica.machine(), command(22, body));
    assert_eq!(pull(replica.machine(), 2, 8), (vec![9.0], true));
    assert_eq!(pull(replica.machine(), 2, 100), (vec![1.0], true));
    // The warm-up counts and brings the rest.
    assert!(replica.machine().warm_up() && !replica.machine().warm_up());
    replica.machine().run_scans();
    let table = replica.machine().status().tables[0];
    assert_eq!((table.rows, table.is_counted, table.resident), (21, true, 21));
    assert!(replica.machine().rows().read().table(2).expect("it is there").is_whole());
}

#[test]
fn a_mix_of_rows_in_memory_and_on_disk_keeps_its_order() {
    let replica = flushed(30, 0);
    replica.machine().rows().let_go(15);
    let ids = [30, 77, 1, 2, 2, 15, 16, 78, 29];
    let keys: Vec<u8> = ids.iter().flat_map(|id| key_of(2, *id).to_le_bytes()).collect();
    let (mut rows, mut exists) = (BytesMut::from(&b"four"[..]), BytesMut::from(&b"x"[..]));
    replica.machine().pull(2, &keys, Some(&mut exists), &mut rows).expect("a pull");
    let expected: Vec<u8> = [30.0f32, 0.0, 1.0, 2.0, 2.0, 15.0, 16.0, 0.0, 29.0]
        .iter()
        .flat_map(|row| row.to_le_bytes())
        .collect();
    assert_eq!(&rows[..], &[b"four".to_vec(), expected].concat()[..]);
    assert_eq!(&exists[..], b"x\x01\x00\x01\x01\x01\x01\x01\x00\x01");
}

#[test]
fn what_was_read_too_long_ago_is_not_brought_to_memory() {
    let replica = flushed(1, 0);
    let machine = replica.machine();
    assert_eq!(machine.rows().let_go(1), 1);
    let rows = machine.rows();
    let read = || {
        let (absent, shape) = rows.absent(2, &[key_of(2, 1)]).expect("absent");
        let mut fetched = Fetched::default();
        rows.fetch(2, shape, &absent.keys, &mut fetched).expect("read");
        (absent, fetched)
    };
    let (absent, fetched) = read();
    apply(machine, command(3, one(1, 2, 2, Operation::Gradient, &[(1, &[-5.0])])));
    rows.take_in(&absent, &fetched);
    assert_eq!(pull(machine, 2, 1), (vec![6.0], true), "it is in memory, and newer");
    flush(machine);
    assert_eq!(rows.let_go(1) + rows.let_go(1) + rows.let_go(1) + rows.let_go(1), 1);
    rows.take_in(&absent, &fetched);
    assert_eq!(resident(&replica), 0);
    assert_eq!(pull(machine, 2, 1), (vec![6.0], true));
    // What is still so is taken.
    rows.let_go(1);
    let (absent, fetched) = read();
    rows.take_in(&absent, &fetched);
    assert_eq!(resident(&replica), 1);
}

#[test]
fn a_removed_row_does_not_come_back_from_disk() {
    let mut replica = flushed(3, 0);
    replica.machine().rows().let_go(3);
    apply(replica.machine(), command(5, one(1, 4, 2, Operation::Remove, &[(2, &[0.0])])));
    assert_eq!(pull(replica.machine(), 2, 2), (vec![0.0], false));
    flush(replica.machine());
    flush(replica.machine());
    replica.machine().rows().let_go(3);
    assert_eq!(pull(replica.machine(), 2, 2), (vec![0.0], false));
    replica.crash();
    assert_eq!(pull(replica.machine(), 2, 2), (vec![0.0], false));
    apply(replica.machine(), command(6, one(1, 5, 2, Operation::Gradient, &[(2, &[-1.0])])));
    assert_eq!(pull(replica.machine(), 2, 2), (vec![1.0], true));
    replica.machine().warm_up();
    replica.machine().run_scans();
    assert_eq!(replica.machine().status().tables[0].rows, 3);
}

#[test]
fn memory_stays_within_the_budget_and_nothing_is_lost() {
    const BUDGET: u64 = 16 << 10;
    let replica = flushed(2_000, BUDGET);
    let table = replica.machine().status().tables[0];
    assert!(table.memory_bytes <= BUDGET + BUDGET / 4, "{table:?}");
    assert!(table.resident > 50 && table.resident < 1_000, "{table:?}");
    for id in (1..=2_000).step_by(7) {
        assert_eq!(pull(replica.machine(), 2, id), (vec![id as f32], true));
    }
    assert!(replica.machine().status().tables[0].memory_bytes <= BUDGET + BUDGET / 4);
    replica.machine().digest().expect("ready");
}

/// A machine with table 2 and ids 1 to `rows` in the store only, next index `rows + 2`.
fn cold(home: &std::path::Path, prefetcher: &Prefetcher, rows: u64) -> ShardMachine {
    let shared = RocksShared::new(RocksOptions::default()).expect("an environment");
    let identity = flushed(1, 0).machine().identity().clone();
    let store = ReplicaStore::create(home, &identity, &shared).expect("made");
    let options = ShardOptions { prefetches: prefetcher.prefetches(), ..ShardOptions::new(KeyRange::ALL) };
    let machine = ShardMachine::open(options, store).expect("opened");
    apply(&machine, command(1, schema(2, false)));
    for id in 1..=rows {
        apply(&machine, command(id + 1, one(1, id, 2, Operation::Gradient, &[(id, &[-1.0])])));
    }
    flush(&machine);
    while machine.status().tables[0].resident > 0 {
        machine.rows().let_go(u32::MAX);
    }
    machine
}

/// How many rows were prefetched, and how many apply read.
fn counted(machine: &ShardMachine) -> (u64, u64) {
    let counts = machine.rows().cold_counts();
    (counts.prefetched(), counts.read_by_apply())
}

/// A push of ids 1 to 3, and of one that no store has.
fn push_of_three(seq: u64) -> bytes::Bytes {
    let row: &[f32] = &[-1.0];
    one(1, seq, 2, Operation::Gradient, &[(1, row), (2, row), (3, row), (100, row)])
}

#[test]
fn hinted_rows_come_to_memory_before_they_are_applied() {
    let prefetcher = Prefetcher::start().expect("threads");
    let home = tempfile::tempdir().expect("a folder");
    let machine = cold(home.path(), &prefetcher, 5);
    machine.announced(&push_of_three(6));
    // Ends, with what was hinted done, though the machine still has its end of the queue.
    drop(prefetcher);
    assert_eq!(machine.status().tables[0].resident, 3);
    assert_eq!(counted(&machine), (3, 0));
    assert_eq!(pull(&machine, 2, 1), (vec![1.0], true), "nothing was applied");
    apply(&machine, command(7, push_of_three(6)));
    assert_eq!(pull(&machine, 2, 1), (vec![2.0], true));
    assert_eq!(counted(&machine), (3, 0), "apply found them all, and what is nowhere is not read");
}

#[test]
fn rows_that_nobody_prefetched_are_read_by_apply_and_counted() {
    let prefetcher = Prefetcher::start().expect("threads");
    let home = tempfile::tempdir().expect("a folder");
    let machine = cold(home.path(), &prefetcher, 5);
    // Too late: apply was faster.
    apply(&machine, command(7, push_of_three(6)));
    assert_eq!(counted(&machine), (0, 3));
    machine.announced(&push_of_three(6));
    drop(prefetcher);
    assert_eq!(counted(&machine), (0, 3), "what is in memory is not prefetched");
    // Nobody takes hints any more.
    let row: &[f32] = &[-1.0];
    let rest = one(1, 7, 2, Operation::Gradient, &[(3, row), (4, row), (5, row)]);
    machine.announced(&rest);
    apply(&machine, command(8, rest));
    assert_eq!(counted(&machine), (0, 5));
    for (id, sum) in [(1, 2.0), (3, 3.0), (5, 2.0), (100, 1.0)] {
        assert_eq!(pull(&machine, 2, id), (vec![sum], true), "{id}");
    }
}

#[test]
fn a_row_that_does_not_fit_its_table_is_damage() {
    let replica = flushed(1, 0);
    let home = tempfile::tempdir().expect("a folder");
    let shared = RocksShared::new(RocksOptions::default()).expect("an environment");
    let store = ReplicaStore::create(home.path(), replica.machine().identity(), &shared).expect("made");
    let state = replica.machine().store().state();
    let mut run = store.begin_run().expect("begun");
    run.put(2, key_of(2, 1), RowHeader { version: 2, steps: 1, flags: 0 }, &[1.0, 2.0]).expect("written");
    store.commit(run, 2, FlushedState { ..state }).expect("committed");
    let told = Arc::new(AtomicBool::new(false));
    let hears = Arc::clone(&told);
    let on_damage: OnDamage = Arc::new(move |reason| {
        assert!(reason.contains("table 2"), "{reason}");
        assert!(!hears.swap(true, Ordering::SeqCst), "once is enough");
    });
    let options = ShardOptions {
        on_damage: Some(on_damage),
        budget: MemoryBudget::unlimited(),
        ..ShardOptions::new(KeyRange::ALL)
    };
    let machine = ShardMachine::open(options, store).expect("opened: no row is read");
    let keys = key_of(2, 1).to_le_bytes();
    let mut rows = BytesMut::new();
    let refused = machine.pull(2, &keys, None, &mut rows);
    assert!(matches!(refused, Err(ReadError::Disk { table: 2, .. })), "{refused:?}");
    assert!(rows.is_empty() && told.load(Ordering::SeqCst));
    assert!(machine.digest().is_none(), "a scrub finds it too");
    let index = machine.applied().expect("some").index + 1;
    let push = command(index, one(1, 2, 2, Operation::Gradient, &[(1, &[-1.0])]));
    let halt = machine.apply(&[push]).expect_err("a push to it halts");
    assert_eq!(halt.index, index);
}
