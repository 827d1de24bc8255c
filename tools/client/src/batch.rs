//! A batch of ids, made ready to be sent: repetitions found, keys computed, split by shard and cut to size.
//!
//! Invariants:
//! - every distinct id is in exactly one part, with all its rows in order of appearance;
//! - a part's payload is at most the limit it was cut to, unless a single row is longer.
//!
//! Not here: what the rows hold.

use evershard_proto::key::key_of;

use crate::routing_cache::RoutingTable;

/// Ends a chain of rows.
const END: u32 = u32::MAX;

/// The distinct ids of a batch and where their rows are.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// Key of each distinct id, in order of first appearance.
    keys: Vec<u64>,
    /// First row of each distinct id.
    first: Vec<u32>,
    /// Last row so far of each distinct id.
    last: Vec<u32>,
    /// The next row of the same id, for each row.
    next: Vec<u32>,
    /// Open addressing: position in `keys` plus one; 0 is free.
    slots: Vec<u32>,
}

/// Distinct ids for one message to one shard: positions in the batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) group: u64,
    pub(crate) distinct: Vec<u32>,
}

impl Batch {
    /// Finds the distinct ids. At most `u32::MAX - 1` rows.
    pub(crate) fn new(table: u32, ids: &[u64]) -> Self {
        let slots = (ids.len() * 2).next_power_of_two().max(16);
        let mut batch = Batch {
            keys: Vec::with_capacity(ids.len()),
            first: Vec::with_capacity(ids.len()),
            last: Vec::with_capacity(ids.len()),
            next: vec![END; ids.len()],
            slots: vec![0; slots],
        };
        let mask = slots - 1;
        for (row, id) in ids.iter().enumerate() {
            let key = key_of(table, *id);
            let row = row as u32;
            // The key is mixed already: its low bits are as good as any hash.
            let mut at = key as usize & mask;
            loop {
                match batch.slots[at] {
                    0 => {
                        batch.keys.push(key);
                        batch.first.push(row);
                        batch.last.push(row);
                        batch.slots[at] = batch.keys.len() as u32;
                        break;
                    }
                    taken if batch.keys[taken as usize - 1] == key => {
                        let last = &mut batch.last[taken as usize - 1];
                        batch.next[*last as usize] = row;
                        *last = row;
                        break;
                    }
                    _ => at = (at + 1) & mask,
                }
            }
        }
        batch
    }

    /// Distinct ids.
    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    /// The key of a distinct id.
    pub(crate) fn key(&self, distinct: u32) -> u64 {
        self.keys[distinct as usize]
    }

    /// The rows of a distinct id, in order of appearance.
    pub(crate) fn rows(&self, distinct: u32) -> impl Iterator<Item = usize> + '_ {
        let mut row = self.first[distinct as usize];
        std::iter::from_fn(move || {
            let current = row;
            if current == END {
                return None;
            }
            row = self.next[current as usize];
            Some(current as usize)
        })
    }

    /// The first row of a distinct id.
    pub(crate) fn first_row(&self, distinct: u32) -> usize {
        self.first[distinct as usize] as usize
    }

    /// The last row of a distinct id.
    pub(crate) fn last_row(&self, distinct: u32) -> usize {
        self.last[distinct as usize] as usize
    }

    /// Splits by shard, and cuts so that `row_bytes` a distinct id stay within `bytes_max`.
    pub(crate) fn split(&self, routing: &RoutingTable, row_bytes: usize, bytes_max: usize) -> Vec<Part> {
        let rows_max = (bytes_max / row_bytes.max(1)).max(1);
        let mut by_shard: Vec<Vec<u32>> = vec![Vec::new(); routing.shards.len()];
        for (distinct, key) in self.keys.iter().enumerate() {
            by_shard[routing.shard_of(*key)].push(distinct as u32);
        }
        let mut parts = Vec::new();
        for (shard, distinct) in by_shard.into_iter().enumerate() {
            for piece in distinct.chunks(rows_max) {
                parts.push(Part { group: routing.shards[shard].group, distinct: piece.to_vec() });
            }
        }
        parts
    }
}

/// Adds the row `from` to little-endian floats in place.
pub(crate) fn add_row(to: &mut [u8], from: &[f32]) {
    for (raw, value) in to.chunks_exact_mut(4).zip(from) {
        let sum = f32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]) + value;
        raw.copy_from_slice(&sum.to_le_bytes());
    }
}

/// Writes the row `from` as little-endian floats.
pub(crate) fn put_row(to: &mut [u8], from: &[f32]) {
    for (raw, value) in to.chunks_exact_mut(4).zip(from) {
        raw.copy_from_slice(&value.to_le_bytes());
    }
}

/// Reads little-endian floats.
pub(crate) fn get_row(to: &mut [f32], from: &[u8]) {
    for (value, raw) in to.iter_mut().zip(from.chunks_exact(4)) {
        *value = f32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use evershard_proto::v1::{Routing, ShardDescription};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn every_row_is_in_one_part_and_in_order(ids in proptest::collection::vec(0u64..50, 0..300), bytes_max in 1usize..200) {
            let batch = Batch::new(3, &ids);
            let mut model: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
            for (row, id) in ids.iter().enumerate() {
                model.entry(key_of(3, *id)).or_default().push(row);
            }
            prop_assert_eq!(batch.len(), model.len());
            let routing = crate::routing_cache::table_for_tests(3);
            let mut seen = BTreeMap::new();
            for part in batch.split(&routing, 8, bytes_max) {
                prop_assert!(part.distinct.len() * 8 <= bytes_max.max(8));
                for distinct in part.distinct {
                    let key = batch.key(distinct);
                    prop_assert_eq!(routing.shards[routing.shard_of(key)].group, part.group);
                    seen.insert(key, batch.rows(distinct).collect::<Vec<_>>());
                }
            }
            prop_assert_eq!(seen, model);
        }
    }

    pub(crate) fn routing(shards: u64) -> Routing {
        let start = |i: u64| ((u128::from(i) << 64) / u128::from(shards)) as u64;
        let describe = |i| ShardDescription {
            shard: i as u32,
            group: i + 1,
            range_start: start(i),
            ..Default::default()
        };
        Routing { shards: (0..shards).map(describe).collect(), ..Default::default() }
    }
}
