//! Laying out push bodies, and giving a laid-out one another number.
//!
//! Not here: the layout itself, and reading it (`push_body.rs`).

use bytes::{BufMut, Bytes, BytesMut};

use super::ids::{code, coded_bytes};
use super::{
    Encoding, FLAG_COUNTED, FLAG_IDS, HEADER_BYTES, KEY_BYTES, KIND_PUSH, Operation, PUSH_VERSION,
    PUSH_VERSION_CLEAR, PUSH_VERSION_COUNTED, PUSH_VERSION_ENCODED, PUSH_VERSION_IDS, SECTION_BYTES,
    SECTIONS_OF_IDS,
};

/// The same content under another number and clock.
///
/// # Panics
/// When there is no whole header.
#[must_use]
pub fn renumbered(body: &[u8], seq: u64, clock: u64) -> Bytes {
    let mut bytes = BytesMut::from(body);
    bytes[16..24].copy_from_slice(&seq.to_le_bytes());
    bytes[24..32].copy_from_slice(&clock.to_le_bytes());
    let crc = crc32fast::hash(&bytes[8..]);
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    bytes.freeze()
}

/// What a section names its rows by.
#[derive(Debug, Clone, Copy)]
enum Names<'a> {
    Keys(&'a [u64]),
    /// Ascending strictly.
    Ids(&'a [u64]),
}

impl Names<'_> {
    fn count(&self) -> usize {
        match self {
            Names::Keys(names) | Names::Ids(names) => names.len(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Names::Keys(keys) => keys.len() * KEY_BYTES,
            Names::Ids(ids) => coded_bytes(ids),
        }
    }
}

/// Lays out a push body.
#[derive(Debug)]
pub struct PushBodyBuilder {
    bytes: BytesMut,
    tables: Vec<u32>,
}

impl PushBodyBuilder {
    /// A body with no sections yet; `capacity` is a hint for its bytes.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let mut bytes = BytesMut::with_capacity(capacity.max(HEADER_BYTES));
        bytes.put_bytes(0, HEADER_BYTES);
        bytes[0] = KIND_PUSH;
        bytes[1] = PUSH_VERSION;
        PushBodyBuilder { bytes, tables: Vec::new() }
    }

    /// Adds a section of `keys` and gives the place for its payload (`keys.len() x encoding.row_bytes(dim)` bytes, to
    /// be filled by the caller; empty for [`Operation::Remove`]).
    pub fn section(
        &mut self,
        table: u32,
        operation: Operation,
        encoding: Encoding,
        dim: u32,
        lr: Option<f32>,
        keys: &[u64],
    ) -> &mut [u8] {
        self.lay_out(table, (operation, encoding), (dim, lr), Names::Keys(keys), &[])
    }

    /// Adds a section of gradients of `keys`, each of which came as often as `occurrences` says, and gives the place for its
    /// payload, as [`PushBodyBuilder::section`].
    pub fn counted_section(
        &mut self,
        table: u32,
        encoding: Encoding,
        dim: u32,
        lr: Option<f32>,
        keys: &[u64],
        occurrences: &[u32],
    ) -> &mut [u8] {
        debug_assert_eq!(keys.len(), occurrences.len());
        self.lay_out(table, (Operation::Gradient, encoding), (dim, lr), Names::Keys(keys), occurrences)
    }

    /// Adds a section that has ids, ascending strictly, in the place of keys; with how often each came, or nothing of that. Gives
    /// the place for its payload, as [`PushBodyBuilder::section`]. For clusters of [`CLUSTER_VERSION_IDS`] on, and worth it where
    /// [`coded_bytes`] are less than keys.
    ///
    /// [`CLUSTER_VERSION_IDS`]: super::CLUSTER_VERSION_IDS
    pub fn id_section(
        &mut self,
        table: u32,
        (operation, encoding): (Operation, Encoding),
        (dim, lr): (u32, Option<f32>),
        ids: &[u64],
        occurrences: &[u32],
    ) -> &mut [u8] {
        debug_assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "ids ascend strictly");
        debug_assert!(occurrences.is_empty() || occurrences.len() == ids.len());
        self.lay_out(table, (operation, encoding), (dim, lr), Names::Ids(ids), occurrences)
    }

    fn lay_out(
        &mut self,
        table: u32,
        (operation, encoding): (Operation, Encoding),
        (dim, lr): (u32, Option<f32>),
        names: Names<'_>,
        occurrences: &[u32],
    ) -> &mut [u8] {
        let row_bytes = if operation.has_values() { encoding.row_bytes(dim as usize) } else { 0 };
        let (payload_bytes, name_bytes) = (names.count() * row_bytes, names.bytes());
        self.bytes.reserve(SECTION_BYTES + name_bytes + occurrences.len() * 4 + payload_bytes);
        let mut version = PUSH_VERSION;
        if encoding != Encoding::F32 && operation.has_values() {
            version = PUSH_VERSION_ENCODED;
        }
        if !occurrences.is_empty() {
            version = PUSH_VERSION_COUNTED;
        }
        let (mut flags, mut id_bytes) = (if occurrences.is_empty() { 0 } else { FLAG_COUNTED }, 0);
        if matches!(names, Names::Ids(_)) {
            version = PUSH_VERSION_IDS;
            flags |= FLAG_IDS;
            id_bytes = name_bytes as u32;
        }
        self.bytes[1] = self.bytes[1].max(version);
        self.bytes.put_u32_le(table);
        self.bytes.put_u8(operation as u8);
        self.bytes.put_u8(encoding as u8);
        self.bytes.put_u16_le(flags);
        self.bytes.put_u32_le(dim);
        self.bytes.put_u32_le(names.count() as u32);
        self.bytes.put_u32_le(lr.unwrap_or(f32::NAN).to_bits());
        self.bytes.put_u32_le(id_bytes);
        match names {
            Names::Keys(keys) => keys.iter().for_each(|key| self.bytes.put_u64_le(*key)),
            Names::Ids(ids) => {
                let at = self.bytes.len();
                self.bytes.put_bytes(0, name_bytes);
                code(ids, &mut self.bytes[at..]);
            }
        }
        for occurrences in occurrences {
            self.bytes.put_u32_le(*occurrences);
        }
        self.tables.push(table);
        let at = self.bytes.len();
        self.bytes.put_bytes(0, payload_bytes);
        &mut self.bytes[at..]
    }

    /// Makes it a body that clears a table: what no other section may stand beside.
    pub fn clear(&mut self, table: u32) {
        self.bytes[1] = PUSH_VERSION_CLEAR;
        self.section(table, Operation::Clear, Encoding::F32, 0, None, &[]);
    }

    /// Bytes so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// True while there is no section.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
    }

    /// True when there is a section of `table`: a message has one section a table.
    #[must_use]
    pub fn has_table(&self, table: u32) -> bool {
        self.tables.contains(&table)
    }

    /// Seals the body under its exactly-once identity.
    #[must_use]
    pub fn finish(mut self, session: u64, seq: u64, clock: u64) -> Bytes {
        self.bytes[8..16].copy_from_slice(&session.to_le_bytes());
        self.bytes[16..24].copy_from_slice(&seq.to_le_bytes());
        self.bytes[24..32].copy_from_slice(&clock.to_le_bytes());
        let mark = if self.bytes[1] == PUSH_VERSION_IDS { SECTIONS_OF_IDS } else { 0 };
        self.bytes[32..36].copy_from_slice(&(self.tables.len() as u32 | mark).to_le_bytes());
        let crc = crc32fast::hash(&self.bytes[8..]);
        self.bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        self.bytes.freeze()
    }
}
