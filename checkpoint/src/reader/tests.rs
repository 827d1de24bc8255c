//! Chains of base and deltas against a map, and parts of ranges.

use std::collections::BTreeMap;

use bytes::Bytes;
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::manifest::{Link, LinkKind, sample};
use crate::run::{RowHead, RunWriter};

const SHAPE: RunShape = RunShape { dim: 2, state: 1, notes: 1 };
const TABLE: u32 = 4;

type Rows = BTreeMap<u64, (RowHead, Vec<f32>)>;

fn floats(head: &RowHead, value: u64) -> Vec<f32> {
    vec![value as f32; SHAPE.floats(head)]
}

/// Writes the rows of a link in runs of a few rows; with `twice`, some rows are in two runs.
async fn put(target: &Target, rows: &Rows, bytes_max: usize, twice: bool) -> Vec<crate::manifest::RunEntry> {
    let mut entries = Vec::new();
    let halves: [&dyn Fn(u64) -> bool; 2] = [&|_| true, &|key| twice && key % 3 == 0];
    for wanted in halves {
        let writer = || RunWriter::with_bytes_max(TABLE, SHAPE, bytes_max).expect("a shape");
        let mut run = writer();
        for (key, (head, floats)) in rows.iter().filter(|(key, _)| wanted(**key)) {
            if run.is_full() {
                let full = std::mem::replace(&mut run, writer()).finish().expect("rows");
                entries.push(target.put_run(&full).await.expect("put").0);
            }
            run.push(*key, *head, floats).expect("it goes in");
        }
        if !run.is_empty() {
            entries.push(target.put_run(&run.finish().expect("rows")).await.expect("put").0);
        }
    }
    entries
}

async fn read(target: &Target, content: &Content, selection: Selection) -> Rows {
    let mut rows = TableRows::new(target, content, TABLE, selection);
    let (mut batch, mut found) = (Batch::default(), Rows::new());
    while rows.next_batch(&mut batch).await.expect("a batch") {
        for row in batch.rows() {
            let floats = [row.values, row.notes].concat();
            assert!(found.last_key_value().is_none_or(|(last, _)| *last < row.key), "in order, each once");
            found.insert(row.key, (row.head, floats));
        }
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_chain_adds_up_to_its_last_state(
        links in prop::collection::vec(
            (prop::collection::vec((0..60_u64, 0..8_u32), 0..50), any::<bool>(), any::<bool>()), 1..5),
        bytes_max in 200..2000_usize,
        range in (0..70_u64, 0..70_u64),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let home = TempDir::new().expect("a folder");
            let target = Target::create(&format!("file://{}", home.path().display())).expect("a target");
            let mut content = sample();
            let mut shard = content.shards[0].clone();
            (shard.first_key, shard.last_key, shard.links) = (0, u64::MAX, Vec::new());
            shard.state = target.put_state(&Bytes::from_static(b"small")).await.expect("put").0;
            let (mut expected, mut version) = (Rows::new(), 0);
            for (number, (changes, clears, twice)) in links.iter().enumerate() {
                let (mut changed, mut floors) = (Rows::new(), BTreeMap::new());
                for (at, (key, kind)) in changes.iter().enumerate() {
                    version += 1;
                    if *clears && at == changes.len() / 2 && number > 0 {
                        floors.insert(TABLE, version);
                        expected.clear();
                        changed.clear();
                        continue;
                    }
                    let flags = match kind { 0 => RowHead::TOMBSTONE, 1 => RowHead::COUNTING, _ => 0 };
                    if number == 0 && flags == RowHead::TOMBSTONE {
                        continue;
                    }
                    let head = RowHead { version, steps: *kind, flags };
                    changed.insert(*key, (head, floats(&head, version)));
                    if head.is_tombstone() { expected.remove(key); } else { expected.insert(*key, (head, floats(&head, version))); }
                }
                version += 1;
                let kind = if number == 0 { LinkKind::Base } else { LinkKind::Delta };
                let runs = put(&target, &changed, bytes_max, *twice).await;
                shard.links.push(Link { kind, cut: version, runs, floors });
                shard.cut = version;
                content.shards = vec![shard.clone()];
                (content.bytes_total, content.bytes_added) = (content.sum_of_bytes(), 0);
                content.check().expect("valid");
                assert_eq!(read(&target, &content, Selection::all()).await, expected, "at link {number}");
            }
            let live: Rows = expected.clone().into_iter().filter(|(_, (head, _))| head.is_live()).collect();
            assert_eq!(read(&target, &content, Selection::live()).await, live);
            let keys = range.0.min(range.1)..=range.0.max(range.1);
            let part: Rows = expected.range(keys.clone()).map(|(key, row)| (*key, row.clone())).collect();
            assert_eq!(read(&target, &content, Selection { keys, counting: true }).await, part);
        });
    }
}

#[tokio::test]
async fn a_version_that_is_not_of_its_link_is_noticed() {
    let home = TempDir::new().expect("a folder");
    let target = Target::create(&format!("file://{}", home.path().display())).expect("a target");
    let mut content = sample();
    for (versions, cut) in [([5, 30], 20), ([5, 8], 20)] {
        let rows = |version: u64| {
            let head = RowHead { version, steps: 0, flags: 0 };
            Rows::from([(version, (head, floats(&head, 1)))])
        };
        let mut shard = content.shards[0].clone();
        (shard.first_key, shard.last_key, shard.cut) = (0, u64::MAX, cut);
        for (number, version) in versions.into_iter().enumerate() {
            shard.links[number].runs = put(&target, &rows(version), 1000, false).await;
            shard.links[number].floors.clear();
        }
        content.shards = vec![shard.clone(), content.shards[1].clone()];
        let mut rows = TableRows::new(
            &target,
            &Content { shards: vec![shard], ..content.clone() },
            TABLE,
            Selection::all(),
        );
        let mut batch = Batch::default();
        let error = loop {
            match rows.next_batch(&mut batch).await {
                Ok(true) => {}
                Ok(false) => panic!("not noticed"),
                Err(error) => break error,
            }
        };
        assert!(error.is_damage() && error.to_string().contains("version"), "{error}");
    }
}
