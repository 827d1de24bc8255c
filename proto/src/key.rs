//! Where an id lives: `key = mix64(id ^ salt(table))`. The function is part of every format: it never changes.
//!
//! Not here: which shard owns a key (the routing table says so).

/// The SplitMix64 finaliser (Steele, Lea and Flood 2014): a bijection on 64 bits.
#[must_use]
pub const fn mix64(value: u64) -> u64 {
    let mut z = value;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The inverse of [`mix64`].
#[must_use]
pub const fn unmix64(value: u64) -> u64 {
    let mut z = value;
    z = z ^ (z >> 31) ^ (z >> 62);
    z = z.wrapping_mul(0x3196_42b2_d24d_8ec3);
    z = z ^ (z >> 27) ^ (z >> 54);
    z = z.wrapping_mul(0x96de_1b17_3f11_9089);
    z ^ (z >> 30) ^ (z >> 60)
}

/// The salt of a table: its permanent number on the SplitMix64 sequence, never 0.
#[must_use]
pub const fn salt(table: u32) -> u64 {
    mix64((table as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// The key of `id` in `table`. Every u64 is a valid id.
#[must_use]
pub const fn key_of(table: u32, id: u64) -> u64 {
    mix64(id ^ salt(table))
}

/// The id of `key` in `table`.
#[must_use]
pub const fn id_of(table: u32, key: u64) -> u64 {
    unmix64(key) ^ salt(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn vectors_never_change() {
        assert_eq!(mix64(0), 0);
        assert_eq!(mix64(1), 0x5692_161d_100b_05e5);
        assert_eq!(mix64(0x9e37_79b9_7f4a_7c15), 0xe220_a839_7b1d_cdaf);
    }

    proptest! {
        #[test]
        fn a_key_gives_back_its_id(table: u32, id: u64) {
            prop_assert_eq!(id_of(table, key_of(table, id)), id);
        }
    }

    #[test]
    fn edge_ids_are_ordinary() {
        for id in [0, 1, u64::MAX, u64::MAX - 1, i64::MIN as u64] {
            assert_eq!(id_of(7, key_of(7, id)), id);
        }
    }
}
