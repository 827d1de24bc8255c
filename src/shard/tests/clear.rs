//! Clearing a table: rows in memory, on disk and in between go at one entry, and stay gone through flushes, restarts and replay;
//! what is pushed behind it stays.

use evershard_proto::push_body::Operation;
use evershard_raft::state_machine::StateMachine;

use super::harness::{Replica, apply, command, fingerprint, flush, flush_with, pull};
use super::script::{clear, one, schema};
use crate::model::{KeyRange, PushOutcome};
use crate::shard::{ScrubResult, ShardMachine, SkipReason};

/// SGD, one column, zeros.
const TABLE: u32 = 2;
/// As rows can be when their table is cleared.
const COLD: u64 = 1;
const HOT: u64 = 2;
const DIRTY: u64 = 3;
const REMOVED: u64 = 4;
/// Of a table that stays.
const OTHER: u32 = 4;

fn set(machine: &ShardMachine, index: u64, table: u32, id: u64, value: f32) {
    let row = vec![value; if table == OTHER { 2 } else { 1 }];
    apply(machine, command(index, one(1, index - 2, table, Operation::Set, &[(id, &row)])));
}

/// Entries 1 to 9: a row of each kind, and one of the other table.
fn filled() -> Replica {
    let mut replica = Replica::new(1, KeyRange::ALL);
    for (table, index) in [(TABLE, 1), (OTHER, 2)] {
        apply(replica.machine(), command(index, schema(table, false)));
    }
    for (index, id) in (3..).zip([COLD, HOT, DIRTY, REMOVED]) {
        set(replica.machine(), index, TABLE, id, id as f32);
    }
    set(replica.machine(), 7, OTHER, COLD, 7.0);
    flush(replica.machine());
    replica.crash();
    assert!(pull(replica.machine(), TABLE, HOT).1);
    set(replica.machine(), 8, TABLE, DIRTY, 30.0);
    apply(replica.machine(), command(9, one(1, 7, TABLE, Operation::Remove, &[(REMOVED, &[])])));
    replica
}

fn clear_at(machine: &ShardMachine, index: u64) {
    let answer = apply(machine, command(index, clear(1, index - 2, TABLE)));
    assert_eq!(PushOutcome::decode(&answer), Ok(PushOutcome::Applied { index }));
}

fn assert_cleared(replica: &Replica) {
    for id in [COLD, HOT, DIRTY, REMOVED] {
        assert_eq!(pull(replica.machine(), TABLE, id), (vec![0.0], false), "id {id}");
    }
    assert_eq!(pull(replica.machine(), OTHER, COLD), (vec![7.0, 7.0], true));
}

fn rows(replica: &Replica) -> Option<u64> {
    let status = replica.machine().status();
    let table = status.tables.iter().find(|table| table.table == TABLE).expect("it is there");
    table.is_counted.then_some(table.rows)
}

#[test]
fn rows_of_every_kind_go_and_stay_gone() {
    let mut replica = filled();
    clear_at(replica.machine(), 10);
    assert_cleared(&replica);
    assert_eq!(rows(&replica), Some(0), "counted without a scan, though not all rows had been");
    // Before a flush the record has no floor: the entry is replayed.
    replica.crash();
    let again: Vec<_> = [(8, DIRTY)].into();
    for (index, id) in again {
        set(replica.machine(), index, TABLE, id, 30.0);
    }
    apply(replica.machine(), command(9, one(1, 7, TABLE, Operation::Remove, &[(REMOVED, &[])])));
    clear_at(replica.machine(), 10);
    assert_cleared(&replica);
    flush(replica.machine());
    assert_cleared(&replica);
    // Now it is in the record, and the rows are on disk still.
    replica.crash();
    assert_eq!(replica.machine().lock_small().small.floors, [(TABLE, 10)].into());
    assert!(replica.machine().store().has_rows(TABLE).expect("read"));
    assert_cleared(&replica);
    replica.machine().warm_up();
    replica.machine().run_scans();
    assert_eq!(rows(&replica), Some(0));
    // What is pushed now begins anew, and stays.
    apply(replica.machine(), command(11, one(1, 9, TABLE, Operation::Gradient, &[(COLD, &[-5.0])])));
    assert_eq!(pull(replica.machine(), TABLE, COLD), (vec![5.0], true));
    flush(replica.machine());
    replica.crash();
    assert_eq!(pull(replica.machine(), TABLE, COLD), (vec![5.0], true));
    assert_eq!(pull(replica.machine(), TABLE, HOT), (vec![0.0], false));
}

#[test]
fn a_flush_that_the_clear_comes_into_recovers_exactly() {
    let mut replica = filled();
    let machine = replica.machine().clone();
    let mut is_cleared = false;
    // The record is as of entry 9, and of rows that the clear took away it has nothing.
    let report = flush_with(&machine, true, || {
        if !std::mem::replace(&mut is_cleared, true) {
            clear_at(&machine, 10);
            set(&machine, 11, TABLE, HOT, 11.0);
        }
    });
    assert_eq!(report.expect("flushed").expect("something").position.index, 9);
    let before = fingerprint(&machine);
    assert_eq!(pull(&machine, TABLE, HOT), (vec![11.0], true));
    assert_eq!(pull(&machine, TABLE, DIRTY), (vec![0.0], false));
    drop(machine);
    replica.crash();
    assert!(!replica.machine().ready(), "rows of the run may lack what is before the clear");
    clear_at(replica.machine(), 10);
    set(replica.machine(), 11, TABLE, HOT, 11.0);
    assert_eq!(fingerprint(replica.machine()), before);
}

#[test]
fn rows_that_are_ahead_of_the_clear_stay_in_replay() {
    let mut replica = filled();
    let machine = replica.machine().clone();
    clear_at(&machine, 10);
    set(&machine, 11, TABLE, HOT, 11.0);
    // The run is in, and the record is not: a crash came between.
    let crashed = super::harness::crash_at("flush::before_meta", || {
        flush(&machine);
    });
    if !crashed {
        // Crash points are not compiled in.
        return;
    }
    drop(machine);
    replica.crash();
    set(replica.machine(), 8, TABLE, DIRTY, 30.0);
    apply(replica.machine(), command(9, one(1, 7, TABLE, Operation::Remove, &[(REMOVED, &[])])));
    clear_at(replica.machine(), 10);
    set(replica.machine(), 11, TABLE, HOT, 11.0);
    assert_eq!(pull(replica.machine(), TABLE, HOT), (vec![11.0], true));
    assert_eq!(pull(replica.machine(), TABLE, COLD), (vec![0.0], false));
    flush(replica.machine());
    replica.crash();
    assert_eq!(pull(replica.machine(), TABLE, HOT), (vec![11.0], true));
}

#[test]
fn a_digest_is_of_its_index_or_skipped() {
    let replica = filled();
    let machine = replica.machine();
    let before = machine.digest().expect("ready");
    // One whose pass over the store has not opened cannot know any more what was there.
    let scrub = evershard_proto::shard_command::ShardCommand::Scrub { scrub_id: 5 };
    apply(machine, command(10, scrub.encode()));
    apply(machine, command(11, clear(1, 8, TABLE)));
    machine.run_scans();
    assert_eq!(machine.scrub_result(5), Some(ScrubResult::Skipped(SkipReason::Cleared)));
    let after = machine.digest().expect("ready");
    assert_ne!(before.1, after.1);
    // One that has opened it ends as it began, whatever comes then.
    apply(machine, command(12, one(1, 9, TABLE, Operation::Set, &[(HOT, &[1.0])])));
    let expected = machine.digest().expect("ready");
    let scrub = evershard_proto::shard_command::ShardCommand::Scrub { scrub_id: 6 };
    apply(machine, command(13, scrub.encode()));
    let mut turns = 0;
    machine.run_scan(&mut || {
        turns += 1;
        if turns == 1 {
            apply(machine, command(14, clear(1, 10, TABLE)));
            apply(machine, command(15, one(1, 11, TABLE, Operation::Set, &[(DIRTY, &[2.0])])));
        }
        true
    });
    assert!(turns > 0);
    let undisturbed = filled();
    let other = undisturbed.machine();
    apply(other, command(10, evershard_proto::shard_command::ShardCommand::Scrub { scrub_id: 5 }.encode()));
    apply(other, command(11, clear(1, 8, TABLE)));
    apply(other, command(12, one(1, 9, TABLE, Operation::Set, &[(HOT, &[1.0])])));
    assert_eq!(other.digest().expect("ready"), expected);
    apply(other, command(13, evershard_proto::shard_command::ShardCommand::Scrub { scrub_id: 6 }.encode()));
    other.run_scans();
    assert_eq!(machine.scrub_result(6), other.scrub_result(6));
    assert!(matches!(machine.scrub_result(6), Some(ScrubResult::Done { index: 13, .. })));
}

#[test]
fn a_snapshot_carries_the_floor() {
    let replica = filled();
    clear_at(replica.machine(), 10);
    set(replica.machine(), 11, TABLE, HOT, 11.0);
    flush(replica.machine());
    let links = replica.folder("links");
    let mark = replica.machine().link_snapshot(&links).expect("linked");
    let other = Replica::new(2, KeyRange::ALL);
    apply(other.machine(), command(1, schema(TABLE, false)));
    apply(other.machine(), command(2, one(1, 1, TABLE, Operation::Set, &[(COLD, &[1.0])])));
    other.machine().install_snapshot(&mark, &links).expect("installed");
    assert_eq!(fingerprint(other.machine()), fingerprint(replica.machine()));
    assert_eq!(pull(other.machine(), TABLE, COLD), (vec![0.0], false));
    assert_eq!(pull(other.machine(), TABLE, HOT), (vec![11.0], true));
}
