//! Finding rows, one by one and in batches with prefetch.

use super::Table;
use super::row::RowRef;
use super::slot::Slot;

impl Table {
    /// The row of a key; a tombstone is a row too.
    #[must_use]
    pub fn find(&self, key: u64) -> Option<RowRef<'_>> {
        self.find_slot(key).map(|slot| self.row(slot))
    }

    /// The slot of a key.
    #[must_use]
    pub fn find_slot(&self, key: u64) -> Option<Slot> {
        self.slot_of(key)
    }

    /// The slots of many keys, in their order (what `slots` held is dropped). The rows found are on their way into the
    /// cache on return: ask for [`Table::BATCH`] keys or few times that at once, and use the rows right away.
    pub fn find_batch(&self, keys: &[u64], slots: &mut Vec<Option<Slot>>) {
        slots.clear();
        for &key in keys {
            slots.push(self.slot_of(key));
        }
    }

    /// Calls `visit` with the position and the row of each key, in order: a pull. Looks up and prefetches in batches.
    pub fn visit<'table>(&'table self, keys: &[u64], mut visit: impl FnMut(usize, Option<RowRef<'table>>)) {
        let mut slots = Vec::with_capacity(Self::BATCH);
        for (batch, keys) in keys.chunks(Self::BATCH).enumerate() {
            self.find_batch(keys, &mut slots);
            for (offset, slot) in slots.iter().enumerate() {
                visit(batch * Self::BATCH + offset, slot.map(|slot| self.row(slot)));
            }
        }
    }

    /// Asks for the row in a slot to be brought near.
    #[inline]
    pub fn prefetch(&self, slot: Slot) {
        self.arena.prefetch(slot);
    }
}
