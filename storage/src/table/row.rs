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
pub struct RowHeader {
    /// Index of the log entry that last changed the row; replay skips entries at or below it. 0 for rows that entered a
    /// new group. At most [`RowHeader::VERSION_MAX`].
    pub version: u64,
    /// How often the optimizer ran on this row (Adam's bias correction).
    pub steps: u32,
    /// [`RowHeader::TOMBSTONE`]; at most [`RowHeader::FLAGS_MAX`].
    pub flags: u32,
}

impl RowHeader {
    /// The row was removed; what remains is its version, until `replay_from` has passed it.
    pub const TOMBSTONE: u32 = 1;

    /// Flags that a row can have.
    pub const FLAGS_MAX: u32 = 0x7f;

    /// Versions that a row can have: in memory they share a word with the flags. A log of a million entries a second takes two
    /// thousand years to get there.
    pub const VERSION_MAX: u64 = (1 << 56) - 1;

    /// Whether the row was removed.
    #[must_use]
    pub const fn is_tombstone(&self) -> bool {
        self.flags & Self::TOMBSTONE != 0
    }
}

/// A row's fixed part as it lies in memory: 20 bytes, aligned to 4 as the floats behind it are, so that no row is padded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(super) struct RowHead {
    key: [u32; 2],
    /// The version below, the flags in the highest byte.
    marks: [u32; 2],
    steps: u32,
}

impl RowHead {
    /// The flag of a slot without a row; never seen outside, never written to disk.
    const VACANT: u32 = 0x80;
    const FLAGS_SHIFT: u32 = 56;

    pub(super) fn new(key: u64) -> Self {
        Self { key: halves(key), ..Self::default() }
    }

    /// Of a slot without a row.
    pub(super) fn vacant() -> Self {
        Self { marks: halves(u64::from(Self::VACANT) << Self::FLAGS_SHIFT), ..Self::default() }
    }

    #[inline]
    pub(super) fn key(&self) -> u64 {
        whole(self.key)
    }

    #[inline]
    pub(super) fn is_vacant(&self) -> bool {
        self.marks[1] >> (Self::FLAGS_SHIFT - 32) & Self::VACANT != 0
    }

    #[inline]
    pub(super) fn header(&self) -> RowHeader {
        let marks = whole(self.marks);
        // Fits: a byte is left.
        let flags = (marks >> Self::FLAGS_SHIFT) as u32;
        RowHeader { version: marks & RowHeader::VERSION_MAX, steps: self.steps, flags }
    }

    /// What of a header does not fit is cut off: versions and flags are checked where they come from.
    #[inline]
    pub(super) fn set_header(&mut self, header: RowHeader) {
        debug_assert!(header.version <= RowHeader::VERSION_MAX && header.flags <= RowHeader::FLAGS_MAX);
        let flags = u64::from(header.flags & RowHeader::FLAGS_MAX);
        self.marks = halves(header.version & RowHeader::VERSION_MAX | flags << Self::FLAGS_SHIFT);
        self.steps = header.steps;
    }
}

#[inline]
fn halves(word: u64) -> [u32; 2] {
    // The low half, then the high one.
    [word as u32, (word >> 32) as u32]
}

#[inline]
fn whole([low, high]: [u32; 2]) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// A row, to read.
#[derive(Debug, Clone, Copy)]
pub struct RowRef<'table> {
    pub(super) header: RowHeader,
    pub(super) floats: &'table [f32],
    pub(super) dim: usize,
}

impl<'table> RowRef<'table> {
    /// A row that is not in a table, such as one read from disk. `floats` has as many as the shape; a tombstone's may be empty.
    #[must_use]
    pub fn from_parts(header: RowHeader, floats: &'table [f32], shape: RowShape) -> Self {
        RowRef { header, floats, dim: (shape.dim as usize).min(floats.len()) }
    }

    /// Version, steps, flags.
    #[inline]
    #[must_use]
    pub fn header(&self) -> RowHeader {
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
    /// Written back when the view ends.
    pub(super) header: RowHeader,
    pub(super) head: &'table mut RowHead,
    pub(super) floats: &'table mut [f32],
    pub(super) dim: usize,
    pub(super) was_tombstone: bool,
    pub(super) tombstones: &'table mut u64,
    pub(super) live_changes: &'table mut i64,
}

impl RowMut<'_> {
    /// Version, steps, flags.
    #[inline]
    #[must_use]
    pub fn header(&self) -> RowHeader {
        self.header
    }

    /// Version, steps, flags, to change.
    #[inline]
    pub fn header_mut(&mut self) -> &mut RowHeader {
        &mut self.header
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
        (&mut self.header, weights, state)
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
        self.head.set_header(self.header);
        match (self.was_tombstone, self.header.is_tombstone()) {
            (false, true) => {
                *self.tombstones += 1;
                *self.live_changes -= 1;
            }
            (true, false) => {
                *self.tombstones -= 1;
                *self.live_changes += 1;
            }
            _ => {}
        }
    }
}
