//! Whether a table's rules let go of a record.
//!
//! The rules stand side by side: a record goes as soon as one of them says so, but for `max_rows`, which counts what the others
//! leave. A counting record is subject to `expire_seconds` and `steps_to_live`, as of its last count; and to `max_rows`, which
//! bounds the ids that are counted as it bounds the rows, each for itself.
//!
//! Not here: finding the records (`look`).

use std::collections::BinaryHeap;

use evershard_proto::shard_command::EvictedRow;
use evershard_storage::table::RowRef;

use crate::model::{KeyRange, RowNotes, RowRules};

/// Records that `max_rows` lets go of in one look, at the most: what it takes to remember them is bounded.
const RARE_MAX: usize = if cfg!(test) { 8 } else { 1 << 16 };

/// What a leader decides by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CutOff {
    /// The replicated clock, in milliseconds.
    pub(crate) clock_ms: u64,
    /// The table's step: the highest clock of its pushes.
    pub(crate) step: u64,
}

/// Judges the records of one table in one look.
#[derive(Debug)]
pub(super) struct Judge {
    rules: RowRules,
    cut_off: CutOff,
    going: Vec<EvictedRow>,
    rows: Rarest,
    counting: Rarest,
}

impl Judge {
    pub(super) fn new(rules: RowRules, cut_off: CutOff, range: KeyRange) -> Self {
        let share = share(rules.max_rows, range);
        Judge { rules, cut_off, going: Vec::new(), rows: Rarest::new(share), counting: Rarest::new(share) }
    }

    /// A record that is no tombstone.
    pub(super) fn hear(&mut self, key: u64, row: RowRef<'_>) {
        let header = row.header();
        let notes = self.rules.read(row.notes());
        let evicted = EvictedRow { key, version: header.version };
        if self.is_over(&notes) || (header.is_live() && self.is_small(row.weights())) {
            self.going.push(evicted);
        } else if header.is_counting() {
            self.counting.hear(header.steps, evicted);
        } else {
            self.rows.hear(notes.frequency, evicted);
        }
    }

    fn is_over(&self, notes: &RowNotes) -> bool {
        let RowRules { expire_seconds, steps_to_live, .. } = self.rules;
        // Both were rounded down: one second more than the rule says is never less than it says.
        let seconds = (self.cut_off.clock_ms / 1000).saturating_sub(u64::from(notes.seconds));
        let steps = self.cut_off.step.saturating_sub(notes.clock);
        (expire_seconds > 0 && seconds > expire_seconds) || (steps_to_live > 0 && steps > steps_to_live)
    }

    /// In f64: no square of a float is beyond it.
    fn is_small(&self, weights: &[f32]) -> bool {
        let least = f64::from(self.rules.min_l2);
        least > 0.0 && weights.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>() < least * least
    }

    /// Everything that is to go, in order of the keys.
    pub(super) fn finish(self) -> Vec<EvictedRow> {
        let mut going = self.going;
        going.extend(self.rows.excess());
        going.extend(self.counting.excess());
        going.sort_unstable();
        going.dedup();
        going
    }
}

/// A shard's share of a cap on the rows of all shards: by its part of the keys, which are spread evenly; rounded up.
fn share(max_rows: u64, range: KeyRange) -> u64 {
    let width = u128::from(range.end - range.start) + 1;
    let share = (u128::from(max_rows) * width).div_ceil(1 << 64);
    u64::try_from(share).unwrap_or(u64::MAX)
}

/// The records that came least often, of them the ones with the lowest versions; as many as are too many.
#[derive(Debug)]
struct Rarest {
    /// Records that may be; 0: any number.
    cap: u64,
    heard: u64,
    /// The rarest so far, the most frequent of them on top.
    rarest: BinaryHeap<(u32, u64, u64)>,
}

impl Rarest {
    fn new(cap: u64) -> Self {
        Rarest { cap, heard: 0, rarest: BinaryHeap::new() }
    }

    fn hear(&mut self, frequency: u32, row: EvictedRow) {
        if self.cap == 0 {
            return;
        }
        self.heard += 1;
        self.rarest.push((frequency, row.version, row.key));
        if self.rarest.len() > RARE_MAX {
            self.rarest.pop();
        }
    }

    fn excess(self) -> impl Iterator<Item = EvictedRow> {
        let excess = usize::try_from(self.heard.saturating_sub(self.cap)).unwrap_or(usize::MAX);
        let rarest = self.rarest.into_sorted_vec().into_iter();
        rarest.take(excess).map(|(_, version, key)| EvictedRow { key, version })
    }
}

#[cfg(test)]
mod tests {
    use evershard_proto::v1::{Eviction, TableDefinition};
    use evershard_storage::table::{RowHeader, RowShape};

    use super::*;
    use crate::model::RowUse;

    fn rules(eviction: Eviction) -> RowRules {
        let name = "t".to_owned();
        RowRules::new(&TableDefinition { name, eviction: Some(eviction), ..Default::default() })
            .expect("valid")
    }

    /// Key, how often it came, when, at which clock; its version is its key times 10.
    type Record = (u64, u32, u32, u64);

    fn going(rules: RowRules, cut_off: CutOff, records: &[Record], weights: &[f32]) -> Vec<u64> {
        let shape = RowShape { dim: 2, state: 0, notes: rules.notes() };
        let mut judge = Judge::new(rules, cut_off, KeyRange::ALL);
        for (key, occurrences, seconds, clock) in records {
            let mut floats = [weights, &vec![0.0; shape.notes as usize]].concat();
            let happened = RowUse { occurrences: *occurrences, seconds: *seconds, clock: *clock };
            rules.note(&mut floats[2..], happened);
            let header = RowHeader { version: key * 10, ..Default::default() };
            judge.hear(*key, RowRef::from_parts(header, &floats, shape));
        }
        let going = judge.finish();
        assert!(going.iter().all(|row| row.version == row.key * 10));
        going.iter().map(|row| row.key).collect()
    }

    const NEVER: CutOff = CutOff { clock_ms: 0, step: 0 };

    #[test]
    fn a_row_expires_when_the_time_is_over_and_not_before() {
        let rules = rules(Eviction { expire_seconds: 5, ..Default::default() });
        let records = [(1, 1, 100, 0), (2, 1, 101, 0), (3, 1, 0, 0)];
        let at = |clock_ms| going(rules, CutOff { clock_ms, step: 0 }, &records, &[1.0, 0.0]);
        // Row 1 may have changed at 100.999.
        assert_eq!(at(105_999), [3]);
        assert_eq!(at(106_000), [1, 3]);
        assert_eq!(at(107_000), [1, 2, 3]);
        assert!(at(0).is_empty(), "the clock of a group that has none yet");
    }

    #[test]
    fn a_row_lives_for_so_many_steps() {
        let rules = rules(Eviction { steps_to_live: 3, ..Default::default() });
        let records = [(1, 1, 0, 7), (2, 1, 0, 8), (3, 1, 0, u64::MAX)];
        let at = |step| going(rules, CutOff { step, ..NEVER }, &records, &[1.0, 0.0]);
        assert!(at(10).is_empty());
        assert_eq!(at(11), [1]);
        assert_eq!(at(12), [1, 2]);
    }

    #[test]
    fn a_row_with_small_weights_goes() {
        let rules = rules(Eviction { min_l2: 5.0, ..Default::default() });
        for (weights, goes) in [
            ([3.0, 4.0], false),
            ([3.0, 3.999], true),
            ([-3.0, -4.0], false),
            ([f32::MAX, f32::MAX], false),
            ([f32::NAN, 0.0], false),
        ] {
            assert_eq!(
                going(rules, NEVER, &[(1, 1, 0, 0)], &weights).len(),
                usize::from(goes),
                "{weights:?}"
            );
        }
    }

    #[test]
    fn too_many_rows_lose_the_rarest_and_of_them_the_oldest() {
        let rules = rules(Eviction { max_rows: 3, ..Default::default() });
        let records = [(1, 9, 0, 0), (2, 1, 0, 0), (3, 2, 0, 0), (4, 2, 0, 0), (5, 2, 0, 0), (6, 8, 0, 0)];
        assert_eq!(going(rules, NEVER, &records, &[0.0; 2]), [2, 3, 4]);
        assert!(going(rules, NEVER, &records[3..], &[0.0; 2]).is_empty());
        // More than are remembered: the rest waits for the next look.
        let many: Vec<Record> = (1..=40).map(|key| (key, 1, 0, 0)).collect();
        assert_eq!(going(rules, NEVER, &many, &[0.0; 2]), (1..=8).collect::<Vec<_>>());
    }

    #[test]
    fn rows_that_other_rules_let_go_of_are_not_among_the_too_many() {
        let rules = rules(Eviction { max_rows: 2, expire_seconds: 5, ..Default::default() });
        let cut_off = CutOff { clock_ms: 100_000, step: 0 };
        let records = [(1, 9, 1, 0), (2, 9, 100, 0), (3, 1, 100, 0)];
        assert_eq!(going(rules, cut_off, &records, &[0.0; 2]), [1]);
    }

    #[test]
    fn ids_that_are_counted_are_capped_for_themselves() {
        let rules = rules(Eviction { max_rows: 1, ..Default::default() });
        let shape = RowShape { dim: 2, state: 0, notes: 1 };
        let mut judge = Judge::new(rules, NEVER, KeyRange::ALL);
        let mut notes = [0.0];
        rules.note(&mut notes, RowUse { occurrences: 1, seconds: 0, clock: 0 });
        let live = [0.0, 0.0, notes[0]];
        judge.hear(1, RowRef::from_parts(RowHeader::default(), &live, shape));
        for (key, steps) in [(2, 3), (3, 2), (4, 1)] {
            let header = RowHeader { version: 7, steps, flags: RowHeader::COUNTING };
            judge.hear(key, RowRef::from_parts(header, &[0.0], shape));
        }
        assert_eq!(judge.finish(), [3, 4].map(|key| EvictedRow { key, version: 7 }));
    }

    #[test]
    fn shares_of_all_shards_are_the_cap_or_a_little_more() {
        let halves = [(0, u64::MAX / 2), (u64::MAX / 2 + 1, u64::MAX)];
        for cap in [0, 1, 2, 3, 1000, u64::MAX] {
            assert_eq!(share(cap, KeyRange::ALL), cap);
            let shares = halves.map(|(start, end)| share(cap, KeyRange { start, end }));
            assert_eq!(shares, [cap.div_ceil(2); 2]);
        }
    }
}
