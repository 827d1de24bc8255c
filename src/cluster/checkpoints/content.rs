//! The manifest's content, from the cuts, the parts and the meta group's state at the hold.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use evershard_checkpoint::manifest::{
    Content, JobEntry, Link, LinkKind, ShardEntry, TableEntry, WorkerEntry,
};
use evershard_checkpoint::name::CheckpointName;
use evershard_proto::digest::Digest;
use evershard_proto::v1::{CreateCheckpointRequest, ErrorKind, MetaJob, MetaState, PartDone};
use prost::Message;

use super::{Cut, shard_before};
use crate::meta::{jobs, steps};
use crate::service::RequestError;

/// How long workers were waited for, and held.
pub(super) struct Times {
    pub(super) hold_ms: f64,
    pub(super) wait_ms: f64,
}

fn malformed(what: impl std::fmt::Display) -> RequestError {
    RequestError::new(ErrorKind::Internal, format!("a part of the checkpoint is not as it should be: {what}"))
}

/// What the manifest says.
pub(super) fn content_of(
    state: &MetaState,
    (name, request): (CheckpointName, CreateCheckpointRequest),
    (cuts, parts): (&[Cut], Vec<PartDone>),
    before: Option<&Content>,
    Times { hold_ms, wait_ms }: Times,
) -> Result<Content, RequestError> {
    let mut counted: BTreeMap<u32, (u64, Digest)> = BTreeMap::new();
    let (mut shards, mut bytes_added, mut has_deltas) = (Vec::new(), 0, false);
    for (cut, part) in cuts.iter().zip(parts) {
        bytes_added += part.bytes_added;
        has_deltas |= cut.above.is_some();
        for table in &part.tables {
            let raw: [u8; 16] =
                table.digest[..].try_into().map_err(|_| malformed("a digest of another length"))?;
            let (rows, digest) = counted.entry(table.table).or_default();
            *rows += table.rows;
            *digest = digest.merge(Digest::from_u128(u128::from_le_bytes(raw)));
        }
        shards.push(shard_entry(cut, &part, before)?);
    }
    shards.sort_by_key(|shard| shard.first_key);
    // A table that is being created or dropped is on some shards only: it is in no checkpoint.
    let in_order = |table: &&evershard_proto::v1::MetaTable| table.active && !table.dropped;
    let mut tables = Vec::new();
    for table in state.tables.iter().filter(in_order) {
        let Some(definition) = &table.definition else { continue };
        let (rows, digest) = counted.get(&table.number).copied().unwrap_or_default();
        tables.push(TableEntry {
            name: definition.name.clone(),
            number: table.number,
            definition: definition.encode_to_vec(),
            definition_version: table.definition_version,
            rows,
            digest: digest.to_string(),
        });
    }
    tables.sort_by_key(|table| table.number);
    let mut jobs: Vec<JobEntry> = state.jobs.iter().map(job_entry).collect();
    jobs.sort_by(|a, b| a.name.cmp(&b.name));
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut content = Content {
        name,
        created_ms: u64::try_from(created.as_millis()).unwrap_or(u64::MAX),
        cluster: state.cluster_id.clone(),
        cluster_version: state.cluster_version,
        tables,
        shards,
        bytes_total: 0,
        bytes_added,
        parent: before.filter(|_| has_deltas).map(|before| before.name.clone()),
        jobs,
        metadata: request.metadata.into_iter().collect(),
        hold_ms,
        wait_ms,
    };
    content.bytes_total = content.sum_of_bytes();
    content.bytes_added = content.bytes_added.min(content.bytes_total);
    Ok(content)
}

fn shard_entry(cut: &Cut, part: &PartDone, before: Option<&Content>) -> Result<ShardEntry, RequestError> {
    let link: Link = serde_json::from_slice(&part.link).map_err(malformed)?;
    let kind = if cut.above.is_some() { LinkKind::Delta } else { LinkKind::Base };
    if (link.kind, link.cut) != (kind, cut.index) {
        return Err(malformed(format!(
            "a {:?} of cut {} was written, not of {}",
            link.kind, link.cut, cut.index
        )));
    }
    let mut links = match cut.above {
        Some(_) => shard_before(before, &cut.placement).map_or_else(Vec::new, |shard| shard.links.clone()),
        None => Vec::new(),
    };
    links.push(link);
    Ok(ShardEntry {
        shard: cut.placement.shard,
        group: cut.placement.group,
        cut: cut.index,
        term: part.term,
        first_key: cut.placement.range_start,
        last_key: cut.placement.range_end,
        links,
        state: serde_json::from_slice(&part.state).map_err(malformed)?,
    })
}

fn job_entry(job: &MetaJob) -> JobEntry {
    let definition = job.definition.clone().unwrap_or_default();
    let step = if steps::sums_steps(&definition) { job.step } else { jobs::slowest(job).unwrap_or(0) };
    let worker = |(rank, worker): (u32, &evershard_proto::v1::MetaWorker)| WorkerEntry {
        rank,
        clock: worker.clock,
        barriers: worker.barriers,
        cursor: worker.cursor.to_vec(),
    };
    JobEntry {
        name: definition.name.clone(),
        number: job.number,
        definition: definition.encode_to_vec(),
        step,
        workers: (0..).zip(&job.workers).map(worker).collect(),
    }
}
