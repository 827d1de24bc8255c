//! What messages hold of rows as a user gave them.

use super::*;
use evershard_proto::encoding::decode_row;
use evershard_proto::key::key_of;
use evershard_proto::push_body::PushBody;
use evershard_proto::v1::{ErrorKind, NonFiniteAction};

#[test]
fn more_tables_than_a_message_takes_go_in_several() {
    let tables = PUSH_TABLES_MAX as u32 + 1;
    let content = |table| Content {
        table,
        name: "t",
        dim: 1,
        operation: Operation::Gradient,
        encoding: Encoding::F32,
        ids: &[7, 7],
        values: &[1.0, 2.0],
        non_finite: NonFinitePolicy::Reject,
        counts: false,
    };
    let contents: Vec<_> = (1..=tables).map(content).collect();
    let (messages, rows) = pack(
        &contents,
        &crate::routing_cache::table_for_tests(1),
        None,
        &mut Residuals::new(0),
        &mut Found::default(),
    )
    .expect("all finite");
    assert_eq!(rows, tables as usize);
    let mut seen = Vec::new();
    for message in messages {
        let bytes = message.builder.finish(1, 1, 0);
        let body = PushBody::parse(&bytes).expect("a server can read it");
        assert_eq!(body.sections().count(), message.ids.len());
        seen.extend(body.sections().map(|section| section.table));
    }
    assert_eq!(seen, (1..=tables).collect::<Vec<_>>());
}

/// A cluster of a version.
fn routing_of(cluster_version: u32, shards: u64) -> RoutingTable {
    let mut table = crate::routing_cache::table_for_tests(shards);
    table.routing.cluster_version = cluster_version;
    table
}

fn gradients<'a>(ids: &'a [u64], values: &'a [f32], encoding: Encoding) -> Content<'a> {
    let dim = values.len() / ids.len();
    let non_finite = NonFinitePolicy::Reject;
    let operation = Operation::Gradient;
    Content { table: 1, name: "t", dim, operation, encoding, ids, values, non_finite, counts: true }
}

/// What the servers read, by key: how often it came, and its bytes.
type Rows = std::collections::BTreeMap<u64, (u32, Vec<u8>)>;

/// Packs for a cluster of a version: versions of the bodies, their bytes, and all rows. The ids of a message are those of its rows.
fn packed(content: Content<'_>, version: u32, residuals: &mut Residuals) -> (Vec<u8>, usize, Rows) {
    let (messages, _) =
        pack(&[content], &routing_of(version, 4), None, residuals, &mut Found::default()).expect("finite");
    let (mut versions, mut bytes, mut rows) = (Vec::new(), 0, Rows::new());
    for message in messages {
        let ids = message.ids.clone();
        let body = message.builder.finish(1, 1, 0);
        let parsed = PushBody::parse(&body).expect("a server can read it");
        let section = parsed.sections().next().expect("one");
        let keys: Vec<u64> = section.keys().collect();
        assert_eq!(keys, ids.iter().map(|id| key_of(1, *id)).collect::<Vec<_>>());
        for (row, key) in keys.into_iter().enumerate() {
            let of_row = (section.occurrences(row), section.row(row).to_vec());
            assert_eq!(rows.insert(key, of_row), None, "an id is in one message");
        }
        versions.push(parsed.version);
        bytes += body.len();
    }
    (versions, bytes, rows)
}

#[test]
fn rows_have_ids_where_the_cluster_knows_them_and_that_is_shorter() {
    // With repetitions, and in no order.
    let near: Vec<u64> = (0..600u64).map(|at| at * 7919 % 401).chain([u64::MAX, 0]).collect();
    let far: Vec<u64> = (1..600).map(evershard_proto::key::mix64).collect();
    let values: Vec<f32> = (0..near.len() * 2).map(|at| (at % 11) as f32 - 5.0).collect();
    for encoding in Encoding::ALL {
        let content = gradients(&near, &values, encoding);
        let (mut known, mut unknown) = (Residuals::new(1 << 20), Residuals::new(1 << 20));
        // Twice: what int8 left out of an id comes with that id.
        for _ in 0..2 {
            let (plain, before, expected) = packed(content, CLUSTER_VERSION_IDS - 1, &mut unknown);
            assert_eq!(plain, [4; 4], "{encoding:?}: of occurrences, and no more");
            let (coded, after, rows) = packed(content, CLUSTER_VERSION_IDS, &mut known);
            assert_eq!(coded, [5; 4], "{encoding:?}");
            assert_eq!(rows, expected, "{encoding:?}: the same rows, whatever names them");
            assert!(before - after > rows.len() * 6, "{encoding:?}: {before} and {after} bytes");
        }
        let content = gradients(&far, &values[..far.len() * 2], encoding);
        let (versions, ..) = packed(content, CLUSTER_VERSION_IDS, &mut Residuals::new(0));
        assert_eq!(versions, [4; 4], "{encoding:?}: hashes are not shorter than keys");
    }
    let (later, ..) =
        packed(gradients(&near, &values, Encoding::F32), CLUSTER_VERSION_IDS + 1, &mut Residuals::new(0));
    assert_eq!(later, [5; 4]);
}

/// Figures for docs/encodings.md, not a test: bytes and time of a push with keys and with ids.
#[test]
#[ignore = "a measurement: --release, --ignored, --nocapture"]
fn measure_bytes_and_time_of_a_push_of_zipf_ids() {
    const ROWS: u64 = 10_000_000;
    const BATCH: usize = 4096;
    const DIM: usize = 16;
    let mut total = 0.0;
    let weights: Vec<f64> = (1..=ROWS)
        .map(|rank| {
            total += (rank as f64).powf(-1.05);
            total
        })
        .collect();
    // Popularity is scattered over the ids.
    let drawn = (0..BATCH as u64).map(|at| {
        let share = (evershard_proto::key::mix64(at + 1) >> 11) as f64 / (1u64 << 53) as f64;
        let rank = weights.partition_point(|weight| *weight < share * total);
        evershard_proto::key::mix64(rank as u64) % ROWS
    });
    let ids: Vec<u64> = drawn.collect();
    let values: Vec<f32> = (0..BATCH * DIM).map(|at| (at % 251) as f32 - 125.0).collect();
    println!("encoding shards rows keys ids (bytes) packing keys ids (us) reading keys ids (us)");
    for (encoding, shards) in Encoding::ALL.iter().flat_map(|encoding| [(*encoding, 1), (*encoding, 8)]) {
        let (mut rows, mut bytes, mut packing, mut reading) = (0, [0; 2], [f64::MAX; 2], [f64::MAX; 2]);
        for round in 0..200 {
            let version = round % 2;
            let routing = routing_of(version as u32 + CLUSTER_VERSION_IDS - 1, shards);
            let content = Content { counts: false, ..gradients(&ids, &values, encoding) };
            let (mut residuals, mut found) = (Residuals::new(0), Found::default());
            let since = std::time::Instant::now();
            let (messages, distinct) =
                pack(&[content], &routing, None, &mut residuals, &mut found).expect("finite");
            let bodies: Vec<_> = messages.into_iter().map(|m| m.builder.finish(1, 1, 0)).collect();
            packing[version] = packing[version].min(since.elapsed().as_secs_f64() * 1e6);
            let since = std::time::Instant::now();
            let parsed = bodies.iter().map(|body| PushBody::parse(body).expect("ours"));
            let keys = parsed.flat_map(|body| body.sections().collect::<Vec<_>>()).flat_map(|s| s.keys());
            std::hint::black_box(keys.fold(0, u64::wrapping_add));
            reading[version] = reading[version].min(since.elapsed().as_secs_f64() * 1e6);
            (rows, bytes[version]) = (distinct, bodies.iter().map(bytes::Bytes::len).sum());
        }
        let name = encoding.name();
        println!("{name} {shards} {rows} {bytes:?} {packing:.0?} {reading:.1?}");
    }
}

#[test]
fn each_section_is_named_for_itself_and_the_last_value_of_an_id_counts() {
    let (near, far) = ([3u64, 1, 3], [evershard_proto::key::mix64(1), evershard_proto::key::mix64(2)]);
    let of = |table, operation, ids, values| Content {
        table,
        operation,
        counts: false,
        ids,
        values,
        dim: 1,
        ..gradients(&[1], &[1.0], Encoding::F32)
    };
    let contents = [
        of(1, Operation::Set, &near, &[1.0, 2.0, 3.0]),
        of(2, Operation::Gradient, &far, &[4.0, 5.0]),
        of(3, Operation::Remove, &near, &[]),
    ];
    let routing = routing_of(CLUSTER_VERSION_IDS, 1);
    let (mut messages, _) =
        pack(&contents, &routing, None, &mut Residuals::new(0), &mut Found::default()).expect("finite");
    assert_eq!(messages.len(), 1);
    let bytes = messages.remove(0).builder.finish(1, 1, 0);
    let body = PushBody::parse(&bytes).expect("a server can read it");
    let sections: Vec<_> = body.sections().collect();
    assert_eq!(sections.iter().map(|s| s.has_ids()).collect::<Vec<_>>(), [true, false, true]);
    let keys = |at: usize| sections[at].keys().collect::<Vec<_>>();
    assert_eq!(keys(0), [1, 3].map(|id| key_of(1, id)));
    assert_eq!(sections[0].payload(), [2.0f32.to_le_bytes(), 3.0f32.to_le_bytes()].concat());
    assert_eq!(keys(1), far.map(|id| key_of(2, id)), "in order of appearance");
    assert_eq!(keys(2), [1, 3].map(|id| key_of(3, id)));
}

#[test]
fn a_table_that_counts_is_told_how_often_each_id_came() {
    let content = |counts, non_finite, values| Content {
        table: 1,
        name: "t",
        dim: 1,
        operation: Operation::Gradient,
        encoding: Encoding::F32,
        ids: &[5, 5, 5, 6],
        values,
        non_finite,
        counts,
    };
    let sent = |content: Content<'_>| {
        let routing = crate::routing_cache::table_for_tests(1);
        let (mut messages, _) =
            pack(&[content], &routing, None, &mut Residuals::new(0), &mut Found::default()).expect("packed");
        let bytes = messages.remove(0).builder.finish(1, 1, 0);
        let body = PushBody::parse(&bytes).expect("a server can read it");
        let section = body.sections().next().expect("one");
        (body.version, (0..section.count()).map(|row| section.occurrences(row)).collect::<Vec<_>>())
    };
    let values = &[1.0; 4][..];
    assert_eq!(sent(content(true, NonFinitePolicy::Reject, values)), (4, vec![3, 1]));
    assert_eq!(sent(content(false, NonFinitePolicy::Reject, values)), (1, vec![1, 1]));
    let bad = &[1.0, f32::NAN, 1.0, f32::NAN][..];
    assert_eq!(sent(content(true, NonFinitePolicy::SkipRow, bad)), (4, vec![2, 1]));
    assert_eq!(sent(content(true, NonFinitePolicy::Clip, bad)), (4, vec![3, 1]));
}

#[test]
fn a_push_with_a_sum_beyond_the_range_is_refused_whole() {
    let pack_as = |operation, non_finite, values: &[f32]| {
        let ids = &[7, 8, 7];
        let encoding = Encoding::F32;
        let content = Content {
            table: 1,
            name: "t",
            dim: 1,
            operation,
            encoding,
            ids,
            values,
            non_finite,
            counts: false,
        };
        super::super::check(&[content], &mut Found::default()).expect("each row is finite");
        pack(
            &[content],
            &crate::routing_cache::table_for_tests(64),
            None,
            &mut Residuals::new(0),
            &mut Found::default(),
        )
        .map(|(messages, _)| messages.len())
    };
    let large = [3e38, 1.0, 3e38];
    for operation in [Operation::Gradient, Operation::Add] {
        let refused = pack_as(operation, NonFinitePolicy::Reject, &large).expect_err("the sum is infinite");
        assert_eq!(refused.kind(), ErrorKind::NonFinite);
        assert!(refused.to_string().contains("id 7"), "{refused}");
        assert!(pack_as(operation, NonFinitePolicy::Reject, &[3e38, 1.0, -3e38]).is_ok());
    }
    assert!(pack_as(Operation::Set, NonFinitePolicy::Reject, &large).is_ok(), "the last one counts");
    assert!(pack_as(Operation::Gradient, NonFinitePolicy::Clip, &large).is_ok());
}

/// Packs gradients of one table of dim 2, and gives back the rows as a server decodes them.
fn decoded(
    encoding: Encoding,
    non_finite: NonFinitePolicy,
    ids: &[u64],
    values: &[f32],
    residuals: &mut Residuals,
) -> Result<Vec<[f32; 2]>, Error> {
    decoded_and_found(encoding, non_finite, ids, values, residuals, &mut Found::default())
}

fn decoded_and_found(
    encoding: Encoding,
    non_finite: NonFinitePolicy,
    ids: &[u64],
    values: &[f32],
    residuals: &mut Residuals,
    found: &mut Found,
) -> Result<Vec<[f32; 2]>, Error> {
    let operation = Operation::Gradient;
    let content =
        Content { table: 1, name: "t", dim: 2, operation, encoding, ids, values, non_finite, counts: false };
    let (messages, _) = pack(&[content], &crate::routing_cache::table_for_tests(1), None, residuals, found)?;
    let mut rows = Vec::new();
    for message in messages {
        let bytes = message.builder.finish(1, 1, 0);
        for section in PushBody::parse(&bytes).expect("a server can read it").sections() {
            for row in 0..section.count() {
                let mut values = [0.0; 2];
                decode_row(section.encoding, section.row(row), &mut values);
                rows.push(values);
            }
        }
    }
    Ok(rows)
}

#[test]
fn what_no_server_sees_is_found() {
    use NonFinitePolicy::{Clip, Reject, SkipRow};
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let find = |encoding, policy, ids: &[u64], values: &[f32]| {
        let (mut found, mut residuals) = (Found::default(), Residuals::new(0));
        let _ = decoded_and_found(encoding, policy, ids, values, &mut residuals, &mut found);
        let rows = found.rows().into_iter();
        rows.map(|rows| (rows.action(), rows.count, rows.id, rows.column, rows.of_sum)).collect::<Vec<_>>()
    };
    let f32_of = |policy, ids: &[u64], values: &[f32]| find(Encoding::F32, policy, ids, values);
    let (rejected, skipped) = (NonFiniteAction::Rejected, NonFiniteAction::Skipped);
    let clipped = NonFiniteAction::Clipped;
    // Beside a good row of its id a bad one is left out here; alone it is the servers' to see.
    assert_eq!(f32_of(SkipRow, &[7, 7, 7], &[nan, 1.0, 2.0, 3.0, 4.0, inf]), [(skipped, 2, 7, 0, false)]);
    assert_eq!(f32_of(SkipRow, &[7, 8], &[nan, 1.0, 2.0, inf]), []);
    assert_eq!(f32_of(SkipRow, &[7, 7], &[nan, 1.0, 2.0, inf]), [(skipped, 1, 7, 0, false)]);
    assert_eq!(f32_of(Clip, &[7, 8], &[1.0, nan, 2.0, inf]), [(clipped, 2, 7, 1, false)]);
    assert_eq!(f32_of(Clip, &[7, 8], &[1.0, 2.0, 3.0, 4.0]), []);
    assert_eq!(f32_of(Reject, &[7, 7], &[3e38, 1.0, 3e38, 1.0]), [(rejected, 1, 7, 0, true)]);
    // Finite, and more than f16 holds.
    let f16_of = |policy| find(Encoding::F16, policy, &[7], &[1.0, 1e6]);
    assert_eq!(f16_of(Reject), [(rejected, 1, 7, 1, false)]);
    assert_eq!(f16_of(Clip), [(clipped, 1, 7, 1, false)]);
    assert_eq!(f16_of(SkipRow), []);
    // Clipped to f32's range, and again to f16's: one row.
    assert_eq!(find(Encoding::F16, Clip, &[7], &[1.0, inf]), [(clipped, 1, 7, 1, false)]);
    let large = [3e38, 1.0, 3e38, 1.0];
    assert_eq!(find(Encoding::Bf16, Clip, &[7, 7], &large), [(clipped, 1, 7, 0, true)]);
    assert_eq!(f32_of(Clip, &[7, 7], &large), [], "the servers clip the sum");
}

#[test]
fn duplicates_are_summed_before_they_are_encoded() {
    // 256 + 1 is 256 in bf16, and 256 + 1 + 1 is 258.
    let rows = decoded(
        Encoding::Bf16,
        NonFinitePolicy::Reject,
        &[7, 7, 7],
        &[256.0, 0.5, 1.0, 0.5, 1.0, 0.5],
        &mut Residuals::new(0),
    );
    assert_eq!(rows.expect("finite"), [[258.0, 1.5]]);
}

#[test]
fn what_an_encoding_cannot_hold_goes_by_the_policy() {
    let pack_as = |policy| decoded(Encoding::F16, policy, &[7], &[1.0, 1e6], &mut Residuals::new(0));
    let refused = pack_as(NonFinitePolicy::Reject).expect_err("more than f16 holds");
    assert_eq!(refused.kind(), ErrorKind::NonFinite);
    assert!(refused.to_string().contains("column 1 of id 7 is 1000000, which f16"), "{refused}");
    assert_eq!(pack_as(NonFinitePolicy::Clip).expect("clipped"), [[1.0, 65504.0]]);
    assert_eq!(pack_as(NonFinitePolicy::SkipRow).expect("for the servers to skip"), [[1.0, f32::INFINITY]]);
}

#[test]
fn what_int8_leaves_out_comes_with_the_next_gradients() {
    let mut residuals = Residuals::new(1 << 20);
    let (mut sent, steps) = ([0.0f64; 2], 1000);
    for _ in 0..steps {
        // The second is a third of a step: alone it would round to nothing each time.
        let rows = decoded(Encoding::Int8, NonFinitePolicy::Reject, &[7], &[1.27, 0.0033], &mut residuals)
            .expect("finite");
        sent.iter_mut().zip(rows[0]).for_each(|(sum, value)| *sum += f64::from(value));
    }
    let wanted = [1.27, 0.0033].map(|value: f64| value * f64::from(steps));
    for (sent, wanted) in sent.iter().zip(wanted) {
        assert!((sent - wanted).abs() < 0.02, "{sent} {wanted}");
    }
}

#[test]
fn a_refused_push_leaves_residuals_as_they_were_and_values_end_them() {
    let mut residuals = Residuals::new(1 << 20);
    let push = |ids: &[u64], values: &[f32], residuals: &mut Residuals| {
        decoded(Encoding::Int8, NonFinitePolicy::Reject, ids, values, residuals)
    };
    push(&[7], &[1.27, 0.0033], &mut residuals).expect("finite");
    let before = residuals.get(1, 7).map(<[f32]>::to_vec);
    assert!(before.is_some());
    let refused = push(&[7, 8, 8], &[1.0, 0.001, 3e38, 0.0, 3e38, 0.0], &mut residuals);
    assert!(refused.is_err(), "the sum of 8 is infinite");
    assert_eq!(residuals.get(1, 7).map(<[f32]>::to_vec), before);
    let content = Content {
        table: 1,
        name: "t",
        dim: 2,
        operation: Operation::Set,
        encoding: Encoding::F32,
        ids: &[7],
        values: &[0.0, 0.0],
        non_finite: NonFinitePolicy::Reject,
        counts: false,
    };
    pack(&[content], &crate::routing_cache::table_for_tests(1), None, &mut residuals, &mut Found::default())
        .expect("packed");
    assert_eq!(residuals.get(1, 7), None);
}
