//! What a row looks like to its users: shape, header, a view to read and a view to change.
//!
//! A row is one record everywhere (memory, RocksDB, checkpoint): header, weights, optimizer slots, notes. Weights and slots are
//! adjacent, so an optimizer touches one run of cache lines. Notes are words about the row's use, in tables that ask for them;
//! they lie behind the slots, as floats of their bits.
//!
//! A record is a live row, a tombstone, or counting: an id that its table does not admit yet. A counting record reads as absent;
//! it has no weights, `steps` is how often the id came, and on disk only its notes follow the header.
//!
//! Not here: where rows live (`arena`), how they are found (`index`), what the floats mean (the server's optimizers).

/// How many floats the rows of a table have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowShape {
    /// Floats of weights.
    pub dim: u32,
    /// Floats of optimizer state, right behind the weights.
    pub state: u32,
    /// Words about the row's use, behind the state.
    pub notes: u32,
}

impl RowShape {
    /// Rows without notes.
    #[must_use]
    pub const fn plain(dim: u32, state: u32) -> Self {
        RowShape { dim, state, notes: 0 }
    }

    /// Weights, state and notes together.
    #[must_use]
    pub const fn floats(self) -> usize {
        self.dim as usize + self.state as usize + self.notes as usize
    }

    /// Where the notes begin.
    #[must_use]
    pub const fn notes_at(self) -> usize {
        self.dim as usize + self.state as usize
    }

    /// How many floats of a record are on disk: all of a live row, the notes of a counting one, none of a tombstone.
    #[must_use]
    pub const fn stored_floats(self, header: RowHeader) -> usize {
        if header.is_tombstone() {
            0
        } else if header.is_counting() {
            self.notes as usize
        } else {
            self.floats()
        }
    }
}

/// What a row carries besides its floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RowHeader {
    /// Index of the log entry that last changed the row; replay skips entries at or below it. 0 for rows that entered a
    /// new group. At most [`RowHeader::VERSION_MAX`].
    pub version: u64,
    /// How often the optimizer ran on this row (Adam's bias correction). Of a counting record: how often its id came.
    pub steps: u32,
    /// [`RowHeader::TOMBSTONE`], [`RowHeader::COUNTING`] or none; at most [`RowHeader::FLAGS_MAX`].
    pub flags: u32,
}

impl RowHeader {
    /// The row was removed; what remains is its version, until `replay_from` has passed it.
    pub const TOMBSTONE: u32 = 1;

    /// Not a row yet: its id came less often than its table asks for.
    pub const COUNTING: u32 = 2;

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

    /// Whether it only counts how often its id came.
    #[must_use]
    pub const fn is_counting(&self) -> bool {
        self.flags & (Self::TOMBSTONE | Self::COUNTING) == Self::COUNTING
    }

    /// Whether there is a row: neither removed nor only counting.
    #[must_use]
    pub const fn is_live(&self) -> bool {
        self.flags & (Self::TOMBSTONE | Self::COUNTING) == 0
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
    /// Of `floats`.
    pub(super) notes_at: usize,
}

impl<'table> RowRef<'table> {
    /// A row that is not in a table, such as one read from disk: `floats` are [`RowShape::stored_floats`].
    #[must_use]
    pub fn from_parts(header: RowHeader, floats: &'table [f32], shape: RowShape) -> Self {
        let notes_at = if header.is_live() { shape.notes_at() } else { 0 }.min(floats.len());
        RowRef { header, floats, dim: (shape.dim as usize).min(notes_at), notes_at }
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
        &self.floats[self.dim..self.notes_at]
    }

    /// Weights, then slots; of a counting record there are none.
    #[inline]
    #[must_use]
    pub fn values(&self) -> &'table [f32] {
        if self.header.is_counting() { &[] } else { &self.floats[..self.notes_at] }
    }

    /// Words about its use, each the bits of a float.
    #[inline]
    #[must_use]
    pub fn notes(&self) -> &'table [f32] {
        &self.floats[self.notes_at..]
    }

    /// Weights, slots, notes, as they lie there.
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

    /// Whether there is a row: neither removed nor only counting.
    #[inline]
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.header.is_live()
    }
}

/// A row, to change. The row is dirty from the moment this view was taken; when the view ends, the table's counts of
/// tombstones and counting records follow the flags.
#[derive(Debug)]
pub struct RowMut<'table> {
    /// Written back when the view ends.
    pub(super) header: RowHeader,
    pub(super) head: &'table mut RowHead,
    pub(super) floats: &'table mut [f32],
    pub(super) dim: usize,
    pub(super) notes_at: usize,
    pub(super) before: RowHeader,
    pub(super) census: &'table mut Census,
}

/// What kinds of records a table has in memory.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Census {
    /// Records of removed rows.
    pub(super) tombstones: u64,
    /// Records that only count.
    pub(super) counting: u64,
    /// Rows made, less rows removed, since the table was opened: those that came from the disk do not count.
    pub(super) live_changes: i64,
}

impl Census {
    /// A record came to memory.
    #[inline]
    pub(super) fn came(&mut self, header: RowHeader) {
        self.tombstones += u64::from(header.is_tombstone());
        self.counting += u64::from(header.is_counting());
    }

    /// A record left memory.
    #[inline]
    pub(super) fn left(&mut self, header: RowHeader) {
        self.tombstones -= u64::from(header.is_tombstone());
        self.counting -= u64::from(header.is_counting());
    }

    #[inline]
    fn changed(&mut self, before: RowHeader, after: RowHeader) {
        if before.flags != after.flags {
            self.left(before);
            self.came(after);
            self.live_changes += i64::from(after.is_live()) - i64::from(before.is_live());
        }
    }
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
        &mut self.floats[self.dim..self.notes_at]
    }

    /// Words about its use, to change: each the bits of a float.
    #[inline]
    pub fn notes_mut(&mut self) -> &mut [f32] {
        &mut self.floats[self.notes_at..]
    }

    /// Weights and slots, to change together.
    #[inline]
    pub fn split_mut(&mut self) -> (&mut RowHeader, &mut [f32], &mut [f32]) {
        let (weights, state) = self.floats[..self.notes_at].split_at_mut(self.dim);
        (&mut self.header, weights, state)
    }

    /// Weights, slots, notes, to change.
    #[inline]
    pub fn floats_mut(&mut self) -> &mut [f32] {
        self.floats
    }
}

impl Drop for RowMut<'_> {
    #[inline]
    fn drop(&mut self) {
        self.head.set_header(self.header);
        self.census.changed(self.before, self.header);
    }
}
