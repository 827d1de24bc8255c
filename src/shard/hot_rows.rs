//! Which rows were used most, remembered on disk: after a restart they come to memory before all others.
//!
//! The file is a hint, and lies in the replica's folder beside its store. It holds keys and no rows: what it names is read from
//! the store like anything else, so an old file, or none, costs time and nothing else.
//!
//! A [durable file](crate::durable_file) of magic `EVHOTROW`, version 1; its body, little-endian:
//!
//! ```text
//! row, the hottest first, 12 bytes each: table u32 | key u64
//! ```
//!
//! How hot a row is: its use count, which the clock of the memory budget takes down again (`evershard_storage::table`,
//! `residency`); where no budget presses all counts are at their top, and the rows that were changed last win.
//!
//! Not here: when it is written (`crate::flush`) and when it is used (`scrubber`).

use std::path::PathBuf;

use evershard_storage::table::{Table, UsedRow};

use super::cold::{Absent, Fetched, rows_a_lock};
use super::rows::Rows;
use crate::durable_file::{self, DurableFileError};

const MAGIC: [u8; 8] = *b"EVHOTROW";
const VERSION: u32 = 1;
const FILE_NAME: &str = "hot-rows";
const ENTRY_BYTES: usize = 12;
/// Rows that are remembered, of a replica: 1.5 MiB of keys. Of ids of Zipf 1.05 they are most of all uses.
pub(super) const ROWS_MAX: usize = if cfg!(test) { 8 } else { 1 << 17 };
/// Slots looked at under one taking of the lock.
const SLOTS_AT_ONCE: u32 = 1 << 12;
/// Rows read from the store together: in order of their keys, which the store likes.
pub(super) const READ_AT_ONCE: usize = if cfg!(test) { 4 } else { 1 << 12 };
/// Rows that come to memory under one taking of the lock.
const USED_AT_ONCE: usize = 256;

/// A row's place: table and key.
type Place = (u32, u64);

impl Rows {
    /// The rows in memory that are used most, the hottest first.
    fn hottest(&self) -> Vec<Place> {
        let tables: Vec<u32> = self.read().tables().keys().copied().collect();
        let (mut hottest, mut found) = (Vec::new(), Vec::new());
        for number in tables {
            let mut next = Some(0);
            while let Some(first) = next {
                next = self
                    .read()
                    .table(number)
                    .and_then(|table| table.used_rows(first, SLOTS_AT_ONCE, &mut found));
                hottest.extend(found.drain(..).map(|row| (row, number)));
                if hottest.len() > 2 * ROWS_MAX {
                    keep_hottest(&mut hottest);
                }
            }
        }
        keep_hottest(&mut hottest);
        hottest.sort_unstable_by(|one, other| other.cmp(one));
        hottest.into_iter().map(|(row, number)| (number, row.key)).collect()
    }

    /// Remembers the rows that are used most. Blocks on the disk.
    ///
    /// # Errors
    /// [`DurableFileError`]: what was remembered before is still there.
    pub(crate) fn remember_hottest(&self) -> Result<(), DurableFileError> {
        let hottest = self.hottest();
        if hottest.is_empty() {
            // A replica that just began has nothing to say: what it said before its restart is worth more.
            return Ok(());
        }
        durable_file::write(&self.hot_rows_path(), MAGIC, VERSION, &encode(&hottest))
    }

    /// Brings the rows that were used most to memory, as far as there is room, the hottest first. `go_on` is asked between
    /// batches, with no lock held. Blocks on the disk.
    pub(crate) fn warm_hottest(&self, go_on: &mut dyn FnMut() -> bool) {
        let hottest = match durable_file::read(&self.hot_rows_path(), MAGIC, VERSION) {
            Ok(body) => decode(&body.unwrap_or_default()),
            Err(error) => {
                tracing::warn!(%error, "rows come to memory in no particular order");
                return;
            }
        };
        for batch in hottest.chunks(READ_AT_ONCE) {
            if !go_on() || !self.warm_batch(batch) {
                return;
            }
        }
    }

    /// False when there is no room for more, or the store cannot be read.
    fn warm_batch(&self, batch: &[Place]) -> bool {
        let mut batch = batch.to_vec();
        batch.sort_unstable();
        for rows in batch.chunk_by(|one, other| one.0 == other.0) {
            let number = rows[0].0;
            let keys: Vec<u64> = rows.iter().map(|row| row.1).collect();
            let shape = self.read().table(number).map(Table::shape);
            let at_once = shape.map_or(USED_AT_ONCE, |shape| rows_a_lock(USED_AT_ONCE, shape));
            for keys in keys.chunks(at_once) {
                let Some((absent, shape)) = self.absent(number, keys) else { continue };
                if !self.has_room_for(number, absent.keys.len()) {
                    return false;
                }
                let mut fetched = Fetched::default();
                // Errors were reported.
                if self.fetch(number, shape, &absent.keys, &mut fetched).is_err() {
                    return false;
                }
                self.take_in(&absent, &fetched);
                self.count_uses(&absent);
            }
        }
        true
    }

    fn has_room_for(&self, number: u32, rows: usize) -> bool {
        let mut set = self.write();
        set.table_mut(number).is_some_and(|entry| entry.has_room(rows))
    }

    /// What comes from the disk counts as used once: else what the scan brings next would be worth as much.
    fn count_uses(&self, absent: &Absent) {
        if let Some(table) = self.read().table(absent.table) {
            table.visit(&absent.keys, |_, _| ());
        }
    }

    pub(super) fn hot_rows_path(&self) -> PathBuf {
        self.store().directory().join(FILE_NAME)
    }
}

/// Cuts off all but the hottest.
fn keep_hottest(rows: &mut Vec<(UsedRow, u32)>) {
    if rows.len() > ROWS_MAX {
        rows.select_nth_unstable_by(ROWS_MAX, |one, other| other.cmp(one));
        rows.truncate(ROWS_MAX);
    }
}

fn encode(rows: &[Place]) -> Vec<u8> {
    let bytes = rows.iter().flat_map(|(table, key)| {
        let mut entry = [0; ENTRY_BYTES];
        entry[..4].copy_from_slice(&table.to_le_bytes());
        entry[4..].copy_from_slice(&key.to_le_bytes());
        entry
    });
    bytes.collect()
}

/// Reads as many as are ever written; what is left behind the last whole one is nothing.
fn decode(body: &[u8]) -> Vec<Place> {
    let (entries, _) = body.as_chunks::<ENTRY_BYTES>();
    let place = |entry: &[u8; ENTRY_BYTES]| {
        let [a, b, c, d, key @ ..] = *entry;
        (u32::from_le_bytes([a, b, c, d]), u64::from_le_bytes(key))
    };
    entries.iter().take(ROWS_MAX).map(place).collect()
}

#[cfg(test)]
mod tests {
    use evershard_formats::bytes_or_damaged;
    use evershard_formats::golden::golden;
    use proptest::prelude::*;

    use super::*;

    fn sample() -> Vec<Place> {
        vec![(2, 0x0102_0304_0506_0708), (1, 7), (2, u64::MAX)]
    }

    #[test]
    fn version_1_stays_as_it_is() {
        assert_eq!(
            decode(&golden(env!("CARGO_MANIFEST_DIR"), "hot-rows-1.bin", &encode(&sample()))),
            sample()
        );
    }

    proptest! {
        #[test]
        fn fuzz_hot_rows(bytes in bytes_or_damaged(Just(encode(&sample())))) {
            let rows = decode(&bytes);
            prop_assert!(rows.len() <= ROWS_MAX && encode(&rows).len() <= bytes.len());
            prop_assert_eq!(&encode(&rows)[..], &bytes[..rows.len() * ENTRY_BYTES]);
        }
    }
}
