//! Bytes that a decoder should never see, and will.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

/// One thing that happens to bytes.
#[derive(Debug, Clone)]
pub enum Damage {
    /// A bit is flipped.
    Flip(Index, u8),
    /// A byte becomes another.
    Set(Index, u8),
    /// The end is cut off.
    Cut(Index),
    /// Something follows.
    Extend(Vec<u8>),
    /// A part is left out.
    Remove(Index, usize),
    /// A part is written over another.
    Splice(Index, Index, usize),
    /// A number becomes an extreme one, little-endian.
    Number(Index, u64, usize),
    /// Sectors that were never written.
    Zeros(Index, usize),
}

impl Damage {
    /// Does it. Empty bytes stay as they are, unless something is added.
    pub fn apply(&self, bytes: &mut Vec<u8>) {
        let length = bytes.len();
        if let Damage::Extend(more) = self {
            bytes.extend_from_slice(more);
            return;
        }
        if length == 0 {
            return;
        }
        match self {
            Damage::Flip(at, bit) => bytes[at.index(length)] ^= 1 << (bit % 8),
            Damage::Set(at, byte) => bytes[at.index(length)] = *byte,
            Damage::Cut(at) => bytes.truncate(at.index(length)),
            Damage::Extend(_) => {}
            Damage::Remove(at, count) => {
                let start = at.index(length);
                bytes.drain(start..(start + count).min(length));
            }
            Damage::Splice(from, to, count) => {
                let (from, to) = (from.index(length), to.index(length));
                let count = (*count).min(length - from).min(length - to);
                bytes.copy_within(from..from + count, to);
            }
            Damage::Number(at, number, width) => {
                let start = at.index(length);
                let width = (*width).min(length - start);
                bytes[start..start + width].copy_from_slice(&number.to_le_bytes()[..width]);
            }
            Damage::Zeros(at, count) => {
                let start = at.index(length);
                bytes[start..(start + count).min(length)].fill(0);
            }
        }
    }
}

fn extreme() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(1),
        Just(u64::MAX),
        Just(u64::MAX / 8),
        Just(i64::MAX as u64),
        Just(u64::from(u32::MAX)),
        Just(u64::from(u32::MAX / 2)),
        Just(1 << 30),
        Just(u64::from(u16::MAX)),
        0..1000_u64,
    ]
}

/// Any one thing.
pub fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        3 => (any::<Index>(), 0..8_u8).prop_map(|(at, bit)| Damage::Flip(at, bit)),
        1 => (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        2 => any::<Index>().prop_map(Damage::Cut),
        1 => vec(any::<u8>(), 1..40).prop_map(Damage::Extend),
        1 => (any::<Index>(), 1..40_usize).prop_map(|(at, count)| Damage::Remove(at, count)),
        2 => (any::<Index>(), any::<Index>(), 1..80_usize).prop_map(|(from, to, n)| Damage::Splice(from, to, n)),
        3 => (any::<Index>(), extreme(), prop_oneof![Just(1), Just(2), Just(4), Just(8_usize)])
            .prop_map(|(at, number, width)| Damage::Number(at, number, width)),
        1 => (any::<Index>(), 1..600_usize).prop_map(|(at, count)| Damage::Zeros(at, count)),
    ]
}

/// Valid bytes with one to four things done to them. They may still be valid.
pub fn damaged(valid: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    (valid, vec(damage(), 1..5)).prop_map(|(mut bytes, damages)| {
        for damage in damages {
            damage.apply(&mut bytes);
        }
        bytes
    })
}

/// What a fuzz test feeds a decoder: noise, or damaged valid bytes.
pub fn bytes_or_damaged(valid: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![1 => vec(any::<u8>(), 0..400), 3 => damaged(valid)]
}

/// Valid bytes, and the same with exactly one bit flipped.
pub fn one_bit(valid: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let valid = valid.prop_filter("nothing to flip", |bytes| !bytes.is_empty());
    (valid, any::<Index>(), 0..8_u8).prop_map(|(valid, at, bit)| {
        let mut flipped = valid.clone();
        Damage::Flip(at, bit).apply(&mut flipped);
        (valid, flipped)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest! {
        #[test]
        fn one_bit_is_one_bit((valid, flipped) in one_bit(vec(any::<u8>(), 0..50))) {
            let bits: u32 = valid.iter().zip(&flipped).map(|(a, b)| (a ^ b).count_ones()).sum();
            prop_assert_eq!((bits, valid.len()), (1, flipped.len()));
        }

        #[test]
        fn damage_never_fails(bytes in damaged(vec(any::<u8>(), 0..50))) {
            prop_assert!(bytes.len() <= 50 + 4 * 40);
        }
    }
}
