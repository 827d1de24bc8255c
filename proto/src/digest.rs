//! An order-independent digest of rows: the sum, modulo 2^128, of a hash of each live row.
//!
//! What enters: table, key, weights, optimizer state, step count, notes; of a counting record, which has no weights, how often its
//! id came. What does not: versions and tombstones, which differ between groups that hold the same rows (design 14.1).
//!
//! ```text
//! words  = weights then state, two f32 (little-endian bits) a word, the last one padded with zeros; then each note, a word
//! a, b   = seeds mixed with table, key, steps and the number of weights
//! a      = ((a ^ word) x P1), xor-shifted by 32; b = ((b rotated by 29) ^ word) x P2, xor-shifted by 31
//! hash   = mix64(a) | mix64(b ^ a) << 64
//! ```
//!
//! A scrub's digest starts from a hash of the small state (sessions, schemas, clock), whose bytes take the words' place.
//!
//! A NaN, but not in a note, enters as one canonical NaN: its bits are the only ones in f32 arithmetic that processors disagree on. The
//! function is part of a format (manifests carry digests): golden values in the tests.

use std::fmt;

use crate::key::mix64;

const P1: u64 = 0x9e37_79b1_85eb_ca87;
const P2: u64 = 0xc2b2_ae3d_27d4_eb4f;
const CANONICAL_NAN: u32 = 0x7fc0_0000;

/// The digest of a set of rows; of no rows by default.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Digest(u128);

impl Digest {
    /// Adds a live row or a counting record, from its parts: `values` are `weights` weights, then optimizer state. Adding is
    /// commutative.
    pub fn add(
        &mut self,
        table: u32,
        key: u64,
        steps: u32,
        weights: usize,
        (values, notes): (&[f32], &[f32]),
    ) {
        self.0 = self.0.wrapping_add(hash(table, key, (steps, weights as u64), values, notes));
    }

    /// Adds what a replica holds beside its rows, as bytes.
    pub fn add_small_state(&mut self, bytes: &[u8]) {
        let mut lanes = Lanes::new(bytes.len() as u64);
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            lanes.enter(u64::from_le_bytes(word));
        }
        self.0 = self.0.wrapping_add(lanes.finish());
    }

    /// Adds the rows of another set.
    #[must_use]
    pub fn merge(self, other: Digest) -> Digest {
        Digest(self.0.wrapping_add(other.0))
    }

    /// What [`Digest::to_u128`] said.
    #[must_use]
    pub fn from_u128(sum: u128) -> Self {
        Digest(sum)
    }

    /// As a number.
    #[must_use]
    pub fn to_u128(self) -> u128 {
        self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

fn hash(table: u32, key: u64, (steps, weights): (u32, u64), floats: &[f32], notes: &[f32]) -> u128 {
    let mut lanes = Lanes::new(key);
    lanes.enter(u64::from(table) | (u64::from(steps) << 32));
    lanes.enter(weights);
    let pairs = floats.chunks_exact(2);
    let rest = pairs.remainder();
    for pair in pairs {
        lanes.enter(canonical(pair[0]) | (canonical(pair[1]) << 32));
    }
    if let [last] = rest {
        lanes.enter(canonical(*last));
    }
    for note in notes {
        // Words, not numbers.
        lanes.enter(u64::from(note.to_bits()));
    }
    lanes.finish()
}

/// Two hashes of the same words.
struct Lanes {
    a: u64,
    b: u64,
}

impl Lanes {
    fn new(key: u64) -> Self {
        Lanes { a: mix64(key ^ P1), b: mix64(key.wrapping_add(P2)) }
    }

    #[inline]
    fn enter(&mut self, word: u64) {
        self.a = (self.a ^ word).wrapping_mul(P1);
        self.a ^= self.a >> 32;
        self.b = (self.b.rotate_left(29) ^ word).wrapping_mul(P2);
        self.b ^= self.b >> 31;
    }

    fn finish(self) -> u128 {
        u128::from(mix64(self.a)) | (u128::from(mix64(self.b ^ self.a)) << 64)
    }
}

fn canonical(value: f32) -> u64 {
    u64::from(if value.is_nan() { CANONICAL_NAN } else { value.to_bits() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn digest(rows: &[(u32, u64, u32, usize, Vec<f32>)]) -> Digest {
        let mut digest = Digest::default();
        for (table, key, steps, weights, floats) in rows {
            digest.add(*table, *key, *steps, *weights, (floats, &[]));
        }
        digest
    }

    #[test]
    fn golden_values_never_change() {
        assert_eq!(Digest::default().to_string(), "0".repeat(32));
        let rows = [(1, 2, 3, 2, vec![1.0, -0.5, 0.25]), (7, u64::MAX, 0, 1, vec![f32::MIN_POSITIVE])];
        assert_eq!(digest(&rows).to_string(), "9afa1dc3040719eb2d12a6acda9d57fd");
    }

    #[test]
    fn everything_that_counts_changes_it() {
        let base = (1, 2, 3, 2, vec![1.0, 0.0, 0.0]);
        let others = [
            (2, 2, 3, 2, vec![1.0, 0.0, 0.0]),
            (1, 3, 3, 2, vec![1.0, 0.0, 0.0]),
            (1, 2, 4, 2, vec![1.0, 0.0, 0.0]),
            (1, 2, 3, 1, vec![1.0, 0.0, 0.0]),
            (1, 2, 3, 2, vec![1.0, -0.0, 0.0]),
            (1, 2, 3, 2, vec![0.0, 1.0, 0.0]),
            (1, 2, 3, 2, vec![1.0, 0.0]),
        ];
        for other in others {
            assert_ne!(digest(std::slice::from_ref(&base)), digest(&[other]));
        }
    }

    #[test]
    fn all_nans_are_one() {
        let nan = |value: f32| digest(&[(1, 1, 1, 1, vec![value])]);
        assert_eq!(nan(f32::NAN), nan(-f32::NAN));
        assert_eq!(nan(f32::NAN), nan(f32::from_bits(0xffff_ffff)));
    }

    proptest! {
        #[test]
        fn the_order_of_rows_does_not_matter(keys in proptest::collection::vec(any::<u64>(), 0..20), at: usize) {
            let rows: Vec<_> = keys.iter().map(|k| (1, *k, 1, 1, vec![*k as f32])).collect();
            let mut turned = rows.clone();
            turned.rotate_left(at % rows.len().max(1));
            turned.reverse();
            let split = at % (rows.len() + 1);
            prop_assert_eq!(digest(&rows), digest(&turned));
            prop_assert_eq!(digest(&rows), digest(&rows[..split]).merge(digest(&rows[split..])));
        }
    }
}
