//! The place of a row in a table's arena.
//!
//! A slot stays with its row until the row's entry is removed or the table is cleared; then it may be given to another key.
//! Slots are handed out in order of first use, so they do not depend on hashing: the arena's order is the same after the
//! same inserts. Not here: memory (`arena`).

use std::num::NonZeroU32;

/// Number of a row in its table's arena. As small as a `u32` also inside an `Option`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(NonZeroU32);

impl Slot {
    /// The highest number of a slot.
    pub(super) const NUMBER_MAX: u32 = u32::MAX - 1;

    #[inline]
    pub(super) fn from_number(number: u32) -> Self {
        debug_assert!(number <= Self::NUMBER_MAX);
        // `number` is below u32::MAX, so the sum neither overflows nor is zero; MIN is for the compiler only.
        Self(NonZeroU32::new(number.wrapping_add(1)).unwrap_or(NonZeroU32::MIN))
    }

    /// The slot's number, from 0.
    #[inline]
    #[must_use]
    pub fn number(self) -> u32 {
        self.0.get() - 1
    }
}
