//! The distinct keys of a section, and the sums of those that come more than once (design 4, rule 2).
//!
//! Invariants:
//! - keys are in order of first appearance, each once;
//! - a key's sum is `((first + second) + third) + ...` in f32, in order of appearance; a key that comes once is not
//!   copied: its values are read from the payload;
//! - values are decoded first: sums are of f32, whatever the encoding;
//! - a key came as often as its rows that were not left out say together, where that counts;
//! - nothing is allocated once the buffers have grown to the size of a message.
//!
//! Not here: finiteness, rows.

use evershard_proto::encoding::decode_row;
use evershard_proto::push_body::{Operation, Section};

use super::finite;

const NONE: u32 = u32::MAX;

/// Where a distinct key's values are.
#[derive(Debug, Clone, Copy)]
struct Source {
    /// Its row in the section: the first one, or the last one for `Set`.
    row: u32,
    /// Its sum, by number, or `NONE`.
    sum: u32,
}

/// The distinct keys of one section; reused from section to section.
#[derive(Debug, Default)]
pub(super) struct Distinct {
    keys: Vec<u64>,
    sources: Vec<Source>,
    sums: Vec<f32>,
    dim: usize,
    /// Each value is clipped to the finite range before anything is summed.
    clip: bool,
    /// How often each distinct key came; empty where that does not count.
    occurrences: Vec<u32>,
    /// Open addressing: position in `keys` + 1, or 0.
    buckets: Vec<u32>,
}

impl Distinct {
    /// Collects the distinct keys of `section`, leaving out rows for which `skip` is true; `clip` brings each value into
    /// the finite range before anything is summed; `counts` says whether it matters how often a key came.
    pub(super) fn collect(
        &mut self,
        section: &Section<'_>,
        (clip, counts): (bool, bool),
        mut skip: impl FnMut(usize) -> bool,
    ) {
        let count = section.count();
        self.clip = clip;
        self.keys.clear();
        self.sources.clear();
        self.sums.clear();
        self.occurrences.clear();
        self.dim = section.dim as usize;
        if section.has_ids() {
            // They ascend strictly: none comes twice.
            for (row, key) in section.keys().enumerate().filter(|(row, _)| !skip(*row)) {
                self.take_in(section, row, key, counts);
            }
            return;
        }
        let capacity = (count * 2).next_power_of_two().max(16);
        self.buckets.clear();
        self.buckets.resize(capacity, 0);
        for (row, key) in section.keys().enumerate() {
            if skip(row) {
                continue;
            }
            match self.find(key) {
                Ok(known) => {
                    if let Some(occurrences) = self.occurrences.get_mut(known) {
                        *occurrences = occurrences.saturating_add(section.occurrences(row));
                    }
                    self.again(section, known, row);
                }
                Err(bucket) => {
                    self.take_in(section, row, key, counts);
                    self.buckets[bucket] = self.keys.len() as u32;
                }
            }
        }
    }

    /// A key that did not come before.
    fn take_in(&mut self, section: &Section<'_>, row: usize, key: u64, counts: bool) {
        if counts {
            self.occurrences.push(section.occurrences(row));
        }
        self.keys.push(key);
        self.sources.push(Source { row: row as u32, sum: NONE });
    }

    /// The distinct keys.
    pub(super) fn keys(&self) -> &[u64] {
        &self.keys
    }

    /// How often the `position`-th distinct key came; 1 where that does not count.
    pub(super) fn occurrences(&self, position: usize) -> u32 {
        self.occurrences.get(position).copied().unwrap_or(1)
    }

    /// Writes the values of the `position`-th distinct key.
    pub(super) fn values(&self, section: &Section<'_>, position: usize, values: &mut [f32]) {
        let source = self.sources[position];
        if source.sum == NONE {
            decode_row(section.encoding, section.row(source.row as usize), values);
            if self.clip {
                finite::clip(values);
            }
        } else {
            values.copy_from_slice(self.sum(source.sum));
        }
    }

    /// The first key whose sum is not finite, if any, and the sum.
    pub(super) fn first_bad_sum(&self) -> Option<(u64, &[f32])> {
        let sums = self.keys.iter().zip(&self.sources).filter(|(_, source)| source.sum != NONE);
        let mut sums = sums.map(|(key, source)| (*key, self.sum(source.sum)));
        sums.find(|(_, sum)| sum.iter().any(|value| !value.is_finite()))
    }

    fn sum(&self, number: u32) -> &[f32] {
        let start = number as usize * self.dim;
        &self.sums[start..start + self.dim]
    }

    /// The position of a key, or the bucket where it belongs.
    fn find(&self, key: u64) -> Result<usize, usize> {
        let mask = self.buckets.len() - 1;
        let shift = 64 - self.buckets.len().trailing_zeros();
        let mut bucket = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> shift) as usize;
        loop {
            match self.buckets[bucket] {
                0 => return Err(bucket),
                position if self.keys[position as usize - 1] == key => return Ok(position as usize - 1),
                _ => bucket = (bucket + 1) & mask,
            }
        }
    }

    fn again(&mut self, section: &Section<'_>, position: usize, row: usize) {
        let source = self.sources[position];
        match section.operation {
            Operation::Set => self.sources[position].row = row as u32,
            Operation::Remove | Operation::Clear => {}
            Operation::Gradient | Operation::Add => {
                let start = if source.sum == NONE {
                    let start = self.sums.len();
                    self.sources[position].sum = (start / self.dim.max(1)) as u32;
                    self.sums.resize(start + self.dim, 0.0);
                    let first = section.row(source.row as usize);
                    decode_row(section.encoding, first, &mut self.sums[start..]);
                    if self.clip {
                        finite::clip(&mut self.sums[start..]);
                    }
                    start
                } else {
                    source.sum as usize * self.dim
                };
                finite::add(section, row, self.clip, &mut self.sums[start..start + self.dim]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evershard_proto::push_body::{Encoding, PushBody, PushBodyBuilder};

    fn body(operation: Operation, rows: &[(u64, [f32; 2])]) -> bytes::Bytes {
        let mut builder = PushBodyBuilder::new(0);
        let keys: Vec<u64> = rows.iter().map(|r| r.0).collect();
        let payload: Vec<u8> = rows.iter().flat_map(|r| r.1).flat_map(f32::to_le_bytes).collect();
        builder.section(1, operation, Encoding::F32, 2, None, &keys).copy_from_slice(&payload);
        builder.finish(1, 1, 0)
    }

    fn distinct(operation: Operation, rows: &[(u64, [f32; 2])]) -> Vec<(u64, [f32; 2])> {
        let bytes = body(operation, rows);
        let parsed = PushBody::parse(&bytes).expect("our own");
        let section = parsed.sections().next().expect("one");
        let mut distinct = Distinct::default();
        // Twice: buffers are reused.
        distinct.collect(&section, (false, false), |_| false);
        distinct.collect(&section, (false, false), |_| false);
        let mut values = [0.0; 2];
        (0..distinct.keys().len())
            .map(|position| {
                distinct.values(&section, position, &mut values);
                (distinct.keys()[position], values)
            })
            .collect()
    }

    #[test]
    fn sums_in_order_of_appearance() {
        // In f32, 1e8 + 1 + ... - 1e8 depends on the order.
        let rows = [(u64::MAX, [1e8, 1.0]), (0, [5.0, 5.0]), (u64::MAX, [1.0, 1.0]), (u64::MAX, [-1e8, 1.0])];
        let expected = ((1e8f32 + 1.0) + -1e8, 3.0);
        assert_eq!(
            distinct(Operation::Gradient, &rows),
            vec![(u64::MAX, [expected.0, expected.1]), (0, [5.0, 5.0])]
        );
    }

    #[test]
    fn occurrences_are_of_rows_before_they_are_summed() {
        let bytes = body(Operation::Gradient, &[(5, [1.0; 2]), (5, [1.0; 2]), (6, [1.0; 2]), (5, [1.0; 2])]);
        let parsed = PushBody::parse(&bytes).expect("our own");
        let section = parsed.sections().next().expect("one");
        let mut distinct = Distinct::default();
        distinct.collect(&section, (false, true), |_| false);
        assert_eq!(distinct.keys(), [5, 6]);
        assert_eq!([0, 1].map(|position| distinct.occurrences(position)), [3, 1]);
        distinct.collect(&section, (false, true), |row| row == 1);
        assert_eq!(distinct.occurrences(0), 2, "a row that is left out did not come");
        // A client that sums rows says how many they were; it may send a key in several rows all the same.
        let mut builder = PushBodyBuilder::new(0);
        builder.counted_section(1, Encoding::F32, 2, None, &[5, 6, 5], &[3, 1, u32::MAX]);
        let bytes = builder.finish(1, 1, 0);
        let parsed = PushBody::parse(&bytes).expect("our own");
        distinct.collect(&parsed.sections().next().expect("one"), (false, true), |_| false);
        assert_eq!([0, 1].map(|position| distinct.occurrences(position)), [u32::MAX, 1]);
    }

    #[test]
    fn ids_are_distinct_as_they_come() {
        let mut builder = PushBodyBuilder::new(0);
        let kind = (Operation::Gradient, Encoding::F32);
        let ids = [0, 7, u64::MAX];
        builder.id_section(1, kind, (1, None), &ids, &[3, 2, 1]).copy_from_slice(
            &[1.0f32, f32::NAN, 3.0].iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>(),
        );
        let bytes = builder.finish(1, 1, 0);
        let parsed = PushBody::parse(&bytes).expect("our own");
        let section = parsed.sections().next().expect("one");
        let mut distinct = Distinct::default();
        distinct.collect(&section, (true, true), |row| row == 0);
        assert_eq!(distinct.keys(), [7, u64::MAX].map(|id| evershard_proto::key::key_of(1, id)));
        assert_eq!([0, 1].map(|position| distinct.occurrences(position)), [2, 1]);
        let mut values = [9.0];
        distinct.values(&section, 0, &mut values);
        assert_eq!(values, [0.0], "clipped");
        distinct.values(&section, 1, &mut values);
        assert_eq!(values, [3.0]);
        assert_eq!(distinct.first_bad_sum(), None);
    }

    #[test]
    fn the_last_set_wins() {
        let rows = [(1, [1.0, 1.0]), (2, [2.0, 2.0]), (1, [3.0, 3.0])];
        assert_eq!(distinct(Operation::Set, &rows), vec![(1, [3.0, 3.0]), (2, [2.0, 2.0])]);
    }

    #[test]
    fn clips_before_it_sums() {
        let bytes = body(
            Operation::Gradient,
            &[(1, [f32::NAN, f32::INFINITY]), (1, [2.0, -1.0]), (2, [f32::NAN, 1.0])],
        );
        let parsed = PushBody::parse(&bytes).expect("our own");
        let section = parsed.sections().next().expect("one");
        let mut distinct = Distinct::default();
        distinct.collect(&section, (true, false), |_| false);
        let mut values = [9.0; 2];
        distinct.values(&section, 0, &mut values);
        assert_eq!(values, [2.0, f32::MAX]);
        distinct.values(&section, 1, &mut values);
        assert_eq!(values, [0.0, 1.0]);
    }

    #[test]
    fn many_keys_with_equal_low_or_high_bits() {
        let rows: Vec<_> = (0..300u64).flat_map(|i| [(i << 32, [1.0; 2]), (i, [1.0; 2])]).collect();
        let distinct = distinct(Operation::Add, &rows);
        assert_eq!(distinct.len(), 599, "0 comes twice");
        assert_eq!(distinct[0], (0, [2.0, 2.0]));
    }
}
