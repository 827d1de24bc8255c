//! What a section does to each of its distinct rows, in batches: find and prefetch, then row by row.
//!
//! Invariants:
//! - a row whose version is not below the entry's index is left alone (design 4, rule 6): it holds this entry already, and
//!   what came after;
//! - a row that is absent, or a tombstone, or only counting, starts from the table's initial values;
//! - a gradient makes a row only of an id that its table admits: by its hash, and then by how often it came, this push included.
//!   The push that gets it there trains it. Until then a counting record keeps the number; of an id whose hash is not admitted
//!   nothing is kept. Values that are set or added make a row in any case, and a row that is there is trained in any case;
//! - running digests are told the old value of a row before it changes.
//!
//! Not here: which keys and sums (`duplicates`), the arithmetic (`optimizer`).

use evershard_proto::key::id_of;
use evershard_proto::push_body::{Operation, Section};
use evershard_storage::table::{RowHeader, Slot, Table};

use super::Target;
use super::duplicates::Distinct;
use super::finite;
use super::offences::add_row;
use crate::model::{BadRows, NonFinite, RowUse, TableSchema};
use crate::optimizer::Stepper;
use crate::shard::TableEntry;

/// Buffers of a row update.
#[derive(Debug, Default)]
pub(super) struct RowUpdateScratch {
    slots: Vec<Option<Slot>>,
    values: Vec<f32>,
}

/// One section at one index.
#[derive(Debug)]
pub(super) struct RowUpdate<'a> {
    section: &'a Section<'a>,
    schema: &'a TableSchema,
    policy: NonFinite,
    index: u64,
    stepper: Option<Stepper>,
    /// What rows note of this push; how often their ids came is each row's own.
    happened: RowUse,
}

impl<'a> RowUpdate<'a> {
    pub(super) fn new(
        section: &'a Section<'a>,
        (schema, policy): (&'a TableSchema, NonFinite),
        target: &Target<'_>,
        clock: u64,
    ) -> Self {
        let stepper = match section.operation {
            Operation::Gradient => schema.optimizer().map(|optimizer| optimizer.stepper(section.lr, clock)),
            Operation::Set | Operation::Add | Operation::Remove | Operation::Clear => None,
        };
        let happened = RowUse { occurrences: 1, seconds: target.seconds(), clock };
        RowUpdate { section, schema, policy, index: target.index, stepper, happened }
    }

    /// Changes every distinct row of the section. Answers those whose values, each of them finite, have a sum that is not.
    pub(super) fn run(
        mut self,
        distinct: &Distinct,
        scratch: &mut RowUpdateScratch,
        mut entry: TableEntry<'_>,
    ) -> Option<BadRows> {
        let mut bad_sums = None;
        scratch.values.clear();
        scratch.values.resize(self.schema.dim() as usize, 0.0);
        for (batch, keys) in distinct.keys().chunks(Table::BATCH).enumerate() {
            entry.table.find_batch(keys, &mut scratch.slots);
            for (offset, (key, slot)) in keys.iter().zip(&scratch.slots).enumerate() {
                if self.section.operation == Operation::Remove {
                    self.remove(*key, *slot, &mut entry);
                    continue;
                }
                let position = batch * Table::BATCH + offset;
                distinct.values(self.section, position, &mut scratch.values);
                self.happened.occurrences = distinct.occurrences(position);
                if self.make_finite(*key, &mut scratch.values, &mut bad_sums) {
                    self.change(*key, *slot, &mut scratch.values, &mut entry);
                }
            }
        }
        bad_sums
    }

    /// Applies the policy to sums that are not finite; false to leave the row out. Under `Reject` there are none: validation saw
    /// to it.
    fn make_finite(&self, key: u64, values: &mut [f32], bad_sums: &mut Option<BadRows>) -> bool {
        if self.policy == NonFinite::Reject || finite::are_finite(values) {
            return true;
        }
        add_row(bad_sums, || finite::bad_value(id_of(self.section.table, key), values, true));
        if self.policy == NonFinite::SkipRow {
            return false;
        }
        finite::clip(values);
        true
    }

    fn change(&mut self, key: u64, slot: Option<Slot>, values: &mut [f32], entry: &mut TableEntry<'_>) {
        let before = slot.map(|slot| entry.table.row(slot).header());
        if before.is_some_and(|header| header.version >= self.index) {
            return;
        }
        let fresh = before.is_none_or(|header| !header.is_live());
        if fresh && self.section.operation == Operation::Gradient && !self.schema.rules().admits_all() {
            let counted = before.filter(RowHeader::is_counting).map_or(0, |header| header.steps);
            let occurrences = counted.saturating_add(self.happened.occurrences);
            if !self.schema.rules().admits_id(id_of(self.section.table, key)) {
                return;
            }
            if !self.schema.rules().admits_frequency(occurrences) {
                self.count(key, slot, occurrences, entry);
                return;
            }
            self.happened.occurrences = occurrences;
        }
        let slot = self.slot_to_change(key, slot, entry);
        let mut row = entry.table.row_mut(slot);
        if fresh {
            row.notes_mut().fill(0.0);
        }
        self.schema.rules().note(row.notes_mut(), self.happened);
        let (header, weights, state) = row.split_mut();
        if fresh {
            *header = RowHeader::default();
            self.schema.fill_new_row(id_of(self.section.table, key), weights, state);
        }
        header.version = self.index;
        match (self.section.operation, &mut self.stepper) {
            (Operation::Gradient, Some(stepper)) => {
                header.steps = header.steps.saturating_add(1);
                stepper.step(weights, state, values, header.steps);
            }
            (Operation::Set, _) => weights.copy_from_slice(values),
            (Operation::Add, _) => {
                for (weight, value) in weights.iter_mut().zip(values) {
                    *weight += *value;
                }
            }
            // A gradient without an optimizer was refused; removing and clearing are no changes.
            (Operation::Gradient, None) | (Operation::Remove | Operation::Clear, _) => {}
        }
    }

    /// Keeps how often an id came that is not admitted yet.
    fn count(&self, key: u64, slot: Option<Slot>, occurrences: u32, entry: &mut TableEntry<'_>) {
        let slot = self.slot_to_change(key, slot, entry);
        let mut row = entry.table.row_mut(slot);
        *row.header_mut() = RowHeader { version: self.index, steps: occurrences, flags: RowHeader::COUNTING };
        // Its frequency is in the header: noted when it becomes a row.
        self.schema.rules().note(row.notes_mut(), RowUse { occurrences: 0, ..self.happened });
    }

    fn slot_to_change(&self, key: u64, slot: Option<Slot>, entry: &mut TableEntry<'_>) -> Slot {
        let Some(slot) = slot else { return entry.table.insert(key) };
        entry.scans.before_change(self.section.table, slot, key, entry.table.row(slot));
        slot
    }

    /// Leaves a tombstone with the entry's version: replay must not bring the row back. An absent row needs none.
    fn remove(&self, key: u64, slot: Option<Slot>, entry: &mut TableEntry<'_>) {
        let Some(slot) = slot else { return };
        let row = entry.table.row(slot);
        if row.header().version >= self.index || row.is_tombstone() {
            return;
        }
        entry.bury(self.section.table, slot, key, self.index);
    }
}
