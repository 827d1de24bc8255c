//! Which rows stay in memory when there are more than fit: use counts, the clock's hand, and who left.
//!
//! A row is used when a batch finds it. Its count grows with each use, to [`USES_MAX`]; the hand of the clock goes over the slots,
//! takes one off each count it passes, and lets go of clean rows whose count is 0. A row that came from the disk begins at 0: read
//! once, as a scan of the whole table does, it is the first to leave again; rows that are used time and again outlast four turns
//! of the hand. (CLOCK with counts: Corbato 1968; Smith, "Sequentiality and prefetching", 1978, calls it GCLOCK.)
//!
//! Invariants:
//! - a row leaves only when the disk has it as it is: it is in neither generation of dirty bits;
//! - whoever leaves is counted under its key's stripe before the lock is let go: a reader that found a key absent, read its row
//!   from the disk, and finds the stripe's count unchanged, knows that the key was never in memory meanwhile, so the row is as
//!   it was read. (A stripe holds many keys: the count may have moved for another one, and then the row is read again.)
//!
//! Not here: how much memory there is and when to let go (the server), the disk (`rocks`).

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use super::Table;
use super::row::RowRef;
use super::slot::Slot;

/// What a use count grows to: two bits.
const USES_MAX: u8 = 3;
const USES_PER_BYTE: u32 = 4;
/// Counts of keys that left: a power of two.
const STRIPES: usize = 1024;

/// How many keys of a stripe had left a table's memory when this was taken: see the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Departures(u32);

/// A table's part of the bookkeeping.
#[derive(Debug)]
pub(super) struct Residency {
    /// Every row there is, is in memory: an absent key is absent.
    pub(super) whole: bool,
    hand: u32,
    /// A count of two bits a slot. Written without a lock by readers: a count may miss a use, or get one back, that another thread
    /// counted or took at the same time.
    uses: Vec<AtomicU8>,
    departures: Vec<u32>,
}

impl Residency {
    pub(super) fn new(whole: bool) -> Self {
        Self { whole, hand: 0, uses: Vec::new(), departures: Vec::new() }
    }

    /// The row in this slot was used. Two that do so at once may count as one.
    #[inline]
    pub(super) fn used(&self, slot: Slot) {
        let (byte, shift) = place(slot.number());
        if let Some(uses) = self.uses.get(byte) {
            let counts = uses.load(Relaxed);
            if counts >> shift & USES_MAX != USES_MAX {
                uses.store(counts + (1 << shift), Relaxed);
            }
        }
    }

    /// A row came into this slot.
    #[inline]
    pub(super) fn arrived(&mut self, slot: Slot) {
        let (byte, shift) = place(slot.number());
        if byte >= self.uses.len() {
            self.uses.resize_with((byte + 1).next_multiple_of(1024), AtomicU8::default);
        }
        *self.uses[byte].get_mut() &= !(USES_MAX << shift);
    }

    pub(super) fn departed(&mut self, key: u64) {
        if self.departures.is_empty() {
            self.departures = vec![0; STRIPES];
        }
        let count = &mut self.departures[stripe(key)];
        *count = count.wrapping_add(1);
    }

    fn departures(&self, key: u64) -> Departures {
        Departures(self.departures.get(stripe(key)).copied().unwrap_or(0))
    }

    pub(super) fn bytes(&self) -> usize {
        self.uses.capacity() + self.departures.capacity() * size_of::<u32>()
    }

    /// A slot's count.
    fn uses(&self, number: u32) -> u8 {
        let (byte, shift) = place(number);
        self.uses.get(byte).map_or(0, |uses| uses.load(Relaxed) >> shift & USES_MAX)
    }

    /// Takes one off the count of a slot; answers whether it was 0.
    fn pass(&mut self, number: u32) -> bool {
        let (byte, shift) = place(number);
        match self.uses.get_mut(byte).map(AtomicU8::get_mut) {
            Some(counts) if *counts >> shift & USES_MAX > 0 => {
                *counts -= 1 << shift;
                false
            }
            _ => true,
        }
    }
}

/// Where a slot's count is.
#[inline]
fn place(number: u32) -> (usize, u32) {
    ((number / USES_PER_BYTE) as usize, number % USES_PER_BYTE * 2)
}

/// Keys are mixed: any bits are as good as others.
fn stripe(key: u64) -> usize {
    key as usize % STRIPES
}

impl Table {
    /// Whether every row there is, is in memory: then an absent key is absent. Otherwise the disk may have its row.
    #[inline]
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.residency.whole
    }

    /// Every row that the disk has was loaded, and none left since.
    pub fn set_whole(&mut self) {
        self.residency.whole = true;
    }

    /// To be taken while a key is absent, before its row is read from the disk: see [`Table::load_absent`].
    #[must_use]
    pub fn departures(&self, key: u64) -> Departures {
        self.residency.departures(key)
    }

    /// The count of every stripe: [`Table::departures`] for whole scans of the disk.
    #[must_use]
    pub fn all_departures(&self) -> AllDepartures {
        AllDepartures(self.residency.departures.clone())
    }

    /// Slots that can take a row without more memory.
    #[must_use]
    pub fn free_slots(&self) -> u32 {
        self.arena.free()
    }

    /// Rows and tombstones in memory.
    #[must_use]
    pub fn resident(&self) -> u64 {
        self.entries
    }

    /// Moves the hand of the clock over at most `slots_max` slots (once around at most) until it has let go of `rows` clean rows;
    /// answers how many it was. `leaving` is told of each before it goes.
    pub fn evict(
        &mut self,
        rows: u32,
        slots_max: u32,
        mut leaving: impl FnMut(Slot, u64, RowRef<'_>),
    ) -> u32 {
        let used = self.arena.used();
        let mut evicted = 0;
        for _ in 0..slots_max.min(used) {
            if evicted == rows {
                break;
            }
            let number = if self.residency.hand < used { self.residency.hand } else { 0 };
            self.residency.hand = number + 1;
            if self.dirty.is_clean(number) && self.residency.pass(number) {
                evicted += u32::from(self.evict_slot(Slot::from_number(number), &mut leaving));
            }
        }
        evicted
    }

    /// Lets go of the clean rows in the last piece of memory; gives it back when it is empty then. Answers whether it was given
    /// back: dirty rows keep it until they are flushed. Looks at no more than `slots_max` slots. Only worth it when other pieces
    /// have room for what is used again.
    pub fn give_back(&mut self, slots_max: u32, mut leaving: impl FnMut(Slot, u64, RowRef<'_>)) -> bool {
        let Some(first) = self.arena.last_chunk() else { return false };
        self.arena.stop_filling(first);
        let last = self.arena.used();
        let from = last.saturating_sub(slots_max).max(first);
        for number in (from..last).rev() {
            if self.dirty.is_clean(number) {
                self.evict_slot(Slot::from_number(number), &mut leaving);
            }
        }
        self.arena.trim()
    }

    /// Adds the live rows among the next `slots_max` slots from `first` on that were used lately; answers where to go on, `None` at
    /// the end. For whoever remembers what is hot.
    pub fn used_rows(&self, first: u32, slots_max: u32, found: &mut Vec<UsedRow>) -> Option<u32> {
        let end = first.saturating_add(slots_max).min(self.arena.used());
        for number in first..end {
            let uses = self.residency.uses(number);
            if uses > 0
                && let Some((key, row)) = self.row_at(number)
                && !row.is_tombstone()
            {
                found.push(UsedRow { uses, version: row.header.version, key });
            }
        }
        (end < self.arena.used()).then_some(end)
    }

    /// Slots in a piece of memory: what [`Table::give_back`] gives back.
    #[must_use]
    pub fn slots_per_piece(&self) -> u32 {
        self.arena.rows_per_chunk()
    }

    /// As [`Table::load`], when the key is still absent and was so ever since `seen` was taken: the row read from the disk since
    /// then is the current one. Answers whether it was taken in.
    pub fn load_absent(
        &mut self,
        key: u64,
        seen: Departures,
        header: super::RowHeader,
        floats: &[f32],
    ) -> bool {
        self.departures(key) == seen && self.load(key, header, floats)
    }

    /// The slot's row leaves, if there is one.
    fn evict_slot(&mut self, slot: Slot, leaving: &mut impl FnMut(Slot, u64, RowRef<'_>)) -> bool {
        let Some((key, row)) = self.row_at(slot.number()) else { return false };
        let header = row.header();
        leaving(slot, key, row);
        self.index.remove(key, slot);
        self.arena.release(slot);
        self.entries -= 1;
        self.census.left(header);
        self.residency.departed(key);
        // A tombstone on disk says what an absent key says.
        self.residency.whole &= header.is_tombstone();
        true
    }
}

/// A row by how much it is used: the hottest is the greatest. Of rows that are used as much, the one that changed last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct UsedRow {
    /// Its use count.
    pub uses: u8,
    /// The last entry that changed it.
    pub version: u64,
    /// Its key.
    pub key: u64,
}

/// What [`Table::all_departures`] saw.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllDepartures(Vec<u32>);

impl AllDepartures {
    /// Those of one key.
    #[must_use]
    pub fn of(&self, key: u64) -> Departures {
        Departures(self.0.get(stripe(key)).copied().unwrap_or(0))
    }
}
