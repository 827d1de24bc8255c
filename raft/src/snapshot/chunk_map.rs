//! Which bytes of a file are here, and their crc32, in a few numbers.
//!
//! Chunks of one file mostly arrive in order. One whose bytes were damaged on the way arrives again, after those that were
//! under way behind it: they are noted, and joined when the gap closes.
//!
//! Invariants:
//! - no byte is counted twice, none past the file's end;
//! - memory does not grow with the file: at most [`AHEAD_MAX`] chunks are noted ahead of a gap.
//!
//! Not here: the bytes themselves (`incoming`).

use std::collections::BTreeMap;

use super::message::Kept;

/// Chunks noted behind a gap; a sender has fewer in flight.
const AHEAD_MAX: usize = 64;

/// What is here of one file.
#[derive(Debug, Clone, Default)]
pub(crate) struct ChunkMap {
    /// From the first byte on, without a gap.
    front: Kept,
    /// Offset to length and crc32.
    ahead: BTreeMap<u64, (u64, u32)>,
}

/// A chunk that is no part of what is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Misplaced {
    /// All of it was here before.
    #[error("it is here already")]
    Known,
    /// It overlaps what is here, ends behind the file, is empty, or leaves too many gaps.
    #[error("it does not fit what is here")]
    Wrong,
}

impl ChunkMap {
    /// A file of which the first bytes are here.
    pub(crate) fn starting_with(front: Kept) -> Self {
        Self { front, ahead: BTreeMap::new() }
    }

    pub(crate) fn front(&self) -> Kept {
        self.front
    }

    /// Whether a chunk may be written and added.
    pub(crate) fn check(&self, offset: u64, length: u64, file_bytes: u64) -> Result<(), Misplaced> {
        let end = offset.checked_add(length).filter(|end| *end <= file_bytes).ok_or(Misplaced::Wrong)?;
        if length == 0 {
            return Err(Misplaced::Wrong);
        }
        if end <= self.front.bytes || self.ahead.get(&offset).is_some_and(|(known, _)| *known == length) {
            return Err(Misplaced::Known);
        }
        let before = self.ahead.range(..end).next_back().map_or(self.front.bytes, |(at, (len, _))| at + len);
        if offset < before || (offset > self.front.bytes && self.ahead.len() >= AHEAD_MAX) {
            return Err(Misplaced::Wrong);
        }
        Ok(())
    }

    /// Adds a chunk that [`ChunkMap::check`] found right.
    pub(crate) fn add(&mut self, offset: u64, length: u64, crc32: u32) {
        self.ahead.insert(offset, (length, crc32));
        while let Some((length, crc32)) = self.ahead.remove(&self.front.bytes) {
            let mut joined = crc32fast::Hasher::new_with_initial_len(self.front.crc32, self.front.bytes);
            joined.combine(&crc32fast::Hasher::new_with_initial_len(crc32, length));
            self.front = Kept { bytes: self.front.bytes + length, crc32: joined.finalize() };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// In any order that the window allows, the front's crc32 is that of its bytes.
        #[test]
        fn chunks_in_any_order_give_the_crc_of_the_file(
            bytes in proptest::collection::vec(any::<u8>(), 1..2000),
            chunk in 50..400usize,
            swaps in proptest::collection::vec(any::<prop::sample::Index>(), 0..40),
        ) {
            let mut chunks: Vec<(usize, &[u8])> = bytes.chunks(chunk).enumerate().collect();
            for swap in swaps {
                let at = swap.index(chunks.len());
                chunks.swap(0, at);
            }
            let mut map = ChunkMap::default();
            for (number, data) in &chunks {
                let (offset, length) = ((number * chunk) as u64, data.len() as u64);
                prop_assert_eq!(map.check(offset, length, bytes.len() as u64), Ok(()));
                map.add(offset, length, crc32fast::hash(data));
                prop_assert_eq!(map.check(offset, length, bytes.len() as u64), Err(Misplaced::Known));
                let front = map.front();
                prop_assert_eq!(front.crc32, crc32fast::hash(&bytes[..front.bytes as usize]));
            }
            prop_assert_eq!(map.front().bytes, bytes.len() as u64);
        }
    }

    #[test]
    fn what_overlaps_or_leaves_the_file_is_wrong() {
        let mut map = ChunkMap::starting_with(Kept { bytes: 10, crc32: 0 });
        map.add(20, 10, 1);
        for (offset, length) in [(5, 10), (15, 10), (15, 20), (25, 10), (95, 6), (u64::MAX, 2), (40, 0)] {
            assert_eq!(map.check(offset, length, 100), Err(Misplaced::Wrong), "{offset}+{length}");
        }
        for (offset, length) in [(10, 10), (10, 5), (12, 3), (30, 70)] {
            assert_eq!(map.check(offset, length, 100), Ok(()), "{offset}+{length}");
        }
        for offset in (30..).step_by(2).take(AHEAD_MAX - 1) {
            map.add(offset, 1, 1);
        }
        assert_eq!(map.check(990, 5, 1000), Err(Misplaced::Wrong), "gaps are bounded");
        assert_eq!(map.check(10, 10, 1000), Ok(()), "the gap itself can always be filled");
    }
}
