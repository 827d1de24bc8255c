//! The push body: one message of one push for one shard, laid out once by the client and never encoded again. The
//! same bytes are validated at the door, logged, replicated and applied.
//!
//! ```text
//! header, 40 bytes     kind u8 = 1 | version u8 = 1, 2, 3 or 4 | flags u16 = 0 | crc32 u32 of all that follows
//!                      session u64 | seq u64 | clock u64 | sections u32 | reserved u32 = 0
//! section, 24 bytes    table u32 | operation u8 | encoding u8 | flags u16 | dim u32 | count u32 | lr f32 | reserved u32
//!   keys               count x u64
//!   occurrences        count x u32, none of them 0: how often each key came (flag 1 of version 4)
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
//! The checksum does not cover the version: one flipped bit makes no body of another version that parses. 4 is more than one
//! bit away from the others, and 3 holds what no other may.
//!
//! Invariant: [`PushBody::parse`] succeeds only when every length adds up to exactly the bytes there are; it never
//! takes memory by a declared length.
//!
//! `builder.rs` lays bodies out; this file reads them.
//!
//! Not here: what a gradient means, whether a table exists, whether floats are finite.

mod builder;

use crate::limits::{
    DIM_MAX, PUSH_BODY_BYTES_HARD_MAX, PUSH_TABLES_MAX, STEP_BODY_BYTES_HARD_MAX, TABLES_MAX,
};
use crate::v1;

pub use builder::{PushBodyBuilder, renumbered};

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
/// Whether it matters to a table how often an id comes in a push: then a client that sums rows says so, and to no other table.
#[must_use]
pub fn counts_occurrences(definition: &v1::TableDefinition) -> bool {
    definition.admission.is_some_and(|admission| admission.filter_freq > 1)
        || definition.eviction.is_some_and(|eviction| eviction.max_rows > 0)
}

/// Of a section: it has occurrences.
const FLAG_COUNTED: u16 = 1;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 40;
/// Bytes of a section's head.
pub const SECTION_BYTES: usize = 24;

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

/// One table's rows in a push body, borrowed from it.
#[derive(Debug, Clone, Copy)]
pub struct Section<'a> {
    /// The table's permanent number.
    pub table: u32,
    /// What to do.
    pub operation: Operation,
    /// How the payload is encoded.
    pub encoding: Encoding,
    /// Values a row, as the client believes.
    pub dim: u32,
    /// Learning rate for this push only.
    pub lr: Option<f32>,
    keys: &'a [u8],
    /// Empty when each row is one.
    occurrences: &'a [u8],
    payload: &'a [u8],
}

impl<'a> Section<'a> {
    /// Rows in the section.
    #[must_use]
    pub fn count(&self) -> usize {
        self.keys.len() / 8
    }

    /// The `row`-th key.
    #[must_use]
    pub fn key(&self, row: usize) -> u64 {
        le_u64(self.keys, row * 8)
    }

    /// The keys, in order.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = u64> + 'a {
        self.keys.chunks_exact(8).map(|k| le_u64(k, 0))
    }

    /// Whether it says how often each key came.
    #[must_use]
    pub fn is_counted(&self) -> bool {
        !self.occurrences.is_empty()
    }

    /// How often the `row`-th key came, as far as this row stands for it.
    #[must_use]
    pub fn occurrences(&self, row: usize) -> u32 {
        if self.occurrences.is_empty() { 1 } else { le_u32(self.occurrences, row * 4) }
    }

    /// All payload bytes: `count x encoding.row_bytes(dim)`.
    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// Payload bytes of the `row`-th row.
    #[must_use]
    pub fn row(&self, row: usize) -> &'a [u8] {
        let width = self.encoding.row_bytes(self.dim as usize);
        &self.payload[row * width..(row + 1) * width]
    }
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
        Self::parse_with(bytes, PUSH_BODY_BYTES_HARD_MAX, PUSH_TABLES_MAX)
    }

    /// The sums of a part of a step, inside a log entry that was checked already: as many tables as there may be.
    ///
    /// # Errors
    /// [`PushBodyError`], naming what does not add up.
    pub fn parse_step(bytes: &'a [u8]) -> Result<Self, PushBodyError> {
        let body = Self::parse_with(bytes, STEP_BODY_BYTES_HARD_MAX, TABLES_MAX)?;
        if body.version == PUSH_VERSION_CLEAR {
            return Err(PushBodyError::Unknown { kind: KIND_PUSH, version: body.version });
        }
        Ok(body)
    }

    fn parse_with(bytes: &'a [u8], bytes_max: usize, sections_max: usize) -> Result<Self, PushBodyError> {
        if bytes.len() > bytes_max {
            return Err(PushBodyError::TooLarge { what: "bytes", actual: bytes.len(), limit: bytes_max });
        }
        if bytes.len() < HEADER_BYTES {
            return Err(PushBodyError::Malformed { at: bytes.len(), what: "shorter than its header" });
        }
        let is_known = matches!(
            bytes[1],
            PUSH_VERSION | PUSH_VERSION_ENCODED | PUSH_VERSION_CLEAR | PUSH_VERSION_COUNTED
        );
        if bytes[0] != KIND_PUSH || !is_known {
            return Err(PushBodyError::Unknown { kind: bytes[0], version: bytes[1] });
        }
        let sections = le_u32(bytes, 32);
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
        };
        if body.version == PUSH_VERSION_CLEAR && sections != 1 {
            return Err(PushBodyError::Malformed { at: 32, what: "a table is cleared beside others" });
        }
        let mut at = HEADER_BYTES;
        for _ in 0..sections {
            at = parse_section(bytes[1], bytes, at)?.1;
        }
        if at != bytes.len() {
            return Err(PushBodyError::Malformed { at, what: "bytes after the last section" });
        }
        Ok(body)
    }

    /// The sections, in order.
    pub fn sections(&self) -> impl Iterator<Item = Section<'a>> + use<'a> {
        let bytes = self.bytes;
        let mut at = HEADER_BYTES;
        (0..self.sections).filter_map(move |_| {
            let (section, next) = parse_section(bytes[1], bytes, at).ok()?;
            at = next;
            Some(section)
        })
    }
}

fn parse_section(version: u8, bytes: &[u8], at: usize) -> Result<(Section<'_>, usize), PushBodyError> {
    let malformed = |what| PushBodyError::Malformed { at, what };
    let rest = bytes.get(at..).ok_or_else(|| malformed("section past the end"))?;
    if rest.len() < SECTION_BYTES {
        return Err(malformed("section head cut short"));
    }
    let operation = match rest[4] {
        0 => Operation::Gradient,
        1 => Operation::Set,
        2 => Operation::Add,
        3 => Operation::Remove,
        4 if bytes[1] == PUSH_VERSION_CLEAR => Operation::Clear,
        _ => return Err(malformed("unknown operation")),
    };
    let encoding = match rest[5] {
        0 => Encoding::F32,
        1 => Encoding::Bf16,
        2 => Encoding::F16,
        3 => Encoding::Int8,
        _ => return Err(malformed("unknown encoding")),
    };
    if bytes[1] == PUSH_VERSION_CLEAR && (operation != Operation::Clear || le_u32(rest, 12) > 0) {
        return Err(malformed("rows in a body that clears a table"));
    }
    let dim = le_u32(rest, 8);
    if dim > DIM_MAX {
        return Err(PushBodyError::TooLarge { what: "dim", actual: dim as usize, limit: DIM_MAX as usize });
    }
    let count = le_u32(rest, 12) as usize;
    let lr = f32::from_bits(le_u32(rest, 16));
    let key_bytes = count.checked_mul(8).ok_or_else(|| malformed("count overflows"))?;
    let row_bytes = if operation.has_values() { encoding.row_bytes(dim as usize) } else { 0 };
    let payload_bytes = count.checked_mul(row_bytes).ok_or_else(|| malformed("count overflows"))?;
    let keys_end = SECTION_BYTES + key_bytes;
    let keys = rest.get(SECTION_BYTES..keys_end).ok_or_else(|| malformed("keys cut short"))?;
    let flags = if version >= PUSH_VERSION_COUNTED { u16::from_le_bytes([rest[6], rest[7]]) } else { 0 };
    if flags & !FLAG_COUNTED != 0 || (flags != 0 && operation != Operation::Gradient) {
        return Err(malformed("flags that mean nothing"));
    }
    // Cannot overflow: less than the keys, which are there.
    let counted_end = keys_end + if flags == FLAG_COUNTED { count * 4 } else { 0 };
    let occurrences = rest.get(keys_end..counted_end).ok_or_else(|| malformed("occurrences cut short"))?;
    if occurrences.chunks_exact(4).any(|raw| raw == [0; 4]) {
        return Err(malformed("a key that never came"));
    }
    let payload_end = counted_end.checked_add(payload_bytes).ok_or_else(|| malformed("count overflows"))?;
    let payload = rest.get(counted_end..payload_end).ok_or_else(|| malformed("payload cut short"))?;
    let section = Section {
        table: le_u32(rest, 0),
        operation,
        encoding,
        dim,
        lr: if lr.is_nan() { None } else { Some(lr) },
        keys,
        occurrences,
        payload,
    };
    Ok((section, at + payload_end))
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
        fn any_bytes_parse_or_fail_without_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), fix: bool) {
            if fix && bytes.len() >= HEADER_BYTES {
                bytes[0] = KIND_PUSH;
                bytes[1] = PUSH_VERSION;
                bytes[32..36].copy_from_slice(&1u32.to_le_bytes());
            }
            if let Ok(body) = PushBody::parse_without_checksum(&bytes) {
                for section in body.sections() {
                    for row in 0..section.count() {
                        let _ = section.key(row);
                        if section.operation != Operation::Remove {
                            let _ = section.row(row);
                        }
                    }
                }
            }
        }
    }
}
