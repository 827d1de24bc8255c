//! Flushes at any moment, crashes at any moment: what recovers and replays is, to the bit, what never stopped.

use std::sync::Arc;

use evershard_proto::key::key_of;
use evershard_proto::push_body::Operation;
use evershard_raft::state_machine::{CommittedEntry, StateMachine};
use proptest::prelude::*;

use super::harness::{Replica, apply, cases, command, crash_at, fingerprint, flush, flush_with, pull};
use super::script::{IDS, TABLES, log, one, schema};
use crate::model::KeyRange;
use crate::read::Marks;

/// What a replica goes through besides its log.
#[derive(Debug, Clone)]
enum Event {
    /// So many entries.
    Apply(usize),
    /// A flush cycle with so many entries applied between its batches each.
    Flush { between: usize },
    /// A flush cycle whose log does not become durable: nothing is committed.
    FlushInVain { between: usize },
    /// Memory is lost.
    Crash,
    /// So many clean rows of each table leave memory.
    LetGo(u32),
    /// Rows are read: those on disk come to memory.
    Pull(usize),
    /// All rows that are on disk come to memory, with so many entries applied between the steps.
    WarmUp { between: usize },
    /// Memory is lost in the middle of a commit (where crash points are compiled in).
    CrashInCommit { point: &'static str, between: usize },
}

const COMMIT_POINTS: [&str; 4] =
    ["flush::before_complete_at", "flush::before_ingest", "flush::before_meta", "flush::after_meta"];
const INSTALL_POINTS: [&str; 3] = ["install::before_move", "install::before_swap", "install::after_swap"];

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        4 => (1usize..12).prop_map(Event::Apply),
        4 => (0usize..4).prop_map(|between| Event::Flush { between }),
        1 => (0usize..4).prop_map(|between| Event::FlushInVain { between }),
        2 => Just(Event::Crash),
        4 => (1u32..20).prop_map(Event::LetGo),
        2 => (0..IDS.len()).prop_map(Event::Pull),
        1 => (0usize..4).prop_map(|between| Event::WarmUp { between }),
        3 => (prop::sample::select(&COMMIT_POINTS[..]), 0usize..4)
            .prop_map(|(point, between)| Event::CrashInCommit { point, between }),
    ];
    prop::collection::vec(event, 1..25)
}

/// Applies the entry behind the last applied one, if there is one.
fn next(machine: &crate::shard::ShardMachine, entries: &[CommittedEntry]) -> bool {
    let at = machine.applied().map_or(0, |position| position.index as usize);
    match entries.get(at) {
        Some(entry) => {
            apply(machine, entry.clone());
            true
        }
        None => false,
    }
}

/// A scan gives what pulls give, each row once and in order, whatever is in memory, on disk, or both.
fn assert_scans_as_pulled(machine: &crate::shard::ShardMachine, table: u32, rows_max: u32) {
    let reader = machine.reader();
    let (mut from_key, mut found) = (0, Vec::new());
    loop {
        let Ok(piece) = reader.scan(table, from_key, rows_max) else {
            assert!(!machine.ready() || reader.schema(table).is_none());
            return;
        };
        assert_eq!(piece.index, reader.applied());
        assert!(piece.keys.len() <= rows_max as usize * 8);
        found
            .extend(piece.keys.chunks_exact(8).map(|raw| u64::from_le_bytes(raw.try_into().expect("eight"))));
        let keys = piece.keys.clone();
        let (mut rows, mut exists) = (bytes::BytesMut::new(), Marks::exists());
        reader.pull(table, &keys, Some(&mut exists), &mut rows).expect("pulled");
        assert_eq!(rows, piece.rows);
        assert!(exists.bytes().iter().all(|exists| *exists == 1));
        match piece.next_key {
            Some(next_key) => {
                assert!(next_key > from_key && found.last().is_none_or(|last| *last < next_key));
                from_key = next_key;
            }
            None => break,
        }
    }
    let mut expected: Vec<u64> = IDS.iter().map(|id| key_of(table, *id)).collect();
    expected.sort_unstable();
    let keys: Vec<u8> = expected.iter().flat_map(|key| key.to_le_bytes()).collect();
    let mut exists = Marks::exists();
    reader.pull(table, &keys, Some(&mut exists), &mut bytes::BytesMut::new()).expect("pulled");
    let mut flags = exists.bytes().iter();
    expected.retain(|_| flags.next() == Some(&1));
    assert_eq!(found, expected);
    if let Some((rows, _)) = reader.size(table).expect("there") {
        assert_eq!(rows, expected.len() as u64);
    }
}

fn copy_folder(from: &std::path::Path, to: &std::path::Path) {
    std::fs::create_dir(to).expect("made");
    for entry in std::fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        if entry.file_type().expect("a type").is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).expect("copied");
        }
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn recovery_is_exact_from_every_flush(
        entries in log(100),
        events in events(),
        budget in prop::sample::select(&[0u64, 400, 1500][..]),
    ) {
        let undisturbed = Replica::new(1, KeyRange::ALL);
        for entry in &entries {
            apply(undisturbed.machine(), entry.clone());
        }
        let mut replica = Replica::with_budget(2, KeyRange::ALL, budget);
        for event in events {
            match event {
                Event::Apply(count) => {
                    for _ in 0..count {
                        next(replica.machine(), &entries);
                    }
                }
                Event::Flush { between } => {
                    let machine = Arc::clone(replica.machine());
                    let report = flush_with(&machine, true, || {
                        for _ in 0..between {
                            next(&machine, &entries);
                        }
                    });
                    let mark = machine.snapshot_mark();
                    if let Some(report) = report.expect("flushed") {
                        prop_assert_eq!(mark.position, Some(report.position));
                    }
                }
                Event::FlushInVain { between } => {
                    let machine = Arc::clone(replica.machine());
                    let before = machine.snapshot_mark();
                    let result = flush_with(&machine, false, || {
                        for _ in 0..between {
                            next(&machine, &entries);
                        }
                    });
                    prop_assert!(matches!(result, Ok(None) | Err(_)));
                    prop_assert_eq!(machine.snapshot_mark(), before);
                }
                Event::LetGo(rows) => {
                    replica.machine().rows().let_go(rows);
                }
                Event::Pull(first) => {
                    let reader = replica.machine().reader();
                    for table in TABLES {
                        let ids = &IDS[first..(first + 4).min(IDS.len())];
                        let keys: Vec<u8> = ids.iter().flat_map(|id| key_of(table, *id).to_le_bytes()).collect();
                        // Refused while there is no such table, and while the replica replays.
                        let _ = reader.pull(table, &keys, None, &mut bytes::BytesMut::new());
                        assert_scans_as_pulled(replica.machine(), table, first as u32 % 3 + 1);
                    }
                }
                Event::WarmUp { between } => {
                    let machine = Arc::clone(replica.machine());
                    machine.warm_up();
                    let mut go_on = || {
                        for _ in 0..between {
                            next(&machine, &entries);
                        }
                        true
                    };
                    while machine.run_scan(&mut go_on) {}
                }
                Event::CrashInCommit { point, between } => {
                    let machine = Arc::clone(replica.machine());
                    crash_at(point, || {
                        let _ = flush_with(&machine, true, || {
                            for _ in 0..between {
                                next(&machine, &entries);
                            }
                        });
                    });
                    drop(machine);
                    replica.crash();
                }
                Event::Crash => {
                    let mark = replica.machine().snapshot_mark();
                    replica.crash();
                    prop_assert_eq!(replica.machine().recovered(), mark);
                }
            }
        }
        replica.crash();
        while next(replica.machine(), &entries) {}
        prop_assert!(replica.machine().ready());
        prop_assert_eq!(fingerprint(replica.machine()), fingerprint(undisturbed.machine()));
        // And it is still so after everything is flushed, tombstones are forgotten and memory is lost once more.
        flush(replica.machine());
        flush(replica.machine());
        replica.crash();
        prop_assert_eq!(replica.machine().status().tables.iter().map(|t| t.tombstones).sum::<u64>(), 0);
        for table in TABLES {
            assert_scans_as_pulled(replica.machine(), table, 2);
        }
        prop_assert_eq!(fingerprint(replica.machine()), fingerprint(undisturbed.machine()));
    }

    #[test]
    fn an_installed_snapshot_is_exact(
        entries in log(80),
        flushed in any::<prop::sample::Index>(),
        behind in any::<prop::sample::Index>(),
        between in 0usize..4,
        point in prop::sample::select(&INSTALL_POINTS[..]),
    ) {
        let sender = Replica::new(1, KeyRange::ALL);
        let flushed = flushed.index(entries.len()) + 1;
        for entry in &entries[..flushed] {
            apply(sender.machine(), entry.clone());
        }
        let machine = Arc::clone(sender.machine());
        flush_with(&machine, true, || {
            for _ in 0..between {
                next(&machine, &entries);
            }
        })
        .expect("flushed");
        let links = sender.folder("links");
        let mark = sender.machine().link_snapshot(&links).expect("linked");
        prop_assert_eq!(&mark, &sender.machine().snapshot_mark());
        while next(sender.machine(), &entries) {}

        let mut receiver = Replica::new(2, KeyRange::ALL);
        for entry in &entries[..behind.index(flushed)] {
            apply(receiver.machine(), entry.clone());
        }
        let incoming = receiver.folder("incoming");
        std::fs::rename(&links, &incoming).expect("moved");
        let install = Arc::clone(receiver.machine());
        let spare = receiver.folder("spare");
        copy_folder(&incoming, &spare);
        if crash_at(point, || install.install_snapshot(&mark, &spare).expect("installed")) {
            drop(install);
            receiver.crash();
        }
        // Sent again, as it is after a crash; an install of what is there already is fine.
        receiver.machine().install_snapshot(&mark, &incoming).expect("installed");
        prop_assert_eq!(receiver.machine().snapshot_mark(), mark.clone());
        prop_assert_eq!(receiver.machine().applied(), mark.position);
        if between == 0 {
            // Nothing was ahead of the mark: it serves at once.
            prop_assert!(receiver.machine().ready());
        }
        let crashed = behind.index(2) == 0;
        if crashed {
            receiver.crash();
            prop_assert_eq!(receiver.machine().recovered(), mark);
        }
        while next(receiver.machine(), &entries) {}
        prop_assert_eq!(fingerprint(receiver.machine()), fingerprint(sender.machine()));
    }
}

#[test]
fn a_replica_that_is_ahead_of_its_log_serves_nothing() {
    let mut replica = Replica::new(1, KeyRange::ALL);
    let machine = Arc::clone(replica.machine());
    apply(&machine, command(1, schema(2, false)));
    apply(&machine, command(2, one(1, 1, 2, Operation::Gradient, &[(5, &[-1.0])])));
    let later = command(3, one(1, 2, 2, Operation::Gradient, &[(5, &[-1.0])]));
    // The row is copied with entry 3 in it, the small state is that of entry 2.
    let mut applied = false;
    flush_with(&machine, true, || {
        if !std::mem::replace(&mut applied, true) {
            apply(&machine, later.clone());
        }
    })
    .expect("flushed");
    drop(machine);
    replica.crash();
    let machine = replica.machine();
    assert_eq!(machine.applied().expect("some").index, 2);
    assert!(!machine.ready());
    assert!(machine.digest().is_none());
    let refused = machine.reader().pull(2, &[], None, &mut bytes::BytesMut::new());
    assert!(
        matches!(refused, Err(crate::read::ReadError::NotReady { applied: 2, complete_at: 3, .. })),
        "{refused:?}"
    );
    apply(machine, later);
    assert!(machine.ready());
    assert_eq!(pull(machine, 2, 5), (vec![2.0], true));
}

#[test]
fn a_table_dropped_in_mid_flush_is_not_served_before_its_drop() {
    let mut replica = Replica::new(1, KeyRange::ALL);
    let machine = Arc::clone(replica.machine());
    apply(&machine, command(1, schema(2, false)));
    apply(&machine, command(2, one(1, 1, 2, Operation::Gradient, &[(5, &[-1.0])])));
    flush(&machine);
    apply(&machine, command(3, one(1, 2, 2, Operation::Gradient, &[(5, &[-1.0])])));
    // The row as of entry 3 is gone before it is copied; the store keeps the one of entry 2 and says it is at 3.
    let mut dropped = false;
    flush_with(&machine, true, || {
        if !std::mem::replace(&mut dropped, true) {
            apply(&machine, command(4, schema(2, true)));
        }
    })
    .expect("flushed");
    drop(machine);
    replica.crash();
    assert_eq!(replica.machine().applied().expect("some").index, 3);
    assert!(!replica.machine().ready());
    apply(replica.machine(), command(4, schema(2, true)));
    assert!(replica.machine().ready());
    assert!(replica.machine().status().tables.is_empty());
}

#[test]
fn an_idle_replica_flushes_nothing() {
    let replica = Replica::new(1, KeyRange::ALL);
    assert_eq!(flush(replica.machine()), None);
    apply(replica.machine(), command(1, schema(2, false)));
    assert_eq!(flush(replica.machine()).expect("flushed").position.index, 1);
    assert_eq!(flush(replica.machine()), None);
    assert_eq!(replica.machine().flushed_index(), 1);
}

#[test]
fn a_dropped_tables_rows_leave_the_disk() {
    let mut replica = Replica::new(1, KeyRange::ALL);
    apply(replica.machine(), command(1, schema(2, false)));
    apply(replica.machine(), command(2, one(1, 1, 2, Operation::Gradient, &[(5, &[-1.0])])));
    flush(replica.machine());
    apply(replica.machine(), command(3, schema(2, true)));
    let rows = |replica: &Replica| {
        let mut rows = 0;
        replica.machine().store().load_rows(|_, _, _, _| rows += 1).expect("read");
        rows
    };
    assert_eq!(rows(&replica), 1);
    replica.crash();
    apply(replica.machine(), command(3, schema(2, true)));
    flush(replica.machine());
    assert_eq!(rows(&replica), 0);
    replica.crash();
    assert_eq!(flush(replica.machine()), None, "settled");
}

#[test]
fn a_snapshot_of_another_group_is_refused_and_the_old_state_stays() {
    let replica = Replica::new(1, KeyRange::ALL);
    apply(replica.machine(), command(1, schema(2, false)));
    apply(replica.machine(), command(2, one(1, 1, 2, Operation::Gradient, &[(5, &[-1.0])])));
    let before = fingerprint(replica.machine());
    let mark = evershard_raft::state_machine::SnapshotMark::default();
    let empty = replica.folder("incoming");
    std::fs::create_dir(&empty).expect("made");
    assert!(replica.machine().install_snapshot(&mark, &empty).is_err());
    assert_eq!(fingerprint(replica.machine()), before);
    apply(replica.machine(), command(3, one(1, 2, 2, Operation::Gradient, &[(5, &[-1.0])])));
}
