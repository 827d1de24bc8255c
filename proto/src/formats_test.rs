//! Golden files and fuzz tests of what is laid out here: push bodies, shard commands, and protobuf messages.

use evershard_formats::allocation::is_counting;
use evershard_formats::golden::golden;
use evershard_formats::{bytes_or_damaged, frugal, one_bit};
use proptest::collection::vec;
use proptest::prelude::*;
use prost::Message;

mod samples;

use samples::*;

use crate::encoding::decode_row;
use crate::key::key_of;
use crate::push_body::{Encoding, Operation, PushBody, PushBodyBuilder};
use crate::shard_command::{EvictedRow, ShardCommand};
use crate::v1;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

#[test]
fn allocations_are_counted() {
    assert!(is_counting());
}

fn push_body() -> impl Strategy<Value = Vec<u8>> {
    let operation = prop_oneof![
        Just(Operation::Gradient),
        Just(Operation::Set),
        Just(Operation::Add),
        Just(Operation::Remove)
    ];
    let encoding =
        prop_oneof![Just(Encoding::F32), Just(Encoding::Bf16), Just(Encoding::F16), Just(Encoding::Int8)];
    let section =
        (any::<u32>(), operation, encoding, 0..9_u32, any::<Option<f32>>(), vec(any::<u64>(), 0..6));
    let cleared = proptest::option::weighted(0.1, any::<u32>());
    (any::<(u64, u64, u64)>(), vec(section, 0..4), cleared).prop_map(
        |((session, seq, clock), sections, cleared)| {
            let mut builder = PushBodyBuilder::new(0);
            if let Some(table) = cleared {
                builder.clear(table);
                return builder.finish(session, seq, clock).to_vec();
            }
            for (table, operation, encoding, dim, lr, keys) in sections {
                if table % 3 == 0 {
                    // Neighbours, and whatever is far from them.
                    let ids = keys.iter().flat_map(|id| [*id, id.saturating_add(1), *id >> (id % 64)]);
                    let ids: Vec<u64> = ids.collect::<std::collections::BTreeSet<_>>().into_iter().collect();
                    let is_counted = operation == Operation::Gradient && table % 2 == 0;
                    let came: Vec<u32> = ids.iter().map(|id| (*id as u32).max(1)).collect();
                    let came = if is_counted { &came[..] } else { &[] };
                    builder.id_section(table, (operation, encoding), (dim, lr), &ids, came).fill(7);
                } else if operation == Operation::Gradient && table % 2 == 0 {
                    let came: Vec<u32> = keys.iter().map(|key| (*key as u32).max(1)).collect();
                    builder.counted_section(table, encoding, dim, lr, &keys, &came).fill(7);
                } else {
                    builder.section(table, operation, encoding, dim, lr, &keys).fill(7);
                }
            }
            builder.finish(session, seq, clock).to_vec()
        },
    )
}

fn shard_command() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        (any::<u32>(), "[a-z]{0,20}", any::<u32>(), any::<bool>(), 0..3_u64).prop_map(
            |(number, name, dim, dropped, definition_version)| {
                let definition = Some(v1::TableDefinition { name, dim, ..Default::default() });
                let table = v1::TableDescription { number, definition, definition_version };
                ShardCommand::Schema { table, dropped }
            }
        ),
        any::<u64>().prop_map(|scrub_id| ShardCommand::Scrub { scrub_id }),
        (any::<u32>(), any::<(u64, u64)>(), vec(any::<(u64, u64)>(), 0..6)).prop_map(
            |(table, (clock_ms, step), rows)| {
                let rows = rows.into_iter().map(|(key, version)| EvictedRow { key, version }).collect();
                ShardCommand::Evict { table, clock_ms, step, rows }
            }
        ),
        Just(ShardCommand::Schema { table: table_with_rules(), dropped: false }),
        (any::<u64>(), vec(any::<u64>(), 0..20))
            .prop_map(|(floor, live)| ShardCommand::Sessions { floor, live }),
        Just(step_command()),
        Just(tensor_command()),
    ]
    .prop_map(|command| command.encode().to_vec())
}

/// Everything that a section gives away is within the body.
fn walk(body: &PushBody<'_>) {
    for section in body.sections() {
        assert_eq!(section.keys().count(), section.count());
        for row in 0..section.count() {
            assert!(section.occurrences(row) > 0);
            if section.operation.has_values() {
                let _ = section.row(row);
            }
        }
    }
}

proptest! {
    #[test]
    fn fuzz_push_body(bytes in bytes_or_damaged(push_body())) {
        frugal(bytes.len(), || {
            if let Ok(body) = PushBody::parse(&bytes) {
                walk(&body);
            }
            // As apply reads it, whatever the checksum says.
            if let Ok(body) = PushBody::parse_without_checksum(&bytes) {
                walk(&body);
            }
            let mut room = Vec::new();
            if let Ok(body) = PushBody::parse_with_keys(&bytes, &mut room) {
                walk(&body);
            }
        });
    }

    #[test]
    fn fuzz_push_body_one_bit((valid, flipped) in one_bit(push_body())) {
        prop_assert!(PushBody::parse(&valid).is_ok());
        // The flags are reserved and mean nothing, so they may change.
        if valid[2..4] == flipped[2..4] {
            prop_assert!(PushBody::parse(&flipped).is_err());
        }
    }

    #[test]
    fn fuzz_shard_command(bytes in bytes_or_damaged(shard_command())) {
        let _ = frugal(bytes.len(), || ShardCommand::decode(&bytes));
    }

    #[test]
    fn fuzz_shard_command_one_bit((valid, flipped) in one_bit(shard_command())) {
        let meant = ShardCommand::decode(&valid);
        let found = ShardCommand::decode(&flipped);
        prop_assert!(meant.is_ok());
        // The kind is outside the checksum (the record and the frame around it cover it): docs/formats.md.
        let same_kind = valid[0] == flipped[0];
        prop_assert!(found.is_err() || !same_kind || found == meant, "{:?}", found);
    }

    /// What the services take is decoded by prost; it must be as frugal as we are.
    #[test]
    fn fuzz_messages(bytes in bytes_or_damaged(messages())) {
        frugal(bytes.len(), || {
            let _ = v1::LaneFrame::decode(bytes.as_slice());
            let _ = v1::MetaState::decode(bytes.as_slice());
            let _ = v1::MetaCommand::decode(bytes.as_slice());
            let _ = v1::MetaOutcome::decode(bytes.as_slice());
        });
        frugal(bytes.len(), || {
            let _ = v1::ExchangeRequest::decode(bytes.as_slice());
            let _ = v1::ExchangeReply::decode(bytes.as_slice());
            let _ = v1::NodeStatus::decode(bytes.as_slice());
            let _ = v1::ErrorDetail::decode(bytes.as_slice());
            let _ = v1::JoinRequest::decode(bytes.as_slice());
            let _ = v1::TickRequest::decode(bytes.as_slice());
            let _ = v1::JoinJobRequest::decode(bytes.as_slice());
        });
    }
}

fn messages() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        Just(lane_frame().encode_to_vec()),
        Just(meta_state().encode_to_vec()),
        Just(meta_state_with_job().encode_to_vec()),
        Just(meta_state_with_step().encode_to_vec()),
        Just(meta_command().encode_to_vec()),
        Just(tick_command().encode_to_vec()),
        Just(set_optimizer_command().encode_to_vec()),
        Just(meta_state_with_change().encode_to_vec()),
        Just(meta_state_with_rules().encode_to_vec()),
        Just(raise_command().encode_to_vec()),
        Just(meta_state_with_tensor().encode_to_vec()),
        Just(create_tensor_command().encode_to_vec()),
        push_body().prop_map(|body| v1::PushRequest { group: 1, body: body.into() }.encode_to_vec()),
    ]
}

#[test]
fn version_1_of_a_push_body_stays_as_it_is() {
    let mut builder = PushBodyBuilder::new(0);
    builder
        .section(3, Operation::Gradient, Encoding::F32, 2, None, &[10, u64::MAX])
        .copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
    builder.section(4, Operation::Remove, Encoding::F32, 2, Some(0.5), &[0]);
    let bytes = golden(CRATE, "push-body-1.bin", &builder.finish(7, 9, 11));
    let body = PushBody::parse(&bytes).expect("of version 1");
    assert_eq!((body.session, body.seq, body.clock, body.sections().count()), (7, 9, 11, 2));
}

#[test]
fn version_3_of_a_push_body_stays_as_it_is() {
    let mut builder = PushBodyBuilder::new(0);
    builder.clear(3);
    let bytes = golden(CRATE, "push-body-3.bin", &builder.finish(7, 9, 11));
    let body = PushBody::parse(&bytes).expect("of version 3");
    let cleared: Vec<_> = body.sections().map(|section| (section.table, section.operation)).collect();
    assert_eq!((body.session, body.seq, body.clock, cleared), (7, 9, 11, vec![(3, Operation::Clear)]));
}

#[test]
fn version_2_of_a_push_body_stays_as_it_is() {
    for (encoding, name) in [
        (Encoding::Bf16, "push-body-2-bf16.bin"),
        (Encoding::F16, "push-body-2-f16.bin"),
        (Encoding::Int8, "push-body-2-int8.bin"),
    ] {
        let mut builder = PushBodyBuilder::new(0);
        let payload = builder.section(3, Operation::Gradient, encoding, 2, None, &[10, u64::MAX]);
        let row: &[u8] = match encoding {
            // 1 and -2; for int8 a scale of 0.5, 2 and -4.
            Encoding::Bf16 => &[0x80, 0x3f, 0x00, 0xc0],
            Encoding::F16 => &[0x00, 0x3c, 0x00, 0xc0],
            Encoding::Int8 => &[0x00, 0x00, 0x00, 0x3f, 2, 0xfc],
            Encoding::F32 => unreachable!("of version 1"),
        };
        payload.copy_from_slice(&row.repeat(2));
        let bytes = golden(CRATE, name, &builder.finish(7, 9, 11));
        let body = PushBody::parse(&bytes).expect("of version 2");
        assert_eq!((body.version, body.session, body.seq, body.clock), (2, 7, 9, 11));
        let section = body.sections().next().expect("one section");
        let mut values = [0.0; 2];
        decode_row(section.encoding, section.row(1), &mut values);
        assert_eq!(values, [1.0, -2.0], "{encoding:?}");
    }
}

#[test]
fn version_4_of_a_push_body_stays_as_it_is() {
    let mut builder = PushBodyBuilder::new(0);
    builder
        .counted_section(3, Encoding::F32, 1, None, &[10, u64::MAX], &[3, 1])
        .copy_from_slice(&[0x00, 0x00, 0x80, 0x3f, 0x00, 0x00, 0x00, 0xc0]);
    let bytes = golden(CRATE, "push-body-4.bin", &builder.finish(7, 9, 11));
    let body = PushBody::parse(&bytes).expect("of version 4");
    let section = body.sections().next().expect("one section");
    assert_eq!((body.version, section.occurrences(0), section.occurrences(1)), (4, 3, 1));
    assert_eq!(section.row(1), &[0x00, 0x00, 0x00, 0xc0]);
}

#[test]
fn version_5_of_a_push_body_stays_as_it_is() {
    let mut builder = PushBodyBuilder::new(0);
    let ids = [0, 1, 300, u64::MAX];
    builder
        .id_section(3, (Operation::Gradient, Encoding::Bf16), (1, None), &ids, &[3, 1, 1, 2])
        .copy_from_slice(&[0x80, 0x3f, 0x00, 0xc0, 0x80, 0x3f, 0x00, 0xc0]);
    builder.id_section(4, (Operation::Remove, Encoding::F32), (2, Some(0.5)), &[7], &[]);
    builder.section(5, Operation::Set, Encoding::F32, 1, None, &[10]).copy_from_slice(&[1, 2, 3, 4]);
    let bytes = golden(CRATE, "push-body-5.bin", &builder.finish(7, 9, 11));
    let body = PushBody::parse(&bytes).expect("of version 5");
    assert_eq!((body.version, body.session, body.seq, body.clock), (5, 7, 9, 11));
    let sections: Vec<_> = body.sections().collect();
    let keys = ids.map(|id| key_of(3, id));
    assert_eq!(sections[0].keys().collect::<Vec<_>>(), keys);
    assert_eq!((sections[0].row(1), sections[0].occurrences(3)), (&[0x00, 0xc0][..], 2));
    assert_eq!(sections[1].keys().collect::<Vec<_>>(), [key_of(4, 7)]);
    assert_eq!((sections[2].keys().collect::<Vec<_>>(), sections[2].row(0)), (vec![10], &[1, 2, 3, 4][..]));
}

#[test]
fn what_rules_for_rows_brought_stays_as_it_is() {
    let rows = vec![EvictedRow { key: 10, version: 5 }, EvictedRow { key: u64::MAX, version: 6 }];
    let mut builder = PushBodyBuilder::new(0);
    builder.counted_section(9, Encoding::F32, 0, None, &[10], &[4]);
    let body = builder.finish(0, 1, 2);
    for (name, command) in [
        ("shard-schema-4.bin", ShardCommand::Schema { table: table_with_rules(), dropped: false }),
        ("shard-evict-1.bin", ShardCommand::Evict { table: 9, clock_ms: 7, step: 8, rows }),
        ("shard-step-2.bin", ShardCommand::Step { job: 1, step: 2, part: 0, of: 1, body }),
    ] {
        let bytes = golden(CRATE, name, &command.encode());
        assert_eq!(ShardCommand::decode(&bytes), Ok(command), "{name}");
    }
    let bytes = golden(CRATE, "meta-command-raise-version.bin", &raise_command().encode_to_vec());
    assert_eq!(v1::MetaCommand::decode(bytes.as_slice()), Ok(raise_command()));
    let bytes = golden(CRATE, "meta-state-rules.bin", &meta_state_with_rules().encode_to_vec());
    assert_eq!(v1::MetaState::decode(bytes.as_slice()), Ok(meta_state_with_rules()));
}

#[test]
fn version_1_of_the_shard_commands_stays_as_it_is() {
    let definition = v1::TableDefinition { name: "items".into(), dim: 16, ..Default::default() };
    let table = v1::TableDescription { number: 9, definition: Some(definition), definition_version: 0 };
    for (name, command) in [
        ("shard-schema-1.bin", ShardCommand::Schema { table, dropped: true }),
        ("shard-scrub-1.bin", ShardCommand::Scrub { scrub_id: 5 }),
        ("shard-sessions-1.bin", ShardCommand::Sessions { floor: 10, live: vec![2, 3] }),
        ("shard-step-1.bin", step_command()),
    ] {
        assert_eq!(ShardCommand::decode(&golden(CRATE, name, &command.encode())), Ok(command));
    }
}

fn step_command() -> ShardCommand {
    let mut sums = PushBodyBuilder::new(0);
    let values: Vec<u8> = [1.0f32, -2.0].into_iter().flat_map(f32::to_le_bytes).collect();
    sums.section(9, Operation::Gradient, Encoding::F32, 2, None, &[77]).copy_from_slice(&values);
    ShardCommand::Step { job: 3, step: 41, part: 1, of: 4, body: sums.finish(0, 2, 41) }
}

#[test]
fn version_2_of_a_schema_stays_as_it_is() {
    let definition =
        v1::TableDefinition { name: "items".into(), dim: 16, optimizer: Some(sgd()), ..Default::default() };
    let table = v1::TableDescription { number: 9, definition: Some(definition), definition_version: 3 };
    let command = ShardCommand::Schema { table, dropped: false };
    let bytes = golden(CRATE, "shard-schema-2.bin", &command.encode());
    assert_eq!((bytes[1], ShardCommand::decode(&bytes)), (2, Ok(command)));
}

fn tensor_command() -> ShardCommand {
    let definition = Some(tensor_definition());
    let table = v1::TableDescription { number: 9, definition, definition_version: 3 };
    ShardCommand::Schema { table, dropped: false }
}

#[test]
fn version_4_of_a_schema_stays_as_it_is() {
    let bytes = golden(CRATE, "shard-schema-4-tensor.bin", &tensor_command().encode());
    assert_eq!((bytes[1], ShardCommand::decode(&bytes)), (4, Ok(tensor_command())));
}

#[test]
fn numbers_of_protobuf_fields_stay_as_they_are() {
    let bytes = golden(CRATE, "lane-frame.bin", &lane_frame().encode_to_vec());
    assert_eq!(v1::LaneFrame::decode(bytes.as_slice()), Ok(lane_frame()));
    let bytes = golden(CRATE, "meta-state.bin", &meta_state().encode_to_vec());
    assert_eq!(v1::MetaState::decode(bytes.as_slice()), Ok(meta_state()));
    let bytes = golden(CRATE, "meta-state-job.bin", &meta_state_with_job().encode_to_vec());
    assert_eq!(v1::MetaState::decode(bytes.as_slice()), Ok(meta_state_with_job()));
    let bytes = golden(CRATE, "meta-state-step.bin", &meta_state_with_step().encode_to_vec());
    assert_eq!(v1::MetaState::decode(bytes.as_slice()), Ok(meta_state_with_step()));
    let bytes = golden(CRATE, "meta-command-tick.bin", &tick_command().encode_to_vec());
    assert_eq!(v1::MetaCommand::decode(bytes.as_slice()), Ok(tick_command()));
    let bytes = golden(CRATE, "meta-state-change.bin", &meta_state_with_change().encode_to_vec());
    assert_eq!(v1::MetaState::decode(bytes.as_slice()), Ok(meta_state_with_change()));
    let bytes = golden(CRATE, "meta-command-set-optimizer.bin", &set_optimizer_command().encode_to_vec());
    assert_eq!(v1::MetaCommand::decode(bytes.as_slice()), Ok(set_optimizer_command()));
    let bytes = golden(CRATE, "meta-state-tensor.bin", &meta_state_with_tensor().encode_to_vec());
    assert_eq!(v1::MetaState::decode(bytes.as_slice()), Ok(meta_state_with_tensor()));
    let bytes = golden(CRATE, "meta-command-tensor.bin", &create_tensor_command().encode_to_vec());
    assert_eq!(v1::MetaCommand::decode(bytes.as_slice()), Ok(create_tensor_command()));
    let bytes = golden(CRATE, "meta-command.bin", &meta_command().encode_to_vec());
    assert_eq!(v1::MetaCommand::decode(bytes.as_slice()), Ok(meta_command()));
}
