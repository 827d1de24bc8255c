//! Scanning one segment: which records it holds, and where it cannot be read.
//!
//! Pure, over the segment's bytes. Judges nothing: whether an unreadable place is a torn tail or damage depends on the
//! rest of the log (`verdict`).
//!
//! Invariants:
//! - Never panics, whatever the bytes; takes memory only for records that are there.
//! - After an unreadable place it goes on at the next mark, so that proofs behind it are found.
//!
//! Not here: what the records add up to (`replay`).

use crate::log::record::{ALIGNMENT, RecordHeader, RecordKind, Seed};
use crate::log::segment::{HeaderCheck, Position, SEGMENT_HEADER_BYTES, check_header};
use bytes::Bytes;

/// A record's body, as far as recovery needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Body {
    /// As written. Entries stay on the disk; small bodies are kept.
    Good(Bytes),
    /// Not what was written.
    Bad,
}

/// A record with a readable header.
#[derive(Debug, Clone)]
pub(crate) struct Scanned {
    pub(crate) offset: u64,
    pub(crate) header: RecordHeader,
    pub(crate) body: Body,
}

/// What a segment holds.
#[derive(Debug)]
pub(crate) struct SegmentScan {
    pub(crate) header: HeaderCheck,
    pub(crate) records: Vec<Scanned>,
    /// Offsets at which no record could be read, though a mark was found later.
    pub(crate) gaps: Vec<u64>,
    /// The end of the last readable record.
    pub(crate) end: u64,
}

impl SegmentScan {
    /// Where the segment before this one ends, as this one's first record says.
    pub(crate) fn end_of_previous(&self) -> Option<Position> {
        let first = self.records.first()?;
        (first.offset == SEGMENT_HEADER_BYTES && first.header.kind == RecordKind::Mark)
            .then(|| first.header.proven())
    }

    /// The furthest position that any mark in it proves, or its header.
    pub(crate) fn proven(&self, number: u64) -> Option<Position> {
        let marks = self.records.iter().filter(|record| record.header.kind == RecordKind::Mark);
        let marks = marks.map(|mark| mark.header.proven());
        let header = match self.header {
            HeaderCheck::Good(offset) if offset > 0 => {
                number.checked_sub(1).map(|segment| Position { segment, offset })
            }
            _ => None,
        };
        marks.chain(header).max()
    }
}

/// Scans a segment's bytes.
pub(crate) fn scan(number: u64, bytes: &[u8]) -> SegmentScan {
    let seed = Seed::of_segment(number);
    let mut scan = SegmentScan {
        header: check_header(bytes, number),
        records: Vec::new(),
        gaps: Vec::new(),
        end: SEGMENT_HEADER_BYTES,
    };
    let mut offset = SEGMENT_HEADER_BYTES as usize;
    while offset < bytes.len() {
        if let Some(header) = RecordHeader::decode(seed, &bytes[offset..]) {
            let body = match header.body_in(bytes, offset) {
                Some(body) if header.is_body(seed, body) => Body::Good(kept(&header, body)),
                _ => Body::Bad,
            };
            scan.records.push(Scanned { offset: offset as u64, header, body });
            // At most BODY_BYTES_MAX and an offset within memory: no overflow.
            offset += header.record_bytes() as usize;
            scan.end = offset as u64;
        } else if let Some(mark) = find_mark(seed, bytes, offset + ALIGNMENT) {
            scan.gaps.push(offset as u64);
            offset = mark;
        } else {
            break;
        }
    }
    scan
}

fn kept(header: &RecordHeader, body: &[u8]) -> Bytes {
    if header.kind == RecordKind::Entry { Bytes::new() } else { Bytes::copy_from_slice(body) }
}

/// The next mark from `start` on.
fn find_mark(seed: Seed, bytes: &[u8], start: usize) -> Option<usize> {
    let mut offset = start;
    while offset < bytes.len() {
        let rest = &bytes[offset..];
        // Reserved space is zeros: skip it a page at a time.
        if rest.len() >= 4096 && rest[..4096].iter().all(|&byte| byte == 0) {
            offset += 4096;
            continue;
        }
        let end = offset + rest.len().min(4096);
        while offset < end {
            if bytes.get(offset + 12) == Some(&(RecordKind::Mark as u8))
                && RecordHeader::decode(seed, &bytes[offset..]).is_some()
            {
                return Some(offset);
            }
            offset += ALIGNMENT;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::GroupKey;
    use crate::log::batch::Batch;
    use crate::log::record::HEADER_BYTES;
    use proptest::prelude::*;

    /// Two batches: a mark, a vote of 5 bytes and a truncation each.
    fn segment(number: u64) -> Vec<u8> {
        let mut bytes = vec![0; SEGMENT_HEADER_BYTES as usize];
        for _ in 0..2 {
            let start = Position { segment: number, offset: bytes.len() as u64 };
            let mut batch = Batch::new(start, start);
            let key = GroupKey { group: 1, replica: 2 };
            batch.put(RecordHeader::new(RecordKind::Vote, key), Bytes::from_static(b"aVote"));
            batch.put(RecordHeader::new(RecordKind::Truncate, key), Bytes::new());
            batch.slices().iter().for_each(|slice| bytes.extend_from_slice(slice));
        }
        bytes
    }

    #[test]
    fn a_bad_body_costs_one_record_and_a_bad_header_the_batch() {
        let mut bytes = segment(3);
        assert_eq!(scan(3, &bytes).records.len(), 6);
        let body = SEGMENT_HEADER_BYTES as usize + 2 * HEADER_BYTES;
        bytes[body] ^= 1;
        let found = scan(3, &bytes);
        assert_eq!((found.records.len(), found.gaps.len()), (6, 0));
        assert_eq!(found.records[1].body, Body::Bad);
        bytes[body - 1] ^= 1;
        let found = scan(3, &bytes);
        assert_eq!((found.records.len(), found.gaps.clone()), (4, vec![SEGMENT_HEADER_BYTES + 64]));
        assert_eq!(found.end, bytes.len() as u64);
    }

    #[test]
    fn reserved_space_is_no_record() {
        let mut bytes = segment(3);
        let end = bytes.len() as u64;
        bytes.resize(bytes.len() + 20_000, 0);
        let found = scan(3, &bytes);
        assert_eq!((found.records.len(), found.end, found.gaps.len()), (6, end, 0));
        assert_eq!(scan(4, &bytes).records.len(), 0);
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..2000), number: u64) {
            let found = scan(number, &bytes);
            prop_assert!(found.records.len() * HEADER_BYTES <= bytes.len());
        }

        #[test]
        fn a_mutilated_segment_never_panics(edits in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..20), cut: usize) {
            let mut bytes = segment(3);
            for (at, byte) in edits {
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            bytes.truncate(cut % (bytes.len() + 1));
            scan(3, &bytes);
        }
    }
}
