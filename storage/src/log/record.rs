//! The record: the only thing a segment holds after its header. A disk format; a golden file holds it still.
//!
//! ```text
//! offset  0  header_crc u32   over bytes 4..64, seeded with the segment's number
//!         4  body_crc   u32   over the body, seeded with the segment's number
//!         8  body_len   u32
//!        12  kind       u8    see RecordKind
//!        13  entry_kind u8    of an entry; else 0
//!        14  flags      u16   1 = relocated
//!        16  group      u64   of a mark: u64::MAX
//!        24  replica    u64   of a mark: u64::MAX
//!        32  index      u64   of a mark: segment number up to which all was synced before it
//!        40  term       u64   of a mark: offset in that segment
//!        48  leader     u64
//!        56  time_ms    u64
//!        64  body, then zeros up to a multiple of 8
//! ```
//! All numbers are little endian.
//!
//! Invariants:
//! - The header has a checksum of its own: if only the body is bad, one knows whose it is.
//! - The seed makes a record of another segment unreadable here, so reused blocks show nothing old.
//! - Decoding never panics, and takes no memory for a length it has only read.
//!
//! Not here: which records follow each other (`writer`, `recovery`).

use super::segment::Position;
use super::{Entry, GroupKey};

/// Bytes of a record before its body.
pub(super) const HEADER_BYTES: usize = 64;
/// Records start at multiples of this.
pub(super) const ALIGNMENT: usize = 8;
/// Longest body of a record; appending a longer one is refused.
pub const BODY_BYTES_MAX: usize = 64 << 20;

/// The group and replica of a record that belongs to no group.
const NO_GROUP: GroupKey = GroupKey { group: u64::MAX, replica: u64::MAX };
const FLAG_RELOCATED: u16 = 1;

/// What a record says. The numbers are the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum RecordKind {
    /// First in each batch: what was synced before it.
    Mark = 1,
    /// A log entry.
    Entry = 2,
    /// The group's vote.
    Vote = 3,
    /// The group's commit position.
    Committed = 4,
    /// Entries from `index` on are gone.
    Truncate = 5,
    /// Entries up to `index` are gone; `term` and `leader` are the last one's.
    Purge = 6,
    /// The group exists.
    Create = 7,
    /// The group is forgotten.
    Destroy = 8,
    /// The group is quarantined; the body says why.
    Quarantine = 9,
    /// The damage named in the body, a line each, has been turned into quarantines.
    Settled = 10,
    /// The group's quarantine is lifted.
    Release = 11,
}

impl RecordKind {
    fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            1 => RecordKind::Mark,
            2 => RecordKind::Entry,
            3 => RecordKind::Vote,
            4 => RecordKind::Committed,
            5 => RecordKind::Truncate,
            6 => RecordKind::Purge,
            7 => RecordKind::Create,
            8 => RecordKind::Destroy,
            9 => RecordKind::Quarantine,
            10 => RecordKind::Settled,
            11 => RecordKind::Release,
            _ => return None,
        })
    }

    fn has_body(self) -> bool {
        matches!(
            self,
            RecordKind::Entry
                | RecordKind::Vote
                | RecordKind::Committed
                | RecordKind::Quarantine
                | RecordKind::Settled
        )
    }
}

/// A record's header, in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RecordHeader {
    pub(super) kind: RecordKind,
    pub(super) entry_kind: u8,
    /// A live entry copied forward from an old segment.
    pub(super) is_relocated: bool,
    pub(super) key: GroupKey,
    pub(super) index: u64,
    pub(super) term: u64,
    pub(super) leader: u64,
    pub(super) time_ms: u64,
    pub(super) body_len: u32,
    pub(super) body_crc: u32,
}

impl RecordHeader {
    /// A header of this kind with all else zero and an empty body.
    pub(super) fn new(kind: RecordKind, key: GroupKey) -> Self {
        RecordHeader {
            kind,
            entry_kind: 0,
            is_relocated: false,
            key,
            index: 0,
            term: 0,
            leader: 0,
            time_ms: 0,
            body_len: 0,
            body_crc: 0,
        }
    }

    pub(super) fn mark(synced: Position) -> Self {
        RecordHeader { index: synced.segment, term: synced.offset, ..Self::new(RecordKind::Mark, NO_GROUP) }
    }

    pub(super) fn settled() -> Self {
        Self::new(RecordKind::Settled, NO_GROUP)
    }

    pub(super) fn entry(key: GroupKey, entry: &Entry) -> Self {
        RecordHeader {
            entry_kind: entry.kind,
            index: entry.index,
            term: entry.term,
            leader: entry.leader,
            time_ms: entry.time_ms,
            ..Self::new(RecordKind::Entry, key)
        }
    }

    /// What a mark proves.
    pub(super) fn proven(&self) -> Position {
        Position { segment: self.index, offset: self.term }
    }

    /// Bytes of the whole record, padding included.
    pub(super) fn record_bytes(&self) -> u64 {
        record_bytes(self.body_len as usize)
    }

    /// Encodes header and checksums for a record with this body in the segment of `seed`.
    pub(super) fn encode(&mut self, seed: Seed, body: &[u8]) -> [u8; HEADER_BYTES] {
        // Bodies are checked against BODY_BYTES_MAX where they enter the log.
        self.body_len = body.len() as u32;
        self.body_crc = seed.crc(body);
        let mut bytes = [0; HEADER_BYTES];
        bytes[4..8].copy_from_slice(&self.body_crc.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.body_len.to_le_bytes());
        bytes[12] = self.kind as u8;
        bytes[13] = self.entry_kind;
        let flags = if self.is_relocated { FLAG_RELOCATED } else { 0 };
        bytes[14..16].copy_from_slice(&flags.to_le_bytes());
        let numbers = [self.key.group, self.key.replica, self.index, self.term, self.leader, self.time_ms];
        for (field, number) in bytes[16..].chunks_exact_mut(8).zip(numbers) {
            field.copy_from_slice(&number.to_le_bytes());
        }
        let crc = seed.crc(&bytes[4..]);
        bytes[..4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Decodes a header; `None` if it is not one of this segment. Looks at the first 64 bytes only.
    pub(super) fn decode(seed: Seed, bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HEADER_BYTES] = bytes.first_chunk()?;
        // Zeros and most garbage end here, before a checksum is computed.
        let kind = RecordKind::from_number(bytes[12])?;
        if u32_at(bytes, 0) != seed.crc(&bytes[4..]) {
            return None;
        }
        let flags = u16::from_le_bytes([bytes[14], bytes[15]]);
        let header = RecordHeader {
            kind,
            entry_kind: bytes[13],
            is_relocated: flags & FLAG_RELOCATED != 0,
            key: GroupKey { group: u64_at(bytes, 16), replica: u64_at(bytes, 24) },
            index: u64_at(bytes, 32),
            term: u64_at(bytes, 40),
            leader: u64_at(bytes, 48),
            time_ms: u64_at(bytes, 56),
            body_len: u32_at(bytes, 8),
            body_crc: u32_at(bytes, 4),
        };
        let is_known = flags & !FLAG_RELOCATED == 0
            && header.body_len as usize <= BODY_BYTES_MAX
            && (header.body_len == 0 || kind.has_body());
        is_known.then_some(header)
    }

    /// The record's body in the segment's bytes, given that the record starts at `offset`: `None` if the segment ends before.
    pub(super) fn body_in<'a>(&self, segment: &'a [u8], offset: usize) -> Option<&'a [u8]> {
        let start = offset.checked_add(HEADER_BYTES)?;
        segment.get(start..start.checked_add(self.body_len as usize)?)
    }

    /// Whether this is the body that was written.
    pub(super) fn is_body(&self, seed: Seed, body: &[u8]) -> bool {
        body.len() == self.body_len as usize && seed.crc(body) == self.body_crc
    }
}

/// Bytes of a record with a body of this length, padding included.
pub(super) fn record_bytes(body_len: usize) -> u64 {
    (HEADER_BYTES + body_len).next_multiple_of(ALIGNMENT) as u64
}

/// Where the checksums of a segment start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seed(u32);

impl Seed {
    /// Distinct for all segment numbers below 2^32.
    pub(super) fn of_segment(number: u64) -> Self {
        Seed(crc32fast::hash(&number.to_le_bytes()))
    }

    pub(super) fn crc(self, bytes: &[u8]) -> u32 {
        let mut hasher = crc32fast::Hasher::new_with_initial(self.0);
        hasher.update(bytes);
        hasher.finalize()
    }
}

fn u32_at(bytes: &[u8; HEADER_BYTES], offset: usize) -> u32 {
    u32::from_le_bytes([bytes[offset], bytes[offset + 1], bytes[offset + 2], bytes[offset + 3]])
}

fn u64_at(bytes: &[u8; HEADER_BYTES], offset: usize) -> u64 {
    u64::from_le_bytes([
        bytes[offset],
        bytes[offset + 1],
        bytes[offset + 2],
        bytes[offset + 3],
        bytes[offset + 4],
        bytes[offset + 5],
        bytes[offset + 6],
        bytes[offset + 7],
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use proptest::prelude::*;

    const KEY: GroupKey = GroupKey { group: 3, replica: 17 };

    fn sample() -> Entry {
        Entry { index: 5, term: 2, leader: 9, kind: 7, time_ms: 123, payload: Bytes::from_static(b"payload") }
    }

    #[test]
    fn an_entry_survives_encoding() {
        let seed = Seed::of_segment(4);
        let mut header = RecordHeader::entry(KEY, &sample());
        let bytes = header.encode(seed, &sample().payload);
        assert_eq!(RecordHeader::decode(seed, &bytes), Some(header));
        assert!(header.is_body(seed, b"payload"));
        assert!(!header.is_body(seed, b"paYload"));
        assert_eq!(header.record_bytes(), 72);
    }

    #[test]
    fn another_segment_does_not_read_it() {
        let mut header = RecordHeader::entry(KEY, &sample());
        let bytes = header.encode(Seed::of_segment(4), &sample().payload);
        for number in [0, 1, 3, 5, 6, u64::MAX] {
            assert_eq!(RecordHeader::decode(Seed::of_segment(number), &bytes), None);
            assert!(!header.is_body(Seed::of_segment(number), &sample().payload));
        }
    }

    #[test]
    fn every_flipped_bit_of_a_header_shows() {
        let seed = Seed::of_segment(1);
        let bytes = RecordHeader::entry(KEY, &sample()).encode(seed, b"payload");
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(RecordHeader::decode(seed, &flipped), None, "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn decoding_garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), number: u64) {
            let seed = Seed::of_segment(number);
            if let Some(header) = RecordHeader::decode(seed, &bytes) {
                let _body = header.body_in(&bytes, 0);
            }
        }

        /// Even with a right checksum no declared length is believed.
        #[test]
        fn decoding_forged_headers_never_panics(bytes in proptest::array::uniform32(any::<u8>()), offset: usize) {
            let seed = Seed::of_segment(1);
            let mut record = [0_u8; HEADER_BYTES];
            record[4..36].copy_from_slice(&bytes);
            let crc = seed.crc(&record[4..]);
            record[..4].copy_from_slice(&crc.to_le_bytes());
            if let Some(header) = RecordHeader::decode(seed, &record) {
                prop_assert!(header.body_len as usize <= BODY_BYTES_MAX);
                let body = header.body_in(&record, offset);
                prop_assert!(body.is_none_or(|body| body.is_empty()));
            }
        }

        #[test]
        fn any_header_survives_encoding(kind in 1_u8..=11, entry_kind: u8, is_relocated: bool, numbers: [u64; 6],
                                        body in proptest::collection::vec(any::<u8>(), 0..100), segment: u64) {
            let kind = RecordKind::from_number(kind).unwrap();
            let body = if kind.has_body() { body } else { Vec::new() };
            let seed = Seed::of_segment(segment);
            let mut header = RecordHeader {
                entry_kind, is_relocated, index: numbers[2], term: numbers[3], leader: numbers[4], time_ms: numbers[5],
                ..RecordHeader::new(kind, GroupKey { group: numbers[0], replica: numbers[1] })
            };
            let bytes = header.encode(seed, &body);
            prop_assert_eq!(RecordHeader::decode(seed, &bytes), Some(header));
            prop_assert!(header.is_body(seed, &body));
        }
    }
}
