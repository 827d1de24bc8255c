//! A digest taken slice by slice, while everything changes, is the digest of the stopped world.

use evershard_proto::push_body::{KIND_PUSH, Operation, PUSH_VERSION_CLEAR};
use evershard_proto::shard_command::ShardCommand;
use evershard_raft::state_machine::{CommittedEntry, EntryContent};
use proptest::prelude::*;

use super::harness::{Replica, apply, cases, command, flush};
use super::script::{log, one, schema};
use crate::model::KeyRange;
use crate::read::Digest;
use crate::shard::{ScrubResult, Scrubber, ShardMachine, ShardOptions, SkipReason};

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn a_scan_between_entries_is_a_scan_of_the_stopped_world(
        entries in log(120),
        at in any::<prop::sample::Index>(),
        slices in prop::collection::vec((0usize..6, 0u32..6), 1..60),
        before in 0usize..4,
        flush_at in any::<prop::sample::Index>(),
        flushed_before: bool,
        budget in prop::sample::select(&[0u64, 600][..]),
    ) {
        let replica = Replica::with_budget(1, KeyRange::ALL, budget);
        let machine = replica.machine();
        let at = at.index(entries.len());
        let mut rest = entries[..].iter();
        for entry in rest.by_ref().take(at) {
            apply(machine, entry.clone());
        }
        if flushed_before {
            flush(machine);
            machine.rows().let_go(10);
        }
        machine.run_scans();
        let expected = with_small_state(machine);
        // The scrub entry takes the place of the next one; everything behind moves by one.
        let index = at as u64 + 1;
        apply(machine, command(index, ShardCommand::Scrub { scrub_id: 1_000_000 }.encode()));
        prop_assert_eq!(machine.scrub_result(1_000_000), Some(ScrubResult::Pending));
        let flush_at = flush_at.index(slices.len());
        let mut slices = slices.into_iter().enumerate();
        let mut go_on = || {
            let Some((number, (applied, let_go))) = slices.next() else { return true };
            for entry in rest.by_ref().take(applied) {
                let mut entry = entry.clone();
                entry.position.index += 1;
                apply(machine, entry);
            }
            if number == flush_at {
                flush(machine);
            }
            // What was flushed leaves memory, and its slots go to other rows.
            machine.rows().let_go(let_go);
            true
        };
        // Some of it happens before anybody looks at the scan.
        for _ in 0..before {
            go_on();
        }
        while machine.run_scan(&mut go_on) {}
        prop_assert!(!machine.run_scan(&mut || true));
        let result = machine.scrub_result(1_000_000);
        if result == Some(ScrubResult::Skipped(SkipReason::Cleared)) {
            // Only what comes before anybody has looked at the scan may end it.
            prop_assert!(before > 0 && entries[at..].iter().any(clears));
            return Ok(());
        }
        prop_assert_eq!(result, Some(ScrubResult::Done { index, digest: expected }));
    }
}

fn clears(entry: &CommittedEntry) -> bool {
    matches!(&entry.content, EntryContent::Command { command, .. } if command.starts_with(&[KIND_PUSH, PUSH_VERSION_CLEAR]))
}

#[test]
fn a_scrub_below_what_the_rows_hold_is_skipped() {
    let mut replica = Replica::new(1, KeyRange::ALL);
    apply(replica.machine(), command(1, schema(2, false)));
    let entries = [
        command(2, ShardCommand::Scrub { scrub_id: 7 }.encode()),
        command(3, one(1, 1, 2, Operation::Gradient, &[(5, &[-1.0])])),
        command(4, ShardCommand::Scrub { scrub_id: 8 }.encode()),
    ];
    // A table that exists before the flush begins, with a row, so that a batch is copied after entry 3.
    let machine = std::sync::Arc::clone(replica.machine());
    super::harness::flush_with(&machine, true, || {
        if machine.applied().is_some_and(|position| position.index == 1) {
            apply(&machine, entries[0].clone());
            apply(&machine, entries[1].clone());
        }
    })
    .expect("flushed");
    flush(&machine);
    drop(machine);
    replica.crash();
    // Everything was flushed: the rows are at 3, so is the state; a scrub behind it is taken.
    assert_eq!(replica.machine().applied().expect("some").index, 3);
    apply(replica.machine(), entries[2].clone());
    replica.machine().run_scans();
    assert!(matches!(replica.machine().scrub_result(8), Some(ScrubResult::Done { index: 4, .. })));
    assert_eq!(replica.machine().scrub_result(9), None);
}

#[test]
fn the_scrubber_takes_digests_by_itself() {
    let home = tempfile::tempdir().expect("a folder");
    let scrubber = Scrubber::start().expect("a thread");
    let replica = Replica::new(1, KeyRange::ALL);
    drop(home);
    let machine = {
        let store = {
            let home = replica.folder("other");
            let shared =
                evershard_storage::rocks::RocksShared::new(evershard_storage::rocks::RocksOptions::default())
                    .expect("an environment");
            evershard_storage::rocks::ReplicaStore::create(&home, replica.machine().identity(), &shared)
                .expect("made")
        };
        let options =
            ShardOptions { scrub_waker: Some(scrubber.waker()), ..ShardOptions::new(KeyRange::ALL) };
        std::sync::Arc::new(ShardMachine::open(options, store).expect("loaded"))
    };
    scrubber.add(&machine);
    apply(&machine, command(1, schema(2, false)));
    apply(&machine, command(2, ShardCommand::Scrub { scrub_id: 5 }.encode()));
    while machine.scrub_result(5) == Some(ScrubResult::Pending) {
        std::thread::yield_now();
    }
    assert!(matches!(machine.scrub_result(5), Some(ScrubResult::Done { index: 2, .. })));
}

#[test]
fn a_row_that_leaves_and_comes_back_before_the_scan_looks_counts_once() {
    let replica = Replica::new(1, KeyRange::ALL);
    let machine = replica.machine();
    apply(machine, command(1, schema(2, false)));
    apply(machine, command(2, one(1, 1, 2, Operation::Gradient, &[(5, &[-1.0])])));
    let expected = with_small_state(machine);
    // Unflushed at the scrub; then flushed, let go of, read again as it was, and changed.
    apply(machine, command(3, ShardCommand::Scrub { scrub_id: 7 }.encode()));
    flush(machine);
    assert_eq!(machine.rows().let_go(1), 1);
    apply(machine, command(4, one(1, 2, 2, Operation::Gradient, &[(5, &[-1.0])])));
    machine.run_scans();
    assert_eq!(machine.scrub_result(7), Some(ScrubResult::Done { index: 3, digest: expected }));
}

#[test]
fn a_row_that_changes_and_is_flushed_before_the_scan_looks_counts_as_it_was() {
    let replica = Replica::new(1, KeyRange::ALL);
    let machine = replica.machine();
    apply(machine, command(1, schema(2, false)));
    apply(machine, command(2, one(1, 1, 2, Operation::Gradient, &[(5, &[-1.0])])));
    // On disk as it is at the scrub, in memory or not.
    flush(machine);
    let expected = with_small_state(machine);
    for (in_memory, scrub) in [(true, 7), (false, 8)] {
        let index = machine.applied().expect("some").index + 1;
        if !in_memory {
            machine.rows().let_go(1);
        }
        let expected = if in_memory { expected } else { with_small_state(machine) };
        apply(machine, command(index, ShardCommand::Scrub { scrub_id: scrub }.encode()));
        let push = one(1, scrub - 5, 2, Operation::Gradient, &[(5, &[-1.0])]);
        apply(machine, command(index + 1, push));
        flush(machine);
        machine.run_scans();
        assert_eq!(machine.scrub_result(scrub), Some(ScrubResult::Done { index, digest: expected }));
    }
}

/// What a scrub of the stopped replica would find.
fn with_small_state(machine: &ShardMachine) -> Digest {
    let mut beside = Digest::default();
    beside.add_small_state(&machine.lock_small().small.encode());
    machine.digest().expect("ready").1.merge(beside)
}
