//! Creating a checkpoint, on the meta group's leader.
//!
//! It walks: the target opened, the checkpoint before found -> a replica of each shard asked to write its part, a follower where
//! possible; each says that it waits -> all jobs held (`holds`) -> a cut proposed to every shard -> a quorum confirms that this node
//! leads still, and nobody has gone on meanwhile -> jobs go on -> parts come in -> the manifest.
//!
//! Invariants:
//! - cuts are proposed while all jobs are held, and jobs go on only after the last is committed: so the shards' states belong
//!   together, in every mode (design 8);
//! - the manifest is written last: whatever fails before it, there is no checkpoint, and the one before stays the latest.
//!
//! Not here: parts (`part_writer`, `crate::checkpoint`), what a manifest is (`evershard-checkpoint`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_checkpoint::manifest::{Content, ShardEntry};
use evershard_checkpoint::name::CheckpointName;
use evershard_checkpoint::target::{Target, TargetError};
use evershard_proto::shard_command::{CLUSTER_VERSION_CUTS, ShardCommand};
use evershard_proto::v1::create_checkpoint_event::Event;
use evershard_proto::v1::{
    CheckpointCut, CheckpointDone, CheckpointHeld, CheckpointProgress, CreateCheckpointEvent,
    CreateCheckpointRequest, ErrorKind, GroupPlacement, MetaState, ShardCut,
};
use futures_util::future::try_join_all;
use tokio::sync::mpsc;

use super::holds::places;
use super::node::Node;
use crate::checkpoint::builds_upon;
use crate::meta::state::META_SHARD;
use crate::service::RequestError;

mod content;
mod writer;

use writer::Writer;

/// For workers to end their step, when nobody says.
const HOLD_WITHIN: Duration = Duration::from_secs(60);
/// For the shards to commit their cuts, while workers are held.
const CUT_WITHIN: Duration = Duration::from_secs(10);
/// For every node to say that it knows what a cut is.
const RAISE_WITHIN: Duration = Duration::from_secs(20);

/// Where the events go.
pub(crate) type Events = mpsc::Sender<Result<CreateCheckpointEvent, tonic::Status>>;

/// A shard, cut.
struct Cut {
    placement: GroupPlacement,
    above: Option<u64>,
    index: u64,
    node: u64,
}

/// Opens a target, on a thread that may block.
pub(crate) async fn open_target(url: &str) -> Result<Target, RequestError> {
    let url = url.to_owned();
    let opened = tokio::task::spawn_blocking(move || Target::create(&url)).await;
    let opened = opened.map_err(|_| RequestError::new(ErrorKind::Internal, "opening the target panicked"))?;
    opened.map_err(|error| target_error(&error))
}

/// As the caller hears of it.
pub(crate) fn target_error(error: &TargetError) -> RequestError {
    let kind = match error {
        TargetError::Url { .. } => ErrorKind::Invalid,
        TargetError::Exists { .. } => ErrorKind::Conflict,
        TargetError::Store { .. } => ErrorKind::Unavailable,
        _ => ErrorKind::Corrupt,
    };
    RequestError::new(kind, error.to_string())
}

async fn tell(events: &Events, event: Event) -> Result<(), RequestError> {
    let sent = events.send(Ok(CreateCheckpointEvent { event: Some(event) })).await;
    sent.map_err(|_| RequestError::new(ErrorKind::Withdrawn, "whoever asked for the checkpoint is gone"))
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

impl Node {
    /// Creates a checkpoint of the cluster that this node leads.
    ///
    /// # Errors
    /// NOT_LEADER elsewhere; INVALID for a name or a target; CONFLICT when there is one of this name; UNAVAILABLE when workers, shards
    /// or the target do not answer. There is no checkpoint then.
    pub(crate) async fn create_checkpoint_here(
        self: &Arc<Self>,
        request: CreateCheckpointRequest,
        events: &Events,
    ) -> Result<(), RequestError> {
        self.leading_meta()?;
        let name = request.name.clone();
        let created = self.create_checkpoint_of(request, events).await;
        match &created {
            Ok(()) => tracing::info!(name, "a checkpoint is there"),
            Err(error) => tracing::warn!(name, %error, "a checkpoint was given up"),
        }
        created
    }

    async fn create_checkpoint_of(
        self: &Arc<Self>,
        request: CreateCheckpointRequest,
        events: &Events,
    ) -> Result<(), RequestError> {
        let name: CheckpointName = request
            .name
            .parse()
            .map_err(|error| RequestError::new(ErrorKind::Invalid, format!("{error}")))?;
        self.require_cluster_version(CLUSTER_VERSION_CUTS, Instant::now() + RAISE_WITHIN).await?;
        let target = open_target(&request.url).await?;
        if target.has(&name).await.map_err(|error| target_error(&error))? {
            let url = target.url().to_owned();
            return Err(target_error(&TargetError::Exists { target: url, name }));
        }
        let before = if request.base { None } else { self.checkpoint_before(&target).await? };
        let state = self.meta_state();
        let wanted: Vec<&GroupPlacement> = state.groups.iter().filter(|g| g.shard != META_SHARD).collect();
        let checkpoint = (uuid::Uuid::new_v4().as_u128() as u64).max(1);
        let asked = wanted.iter().map(|group| Writer::begin(self, &state, group, checkpoint, &request));
        let mut writers = try_join_all(asked).await?;

        let asked_at = Instant::now();
        let held = self.holds.begin().ok_or_else(|| {
            RequestError::new(ErrorKind::Unavailable, "another checkpoint is being cut: try again")
                .retry_soon()
        })?;
        let within = match request.hold_within_ms {
            0 => HOLD_WITHIN,
            millis => Duration::from_millis(millis.into()),
        };
        self.wait_until_held(asked_at + within).await.map_err(|missing| {
            RequestError::new(
                ErrorKind::Unavailable,
                format!("the jobs could not be held in time: {missing}"),
            )
        })?;
        let arrived_at = Instant::now();
        let wait_ms = millis(arrived_at - asked_at);
        let held_at = places(&self.meta_state());
        let cuts = self.cut_all(&wanted, &mut writers, checkpoint, before.as_ref()).await?;
        let hold_ms = millis(arrived_at.elapsed());
        self.confirm_meta_state().await?;
        let cut_state = self.meta_state();
        if places(&cut_state) != held_at {
            let what = "a worker went on, came or went while the shards were cut: the checkpoint would not be exact; try again";
            return Err(RequestError::new(ErrorKind::Unavailable, what).retry_soon());
        }
        drop(held);
        tell(events, Event::Held(CheckpointHeld { wait_ms })).await?;
        tell(events, Event::Cut(CheckpointCut { hold_ms, shards: shard_cuts(&cuts) })).await?;

        let parts = self.collect_parts(&mut writers, events).await?;
        let times = content::Times { hold_ms, wait_ms };
        let content =
            content::content_of(&cut_state, (name, request), (&cuts, parts), before.as_ref(), times)?;
        target.finish(&content).await.map_err(|error| target_error(&error))?;
        let done = CheckpointDone {
            name: content.name.to_string(),
            bytes_total: content.bytes_total,
            bytes_added: content.bytes_added,
            hold_ms,
            wait_ms,
            shards: shard_cuts(&cuts),
            parent: content.parent.map_or(String::new(), |parent| parent.to_string()),
        };
        tell(events, Event::Done(done)).await
    }

    /// The newest checkpoint of this cluster at the target. One that cannot be read is not built upon: it says so in the log.
    async fn checkpoint_before(&self, target: &Target) -> Result<Option<Content>, RequestError> {
        let mut listed = target.list().await.map_err(|error| target_error(&error))?;
        listed.sort_by_key(|listed| std::cmp::Reverse(listed.created_ms));
        let cluster = self.cluster_id();
        for listed in listed {
            match target.get_manifest(&listed.name).await {
                Ok(content) if content.cluster == cluster => return Ok(Some(content)),
                Ok(_) => {}
                Err(error) if error.is_of_the_store() => return Err(target_error(&error)),
                Err(error) => {
                    tracing::warn!(%error, "no checkpoint to build upon: a base is written");
                    return Ok(None);
                }
            }
        }
        Ok(None)
    }

    /// Proposes the cuts, all at once, and hears from who writes at which entry each came.
    async fn cut_all(
        self: &Arc<Self>,
        wanted: &[&GroupPlacement],
        writers: &mut [Writer],
        checkpoint: u64,
        before: Option<&Content>,
    ) -> Result<Vec<Cut>, RequestError> {
        let deadline = Instant::now() + CUT_WITHIN;
        let cut = |(group, writer): (&&GroupPlacement, &Writer)| {
            let placement = GroupPlacement::clone(group);
            let above = builds_upon(shard_before(before, &placement), placement.group, writer.remembered());
            let command = ShardCommand::Cut { checkpoint, above: above.unwrap_or(0) };
            let node = writer.node();
            async move {
                self.propose_to_shard(placement.group, &command, deadline).await?;
                Ok::<_, RequestError>(Cut { placement, above, index: 0, node })
            }
        };
        let mut cuts = try_join_all(wanted.iter().zip(&*writers).map(cut)).await?;
        let indexes = try_join_all(writers.iter_mut().map(|writer| writer.cut_index(deadline))).await?;
        for (cut, index) in cuts.iter_mut().zip(indexes) {
            cut.index = index;
        }
        Ok(cuts)
    }

    async fn collect_parts(
        &self,
        writers: &mut [Writer],
        events: &Events,
    ) -> Result<Vec<evershard_proto::v1::PartDone>, RequestError> {
        let shards = u32::try_from(writers.len()).unwrap_or(u32::MAX);
        let progress = parking_lot::Mutex::new(vec![(0, 0, false); writers.len()]);
        let told = |number: usize, rows: u64, bytes: u64, is_done: bool| {
            let mut all = progress.lock();
            all[number] = (rows.max(all[number].0), bytes.max(all[number].1), is_done);
            let shards_done = u32::try_from(all.iter().filter(|part| part.2).count()).unwrap_or(u32::MAX);
            let rows = all.iter().map(|part| part.0).sum();
            let bytes = all.iter().map(|part| part.1).sum();
            CheckpointProgress { rows, bytes, shards_done, shards }
        };
        let parts = writers.iter_mut().enumerate().map(|(number, writer)| {
            let told = &told;
            async move {
                let tell = |progress| {
                    // Who does not take them in time does without.
                    let _ =
                        events.try_send(Ok(CreateCheckpointEvent { event: Some(Event::Progress(progress)) }));
                };
                let part = writer.part(|rows, bytes| tell(told(number, rows, bytes, false))).await?;
                tell(told(number, 0, 0, true));
                Ok::<_, RequestError>(part)
            }
        });
        tokio::select! {
            parts = try_join_all(parts) => parts,
            () = events.closed() => {
                Err(RequestError::new(ErrorKind::Withdrawn, "whoever asked for the checkpoint is gone"))
            }
        }
    }
}

fn shard_cuts(cuts: &[Cut]) -> Vec<ShardCut> {
    let cut = |cut: &Cut| ShardCut {
        shard: cut.placement.shard,
        group: cut.placement.group,
        index: cut.index,
        node: cut.node,
        above: cut.above.unwrap_or(0),
    };
    cuts.iter().map(cut).collect()
}

/// The shard's entry in the checkpoint before, if it is of the same group and keys.
fn shard_before<'a>(before: Option<&'a Content>, group: &GroupPlacement) -> Option<&'a ShardEntry> {
    before?.shards.iter().find(|shard| {
        (shard.group, shard.first_key, shard.last_key) == (group.group, group.range_start, group.range_end)
    })
}

/// The nodes that hold a replica of a group, in the order in which they are asked to write: who does not lead comes first.
fn writers_of(state: &MetaState, group: &GroupPlacement, leader: Option<u64>) -> Vec<(u64, String)> {
    let mut nodes: Vec<(u64, String)> = group
        .replicas
        .iter()
        .filter(|replica| replica.created)
        .filter_map(|replica| state.nodes.iter().find(|node| node.id == replica.node))
        .map(|node| (node.id, node.address.clone()))
        .collect();
    nodes.sort_by_key(|(node, _)| Some(*node) == leader);
    // Shards spread over the nodes.
    let followers = nodes.iter().filter(|(node, _)| Some(*node) != leader).count();
    if followers > 1 {
        nodes[..followers].rotate_left(group.shard as usize % followers);
    }
    nodes
}
