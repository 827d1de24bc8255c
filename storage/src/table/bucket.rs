//! One cache line of the index: up to twelve slots, each with a tag of eight bits of its key's hash.
//!
//! Looking for a key compares all tags at once; a tag that matches is right 19 times of 20 at least, and the row's own key
//! decides. Memory of zeros is an empty bucket.
//!
//! Not here: where a full bucket's entries go (`segment`).

use super::hash::KeyHash;
use super::slot::Slot;

/// Up to [`Bucket::PLACES`] entries.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Bucket {
    /// Numbers of slots, where `used` says so.
    numbers: [u32; Bucket::PLACES],
    tags: [u8; Bucket::PLACES],
    /// A bit per place.
    used: u16,
    /// Entries that belong here or before and had to go on to a later bucket. While it is 0, a search ends here.
    overflow: u16,
}

impl Bucket {
    pub(super) const PLACES: usize = 12;
    const FULL: u16 = (1 << Self::PLACES) - 1;

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.used == Self::FULL
    }

    #[inline]
    pub(super) fn has_overflow(&self) -> bool {
        self.overflow != 0
    }

    /// Whether nothing is here and nothing went by.
    pub(super) fn is_clear(&self) -> bool {
        self.used == 0 && self.overflow == 0
    }

    /// A bit for each place with this hash's tag.
    #[inline]
    pub(super) fn matches(&self, hash: KeyHash) -> Matches {
        Matches { bits: self.tag_bits(hash.tag()) & self.used }
    }

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[inline]
    fn tag_bits(&self, tag: u8) -> u16 {
        use std::arch::x86_64::{__m128i, _mm_cmpeq_epi8, _mm_loadu_si128, _mm_movemask_epi8, _mm_set1_epi8};
        const { assert!(std::mem::offset_of!(Bucket, tags) + 16 == size_of::<Bucket>()) };
        // SAFETY: SSE2 is part of x86-64. The sixteen bytes from `tags` on are the last of this struct (asserted above), and
        // it has no padding; the pointer comes from the whole struct. What is not a tag is masked off by `used`.
        unsafe {
            let tags =
                std::ptr::from_ref(self).byte_add(std::mem::offset_of!(Bucket, tags)).cast::<__m128i>();
            let equal = _mm_cmpeq_epi8(_mm_loadu_si128(tags), _mm_set1_epi8(tag as i8));
            _mm_movemask_epi8(equal) as u16
        }
    }

    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    fn tag_bits(&self, tag: u8) -> u16 {
        self.tag_bits_one_by_one(tag)
    }

    #[cfg(any(test, not(all(target_arch = "x86_64", not(miri)))))]
    fn tag_bits_one_by_one(&self, tag: u8) -> u16 {
        self.tags.iter().enumerate().fold(0, |bits, (place, own)| bits | u16::from(*own == tag) << place)
    }

    #[inline]
    pub(super) fn slot(&self, place: usize) -> Slot {
        Slot::from_number(self.numbers[place])
    }

    /// Puts an entry in a free place; the bucket must not be full.
    #[inline]
    pub(super) fn put(&mut self, hash: KeyHash, slot: Slot) {
        debug_assert!(!self.is_full());
        let place = (!self.used).trailing_zeros() as usize;
        self.numbers[place] = slot.number();
        self.tags[place] = hash.tag();
        self.used |= 1 << place;
    }

    #[inline]
    pub(super) fn free(&mut self, place: usize) {
        self.used &= !(1 << place);
    }

    /// An entry goes by to a later bucket.
    #[inline]
    pub(super) fn pass(&mut self) {
        // A segment has fewer than 2^16 entries.
        self.overflow += 1;
    }

    /// An entry that went by is gone.
    #[inline]
    pub(super) fn unpass(&mut self) {
        self.overflow -= 1;
    }

    /// Every slot here.
    pub(super) fn slots(&self) -> impl Iterator<Item = Slot> {
        Matches { bits: self.used }.map(|place| self.slot(place))
    }
}

/// Places of a bucket.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matches {
    bits: u16,
}

impl Iterator for Matches {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        if self.bits == 0 {
            return None;
        }
        let place = self.bits.trailing_zeros() as usize;
        self.bits &= self.bits - 1;
        Some(place)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn all_tags_at_once_is_one_by_one(tags: [u8; 12], used in 0..1_u16 << 12, overflow: u16, tag: u8) {
            let bucket = Bucket { numbers: [0; 12], tags, used, overflow };
            prop_assert_eq!(bucket.tag_bits(tag) & used, bucket.tag_bits_one_by_one(tag) & used);
            let last = tags[11];
            prop_assert_eq!(bucket.tag_bits(last) & used, bucket.tag_bits_one_by_one(last) & used);
        }
    }
}
