//! What tests of whole checkpoints share: small ones, of one shard and one table.

use bytes::Bytes;
use std::collections::BTreeMap;

use tempfile::TempDir;

use crate::manifest::{Content, Link, LinkKind, RunEntry, sample};
use crate::reader::{Batch, Selection, TableRows};
use crate::run::{RowHead, RunShape, RunWriter};
use crate::target::{Target, TargetError};

/// The table of all rows here.
pub(crate) const TABLE: u32 = 4;
pub(crate) const SHAPE: RunShape = RunShape { dim: 2, state: 1, notes: 0 };

/// A directory with an opened target in it.
pub(crate) fn directory() -> (TempDir, Target) {
    let home = TempDir::new().expect("a folder");
    let target = Target::create(&format!("file://{}", home.path().display())).expect("a target");
    (home, target)
}

/// Puts a run of these keys and values, as of a version.
pub(crate) async fn put_rows(
    target: &Target,
    version: u64,
    rows: impl IntoIterator<Item = (u64, [f32; 3])>,
) -> Result<RunEntry, TargetError> {
    let mut run = RunWriter::new(TABLE, SHAPE).expect("a shape");
    for (key, floats) in rows {
        run.push(key, RowHead { version, steps: 1, flags: 0 }, &floats).expect("it goes in");
    }
    Ok(target.put_run(&run.finish().expect("rows")).await?.0)
}

/// A checkpoint's content: a base of these runs, as of `cut`.
pub(crate) async fn content_of(
    target: &Target,
    name: &str,
    created_ms: u64,
    runs: Vec<RunEntry>,
) -> Result<Content, TargetError> {
    let mut content = sample();
    let mut shard = content.shards[1].clone();
    (shard.first_key, shard.cut) = (0, 10);
    shard.state = target.put_state(&Bytes::from_static(b"small")).await?.0;
    shard.links = vec![Link { kind: LinkKind::Base, cut: 10, runs, floors: BTreeMap::new() }];
    content.shards = vec![shard];
    (content.name, content.created_ms, content.parent) = (name.parse().expect("a name"), created_ms, None);
    (content.bytes_total, content.bytes_added) = (content.sum_of_bytes(), 0);
    let found = crate::verify::verify(target, &content, |_| ()).await;
    if let Some(table) = found.tables.first() {
        (content.tables[0].rows, content.tables[0].digest) = (table.rows, table.digest.clone());
    }
    Ok(content)
}

/// How many rows there are, when the checkpoint is whole.
pub(crate) async fn rows_of(target: &Target, name: &str) -> Result<usize, TargetError> {
    let content = target.get_manifest(&name.parse().expect("a name")).await?;
    let mut rows = TableRows::new(target, &content, TABLE, Selection::all());
    let (mut batch, mut count) = (Batch::default(), 0);
    while rows.next_batch(&mut batch).await? {
        count += batch.len();
    }
    target.read_state(&content.shards[0].state).await?;
    Ok(count)
}
