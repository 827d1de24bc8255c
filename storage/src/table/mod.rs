//! The table in memory: where a replica's rows are while they train.
//!
//! One [`Table`] per (replica, table number). It is not thread safe by itself: the server keeps a replica's tables behind a
//! read-write lock; apply takes it for writing, pulls and the flush take it for reading.
//!
//! How a row is reached: key -> `index` (buckets of one cache line: tags and slots) -> slot -> `arena` (key, header, weights
//! and state in one run of memory). Batches prefetch all buckets first and all rows next ([`Table::find_batch`],
//! [`Table::visit`]): that is worth 4 x over one row at a time.
//!
//! How a row reaches the disk: [`Table::row_mut`] and [`Table::insert`] mark it dirty; a flush then walks
//!
//! 1. [`Table::begin_flush`] (lock for writing, short): what is dirty now is owed by this flush;
//! 2. [`Table::flush_keys`] (lock for reading, in steps): which rows; the caller sorts them by key;
//! 3. [`Table::flush_rows`] (lock for reading, a batch at a time): copies rows out whole, as they are by then;
//! 4. [`Table::commit_flush`] when the run is durable, or [`Table::abort_flush`] (lock for writing, short).
//!
//! Invariants:
//! - every key in the index has exactly one slot, and the row there carries that key;
//! - a row changed after its copy stays dirty; rows of a failed flush are dirty again (`dirty`);
//! - only clean rows leave memory, so a slot owed by a flush is never given to another key, and what is not in memory is on disk
//!   as it is (`residency`);
//! - `len() + tombstones() + counting()` is the number of keys in the index.
//!
//! Not here: what rows mean, RocksDB (`rocks`), locks, how much memory there is.

mod arena;
mod bucket;
mod chunk;
mod dirty;
mod flush;
mod hash;
mod index;
mod lookup;
mod residency;
mod row;
mod segment;
mod slot;
#[cfg(test)]
mod tests;

pub use dirty::SlotSet;
pub use flush::{DirtyRow, FlushCursor};
pub use residency::{AllDepartures, Departures, UsedRow};
pub use row::{RowHeader, RowMut, RowRef, RowShape};
pub use slot::Slot;

use arena::Arena;
use dirty::Dirty;
use index::Index;
use residency::Residency;
use row::{Census, RowHead};

/// Rows of one table in one replica. See the [module](self).
#[derive(Debug)]
pub struct Table {
    index: Index,
    arena: Arena,
    dirty: Dirty,
    /// Keys in the index.
    entries: u64,
    /// Which of them are no live rows.
    census: Census,
    residency: Residency,
}

impl Table {
    /// Rows looked up together: what [`Table::find_batch`] keeps in flight, and a good size for callers' own batches.
    pub const BATCH: usize = 128;

    /// An empty table; takes no memory for rows yet. It is whole: there is no row on disk either.
    #[must_use]
    pub fn new(shape: RowShape) -> Self {
        Self {
            index: Index::default(),
            arena: Arena::new(shape),
            dirty: Dirty::default(),
            entries: 0,
            census: Census::default(),
            residency: Residency::new(true),
        }
    }

    /// A table whose rows are all on disk, if there are any: they come to memory one by one ([`Table::load`]).
    #[must_use]
    pub fn on_disk(shape: RowShape) -> Self {
        Self { residency: Residency::new(false), ..Self::new(shape) }
    }

    /// What its rows look like.
    #[inline]
    #[must_use]
    pub fn shape(&self) -> RowShape {
        self.arena.shape()
    }

    /// Live rows in memory: tombstones and counting records are none.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.entries - self.census.tombstones - self.census.counting
    }

    /// Rows made, less rows removed, since the table was opened: with a count of all rows as of some moment, the count as of
    /// now.
    #[must_use]
    pub fn live_changes(&self) -> i64 {
        self.census.live_changes
    }

    /// Whether there is no live row in memory.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removed rows whose version is still kept.
    #[must_use]
    pub fn tombstones(&self) -> u64 {
        self.census.tombstones
    }

    /// Records in memory that only count how often their ids came.
    #[must_use]
    pub fn counting(&self) -> u64 {
        self.census.counting
    }

    /// Memory taken by rows, index and dirty bits.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.arena.bytes() + self.index.bytes() + self.dirty.bytes() + self.residency.bytes()
    }

    /// Of them, what holds no row now and takes the next one that comes.
    #[must_use]
    pub fn free_bytes(&self) -> usize {
        self.arena.bytes() - self.entries as usize * self.arena.row_bytes()
    }

    /// About what one more row takes: its record, its place in the index and its bookkeeping.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        const BESIDE_THE_RECORD: usize = 12;
        self.arena.row_bytes() + BESIDE_THE_RECORD
    }

    /// The row in a slot.
    ///
    /// # Panics
    /// When the slot was not handed out by this table since it was last cleared.
    #[inline]
    #[must_use]
    pub fn row(&self, slot: Slot) -> RowRef<'_> {
        let (head, floats) = self.arena.row(slot);
        self.view(head, floats)
    }

    /// The row in a slot, to change: it is dirty from here on.
    ///
    /// # Panics
    /// When the slot was not handed out by this table since it was last cleared.
    #[inline]
    pub fn row_mut(&mut self, slot: Slot) -> RowMut<'_> {
        self.dirty.mark(slot.number());
        let shape = self.arena.shape();
        let (head, floats) = self.arena.row_mut(slot);
        let header = head.header();
        let (dim, notes_at) = (shape.dim as usize, shape.notes_at());
        RowMut { before: header, header, head, floats, dim, notes_at, census: &mut self.census }
    }

    /// Makes a row of zeros for an absent key, dirty. A key that is there keeps its row, which becomes dirty: so a batch may
    /// insert the same key twice.
    pub fn insert(&mut self, key: u64) -> Slot {
        let (slot, fresh) = self.entry(key);
        self.census.live_changes += i64::from(fresh);
        self.dirty.mark(slot.number());
        slot
    }

    /// Takes in a row from disk: clean. A row that is in memory already is newer: it stays, and the answer is `false`.
    /// `floats` are those on disk ([`RowShape::stored_floats`]), the others are zero; more floats than the shape has are left
    /// out, so the caller checks their number before.
    pub fn load(&mut self, key: u64, header: RowHeader, floats: &[f32]) -> bool {
        let (slot, fresh) = self.entry(key);
        let notes_at = self.arena.shape().notes_at();
        if fresh {
            let (head, own) = self.arena.row_mut(slot);
            head.set_header(header);
            let first = if header.is_counting() { notes_at } else { 0 };
            for (own, loaded) in own[first..].iter_mut().zip(floats) {
                *own = *loaded;
            }
            self.census.came(header);
        }
        fresh
    }

    /// Lets go of a tombstone, also of a whole table: a tombstone on disk is as good as none. Answers whether it did. Live rows,
    /// rows not flushed yet and absent keys stay as they are.
    pub fn remove_entry(&mut self, key: u64) -> bool {
        let Some(slot) = self.find_slot(key) else { return false };
        if !self.arena.head(slot).header().is_tombstone() || !self.dirty.is_clean(slot.number()) {
            return false;
        }
        self.index.remove(key, slot);
        self.arena.release(slot);
        self.entries -= 1;
        self.census.tombstones -= 1;
        self.residency.departed(key);
        true
    }

    /// Number of slots ever used: what [`Table::row_at`] may be asked for.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.arena.used()
    }

    /// The row in the slot of this number, if there is one: tombstones too. For scans, in the arena's order.
    #[inline]
    #[must_use]
    pub fn row_at(&self, number: u32) -> Option<(u64, RowRef<'_>)> {
        if number >= self.arena.used() {
            return None;
        }
        let (head, floats) = self.arena.row(Slot::from_number(number));
        (!head.is_vacant()).then(|| (head.key(), self.view(head, floats)))
    }

    #[inline]
    fn view<'table>(&self, head: &RowHead, floats: &'table [f32]) -> RowRef<'table> {
        let shape = self.arena.shape();
        RowRef { header: head.header(), floats, dim: shape.dim as usize, notes_at: shape.notes_at() }
    }

    /// Slots whose rows are dirty, or owed by a running flush: the rows that the disk does not have as they are.
    #[must_use]
    pub fn unflushed(&self) -> SlotSet {
        self.dirty.both()
    }

    fn entry(&mut self, key: u64) -> (Slot, bool) {
        if let Some(slot) = self.find_slot(key) {
            return (slot, false);
        }
        let slot = self.arena.allocate(key);
        self.residency.arrived(slot);
        self.index.insert(key, slot, &self.arena);
        self.entries += 1;
        (slot, true)
    }
}
