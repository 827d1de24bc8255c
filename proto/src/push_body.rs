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
mod tests;
