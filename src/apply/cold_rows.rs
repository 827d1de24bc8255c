//! What a push needs of rows that are on disk only, read before it changes anything.
//!
//! Apply is the only one that changes rows: what is read here is a row's current content until apply has changed it, also when
//! somebody brings the row to memory and it leaves again. So nothing read is ever asked for twice in one section, and the search
//! ends.
//!
//! Not here: reading (`crate::shard`), changing (`row_update`).

use std::collections::BTreeMap;

use evershard_storage::table::Slot;

use crate::shard::{Fetched, Rows, ShardError, TableEntry};
use evershard_storage::table::RowShape;

/// Rows of one section's keys that were read from the store; reused from section to section.
#[derive(Debug, Default)]
pub(super) struct ColdRows {
    fetched: Fetched,
    /// Keys that were looked for in the store: the number in `fetched`, or `None` when the store has no row.
    known: BTreeMap<u64, Option<usize>>,
    wanted: Vec<u64>,
    slots: Vec<Option<Slot>>,
}

impl ColdRows {
    pub(super) fn clear(&mut self) {
        self.fetched.clear();
        self.known.clear();
        self.wanted.clear();
    }

    /// Makes every one of these keys' rows be in memory, or known to be nowhere, and leaves room for those; false when some have
    /// to be read first ([`ColdRows::read`]), and then nothing was changed.
    pub(super) fn settle(&mut self, keys: &[u64], entry: &mut TableEntry<'_>) -> bool {
        let is_whole = entry.table.is_whole();
        if is_whole && entry.has_room(keys.len()) {
            return true;
        }
        // Counts as a use: what the section needs does not leave for the room it needs.
        entry.table.find_batch(keys, &mut self.slots);
        let absent = || keys.iter().zip(&self.slots).filter(|(_, slot)| slot.is_none()).map(|(key, _)| *key);
        if !is_whole {
            self.wanted.clear();
            self.wanted.extend(absent().filter(|key| !self.known.contains_key(key)));
            if !self.wanted.is_empty() {
                return false;
            }
        }
        entry.make_room(absent().count());
        for key in absent() {
            if let Some(Some(number)) = self.known.get(&key) {
                let (_, header, floats) = self.fetched.get(*number);
                entry.table.load(key, header, floats);
            }
        }
        true
    }

    /// Reads what [`ColdRows::settle`] lacked. Blocks on the disk; no lock is held.
    pub(super) fn read(&mut self, rows: &Rows, table: u32, shape: RowShape) -> Result<(), ShardError> {
        let before = self.fetched.len();
        rows.fetch(table, shape, &self.wanted, &mut self.fetched)?;
        rows.cold_counts().add_read_by_apply(self.fetched.len() - before);
        self.known.extend(self.wanted.iter().map(|key| (*key, None)));
        for number in before..self.fetched.len() {
            let (position, ..) = self.fetched.get(number);
            self.known.insert(self.wanted[position], Some(number));
        }
        Ok(())
    }
}
