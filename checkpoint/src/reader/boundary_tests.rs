//! What happens where a batch ends: runs that begin exactly there, in links before and after.

use std::collections::BTreeMap;

use tempfile::TempDir;

use super::*;
use crate::manifest::{Link, LinkKind, sample};
use crate::run::{RowHead, RunWriter};

const SHAPE: RunShape = RunShape { dim: 1, state: 0, notes: 0 };
const TABLE: u32 = 4;

async fn link(target: &Target, cut: u64, runs: &[&[(u64, u64, u32)]]) -> Link {
    let mut entries = Vec::new();
    for rows in runs {
        let mut run = RunWriter::new(TABLE, SHAPE).expect("a shape");
        for (key, version, flags) in *rows {
            let head = RowHead { version: *version, steps: 0, flags: *flags };
            let floats = vec![*version as f32; SHAPE.floats(&head)];
            run.push(*key, head, &floats).expect("it goes in");
        }
        entries.push(target.put_run(&run.finish().expect("rows")).await.expect("put").0);
    }
    let kind = if cut == 10 { LinkKind::Base } else { LinkKind::Delta };
    Link { kind, cut, runs: entries, floors: BTreeMap::new() }
}

/// A delta has the keys 0 to `rows`; a run of the base begins at the last of them, and is not opened before.
async fn keys_and_versions(rows: u64, last_is_tombstone: bool) -> Vec<(u64, u64)> {
    let home = TempDir::new().expect("a folder");
    let target = Target::create(&format!("file://{}", home.path().display())).expect("a target");
    let last = rows - 1;
    let flag = |key| if key == last && last_is_tombstone { RowHead::TOMBSTONE } else { 0 };
    let delta: Vec<(u64, u64, u32)> = (0..rows).map(|key| (key, 15, flag(key))).collect();
    let base = link(&target, 10, &[&[(last, 3, 0), (last + 1, 3, 0)], &[(last, 3, 0)]]).await;
    let mut content = sample();
    let mut shard = content.shards[0].clone();
    (shard.first_key, shard.last_key, shard.cut) = (0, u64::MAX, 20);
    shard.links = vec![base, link(&target, 20, &[&delta]).await];
    content.shards = vec![shard];
    let mut stream = TableRows::new(&target, &content, TABLE, Selection::all());
    let (mut batch, mut found) = (Batch::default(), Vec::new());
    while stream.next_batch(&mut batch).await.expect("a batch") {
        found.extend(batch.rows().map(|row| (row.key, row.head.version)));
    }
    found
}

#[tokio::test]
async fn a_key_at_the_end_of_a_batch_is_not_seen_again_in_a_link_before() {
    for rows in [1, 2, 1023, 1024, 1025, 2047, 2048, 2049] {
        let expected: Vec<(u64, u64)> = (0..rows).map(|key| (key, 15)).chain([(rows, 3)]).collect();
        assert!(keys_and_versions(rows, false).await == expected, "{rows} rows");
    }
}

#[tokio::test]
async fn a_row_that_was_removed_at_the_end_of_a_batch_does_not_come_back() {
    for rows in [1, 1024, 1025, 1026, 2049] {
        let expected: Vec<(u64, u64)> = (0..rows - 1).map(|key| (key, 15)).chain([(rows, 3)]).collect();
        assert!(keys_and_versions(rows, true).await == expected, "{rows} rows");
    }
}
