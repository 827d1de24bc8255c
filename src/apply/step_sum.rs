//! A step's sums: what the contributors of a job pushed for one shard, added up at its leader before it is logged.
//!
//! Invariants:
//! - contributions are added in the order they are given (by rank), a contributor's parts in their order, in f32, beginning with
//!   the first value itself: the same contributions give the same bits, whoever adds them;
//! - parts are cut by key ranges of equal width: no key is in two of them, however often they are cut into as many;
//! - occurrences of an id are added over contributors, where its table counts them;
//! - each table's policy for values that are not finite is applied to the gradients before they are added, as it is to a push.
//!
//! Not here: who contributes (`ingest::step_buffer`), what becomes of a sum that is not finite (`step`).

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use bytes::Bytes;
use evershard_proto::encoding::decode_row;
use evershard_proto::key::id_of;
use evershard_proto::limits::{PUSH_BODY_BYTES_MAX, STEP_BODY_BYTES_HARD_MAX};
use evershard_proto::push_body::{
    Encoding, HEADER_BYTES, Operation, PushBody, PushBodyBuilder, PushBodyError, SECTION_BYTES, Section,
};

use super::finite;
use super::offences::{action_of, add_row};
use crate::model::{Action, BadRows, KeyRange, NonFinite, TableSchema};

/// Entries of a step, at the most.
const PARTS_MAX: u32 = 1 << 20;

/// Keys are mixed already; a multiplication spreads those of a narrow range, too, and the halves change places because the map
/// takes the low bits first.
#[derive(Debug, Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }
}

#[derive(Debug)]
struct TableSum {
    dim: usize,
    places: HashMap<u64, u32, BuildHasherDefault<KeyHasher>>,
    /// In order of first appearance.
    keys: Vec<u64>,
    sums: Vec<f32>,
    /// How often each key came; empty where that does not count.
    occurrences: Vec<u32>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct StepSum {
    tables: BTreeMap<u32, TableSum>,
    range: KeyRange,
    offences: Vec<StepOffence>,
}

/// What a policy did to gradients of one part of a contribution, before they were added.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepOffence {
    /// The contribution's place.
    pub(crate) contributor: usize,
    /// The table.
    pub(crate) table: u32,
    /// What was done.
    pub(crate) action: Action,
    /// To what.
    pub(crate) rows: BadRows,
}

impl StepSum {
    /// Adds up contributions, each the parts of one contributor in their order. With `mean_over`, sums are divided by it. Tables
    /// that are no more are left out.
    ///
    /// # Errors
    /// A part that does not parse: it was checked when it came.
    pub(crate) fn of(
        contributions: &[Vec<Bytes>],
        mean_over: Option<u32>,
        schemas: &BTreeMap<u32, Arc<TableSchema>>,
        range: KeyRange,
    ) -> Result<Self, PushBodyError> {
        let mut sum = StepSum { tables: BTreeMap::new(), range, offences: Vec::new() };
        let mut values = Vec::new();
        let parts =
            contributions.iter().enumerate().flat_map(|(at, parts)| parts.iter().map(move |p| (at, p)));
        for (contributor, part) in parts {
            for section in PushBody::parse_without_checksum(part)?.sections() {
                if let Some(schema) = schemas.get(&section.table)
                    && schema.dim() == section.dim
                {
                    let policy = schema.non_finite();
                    if let Some(rows) = sum.add(&section, schema, &mut values) {
                        let (table, action) = (section.table, action_of(policy));
                        sum.offences.push(StepOffence { contributor, table, action, rows });
                    }
                }
            }
        }
        if let Some(count) = mean_over {
            for table in sum.tables.values_mut() {
                table.sums.iter_mut().for_each(|value| *value /= count as f32);
            }
        }
        Ok(sum)
    }

    /// What the policy took out of the gradients before they were added.
    pub(crate) fn offences(&self) -> &[StepOffence] {
        &self.offences
    }

    /// Adds a section's rows; answers those that the policy skipped or clipped.
    fn add(&mut self, section: &Section<'_>, schema: &TableSchema, values: &mut Vec<f32>) -> Option<BadRows> {
        let (mut bad, policy) = (None, schema.non_finite());
        let dim = section.dim as usize;
        let table = self.tables.entry(section.table).or_insert_with(|| TableSum {
            dim,
            places: HashMap::default(),
            keys: Vec::new(),
            sums: Vec::new(),
            occurrences: Vec::new(),
        });
        values.resize(dim, 0.0);
        for (row, key) in section.keys().enumerate() {
            decode_row(section.encoding, section.row(row), values);
            // Under `Reject` a door refused what is not finite.
            if policy != NonFinite::Reject && !finite::are_finite(values) {
                add_row(&mut bad, || finite::bad_value(id_of(section.table, key), values, false));
                if policy == NonFinite::SkipRow {
                    continue;
                }
                finite::clip(values);
            }
            let next = table.keys.len() as u32;
            let place = *table.places.entry(key).or_insert(next);
            if place == next {
                table.keys.push(key);
                table.sums.extend_from_slice(values);
                if schema.rules().counts() {
                    table.occurrences.push(0);
                }
            } else {
                let start = place as usize * dim;
                let sums = &mut table.sums[start..start + dim];
                sums.iter_mut().zip(&*values).for_each(|(sum, value)| *sum += value);
            }
            if let Some(occurrences) = table.occurrences.get_mut(place as usize) {
                *occurrences = occurrences.saturating_add(section.occurrences(row));
            }
        }
        bad
    }

    /// Into how many parts it is cut, so that most entries are not longer than a push, and none is too long. At least one: also
    /// a step without rows is applied.
    pub(crate) fn parts(&self) -> u32 {
        let row_bytes = |table: &TableSum| 8 + table.dim * 4 + usize::from(!table.occurrences.is_empty()) * 4;
        let bytes: usize = self.tables.values().map(|table| table.keys.len() * row_bytes(table)).sum();
        // Some are fuller than others.
        let mut of = (bytes.div_ceil(PUSH_BODY_BYTES_MAX / 4 * 3) as u32).clamp(1, PARTS_MAX);
        while of < PARTS_MAX {
            let mut sizes = vec![0usize; of as usize];
            for table in self.tables.values() {
                for key in &table.keys {
                    sizes[self.part_of(*key, of) as usize] += row_bytes(table);
                }
            }
            // Far below what an entry may have: another set of contributors may be cut as this one.
            if sizes.iter().all(|size| *size <= STEP_BODY_BYTES_HARD_MAX / 4) {
                break;
            }
            of = (of * 2).min(PARTS_MAX);
        }
        of
    }

    /// Lays out the parts from `first` to before `end`, of `of`; `step` is the clock that schedules go by.
    pub(crate) fn cut(&self, of: u32, first: u32, end: u32, step: u64) -> Vec<Bytes> {
        let wanted = (end.min(of) - first) as usize;
        let mut bodies: Vec<_> =
            (0..wanted).map(|_| PushBodyBuilder::new(HEADER_BYTES + SECTION_BYTES)).collect();
        let mut rows: Vec<Vec<u32>> = vec![Vec::new(); wanted];
        for (number, table) in &self.tables {
            rows.iter_mut().for_each(Vec::clear);
            for (place, key) in (0..).zip(&table.keys) {
                let at = self.part_of(*key, of).checked_sub(first);
                if let Some(rows) = at.and_then(|at| rows.get_mut(at as usize)) {
                    rows.push(place);
                }
            }
            for (body, rows) in bodies.iter_mut().zip(&rows).filter(|(_, rows)| !rows.is_empty()) {
                let keys: Vec<u64> = rows.iter().map(|place| table.keys[*place as usize]).collect();
                let dim = table.dim as u32;
                let came = rows.iter().filter_map(|place| table.occurrences.get(*place as usize).copied());
                let came: Vec<u32> = came.collect();
                let payload = if came.is_empty() {
                    body.section(*number, Operation::Gradient, Encoding::F32, dim, None, &keys)
                } else {
                    body.counted_section(*number, Encoding::F32, dim, None, &keys, &came)
                };
                let places = payload.chunks_exact_mut(table.dim * 4);
                for (to, place) in places.zip(rows) {
                    let start = *place as usize * table.dim;
                    for (raw, value) in to.chunks_exact_mut(4).zip(&table.sums[start..start + table.dim]) {
                        raw.copy_from_slice(&value.to_le_bytes());
                    }
                }
            }
        }
        let parts = bodies.into_iter().zip(first..);
        parts.map(|(body, part)| body.finish(0, u64::from(part) + 1, step)).collect()
    }

    fn part_of(&self, key: u64, of: u32) -> u32 {
        let width = u128::from(self.range.end - self.range.start) + 1;
        let at = u128::from(key.saturating_sub(self.range.start));
        // Below `of`: keys were checked to be in the range.
        u32::try_from(at * u128::from(of) / width).unwrap_or(u32::MAX).min(of - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evershard_proto::key::key_of;
    use evershard_proto::v1::{NonFinitePolicy, TableDefinition};

    const DIM: u32 = 2;

    fn schemas() -> BTreeMap<u32, Arc<TableSchema>> {
        let schema = |number| {
            let name = format!("table {number}");
            let definition = TableDefinition { name, dim: DIM, ..Default::default() };
            (number, Arc::new(TableSchema::new(number, &definition).expect("valid")))
        };
        [1, 2].map(schema).into()
    }

    fn part(table: u32, rows: &[(u64, [f32; 2])]) -> Bytes {
        let mut builder = PushBodyBuilder::new(0);
        let keys: Vec<u64> = rows.iter().map(|row| key_of(table, row.0)).collect();
        let payload: Vec<u8> = rows.iter().flat_map(|row| row.1).flat_map(f32::to_le_bytes).collect();
        builder
            .section(table, Operation::Gradient, Encoding::F32, DIM, None, &keys)
            .copy_from_slice(&payload);
        builder.finish(0, 1, 0)
    }

    fn sum(contributions: &[Vec<Bytes>], mean_over: Option<u32>) -> StepSum {
        StepSum::of(contributions, mean_over, &schemas(), KeyRange::ALL).expect("our own parts")
    }

    /// Every row of the parts, by table and key.
    fn rows(bodies: &[Bytes]) -> BTreeMap<(u32, u64), Vec<u32>> {
        let mut rows = BTreeMap::new();
        for body in bodies {
            for section in PushBody::parse_step(body).expect("our own").sections() {
                for (row, key) in section.keys().enumerate() {
                    let mut values = [0.0; 2];
                    decode_row(section.encoding, section.row(row), &mut values);
                    let bits = values.map(f32::to_bits).to_vec();
                    assert_eq!(rows.insert((section.table, key), bits), None, "a key in two parts");
                }
            }
        }
        rows
    }

    #[test]
    fn contributions_are_added_in_their_order() {
        // In f32, 1e8 + 1 - 1e8 depends on the order.
        let contributions = [
            vec![part(1, &[(7, [1e8, -0.0])]), part(1, &[(7, [1.0, 0.0])])],
            vec![],
            vec![part(1, &[(7, [-1e8, 0.0]), (8, [1.0, -0.0])]), part(2, &[(7, [5.0, 5.0])])],
        ];
        let all = rows(&sum(&contributions, None).cut(1, 0, 1, 0));
        let expected = ((1e8f32 + 1.0) + -1e8).to_bits();
        assert_eq!(all[&(1, key_of(1, 7))], [expected, 0]);
        assert_eq!(all[&(1, key_of(1, 8))][1], (-0.0f32).to_bits(), "a value that stands alone is itself");
        assert_eq!(all.len(), 3);
        let mean = rows(&sum(&contributions, Some(4)).cut(1, 0, 1, 0));
        assert_eq!(mean[&(2, key_of(2, 7))], [1.25f32.to_bits(); 2]);
    }

    #[test]
    fn gradients_that_are_not_finite_are_taken_out_before_they_are_added_and_told_by_contributor() {
        let policies = [NonFinitePolicy::SkipRow, NonFinitePolicy::Clip];
        let schemas: BTreeMap<u32, Arc<TableSchema>> = schemas()
            .into_iter()
            .zip(policies)
            .map(|((number, known), policy)| {
                let definition = TableDefinition {
                    non_finite: policy.into(),
                    ..known.description().definition.expect("one")
                };
                (number, Arc::new(TableSchema::new(number, &definition).expect("valid")))
            })
            .collect();
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        let contributions = [
            vec![part(1, &[(7, [1.0, 1.0]), (8, [nan, 1.0])]), part(2, &[(7, [1.0, nan])])],
            vec![part(1, &[(7, [2.0, 2.0])])],
            vec![part(1, &[(7, [-inf, 1.0]), (9, [inf, 1.0])]), part(2, &[(7, [1.0, -inf])])],
        ];
        let sum = StepSum::of(&contributions, None, &schemas, KeyRange::ALL).expect("our own parts");
        let all = rows(&sum.cut(1, 0, 1, 0));
        let bits = |values: [f32; 2]| values.map(f32::to_bits).to_vec();
        assert_eq!(all[&(1, key_of(1, 7))], bits([3.0, 3.0]));
        assert_eq!(all[&(2, key_of(2, 7))], bits([2.0, -f32::MAX]));
        assert_eq!(all.len(), 2, "rows 8 and 9 are left out");
        let told: Vec<_> = sum
            .offences()
            .iter()
            .map(|o| (o.contributor, o.table, o.action, o.rows.count, o.rows.first.id, o.rows.first.column))
            .collect();
        let (skipped, clipped) = (Action::Skipped, Action::Clipped);
        assert_eq!(
            told,
            [
                (0, 1, skipped, 1, 8, 0),
                (0, 2, clipped, 1, 7, 1),
                (2, 1, skipped, 2, 7, 0),
                (2, 2, clipped, 1, 7, 1)
            ]
        );
    }

    #[test]
    fn rows_that_fall_together_are_cut_until_they_fit() {
        // Neighbours in the space of keys: 3 MiB of rows in a thousandth of the range.
        let part = |from: u64| {
            let mut builder = PushBodyBuilder::new(0);
            let keys: Vec<u64> = (from..from + 100_000).map(|at| at << 37).collect();
            builder.section(1, Operation::Gradient, Encoding::F32, DIM, None, &keys);
            builder.finish(0, 1, 0)
        };
        let whole = sum(&[vec![part(0), part(100_000)]], None);
        let of = whole.parts();
        let bodies = whole.cut(of, 0, of, 9);
        assert!(bodies.iter().all(|body| body.len() <= STEP_BODY_BYTES_HARD_MAX / 2), "{of} parts");
        assert_eq!(rows(&bodies).len(), 200_000);
    }

    #[test]
    fn parts_are_disjoint_and_whoever_goes_on_cuts_them_alike() {
        let many: Vec<(u64, [f32; 2])> = (0..40_000u64).map(|id| (id, [id as f32, 1.0])).collect();
        let whole = sum(&[vec![part(1, &many)], vec![part(2, &many[..10])]], None);
        let of = whole.parts();
        assert!((3..=6).contains(&of), "{of} parts of 640 kB");
        let bodies = whole.cut(of, 0, of, 9);
        assert!(bodies.iter().all(|body| body.len() <= PUSH_BODY_BYTES_MAX));
        assert_eq!(rows(&bodies).len(), 40_010);
        assert_eq!(whole.cut(of, 2, of, 9), bodies[2..]);
        assert_eq!(whole.cut(of, 1, 2, 9), bodies[1..2]);
        // Another set of contributors: no key changes its part.
        let fewer = sum(&[vec![part(1, &many[5..100])]], None).cut(of, 0, of, 9);
        for (one, other) in bodies.iter().zip(&fewer) {
            let (one, other) = (rows(std::slice::from_ref(one)), rows(std::slice::from_ref(other)));
            assert!(other.keys().all(|key| one.contains_key(key)));
        }
        assert_eq!(sum(&[vec![], vec![]], None).parts(), 1);
        assert_eq!(sum(&[vec![], vec![]], None).cut(1, 0, 1, 9).len(), 1, "an empty step is a step");
    }
}
