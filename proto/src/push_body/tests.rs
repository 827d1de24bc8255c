//! What bodies parse to, and what is refused.

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
