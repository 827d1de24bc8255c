//! What a cut hands over, while everything goes on, is the state of the stopped world; and with what cuts after it hand over, that of
//! theirs.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use evershard_proto::push_body::{KIND_PUSH, Operation, PUSH_VERSION_CLEAR};
use evershard_proto::shard_command::ShardCommand;
use evershard_raft::state_machine::{CommittedEntry, EntryContent};
use evershard_storage::table::{RowHeader, RowRef, RowShape};
use futures_util::FutureExt;
use proptest::prelude::*;

use super::harness::{Replica, apply, cases, command, flush};
use super::script::{clear, log, one, schema};
use crate::model::{CommandOutcome, KeyRange};
use crate::read::{AddRow, Digest};
use crate::shard::{CutBegun, CutRows, CutSink, CutTicket, ShardMachine, SkipReason, SmallState};

/// What links of a chain add up to.
#[derive(Debug, Default, Clone, PartialEq)]
struct Chain {
    rows: BTreeMap<(u32, u64), (RowHeader, Vec<f32>)>,
    handed_over: usize,
}

#[derive(Default)]
struct Link(BTreeMap<(u32, u64), (RowHeader, Vec<f32>)>);

impl CutSink for Link {
    fn row(&mut self, table: u32, key: u64, header: RowHeader, floats: &[f32]) -> ControlFlow<()> {
        let twice = self.0.insert((table, key), (header, floats.to_vec()));
        assert!(twice.is_none(), "row {key:x} of table {table} came twice");
        ControlFlow::Continue(())
    }
}

impl Chain {
    fn add(&mut self, begun: &CutBegun, link: Link) {
        if begun.above.is_none() {
            self.rows.clear();
            assert!(begun.cleared.is_empty());
        }
        self.handed_over = link.0.len();
        self.rows.extend(link.0);
        let floor = |table: &u32| begun.cleared.get(table).copied().unwrap_or(0);
        self.rows.retain(|(table, _), (header, _)| !header.is_tombstone() && header.version >= floor(table));
        let small = SmallState::decode(&begun.small_state).expect("a small state");
        self.rows.retain(|(table, _), _| small.schemas.contains_key(table));
    }

    fn digest(&self, shapes: &BTreeMap<u32, RowShape>) -> Digest {
        let mut digest = Digest::default();
        for ((table, key), (header, floats)) in &self.rows {
            digest.add_row(*table, *key, &RowRef::from_parts(*header, floats, shapes[table]));
        }
        digest
    }
}

fn cut(index: u64, checkpoint: u64, above: u64) -> CommittedEntry {
    command(index, ShardCommand::Cut { checkpoint, above }.encode())
}

fn begun(ticket: &mut CutTicket) -> Result<CutBegun, SkipReason> {
    ticket.begun().now_or_never().expect("told by the entry")
}

fn shapes(machine: &ShardMachine) -> BTreeMap<u32, RowShape> {
    machine.rows().schemas().iter().map(|(number, schema)| (*number, schema.shape())).collect()
}

/// A cut with nothing beside it.
fn cut_now(machine: &ShardMachine, index: u64, above: u64, chain: &mut Chain) -> CutRows {
    let mut ticket = machine.await_cut(index);
    assert_eq!(CommandOutcome::decode(&apply(machine, cut(index, index, above))), Ok(CommandOutcome::Done));
    let begun = begun(&mut ticket).expect("begun");
    assert_eq!((begun.index, begun.above), (index, (above > 0).then_some(above)));
    let mut link = Link::default();
    let rows = ticket.rows(&mut link, &mut || true).expect("all rows");
    chain.add(&begun, link);
    rows
}

fn clears(entry: &CommittedEntry) -> bool {
    matches!(&entry.content, EntryContent::Command { command, .. } if command.starts_with(&[KIND_PUSH, PUSH_VERSION_CLEAR]))
}

proptest! {
    #![proptest_config(cases())]

    /// Each cut builds upon the one before; entries, flushes and rows that leave memory come in between its slices.
    #[test]
    fn cuts_between_entries_add_up_to_the_stopped_world(
        entries in log(160),
        first in any::<prop::sample::Index>(),
        slices in prop::collection::vec((0usize..5, 0u32..6, any::<bool>()), 3..60),
        cuts in 1usize..4,
        before in 0usize..3,
        flushed_before: bool,
        budget in prop::sample::select(&[0u64, 600][..]),
    ) {
        let replica = Replica::with_budget(1, KeyRange::ALL, budget);
        let machine = replica.machine();
        let mut rest = entries[..].iter();
        let mut shift = 0;
        let mut next = |count: usize, shift: u64| {
            let mut cleared = false;
            for entry in rest.by_ref().take(count) {
                let mut entry = entry.clone();
                cleared |= clears(&entry);
                entry.position.index += shift;
                apply(machine, entry);
            }
            cleared
        };
        next(first.index(entries.len()), 0);
        if flushed_before {
            flush(machine);
            machine.rows().let_go(10);
        }
        let mut chain = Chain::default();
        let (mut above, mut slices) = (0, slices.into_iter());
        for number in 0..cuts as u64 {
            machine.run_scans();
            let expected = machine.digest().expect("ready").1;
            let shapes = shapes(machine);
            let index = machine.applied().map_or(1, |position| position.index + 1);
            let mut ticket = machine.await_cut(number);
            apply(machine, cut(index, number, above));
            shift += 1;
            let mut cleared = false;
            let mut step = |cleared: &mut bool| {
                let Some((applied, let_go, flushed)) = slices.next() else { return };
                *cleared |= next(applied, shift);
                if flushed {
                    flush(machine);
                }
                machine.rows().let_go(let_go);
            };
            for _ in 0..before {
                step(&mut cleared);
            }
            let begun = begun(&mut ticket).expect("begun");
            prop_assert_eq!(begun.index, index);
            let mut link = Link::default();
            let mut later = false;
            let rows = ticket.rows(&mut link, &mut || { step(&mut later); true });
            if rows == Err(SkipReason::Cleared) {
                // Only what comes before anybody has looked at the rows may end it.
                prop_assert!(cleared);
                return Ok(());
            }
            let rows = rows.expect("all rows");
            chain.add(&begun, link);
            prop_assert_eq!(chain.digest(&shapes), expected);
            let sum = rows.tables.iter().fold(Digest::default(), |sum, table| sum.merge(table.digest));
            prop_assert_eq!(sum, expected, "tables add up");
            let live = chain.rows.values().filter(|(header, _)| header.is_live()).count() as u64;
            prop_assert_eq!(rows.tables.iter().map(|table| table.rows).sum::<u64>(), live);
            above = index;
        }
    }
}

/// SGD, one column.
const TABLE: u32 = 2;

fn filled() -> Replica {
    let replica = Replica::new(1, KeyRange::ALL);
    apply(replica.machine(), command(1, schema(TABLE, false)));
    for index in 2..=5 {
        let row = [(index, &[-(index as f32)][..])];
        apply(replica.machine(), command(index, one(1, index - 1, TABLE, Operation::Gradient, &row)));
    }
    replica
}

#[test]
fn a_delta_has_what_changed_and_what_was_removed_and_nothing_else() {
    let mut replica = filled();
    let mut chain = Chain::default();
    let rows = cut_now(replica.machine(), 6, 0, &mut chain);
    assert_eq!((chain.handed_over, rows.tables[0].rows), (4, 4));
    apply(replica.machine(), command(7, one(1, 5, TABLE, Operation::Remove, &[(2, &[]), (3, &[])])));
    apply(replica.machine(), command(8, one(1, 6, TABLE, Operation::Gradient, &[(4, &[-1.0])])));
    // What was removed is on disk, and its record is past replay: it is remembered all the same.
    flush(replica.machine());
    flush(replica.machine());
    replica.crash();
    let rows = cut_now(replica.machine(), 9, 6, &mut chain);
    assert_eq!((chain.handed_over, rows.tables[0].rows), (3, 2), "two tombstones and a row");
    assert_eq!(chain.digest(&shapes(replica.machine())), replica.machine().digest().expect("ready").1);
    // A cleared table needs no tombstones.
    apply(replica.machine(), command(10, clear(1, 7, TABLE)));
    apply(replica.machine(), command(11, one(1, 8, TABLE, Operation::Gradient, &[(5, &[-7.0])])));
    let rows = cut_now(replica.machine(), 12, 9, &mut chain);
    assert_eq!((chain.handed_over, rows.tables[0].rows), (1, 1));
    assert_eq!(chain.digest(&shapes(replica.machine())), replica.machine().digest().expect("ready").1);
    // Nothing happened.
    cut_now(replica.machine(), 13, 12, &mut chain);
    assert_eq!(chain.handed_over, 0);
}

#[test]
fn a_cut_builds_only_upon_what_is_remembered() {
    let replica = filled();
    let machine = replica.machine();
    assert_eq!(machine.remembered_above(), None);
    let refused = |index, above| {
        let mut ticket = machine.await_cut(index);
        let answer = CommandOutcome::decode(&apply(machine, cut(index, index, above)));
        assert_eq!(answer, Ok(CommandOutcome::CutTooOld));
        assert_eq!(begun(&mut ticket), Err(SkipReason::CutTooOld));
    };
    refused(6, 5);
    assert_eq!(machine.remembered_above(), None, "nothing changed");
    let mut chain = Chain::default();
    cut_now(machine, 7, 0, &mut chain);
    assert_eq!(machine.remembered_above(), Some(7));
    refused(8, 6);
    refused(9, 9);
    // Whose checkpoint came to nothing is not built upon: the one before is, again.
    cut_now(machine, 10, 7, &mut chain);
    assert_eq!(machine.remembered_above(), Some(7));
    cut_now(machine, 11, 7, &mut chain);
    cut_now(machine, 12, 11, &mut chain);
    assert_eq!(machine.remembered_above(), Some(11));
    refused(13, 7);
    // A base begins anew.
    cut_now(machine, 14, 0, &mut chain);
    assert_eq!(machine.remembered_above(), Some(14));
    refused(15, 12);
}

#[test]
fn a_ticket_that_goes_takes_its_scan_with_it_and_nobody_else_runs_it() {
    let replica = filled();
    let machine = replica.machine();
    let mut ticket = machine.await_cut(1);
    apply(machine, cut(6, 1, 0));
    assert_eq!(machine.rows().read().scans().running().len(), 1);
    assert!(!machine.run_scan(&mut || true), "it is the ticket's");
    begun(&mut ticket).expect("begun");
    drop(ticket);
    assert!(machine.rows().read().scans().running().is_empty());
    // One that went before its cut, and a cut that nobody waits for.
    drop(machine.await_cut(2));
    apply(machine, cut(7, 2, 0));
    apply(machine, cut(8, 3, 0));
    assert!(machine.rows().read().scans().running().is_empty());
    // A sink that takes no more.
    struct Full;
    impl CutSink for Full {
        fn row(&mut self, _: u32, _: u64, _: RowHeader, _: &[f32]) -> ControlFlow<()> {
            ControlFlow::Break(())
        }
    }
    let mut ticket = machine.await_cut(4);
    apply(machine, cut(9, 4, 0));
    begun(&mut ticket).expect("begun");
    assert_eq!(ticket.rows(&mut Full, &mut || true), Err(SkipReason::Stopped));
    assert!(machine.rows().read().scans().running().is_empty());
}

#[test]
fn a_replica_that_replays_cannot_give_its_rows() {
    let mut replica = filled();
    let machine = std::sync::Arc::clone(replica.machine());
    let row = command(6, one(1, 5, TABLE, Operation::Gradient, &[(9, &[-1.0])]));
    let (first, mut pending) = (row.clone(), true);
    super::harness::flush_with(&machine, true, || {
        if std::mem::take(&mut pending) {
            apply(&machine, first.clone());
            apply(&machine, cut(7, 1, 0));
            apply(&machine, command(8, one(1, 6, TABLE, Operation::Gradient, &[(2, &[-1.0])])));
        }
    })
    .expect("flushed");
    drop(machine);
    replica.crash();
    let machine = replica.machine();
    assert!(!machine.ready());
    apply(machine, row);
    let mut ticket = machine.await_cut(1);
    apply(machine, cut(7, 1, 0));
    assert_eq!(begun(&mut ticket), Err(SkipReason::Replaying));
    assert_eq!(machine.remembered_above(), Some(7), "the entry does its part all the same");
}
