//! Fuzz tests of what the log's files are made of. The golden files, and damage to whole logs, are in `storage/tests/log/`.

use evershard_formats::allocation::is_counting;
use evershard_formats::{bytes_or_damaged, damaged, frugal, one_bit};
use proptest::collection::vec;
use proptest::prelude::*;

use super::record::{BODY_BYTES_MAX, HEADER_BYTES, RecordHeader, RecordKind, Seed};
use super::recovery::scan::{Body, scan};
use super::segment::{HeaderCheck, Position, SEGMENT_HEADER_BYTES, check_header, encode_header};
use super::{GroupKey, batch::Batch};
use bytes::Bytes;

#[test]
fn allocations_are_counted() {
    assert!(is_counting());
}

const SEGMENT: u64 = 3;

/// A segment of batches: a mark, then votes and truncations of some groups.
fn segment() -> impl Strategy<Value = Vec<u8>> {
    let record = (0..3_u64, any::<bool>(), vec(any::<u8>(), 0..60));
    vec(vec(record, 1..4), 1..4).prop_map(|batches| {
        let mut bytes = encode_header(SEGMENT, 77).to_vec();
        for records in batches {
            let start = Position { segment: SEGMENT, offset: bytes.len() as u64 };
            let mut batch = Batch::new(start, start);
            for (group, is_vote, body) in records {
                let key = GroupKey { group, replica: group + 10 };
                let kind = if is_vote { RecordKind::Vote } else { RecordKind::Truncate };
                batch.put(RecordHeader::new(kind, key), if is_vote { body.into() } else { Bytes::new() });
            }
            batch.slices().iter().for_each(|slice| bytes.extend_from_slice(slice));
        }
        bytes
    })
}

proptest! {
    #[test]
    fn fuzz_log_record(bytes in bytes_or_damaged(segment().prop_map(|bytes| bytes[32..].to_vec())), number in 0..5_u64) {
        frugal(0, || {
            let seed = Seed::of_segment(number);
            if let Some(header) = RecordHeader::decode(seed, &bytes) {
                assert!(header.body_len as usize <= BODY_BYTES_MAX);
                let body = header.body_in(&bytes, 0);
                assert!(body.is_none_or(|body| body.len() <= bytes.len()));
                let _ = body.is_some_and(|body| header.is_body(seed, body));
            }
        });
    }

    #[test]
    fn fuzz_log_record_one_bit((valid, flipped) in one_bit(segment().prop_map(|bytes| bytes[32..].to_vec()))) {
        let seed = Seed::of_segment(SEGMENT);
        let head = ..HEADER_BYTES;
        prop_assert!(RecordHeader::decode(seed, &valid).is_some());
        prop_assert_eq!(RecordHeader::decode(seed, &flipped).is_some(), valid[head] == flipped[head]);
    }

    #[test]
    fn fuzz_segment_header(bytes in bytes_or_damaged(Just(encode_header(SEGMENT, 77).to_vec()))) {
        let found = frugal(0, || check_header(&bytes, SEGMENT));
        let is_as_written = bytes.starts_with(&encode_header(SEGMENT, 77));
        prop_assert_eq!(found == HeaderCheck::Good(77), is_as_written);
    }

    /// Every record that a damaged segment gives was written, at the place where it is found.
    #[test]
    fn fuzz_segment(
        (valid, bytes) in segment().prop_flat_map(|valid| (Just(valid.clone()), damaged(Just(valid)))),
    ) {
        let written = scan(SEGMENT, &valid);
        prop_assert!(written.gaps.is_empty() && written.end == valid.len() as u64);
        let found = frugal(bytes.len(), || scan(SEGMENT, &bytes));
        prop_assert!(found.records.len() * HEADER_BYTES <= bytes.len());
        for record in &found.records {
            // A part of the segment may have been copied to another place of it; there it reads as what it is.
            let same = |old: &&super::recovery::scan::Scanned| {
                old.header == record.header && (record.body == Body::Bad || record.body == old.body)
            };
            prop_assert!(written.records.iter().any(|old| same(&old)), "{:?}", record);
            prop_assert!(record.offset >= SEGMENT_HEADER_BYTES);
        }
    }
}
