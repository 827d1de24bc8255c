//! From key to the bits that the index uses.
//!
//! Keys are mixed already, but a shard's keys share their high bits, and whoever chooses ids chooses keys: so they are mixed
//! again, with numbers drawn once per table. Nothing of a replica's state depends on it: slots are handed out in order of
//! insertion, flushes sort by key.
//!
//! Not here: `mix64`, which is a format (the server's `model`).

use std::hash::{BuildHasher, Hasher, RandomState};

/// Mixes the keys of one table.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeyHasher {
    add: u64,
    multiply: u64,
}

impl Default for KeyHasher {
    fn default() -> Self {
        let random = || RandomState::new().build_hasher().finish();
        // Odd and large, so that the product reaches both halves.
        Self { add: random(), multiply: random() | 1 << 63 | 1 }
    }
}

impl KeyHasher {
    /// High half times low half folded: every bit of the key reaches the bits at both ends.
    #[inline]
    pub(super) fn hash(self, key: u64) -> KeyHash {
        let product = u128::from(key ^ self.add) * u128::from(self.multiply);
        KeyHash((product as u64) ^ (product >> 64) as u64)
    }
}

/// A key's bits: from the top for the directory, from the bottom for the bucket, from the middle for the tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct KeyHash(u64);

impl KeyHash {
    /// The first `depth` bits, at most 32.
    #[inline]
    pub(super) fn directory(self, depth: u32) -> usize {
        // Two steps: a shift by 64 is not allowed.
        (self.0 >> 1 >> (63 - depth)) as usize
    }

    #[inline]
    pub(super) fn bucket(self, mask: u32) -> u32 {
        self.0 as u32 & mask
    }

    #[inline]
    pub(super) fn tag(self) -> u8 {
        (self.0 >> 20) as u8
    }
}
