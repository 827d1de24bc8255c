//! The table's side of a flush: which rows it owes, and copies of them.
//!
//! See the [module](super) for the walk and `dirty` for the two generations. Not here: the run and the store (`rocks`).

use super::Table;
use super::row::RowHeader;
use super::slot::Slot;

/// A row that the running flush owes. Ordered by key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DirtyRow {
    /// Its key.
    pub key: u64,
    /// Its place; stays its place for as long as the flush runs.
    pub slot: Slot,
}

/// How far [`Table::flush_keys`] has read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FlushCursor {
    next: u32,
    done: bool,
}

impl FlushCursor {
    /// Whether every row owed was named.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.done
    }
}

impl Table {
    /// Rows changed since their last copy for a flush: what the next flush will owe.
    #[must_use]
    pub fn dirty_rows(&self) -> u64 {
        self.dirty.current()
    }

    /// Rows that the running flush owes; 0 when none runs.
    #[must_use]
    pub fn flushing_rows(&self) -> u64 {
        self.dirty.flushing()
    }

    /// Begins a flush: it owes every row that is dirty now. Answers how many. Short, whatever the size of the table. A flush
    /// begun before and never ended counts as failed.
    pub fn begin_flush(&mut self) -> u64 {
        self.dirty.begin()
    }

    /// Adds some of the rows owed to `rows`, in no particular order: sort them by key when the cursor is done. Looks at no
    /// more than `slots_max` slots, so that the lock can be let go between calls.
    pub fn flush_keys(&self, cursor: &mut FlushCursor, slots_max: u32, rows: &mut Vec<DirtyRow>) {
        if cursor.done {
            return;
        }
        let next = self.dirty.flushing_from(cursor.next, slots_max, |number| {
            let slot = Slot::from_number(number);
            rows.push(DirtyRow { key: self.arena.head(slot).key(), slot });
        });
        match next {
            Some(next) => cursor.next = next,
            None => cursor.done = true,
        }
    }

    /// Calls `copy` with key, header and the floats to store of each row, whole, as it is now; whoever changes it later makes it dirty
    /// again. Rows that this flush does not owe (the table was cleared meanwhile) are passed over. The caller copies the
    /// floats, and remembers the highest version.
    pub fn flush_rows(&self, rows: &[DirtyRow], mut copy: impl FnMut(u64, RowHeader, &[f32])) {
        const AHEAD: usize = 16;
        for (position, row) in rows.iter().enumerate() {
            if let Some(ahead) = rows.get(position + AHEAD).filter(|ahead| self.owes(ahead)) {
                self.arena.prefetch(ahead.slot, self.shape().floats());
            }
            if !self.owes(row) {
                continue;
            }
            let (head, floats) = self.arena.row(row.slot);
            if head.key() == row.key {
                let header = head.header();
                let first = if header.is_counting() { self.shape().notes_at() } else { 0 };
                copy(head.key(), header, &floats[first..]);
                self.dirty.copied(row.slot.number());
            }
        }
    }

    /// Ends a flush whose rows are durable: they are clean, but for those changed after they were copied.
    pub fn commit_flush(&mut self) {
        self.dirty.commit();
    }

    /// Ends a flush that failed: everything it owed is dirty.
    pub fn abort_flush(&mut self) {
        self.dirty.abort();
    }

    fn owes(&self, row: &DirtyRow) -> bool {
        row.slot.number() < self.arena.used() && self.dirty.is_flushing(row.slot.number())
    }
}
