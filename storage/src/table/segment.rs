//! A part of the index: a power of two of buckets, searched from the key's own bucket onwards, around the end.
//!
//! Invariants:
//! - an entry is in its own bucket or in a later one with every bucket between full when it came, and every bucket it passed
//!   counts it (`overflow`): so a search ends at the first bucket that nothing passed;
//! - at most 14/15 of the places are taken, so there is always a free one.
//!
//! Not here: which segment a key belongs to, splitting (`index`).

use std::ptr::NonNull;

use super::arena::prefetch;
use super::bucket::Bucket;
use super::hash::KeyHash;
use super::slot::Slot;

/// Buckets in memory that the index owns. See the module for the invariants.
#[derive(Debug)]
pub(super) struct Segment {
    buckets: NonNull<Bucket>,
    /// Buckets, less one.
    mask: u32,
    /// How many bits of the hash its keys have in common.
    pub(super) depth: u32,
    entries: u32,
}

// SAFETY: a segment is a view of memory owned by the index beside it, reached through `&Segment` for reading and `&mut Segment`
// for writing only.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// Buckets at `memory`.
    ///
    /// # Safety
    /// `memory` holds `count` buckets, all zero or a valid bucket, is aligned to a cache line, outlives the segment, and
    /// nobody else uses it meanwhile. `count` is a power of two, not above 4096.
    pub(super) unsafe fn new(memory: NonNull<u8>, count: u32, depth: u32) -> Self {
        debug_assert!(count.is_power_of_two() && count <= 4096);
        Self { buckets: memory.cast(), mask: count - 1, depth, entries: 0 }
    }

    pub(super) fn bucket_count(&self) -> u32 {
        self.mask + 1
    }

    #[inline]
    pub(super) fn is_crowded(&self) -> bool {
        self.entries >= self.bucket_count() * Bucket::PLACES as u32 / 15 * 14
    }

    #[inline]
    fn bucket(&self, number: u32) -> &Bucket {
        // SAFETY: the mask keeps the number below the count of buckets; see `new` for the rest. `&self` keeps writers away.
        unsafe { self.buckets.add((number & self.mask) as usize).as_ref() }
    }

    #[inline]
    fn bucket_mut(&mut self, number: u32) -> &mut Bucket {
        // SAFETY: as in `bucket`, with `self` borrowed exclusively.
        unsafe { self.buckets.add((number & self.mask) as usize).as_mut() }
    }

    /// The key's own bucket.
    #[inline]
    pub(super) fn home(&self, hash: KeyHash) -> &Bucket {
        self.bucket(hash.bucket(self.mask))
    }

    /// Asks for the key's own bucket to be brought near.
    #[inline]
    pub(super) fn prefetch(&self, hash: KeyHash) {
        prefetch(std::ptr::from_ref(self.home(hash)).cast());
    }

    /// The slot that has this hash's tag and is the one, says `is_it`.
    #[inline]
    pub(super) fn find(&self, hash: KeyHash, mut is_it: impl FnMut(Slot) -> bool) -> Option<Slot> {
        self.locate(hash, &mut is_it).map(|(bucket, place)| self.bucket(bucket).slot(place))
    }

    #[inline]
    fn locate(&self, hash: KeyHash, is_it: &mut impl FnMut(Slot) -> bool) -> Option<(u32, usize)> {
        let home = hash.bucket(self.mask);
        for step in 0..=self.mask {
            let number = home.wrapping_add(step) & self.mask;
            let bucket = self.bucket(number);
            if let Some(place) = bucket.matches(hash).find(|&place| is_it(bucket.slot(place))) {
                return Some((number, place));
            }
            if !bucket.has_overflow() {
                break;
            }
        }
        None
    }

    /// Adds an entry; the segment must not be crowded and the key not be there.
    pub(super) fn insert(&mut self, hash: KeyHash, slot: Slot) {
        let mut number = hash.bucket(self.mask);
        // Ends: some of the places are free.
        while self.bucket(number).is_full() {
            self.bucket_mut(number).pass();
            number = number.wrapping_add(1);
        }
        self.bucket_mut(number).put(hash, slot);
        self.entries += 1;
    }

    /// Removes the entry with this slot; answers whether it was there.
    pub(super) fn remove(&mut self, hash: KeyHash, slot: Slot) -> bool {
        let Some((number, place)) = self.locate(hash, &mut |found| found == slot) else { return false };
        self.bucket_mut(number).free(place);
        let mut passed = hash.bucket(self.mask);
        while passed != number {
            self.bucket_mut(passed).unpass();
            passed = passed.wrapping_add(1) & self.mask;
        }
        self.entries -= 1;
        true
    }

    /// Takes every entry out, in no particular order.
    pub(super) fn drain(&mut self) -> Vec<Slot> {
        let mut slots = Vec::with_capacity(self.entries as usize);
        for number in 0..=self.mask {
            let bucket = self.bucket_mut(number);
            slots.extend(bucket.slots());
            if !bucket.is_clear() {
                *bucket = Bucket::default();
            }
        }
        self.entries = 0;
        slots
    }
}
