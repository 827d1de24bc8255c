//! The push body: one message of one push for one shard, laid out once by the client and never encoded again. The
//! same bytes are validated at the door, logged, replicated and applied.
//!
//! ```text
//! header, 40 bytes     kind u8 = 1 | version u8 = 1, 2, 3, 4 or 5 | flags u16 = 0 | crc32 u32 of all that follows
//!                      session u64 | seq u64 | clock u64 | sections u32 | reserved u32 = 0
//! section, 24 bytes    table u32 | operation u8 | encoding u8 | flags u16 | dim u32 | count u32 | lr f32 | bytes of ids u32
//!   keys               count x u64; or, with flag 2 of version 5, ids in ascending order as differences: see `ids.rs`
//!   occurrences        count x u32, none of them 0: how often each key came (flag 1 of versions 4 and 5)
//!   payload            count rows, see [`Encoding`]
//! ```
//!
//! All little-endian. `lr` is NaN unless the push overrides the table's learning rate.
//!
//! Version 2 is laid out as version 1. It says that a section's payload is not f32: a build that applies f32 only must halt
//! at such an entry, not record a refusal that other replicas do not. A body of f32 alone is of version 1 still.
//! Version 3 clears a table: it has one section, of [`Operation::Clear`], which no other version has.
//!
//! Version 4 says that some section of gradients has occurrences: its client summed rows of a key before it sent them, and the
//! table counts them. Without them each row of a section is one occurrence of its key.
//!
//! Version 5 says that some section may have ids: sorted, their differences take a byte or three where keys, which are mixed, take
//! eight. Its number of sections has the highest bit set. The keys of ids are computed whenever they are read. A section without
//! ids has 0 bytes of them; earlier versions do not look at that number, which is 0 as well.
//!
//! The checksum does not cover the version: one flipped bit makes no body of another version that parses. 4 is more than one
//! bit away from 1, 2 and 3, and 3 holds what no other may. 5 is one bit away from 1 and 4, and has more sections than those may
//! have, by the bit that it must have there.
//!
//! Invariants:
//! - [`PushBody::parse`] succeeds only when every length adds up to exactly the bytes there are; it never takes memory by a
//!   declared length;
//! - a body has no more rows than there would be room for with their keys, however short its ids are: what a row takes of a
//!   server is bounded as before.
//!
//! `builder.rs` lays bodies out; this file and `section.rs` read them.
//!
//! Not here: what a gradient means, whether a table exists, whether floats are finite.

mod builder;
mod ids;
mod section;

use crate::limits::{PUSH_BODY_BYTES_HARD_MAX, PUSH_TABLES_MAX, STEP_BODY_BYTES_HARD_MAX, TABLES_MAX};
use crate::v1;

pub use builder::{PushBodyBuilder, renumbered};
pub use ids::coded_bytes;
pub use section::{Keys, Section};

/// First byte of every push body.
pub const KIND_PUSH: u8 = 1;
/// The layout above, every payload f32.
pub const PUSH_VERSION: u8 = 1;
/// The layout above, any encoding.
pub const PUSH_VERSION_ENCODED: u8 = 2;
/// The layout above, with one section, which clears its table on the shard.
pub const PUSH_VERSION_CLEAR: u8 = 3;
/// The layout above, any encoding, with occurrences.
pub const PUSH_VERSION_COUNTED: u8 = 4;
/// The layout above, any encoding, with or without occurrences, with ids.
pub const PUSH_VERSION_IDS: u8 = 5;
/// The cluster version from which on a client may send bodies of version 5: every node's build knows them.
pub const CLUSTER_VERSION_IDS: u32 = 2;

/// Whether it matters to a table how often an id comes in a push: then a client that sums rows says so, and to no other table.
#[must_use]
pub fn counts_occurrences(definition: &v1::TableDefinition) -> bool {
    definition.admission.is_some_and(|admission| admission.filter_freq > 1)
        || definition.eviction.is_some_and(|eviction| eviction.max_rows > 0)
}

/// Of a section: it has occurrences.
const FLAG_COUNTED: u16 = 1;
/// Of a section: it has ids in the place of keys.
const FLAG_IDS: u16 = 2;
/// In the number of sections: of version 5. More than any other version may have.
const SECTIONS_OF_IDS: u32 = 1 << 31;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 40;
/// Bytes of a section's head.
pub const SECTION_BYTES: usize = 24;
/// Bytes of a key.
pub const KEY_BYTES: usize = 8;

/// What a section does to its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Operation {
    /// The payload is gradients: the optimizer runs once per distinct key.
    Gradient = 0,
    /// The payload is values: the row's weights become these (optimizer state is kept).
    Set = 1,
    /// The payload is added to the row's weights.
    Add = 2,
    /// No payload: the rows are removed.
    Remove = 3,
    /// No keys and no payload: all rows of the table are removed on the shard, the only section of its body.
    Clear = 4,
}

impl Operation {
    /// Whether its rows come with values.
    #[must_use]
    pub const fn has_values(self) -> bool {
        matches!(self, Operation::Gradient | Operation::Set | Operation::Add)
    }
}

/// How the payload's floats are encoded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Encoding {
    /// 4 bytes a value.
    #[default]
    F32 = 0,
    /// 2 bytes a value: the upper half of an f32.
    Bf16 = 1,
    /// 2 bytes a value: IEEE 754 binary16.
    F16 = 2,
    /// One f32 scale a row, then 1 byte a value.
    Int8 = 3,
}

impl Encoding {
    /// Every encoding.
    pub const ALL: [Encoding; 4] = [Encoding::F32, Encoding::Bf16, Encoding::F16, Encoding::Int8];

    /// Its name, as users write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Encoding::F32 => "f32",
            Encoding::Bf16 => "bf16",
            Encoding::F16 => "f16",
            Encoding::Int8 => "int8",
        }
    }

    /// Payload bytes of one row.
    #[must_use]
    pub const fn row_bytes(self, dim: usize) -> usize {
        match self {
            Encoding::F32 => dim * 4,
            Encoding::Bf16 | Encoding::F16 => dim * 2,
            Encoding::Int8 => 4 + dim,
        }
    }
}

/// Why bytes are not a push body.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PushBodyError {
    /// Not a push, or of a version this build does not know.
    #[error("not a push body: kind {kind}, version {version}")]
    Unknown {
        /// First byte.
        kind: u8,
        /// Second byte.
        version: u8,
    },
    /// The checksum does not match: the bytes changed on their way.
    #[error("push body damaged on its way: crc32 is {actual:08x}, the header says {expected:08x}")]
    Checksum {
        /// From the header.
        expected: u32,
        /// Of the bytes.
        actual: u32,
    },
    /// Lengths do not add up.
    #[error("push body malformed at byte {at}: {what}")]
    Malformed {
        /// Offset into the body.
        at: usize,
        /// What is wrong there.
        what: &'static str,
    },
    /// Over a limit of `limits.rs`.
    #[error("push body over a limit: {what} is {actual}, at most {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// How large.
        actual: usize,
        /// The limit.
        limit: usize,
    },
}

/// A checked view of a push body.
#[derive(Debug, Clone, Copy)]
pub struct PushBody<'a> {
    /// The client's session number.
    pub session: u64,
    /// Its sequence number on this shard.
    pub seq: u64,
    /// The worker's clock, 0 outside a job.
    pub clock: u64,
    /// Of this layout: one of the `PUSH_VERSION`s.
    pub version: u8,
    sections: u32,
    bytes: &'a [u8],
    /// The keys of its ids, section by section, if there was room for them.
    keys: Option<&'a [u64]>,
}

impl<'a> PushBody<'a> {
    /// Checks the checksum and every length.
    ///
    /// # Errors
    /// [`PushBodyError`], naming what does not add up.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, PushBodyError> {
        let body = Self::parse_without_checksum(bytes)?;
        let expected = le_u32(bytes, 4);
        let actual = crc32fast::hash(&bytes[8..]);
        if expected != actual {
            return Err(PushBodyError::Checksum { expected, actual });
        }
        Ok(body)
    }

    /// As [`PushBody::parse`], for bytes whose log record was checked already (apply).
    ///
    /// # Errors
    /// [`PushBodyError`], naming what does not add up.
    pub fn parse_without_checksum(bytes: &'a [u8]) -> Result<Self, PushBodyError> {
        Self::parse_with(bytes, (PUSH_BODY_BYTES_HARD_MAX, PUSH_TABLES_MAX), |_| {})
    }

    /// As [`PushBody::parse_without_checksum`]. The keys of ids are computed into `keys`, once for all who look at its sections:
    /// room for a body's is room for the next one's.
    ///
    /// # Errors
    /// [`PushBodyError`], naming what does not add up.
    pub fn parse_with_keys(bytes: &'a [u8], keys: &'a mut Vec<u64>) -> Result<Self, PushBodyError> {
        keys.clear();
        let limits = (PUSH_BODY_BYTES_HARD_MAX, PUSH_TABLES_MAX);
        let body = Self::parse_with(bytes, limits, |key| keys.push(key))?;
        Ok(PushBody { keys: Some(keys), ..body })
    }

    /// The sums of a part of a step, inside a log entry that was checked already: as many tables as there may be.
    ///
    /// # Errors
    /// [`PushBodyError`], naming what does not add up.
    pub fn parse_step(bytes: &'a [u8]) -> Result<Self, PushBodyError> {
        let body = Self::parse_with(bytes, (STEP_BODY_BYTES_HARD_MAX, TABLES_MAX), |_| {})?;
        // Servers lay steps out, with keys: what entry a body with ids may be in, its own version says.
        if matches!(body.version, PUSH_VERSION_CLEAR | PUSH_VERSION_IDS) {
            return Err(PushBodyError::Unknown { kind: KIND_PUSH, version: body.version });
        }
        Ok(body)
    }

    fn parse_with(
        bytes: &'a [u8],
        (bytes_max, sections_max): (usize, usize),
        mut take_key: impl FnMut(u64),
    ) -> Result<Self, PushBodyError> {
        if bytes.len() > bytes_max {
            return Err(PushBodyError::TooLarge { what: "bytes", actual: bytes.len(), limit: bytes_max });
        }
        if bytes.len() < HEADER_BYTES {
            return Err(PushBodyError::Malformed { at: bytes.len(), what: "shorter than its header" });
        }
        let is_known = matches!(
            bytes[1],
            PUSH_VERSION
                | PUSH_VERSION_ENCODED
                | PUSH_VERSION_CLEAR
                | PUSH_VERSION_COUNTED
                | PUSH_VERSION_IDS
        );
        if bytes[0] != KIND_PUSH || !is_known {
            return Err(PushBodyError::Unknown { kind: bytes[0], version: bytes[1] });
        }
        let mut sections = le_u32(bytes, 32);
        if bytes[1] == PUSH_VERSION_IDS {
            let without = sections.checked_sub(SECTIONS_OF_IDS);
            sections =
                without.ok_or(PushBodyError::Malformed { at: 32, what: "not marked as one with ids" })?;
        }
        if sections as usize > sections_max {
            return Err(PushBodyError::TooLarge {
                what: "sections",
                actual: sections as usize,
                limit: sections_max,
            });
        }
        let body = PushBody {
            session: le_u64(bytes, 8),
            seq: le_u64(bytes, 16),
            clock: le_u64(bytes, 24),
            version: bytes[1],
            sections,
            bytes,
            keys: None,
        };
        if body.version == PUSH_VERSION_CLEAR && sections != 1 {
            return Err(PushBodyError::Malformed { at: 32, what: "a table is cleared beside others" });
        }
        let (mut at, mut rows) = (HEADER_BYTES, 0usize);
        for _ in 0..sections {
            let (section, next) = Section::find(bytes[1], bytes, at)?;
            rows = rows.saturating_add(section.count());
            if rows > bytes_max / KEY_BYTES {
                return Err(PushBodyError::TooLarge {
                    what: "rows",
                    actual: rows,
                    limit: bytes_max / KEY_BYTES,
                });
            }
            section.check(&mut take_key).map_err(|what| PushBodyError::Malformed { at, what })?;
            at = next;
        }
        if at != bytes.len() {
            return Err(PushBodyError::Malformed { at, what: "bytes after the last section" });
        }
        Ok(body)
    }

    /// The sections, in order.
    pub fn sections(&self) -> impl Iterator<Item = Section<'a>> + use<'a> {
        let (bytes, mut keys) = (self.bytes, self.keys);
        let mut at = HEADER_BYTES;
        (0..self.sections).filter_map(move |_| {
            let (section, next) = Section::find(bytes[1], bytes, at).ok()?;
            at = next;
            match &mut keys {
                Some(keys) => section.with_keys(keys),
                None => Some(section),
            }
        })
    }
}

fn le_u32(bytes: &[u8], at: usize) -> u32 {
    let mut raw = [0; 4];
    raw.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(raw)
}

fn le_u64(bytes: &[u8], at: usize) -> u64 {
    let mut raw = [0; 8];
    raw.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(raw)
}

/// The checksum that a body was sealed with.
///
/// # Panics
/// When there is no whole header.
#[must_use]
pub fn checksum_of(body: &[u8]) -> u32 {
    le_u32(body, 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::key_of;
    use bytes::Bytes;
    use proptest::prelude::*;

    #[test]
    fn a_table_is_cleared_alone() {
        let mut builder = PushBodyBuilder::new(0);
        builder.clear(7);
        let bytes = builder.finish(1, 2, 0);
        let body = PushBody::parse(&bytes).expect("our own");
        let sections: Vec<_> = body.sections().collect();
        assert_eq!((body.version, sections.len()), (PUSH_VERSION_CLEAR, 1));
        assert_eq!((sections[0].table, sections[0].operation, sections[0].count()), (7, Operation::Clear, 0));
        assert!(PushBody::parse_step(&bytes).is_err(), "a step sums gradients");
        for version in [PUSH_VERSION, PUSH_VERSION_ENCODED] {
            let mut older = bytes.to_vec();
            older[1] = version;
            assert!(PushBody::parse(&older).is_err(), "as builds of that version read it");
        }
        let mut other = sample().to_vec();
        other[1] = PUSH_VERSION_CLEAR;
        assert!(PushBody::parse(&other).is_err());
    }

    fn sample() -> Bytes {
        let mut builder = PushBodyBuilder::new(0);
        builder
            .section(3, Operation::Gradient, Encoding::F32, 2, None, &[10, u64::MAX])
            .copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
        builder.section(4, Operation::Remove, Encoding::F32, 2, Some(0.5), &[0]);
        builder.finish(7, 9, 11)
    }

    #[test]
    fn round_trip() {
        let bytes = sample();
        let body = PushBody::parse(&bytes).expect("a body of our own");
        assert_eq!((body.session, body.seq, body.clock), (7, 9, 11));
        let sections: Vec<_> = body.sections().collect();
        assert_eq!(sections.len(), 2);
        assert_eq!(sections[0].keys().collect::<Vec<_>>(), vec![10, u64::MAX]);
        assert_eq!(sections[0].row(1), &[9, 10, 11, 12, 13, 14, 15, 16]);
        assert_eq!(sections[0].lr, None);
        assert_eq!(sections[1].lr, Some(0.5));
        assert_eq!(sections[1].payload(), &[] as &[u8]);
    }

    #[test]
    fn occurrences_travel_and_make_it_version_4() {
        let mut builder = PushBodyBuilder::new(0);
        builder
            .counted_section(3, Encoding::F32, 1, None, &[10, 11], &[3, 1])
            .copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        builder.section(4, Operation::Gradient, Encoding::F32, 0, None, &[5]);
        let bytes = builder.finish(7, 9, 11);
        let body = PushBody::parse(&bytes).expect("a body of our own");
        assert_eq!(body.version, PUSH_VERSION_COUNTED);
        let sections: Vec<_> = body.sections().collect();
        assert_eq!((sections[0].occurrences(0), sections[0].occurrences(1)), (3, 1));
        assert_eq!(sections[0].row(1), &[5, 6, 7, 8]);
        assert!(sections[0].is_counted() && !sections[1].is_counted());
        assert_eq!(sections[1].occurrences(0), 1);
        // A key that never came, and a flag of another version.
        for (at, value) in [(HEADER_BYTES + SECTION_BYTES + 16, 0), (HEADER_BYTES + 6, 2)] {
            let mut bad = bytes.to_vec();
            bad[at] = value;
            assert!(matches!(PushBody::parse_without_checksum(&bad), Err(PushBodyError::Malformed { .. })));
        }
    }

    /// A plain section, one with ids, and one with ids that are counted.
    fn with_ids() -> Bytes {
        let mut builder = PushBodyBuilder::new(0);
        builder.section(4, Operation::Remove, Encoding::F32, 2, Some(0.5), &[9]);
        builder.id_section(5, (Operation::Set, Encoding::F32), (1, None), &[0, 200, u64::MAX], &[]).fill(7);
        let gradients = (Operation::Gradient, Encoding::Int8);
        builder.id_section(6, gradients, (2, Some(0.5)), &[u64::MAX - 1, u64::MAX], &[3, 1]).fill(8);
        builder.finish(7, 9, 11)
    }

    #[test]
    fn ids_travel_and_make_it_version_5() {
        let bytes = with_ids();
        let body = PushBody::parse(&bytes).expect("a body of our own");
        assert_eq!((body.version, body.session, body.seq, body.clock), (PUSH_VERSION_IDS, 7, 9, 11));
        let sections: Vec<_> = body.sections().collect();
        assert_eq!(sections.iter().map(Section::has_ids).collect::<Vec<_>>(), [false, true, true]);
        assert_eq!(sections[0].keys().collect::<Vec<_>>(), [9], "a plain section has its keys as they are");
        let keys = |table, ids: &[u64]| ids.iter().map(|id| key_of(table, *id)).collect::<Vec<_>>();
        assert_eq!(sections[1].keys().collect::<Vec<_>>(), keys(5, &[0, 200, u64::MAX]));
        assert_eq!((sections[1].operation, sections[1].row(2)), (Operation::Set, &[7; 4][..]));
        assert_eq!(sections[2].keys().collect::<Vec<_>>(), keys(6, &[u64::MAX - 1, u64::MAX]));
        assert_eq!((sections[2].keys().len(), sections[2].occurrences(0)), (2, 3));
        assert_eq!((sections[2].lr, sections[2].row(1)), (Some(0.5), &[8; 6][..]));
        let mut room = vec![1, 2, 3];
        let known = PushBody::parse_with_keys(&bytes, &mut room).expect("a body of our own");
        for (section, known) in sections.iter().zip(known.sections()) {
            assert_eq!(section.keys().collect::<Vec<_>>(), known.keys().collect::<Vec<_>>());
            assert_eq!((section.has_ids(), section.payload()), (known.has_ids(), known.payload()));
            assert_eq!((known.keys().len(), known.count()), (section.count(), section.count()));
        }
        assert_eq!((known.sections().count(), room.len()), (3, 5), "keys of ids only");
        assert!(PushBody::parse_step(&bytes).is_err(), "servers lay steps out with keys");
        let again = renumbered(&bytes, 10, 12);
        let again = PushBody::parse(&again).expect("still one");
        assert_eq!((again.version, again.seq, again.clock, again.sections().count()), (5, 10, 12, 3));
    }

    #[test]
    fn malformed_ids_are_refused() {
        let bytes = with_ids();
        // Behind the plain section: its head, and its ids 0, 200 and what is left to the end: 1 + 2 + 10 bytes.
        let (head, ids) = (HEADER_BYTES + SECTION_BYTES + 8, HEADER_BYTES + SECTION_BYTES * 2 + 8);
        assert_eq!(bytes[head + 20], 13);
        let plain = HEADER_BYTES;
        for (at, value, what) in [
            (ids + 2, 0, "a varint that is not the shortest"),
            (ids + 1, 0, "an id twice"),
            (ids + 12, 2, "an id beyond the last one"),
            (ids, 1, "an id beyond the last one, by a sum"),
            (head + 20, 12, "fewer bytes of ids"),
            (head + 20, 14, "more bytes of ids"),
            (head + 12, 2, "fewer rows"),
            (head + 12, 4, "more rows"),
            (head + 12, 255, "many more rows"),
            (head + 6, 0, "ids without their flag"),
            (head + 6, 3, "occurrences of what is set"),
            (head + 6, 6, "a flag of another version"),
            (plain + 20, 1, "bytes of ids of a section that has none"),
            (35, 0, "no mark"),
            (1, PUSH_VERSION_COUNTED, "another version"),
        ] {
            let mut bad = bytes.to_vec();
            assert_ne!(bad[at], value, "{what}");
            bad[at] = value;
            assert!(PushBody::parse_without_checksum(&bad).is_err(), "{what}");
        }
        let mut older = sample().to_vec();
        older[1] = PUSH_VERSION_IDS;
        assert!(matches!(PushBody::parse(&older), Err(PushBodyError::Malformed { at: 32, .. })));
    }

    #[test]
    fn short_ids_make_no_room_for_more_rows() {
        let remove = |rows: usize| {
            let ids: Vec<u64> = (0..rows as u64).collect();
            let mut builder = PushBodyBuilder::new(0);
            builder.id_section(5, (Operation::Remove, Encoding::F32), (0, None), &ids, &[]);
            builder.finish(1, 1, 0)
        };
        let most = PUSH_BODY_BYTES_HARD_MAX / KEY_BYTES;
        assert_eq!(PushBody::parse(&remove(most)).map(|body| body.version), Ok(PUSH_VERSION_IDS));
        let refused = PushBody::parse(&remove(most + 1)).expect_err("refused");
        assert!(matches!(refused, PushBodyError::TooLarge { what: "rows", .. }), "{refused}");
    }

    #[test]
    fn golden_bytes_never_change() {
        let bytes = sample();
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(bytes.len(), 40 + 24 + 16 + 16 + 24 + 8);
        assert!(hex.starts_with("01010000"), "{hex}");
        assert_eq!(crc32fast::hash(&bytes), GOLDEN_CRC32, "the layout of version 1 changed: {hex}");
    }

    const GOLDEN_CRC32: u32 = 0x905f_b60f;

    proptest! {
        #[test]
        fn any_flipped_bit_is_noticed(bit in 0usize..(128 * 8)) {
            let mut bytes = sample().to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            // Flags are reserved and outside the checksum.
            prop_assume!(!(16..32).contains(&bit));
            prop_assert!(PushBody::parse(&bytes).is_err());
        }

        #[test]
        fn any_flipped_bit_of_a_body_with_ids_is_noticed(bit in any::<proptest::sample::Index>()) {
            let mut bytes = with_ids().to_vec();
            let bit = bit.index(bytes.len() * 8);
            prop_assume!(!(16..32).contains(&bit));
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(PushBody::parse(&bytes).is_err());
        }

        #[test]
        fn any_ascending_ids_round_trip(
            ids in proptest::collection::btree_set((any::<u64>(), 0..64_u32).prop_map(|(id, shift)| id >> shift), 0..80),
            ends: (bool, bool), counted: bool, table: u32
        ) {
            let ids: Vec<u64> = ids.into_iter().chain(ends.0.then_some(0)).chain(ends.1.then_some(u64::MAX))
                .collect::<std::collections::BTreeSet<_>>().into_iter().collect();
            let came: Vec<u32> = (1..).take(if counted { ids.len() } else { 0 }).collect();
            let mut builder = PushBodyBuilder::new(0);
            let payload = builder.id_section(table, (Operation::Gradient, Encoding::Bf16), (1, None), &ids, &came);
            for (place, number) in payload.chunks_exact_mut(2).zip(0_u16..) {
                place.copy_from_slice(&number.to_le_bytes());
            }
            let bytes = builder.finish(1, 2, 3);
            let body = PushBody::parse(&bytes).expect("a body of our own");
            let section = body.sections().next().expect("one");
            prop_assert_eq!(section.count(), ids.len());
            prop_assert_eq!(section.keys().collect::<Vec<_>>(), ids.iter().map(|id| key_of(table, *id)).collect::<Vec<_>>());
            for row in 0..ids.len() {
                prop_assert_eq!(section.row(row), &(row as u16).to_le_bytes());
                prop_assert_eq!(section.occurrences(row), if counted { row as u32 + 1 } else { 1 });
            }
        }

        #[test]
        fn any_bytes_parse_or_fail_without_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), fix: bool) {
            if fix && bytes.len() >= HEADER_BYTES {
                bytes[0] = KIND_PUSH;
                bytes[1] = PUSH_VERSION;
                bytes[32..36].copy_from_slice(&1u32.to_le_bytes());
            }
            if let Ok(body) = PushBody::parse_without_checksum(&bytes) {
                for section in body.sections() {
                    assert_eq!(section.keys().count(), section.count());
                    for row in 0..section.count() {
                        if section.operation != Operation::Remove {
                            let _ = section.row(row);
                        }
                    }
                }
            }
        }
    }
}
