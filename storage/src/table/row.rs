//! What a row looks like to its users: shape, header, a view to read and a view to change.
//!
//! A row is one record everywhere (memory, RocksDB, checkpoint): header, weights, optimizer slots. Weights and slots are
//! adjacent, so an optimizer touches one run of cache lines.
//!
//! Not here: where rows live (`arena`), how they are found (`index`), what the floats mean (the server's optimizers).

/// How many floats the rows of a table have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowShape {
    /// Floats of weights.
    pub dim: u32,
    /// Floats of optimizer state, right behind the weights.
    pub state: u32,
}

impl RowShape {
    /// Weights and state together.
    #[must_use]
    pub const fn floats(self) -> usize {
        self.dim as usize + self.state as usize
    }
}

/// What a row carries besides its floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct RowHeader {
    /// Index of the log entry that last changed the row; replay skips entries at or below it. 0 for rows that entered a
    /// new group.
    pub version: u64,
    /// How often the optimizer ran on this row (Adam's bias correction).
    pub steps: u32,
    /// [`RowHeader::TOMBSTONE`] and flags of the server.
    pub flags: u32,
}

impl RowHeader {
    /// The row was removed; what remains is its version, until `replay_from` has passed it.
    pub const TOMBSTONE: u32 = 1;

    /// Kept by the arena for a slot without a row; never seen outside, never written to disk.
    pub(super) const VACANT: u32 = 1 << 31;

    /// Whether the row was removed.
    #[must_use]
    pub const fn is_tombstone(&self) -> bool {
        self.flags & Self::TOMBSTONE != 0
    }
}

/// A row, to read.
#[derive(Debug, Clone, Copy)]
pub struct RowRef<'table> {
    pub(super) header: &'table RowHeader,
    pub(super) floats: &'table [f32],
    pub(super) dim: usize,
}

impl<'table> RowRef<'table> {
    /// Version, steps, flags.
    #[inline]
    #[must_use]
    pub fn header(&self) -> &'table RowHeader {
        self.header
    }

    /// The weights.
    #[inline]
    #[must_use]
    pub fn weights(&self) -> &'table [f32] {
        &self.floats[..self.dim]
    }

    /// The optimizer's slots.
    #[inline]
    #[must_use]
    pub fn state(&self) -> &'table [f32] {
        &self.floats[self.dim..]
    }

    /// Weights, then slots.
    #[inline]
    #[must_use]
    pub fn floats(&self) -> &'table [f32] {
        self.floats
    }

    /// Whether the row was removed.
    #[inline]
    #[must_use]
    pub fn is_tombstone(&self) -> bool {
        self.header.is_tombstone()
    }
}

/// A row, to change. The row is dirty from the moment this view was taken; when the view ends, the table's count of
/// tombstones follows the flag.
#[derive(Debug)]
pub struct RowMut<'table> {
    pub(super) header: &'table mut RowHeader,
    pub(super) floats: &'table mut [f32],
    pub(super) dim: usize,
    pub(super) was_tombstone: bool,
    pub(super) tombstones: &'table mut u64,
}

impl RowMut<'_> {
    /// Version, steps, flags.
    #[inline]
    #[must_use]
    pub fn header(&self) -> &RowHeader {
        self.header
    }

    /// Version, steps, flags, to change.
    #[inline]
    pub fn header_mut(&mut self) -> &mut RowHeader {
        self.header
    }

    /// The weights, to change.
    #[inline]
    pub fn weights_mut(&mut self) -> &mut [f32] {
        &mut self.floats[..self.dim]
    }

    /// The optimizer's slots, to change.
    #[inline]
    pub fn state_mut(&mut self) -> &mut [f32] {
        &mut self.floats[self.dim..]
    }

    /// Weights and slots, to change together.
    #[inline]
    pub fn split_mut(&mut self) -> (&mut RowHeader, &mut [f32], &mut [f32]) {
        let (weights, state) = self.floats.split_at_mut(self.dim);
        (self.header, weights, state)
    }

    /// Weights, then slots, to change.
    #[inline]
    pub fn floats_mut(&mut self) -> &mut [f32] {
        self.floats
    }
}

impl Drop for RowMut<'_> {
    #[inline]
    fn drop(&mut self) {
        // The top bit is the arena's: a caller that sets it would make the row vanish from scans.
        self.header.flags &= !RowHeader::VACANT;
        match (self.was_tombstone, self.header.is_tombstone()) {
            (false, true) => *self.tombstones += 1,
            (true, false) => *self.tombstones -= 1,
            _ => {}
        }
    }
}
