//! Finding rows, one by one and in batches with prefetch.
//!
//! A batch goes through three passes, each over all keys, so that the waits for memory overlap:
//! 1. hash, and ask for the key's bucket;
//! 2. compare tags in the bucket, and ask for all lines of the row that is likely the one;
//! 3. compare the row's key, and count the use (`residency`). The rare key that was elsewhere (another row with the same tag, a bucket that overflowed) is
//!    searched by itself.
//!
//! Not here: reading or changing the rows.

use super::Table;
use super::hash::KeyHash;
use super::row::RowRef;
use super::slot::Slot;

impl Table {
    /// The row of a key; a tombstone is a row too.
    #[inline]
    #[must_use]
    pub fn find(&self, key: u64) -> Option<RowRef<'_>> {
        self.find_slot(key).map(|slot| self.row(slot))
    }

    /// The slot of a key.
    #[inline]
    #[must_use]
    pub fn find_slot(&self, key: u64) -> Option<Slot> {
        self.index.find(key, &self.arena)
    }

    /// The slots of many keys, in their order (what `slots` held is dropped). The rows found are on their way into the
    /// cache on return: ask for [`Table::BATCH`] keys or few times that at once, and use the rows right away.
    pub fn find_batch(&self, keys: &[u64], slots: &mut Vec<Option<Slot>>) {
        slots.clear();
        slots.reserve(keys.len());
        for keys in keys.chunks(Self::BATCH) {
            self.find_some(keys, slots, self.shape().floats());
        }
    }

    /// Adds the slots of at most [`Table::BATCH`] keys to `slots`, and asks for the first `floats` of their rows.
    fn find_some(&self, keys: &[u64], slots: &mut Vec<Option<Slot>>, floats: usize) {
        let mut hashes = [KeyHash::default(); Self::BATCH];
        for (hash, &key) in hashes.iter_mut().zip(keys) {
            *hash = self.index.hash(key);
            if let Some(segment) = self.index.segment(*hash) {
                segment.prefetch(*hash);
            }
        }
        // Bit i: key i may be elsewhere than in the first match of its own bucket.
        let mut elsewhere = 0_u128;
        let first = slots.len();
        for (position, &hash) in hashes.iter().take(keys.len()).enumerate() {
            let likely = self.index.segment(hash).and_then(|segment| {
                let home = segment.home(hash);
                let place = home.matches(hash).next();
                elsewhere |= u128::from(place.is_none() && home.has_overflow()) << position;
                place.map(|place| home.slot(place))
            });
            if let Some(slot) = likely {
                self.arena.prefetch(slot, floats);
            }
            slots.push(likely);
        }
        for (position, (found, &key)) in slots[first..].iter_mut().zip(keys).enumerate() {
            let wrong = match *found {
                Some(slot) => self.arena.head(slot).key() != key,
                None => elsewhere >> position & 1 == 1,
            };
            if wrong {
                *found = self.find_slot(key);
                if let Some(slot) = *found {
                    self.arena.prefetch(slot, floats);
                }
            }
            if let Some(slot) = *found {
                self.residency.used(slot);
            }
        }
    }

    /// Calls `visit` with the position and the row of each key, in order: a pull. Looks up and prefetches in batches; only the
    /// weights are prefetched.
    pub fn visit<'table>(&'table self, keys: &[u64], mut visit: impl FnMut(usize, Option<RowRef<'table>>)) {
        let mut slots = Vec::with_capacity(keys.len().min(Self::BATCH));
        for (batch, keys) in keys.chunks(Self::BATCH).enumerate() {
            slots.clear();
            self.find_some(keys, &mut slots, self.shape().dim as usize);
            for (offset, slot) in slots.iter().enumerate() {
                visit(batch * Self::BATCH + offset, slot.map(|slot| self.row(slot)));
            }
        }
    }

    /// Asks for the row in a slot to be brought near.
    ///
    /// # Panics
    /// When the slot was not handed out by this table since it was last cleared.
    #[inline]
    pub fn prefetch(&self, slot: Slot) {
        self.arena.prefetch(slot, self.shape().floats());
    }
}
