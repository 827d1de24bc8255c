//! Manifests: the bytes of version 1, what contradicts itself, and whatever else may be read as one.

use std::collections::BTreeMap;

use evershard_formats::golden::golden;
use evershard_formats::{bytes_or_damaged, frugal, one_bit};
use evershard_proto::v1::{JobDefinition, TableDefinition};
use proptest::prelude::*;
use prost::Message;

use super::*;
use crate::hash::FileHash;

fn run(text: &str, first_key: u64, last_key: u64) -> RunEntry {
    let hash = FileHash::of(text.as_bytes());
    RunEntry { hash, table: 4, rows: 3, first_key, last_key, bytes: 100, crc32: 7 }
}

pub(crate) fn sample() -> Content {
    let definition = TableDefinition { name: "items".into(), dim: 2, ..Default::default() }.encode_to_vec();
    let job = JobDefinition { name: "ml".into(), workers: 2, ..Default::default() }.encode_to_vec();
    let state = StateEntry { hash: FileHash::of(b"state"), bytes: 50, crc32: 9 };
    let half = u64::MAX / 2;
    let base = Link { kind: LinkKind::Base, cut: 10, runs: vec![run("a", 0, half)], floors: BTreeMap::new() };
    let delta = Link { kind: LinkKind::Delta, cut: 20, runs: vec![run("b", 5, 5)], floors: [(4, 15)].into() };
    let other =
        Link { kind: LinkKind::Base, cut: 9, runs: vec![run("c", half + 1, u64::MAX)], ..base.clone() };
    let worker = |rank| WorkerEntry { rank, clock: 8, barriers: 1, cursor: vec![0, 255, rank as u8] };
    Content {
        name: "day-1".parse().expect("a name"),
        created_ms: 1_764_806_400_000,
        cluster: "c0ffee".into(),
        cluster_version: 3,
        tables: vec![TableEntry {
            name: "items".into(),
            number: 4,
            definition,
            definition_version: 1,
            rows: 6,
            digest: "0123456789abcdef0123456789abcdef".into(),
        }],
        shards: vec![
            ShardEntry {
                shard: 0,
                group: 1,
                cut: 20,
                term: 2,
                first_key: 0,
                last_key: half,
                links: vec![base, delta],
                state,
            },
            ShardEntry {
                shard: 1,
                group: 2,
                cut: 9,
                term: 1,
                first_key: half + 1,
                last_key: u64::MAX,
                links: vec![other],
                state,
            },
        ],
        bytes_total: 350,
        bytes_added: 150,
        parent: Some("day-0".parse().expect("a name")),
        jobs: vec![JobEntry {
            name: "ml".into(),
            number: 2,
            definition: job,
            step: 8,
            workers: vec![worker(0), worker(1)],
        }],
        metadata: [("epoch".to_owned(), "3".to_owned())].into(),
        hold_ms: 1.5,
        wait_ms: 20.25,
    }
}

#[test]
fn version_1_stays_as_it_is() {
    let bytes = golden(env!("CARGO_MANIFEST_DIR"), "manifest-1.json", &encode(&sample()).expect("valid"));
    assert_eq!(decode(&bytes).expect("a manifest"), sample());
}

#[test]
fn an_edited_manifest_and_one_of_another_version_are_refused() {
    let text = String::from_utf8(encode(&sample()).expect("valid")).expect("text");
    let edited = text.replace("\"rows\":6", "\"rows\":7");
    assert_ne!(edited, text);
    assert!(matches!(decode(edited.as_bytes()), Err(ManifestError::Checksum { .. })));
    let newer = text.replace("\"version\":1", "\"version\":2");
    assert!(matches!(decode(newer.as_bytes()), Err(ManifestError::Version { found: 2 })));
    let other = text.replace("evershard-checkpoint", "something-else");
    assert!(matches!(decode(other.as_bytes()), Err(ManifestError::Malformed { .. })));
    for length in 0..text.len() {
        assert!(decode(&text.as_bytes()[..length]).is_err(), "{length}");
    }
}

#[test]
fn what_contradicts_itself_is_no_manifest() {
    type Change = (&'static str, fn(&mut Content));
    let changes: Vec<Change> = vec![
        ("shards", |c| drop(c.shards.remove(1))),
        ("shard 1", |c| drop(c.shards.remove(0))),
        ("shard 1", |c| c.shards[1].first_key += 1),
        ("shards", |c| c.shards[1].shard = 0),
        ("shard 0", |c| c.shards[0].cut = 21),
        ("shard 0", |c| c.shards[0].links.clear()),
        ("shard 0, link 0", |c| c.shards[0].links[0].kind = LinkKind::Delta),
        ("shard 0, link 1", |c| c.shards[0].links[1].kind = LinkKind::Base),
        ("shard 0", |c| c.shards[0].links[1].cut = 10),
        ("shard 0, link 1", |c| c.shards[0].links[1].floors.extend([(4, 21)])),
        ("shard 0, link 0", |c| c.shards[0].links[0].runs[0].last_key = u64::MAX),
        ("shard 0, link 0", |c| c.shards[0].links[0].runs[0].rows = 0),
        ("bytes_total", |c| c.shards[0].links[0].runs[0].bytes += 1),
        ("bytes_total", |c| c.bytes_total += 1),
        ("bytes_added", |c| c.bytes_added = 351),
        ("shard 1", |c| c.shards[1].state.crc32 = 1),
        ("tables", |c| c.tables.push(c.tables[0].clone())),
        ("table 4", |c| c.tables[0].name = "users".into()),
        ("table 4", |c| c.tables[0].definition = vec![255]),
        ("table 4", |c| c.tables[0].digest = "12".into()),
        ("jobs", |c| c.jobs.push(c.jobs[0].clone())),
        ("job \"ml\"", |c| c.jobs[0].workers.swap(0, 1)),
        ("cluster", |c| c.cluster.clear()),
        ("hold_ms, wait_ms", |c| c.hold_ms = f64::NAN),
    ];
    for (number, (expected, change)) in changes.into_iter().enumerate() {
        let mut content = sample();
        change(&mut content);
        let Err(ManifestError::Invalid { place, what }) = content.check() else {
            panic!("change {number} at {expected} passed")
        };
        assert_eq!(place, expected, "change {number}: {what}");
        assert!(encode(&content).is_err());
    }
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    (0..100_u64, "[a-z]{1,9}").prop_map(|(step, value)| {
        let mut content = sample();
        content.jobs[0].step = step;
        content.metadata.insert("note".into(), value);
        encode(&content).expect("valid")
    })
}

proptest! {
    #[test]
    fn fuzz_manifest(bytes in bytes_or_damaged(bytes())) {
        if let Ok(content) = frugal(bytes.len(), || decode(&bytes)) {
            prop_assert_eq!(decode(&encode(&content).expect("was checked")).expect("ours"), content);
        }
    }

    #[test]
    fn fuzz_manifest_one_bit((valid, flipped) in one_bit(bytes())) {
        // What stands outside of the content and is not looked at does not change what is read.
        if let Ok(content) = decode(&flipped) {
            prop_assert_eq!(content, decode(&valid).expect("ours"));
        }
    }
}
