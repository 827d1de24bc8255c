//! Ids in ascending order as the differences between them: what a section of version 5 may have in the place of its keys.
//!
//! ```text
//! ids       count x varint: the first id, then how far each is from the one before it
//! varint    1 to 10 bytes of 7 bits each, the lowest first; the highest bit of a byte says that another follows
//! ```
//!
//! Invariants:
//! - ids ascend strictly, and a varint has no byte that it could do without: a list of ids has one code only;
//! - bytes that [`read`] accepts decode to exactly as many ids as it was asked for;
//! - decoding takes no memory.
//!
//! Not here: when a client codes its ids (the client), what a key is (`key.rs`).

/// Bits of a varint's byte that are of its number.
const BITS: u64 = 0x7f7f_7f7f_7f7f_7f7f;
/// Bits of a varint's byte that say that another follows.
const MORE: u64 = 0x8080_8080_8080_8080;

/// Bytes of the code of ids that ascend strictly.
#[must_use]
pub fn coded_bytes(ids: &[u64]) -> usize {
    let mut before = 0;
    ids.iter().map(|id| varint_bytes(id.wrapping_sub(std::mem::replace(&mut before, *id)))).sum()
}

/// Writes the code of ids that ascend strictly: `place` has [`coded_bytes`] bytes.
pub(super) fn code(ids: &[u64], place: &mut [u8]) {
    let (mut before, mut at) = (0, 0);
    for id in ids {
        let mut rest = id.wrapping_sub(std::mem::replace(&mut before, *id));
        while rest >= 0x80 {
            place[at] = rest as u8 | 0x80;
            rest >>= 7;
            at += 1;
        }
        place[at] = rest as u8;
        at += 1;
    }
}

/// Gives the ids that bytes are the code of, exactly `count` of them.
///
/// # Errors
/// What is wrong with them; ids before it are given.
#[inline]
pub(super) fn read(bytes: &[u8], count: usize, mut take: impl FnMut(u64)) -> Result<(), &'static str> {
    let (mut rest, mut before) = (bytes, None);
    for _ in 0..count {
        let (number, behind) = split_varint(rest).ok_or("an id cut short, or longer than it needs to be")?;
        let id = match before {
            None => number,
            Some(before) if number > 0 => number.checked_add(before).ok_or("an id beyond the last one")?,
            Some(_) => return Err("an id twice"),
        };
        take(id);
        (rest, before) = (behind, Some(id));
    }
    if rest.is_empty() { Ok(()) } else { Err("bytes after the last id") }
}

/// The ids of bytes that were checked, in ascending order.
#[derive(Debug, Clone)]
pub(super) struct Ids<'a> {
    rest: &'a [u8],
    before: u64,
}

impl<'a> Ids<'a> {
    pub(super) fn new(checked: &'a [u8]) -> Self {
        Ids { rest: checked, before: 0 }
    }
}

impl Iterator for Ids<'_> {
    type Item = u64;

    #[inline]
    fn next(&mut self) -> Option<u64> {
        let (number, rest) = split_varint(self.rest)?;
        self.rest = rest;
        self.before = self.before.wrapping_add(number);
        Some(self.before)
    }
}

const fn varint_bytes(number: u64) -> usize {
    let bits = 64 - (number | 1).leading_zeros() as usize;
    bits.div_ceil(7)
}

/// The number at the beginning, and what is behind it. `None` when it is cut short, has a byte that it could do without, or has
/// more than 64 bits.
#[inline]
fn split_varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    // How many bytes a number has is hard to foresee, so that a branch for each would cost more than the arithmetic. Eight bytes
    // hold all but the largest numbers.
    if let Some(head) = bytes.first_chunk() {
        let word = u64::from_le_bytes(*head);
        let last = !word & MORE;
        if last != 0 {
            // Everything up to the first byte without its highest bit.
            let of_number = last ^ (last - 1);
            let length = (last.trailing_zeros() as usize + 1) / 8;
            let is_shortest = length == 1 || head[length - 1] != 0;
            return is_shortest.then(|| (gather(word & of_number & BITS), &bytes[length..]));
        }
    }
    split_slowly(bytes)
}

/// Brings the seven bits of each byte together.
#[inline]
const fn gather(word: u64) -> u64 {
    let pairs = word & 0x007f_007f_007f_007f | (word & 0x7f00_7f00_7f00_7f00) >> 1;
    let fours = pairs & 0x0000_3fff_0000_3fff | (pairs & 0x3fff_0000_3fff_0000) >> 2;
    fours & 0x0000_0000_0fff_ffff | (fours & 0x0fff_ffff_0000_0000) >> 4
}

/// As [`split_varint`]: near the end of the bytes, and for numbers of more than eight.
fn split_slowly(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut number = 0;
    for (position, byte) in bytes.iter().enumerate().take(10) {
        let is_last = byte & 0x80 == 0;
        if position > 0 && *byte == 0 || position == 9 && *byte > 1 {
            return None;
        }
        number |= u64::from(byte & 0x7f) << (position * 7);
        if is_last {
            return Some((number, &bytes[position + 1..]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn coded(ids: &[u64]) -> Vec<u8> {
        let mut bytes = vec![0xee; coded_bytes(ids)];
        code(ids, &mut bytes);
        bytes
    }

    fn check(bytes: &[u8], count: usize) -> Result<(), &'static str> {
        read(bytes, count, |_| {})
    }

    /// Gaps of every length, from neighbours to the ends of the range.
    fn ascending() -> impl Strategy<Value = Vec<u64>> {
        let id = (any::<u64>(), 0..64_u32).prop_map(|(id, shift)| id >> shift);
        let id = prop_oneof![20 => id, 1 => Just(0), 1 => Just(u64::MAX), 1 => Just(u64::MAX - 1)];
        (proptest::collection::btree_set(id, 0..60), 0..6_u64).prop_map(|(ids, neighbours)| {
            let with_neighbours =
                ids.iter().flat_map(|id| (0..=neighbours).filter_map(|n| id.checked_add(n)));
            let all: std::collections::BTreeSet<u64> = with_neighbours.collect();
            all.into_iter().collect()
        })
    }

    proptest! {
        #[test]
        fn ascending_ids_come_back_and_no_other_number_of_them(ids in ascending()) {
            let bytes = coded(&ids);
            let mut given = Vec::new();
            prop_assert_eq!(read(&bytes, ids.len(), |id| given.push(id)), Ok(()));
            prop_assert_eq!(&given, &ids);
            prop_assert_eq!(Ids::new(&bytes).collect::<Vec<_>>(), ids.clone());
            prop_assert!(check(&bytes, ids.len() + 1).is_err());
            prop_assert!(ids.is_empty() || check(&bytes, ids.len() - 1).is_err());
            for cut in 0..bytes.len() {
                prop_assert!(check(&bytes[..cut], ids.len()).is_err());
            }
        }

        #[test]
        fn both_ways_to_read_a_number_agree(bytes in proptest::collection::vec(prop_oneof![any::<u8>(), Just(0), Just(0x80), Just(0xff)], 0..14)) {
            prop_assert_eq!(split_varint(&bytes), split_slowly(&bytes));
        }

        #[test]
        fn what_is_accepted_is_the_one_code_of_its_ids(
            bytes in proptest::collection::vec(prop_oneof![0..4_u8, 0x80..0x84_u8, any::<u8>()], 0..20), count in 0..20_usize
        ) {
            if check(&bytes, count).is_ok() {
                let ids: Vec<u64> = Ids::new(&bytes).collect();
                prop_assert_eq!(ids.len(), count);
                prop_assert!(ids.windows(2).all(|pair| pair[0] < pair[1]));
                prop_assert_eq!(coded(&ids), bytes);
            }
        }
    }

    #[test]
    fn the_code_never_changes() {
        assert_eq!(coded(&[0, 1, 128, 128 + 128, 1 << 20]), [0, 1, 0x7f, 0x80, 0x01, 0x80, 0xfe, 0x3f]);
        let mut largest = vec![0xff; 9];
        largest.push(1);
        assert_eq!(coded(&[u64::MAX]), largest);
        assert_eq!(coded(&[0, u64::MAX])[1..], largest);
        assert!(coded(&[]).is_empty());
    }

    #[test]
    fn what_is_no_ascending_list_is_refused_by_name() {
        for (bytes, count, what) in [
            (&[5, 0][..], 2, "an id twice"),
            (&[5, 0x80, 0], 2, "longer than it needs to be"),
            (&[0x80], 1, "cut short"),
            (&[5], 2, "cut short"),
            (&[5, 1], 1, "bytes after"),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 1], 2, "beyond the last one"),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2], 1, "longer than"),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x81, 0], 1, "longer than"),
            (&[0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0, 0, 0], 3, "longer than"),
        ] {
            let refused = check(bytes, count).expect_err("refused");
            assert!(refused.contains(what), "{bytes:02x?}: {refused}");
        }
        // Of a first id 0 is the one code.
        assert_eq!(check(&[0, 1], 2), Ok(()));
    }
}
