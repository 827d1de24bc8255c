//! Scrubbing: one entry in each shard's log fixes the index at which every replica computes its digest; this node
//! collects and compares them.
//!
//! Invariant: digests are compared at one index a shard, or not at all: a replica that gives none within the deadline is
//! named, and the shard is not called equal.
//!
//! Not here: computing a digest (`shard/`, `read/digest.rs`), what becomes of a replica that differs (`scrub_repair`), when
//! nobody asks (`scrub_schedule`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::shard_command::ShardCommand;
use evershard_proto::v1::{
    GetNodeStatusRequest, GroupPlacement, MetaState, NodeAddress, NodeStatus, ReplicaDigest, ScrubReply,
    ShardDigests,
};
use futures_util::future::{join_all, try_join_all};

use super::node::Node;
use super::scrub_schedule::outcome;
use crate::meta::state::META_SHARD;
use crate::service::RequestError;
use crate::telemetry::metric_definitions as metric;

/// Between two looks at who has its digest: the first, growing to the last.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// For the shards' leaders to take the entry.
const PROPOSE_WITHIN: Duration = Duration::from_secs(120);

impl Node {
    /// Digests of every replica of `shards` (all, when empty). Shards whose replicas differ are scrubbed once more, and the
    /// second result is the one that counts (design 14.12). With `repair`, minority replicas that differed twice are quarantined.
    ///
    /// # Errors
    /// UNAVAILABLE when a shard has no leader until the deadline.
    pub async fn scrub(
        self: &Arc<Self>,
        shards: &[u32],
        repair: bool,
        deadline: Instant,
    ) -> Result<ScrubReply, RequestError> {
        let scrubbed = self.scrub_shards(shards, repair, deadline).await;
        let count = |result| metrics::counter!(metric::SCRUBS_TOTAL, "result" => result).increment(1);
        match &scrubbed {
            Ok(reply) => reply.shards.iter().map(outcome).for_each(count),
            Err(_) => count("failed"),
        }
        scrubbed
    }

    async fn scrub_shards(
        self: &Arc<Self>,
        shards: &[u32],
        repair: bool,
        deadline: Instant,
    ) -> Result<ScrubReply, RequestError> {
        let state = self.meta_state();
        let wanted: Vec<&GroupPlacement> = state
            .groups
            .iter()
            .filter(|g| g.shard != META_SHARD && (shards.is_empty() || shards.contains(&g.shard)))
            .collect();
        let mut found = self.scrub_once(&state, &wanted, deadline).await?;
        let differs = |shard: &ShardDigests| !shard.equal && shard.problem.is_empty();
        let doubtful: Vec<&GroupPlacement> = wanted
            .iter()
            .copied()
            .filter(|group| found.iter().any(|shard| shard.shard == group.shard && differs(shard)))
            .collect();
        if doubtful.is_empty() {
            return Ok(ScrubReply { shards: found });
        }
        for first in found.iter().filter(|shard| differs(shard)) {
            tracing::error!(shard = first.shard, index = first.index, digests = ?first.digests, "replicas differ");
        }
        let mut confirmed = self.scrub_once(&state, &doubtful, deadline).await?;
        if repair {
            self.quarantine_minorities(&state, &found, &mut confirmed).await?;
        }
        for second in confirmed {
            if let Some(shard) = found.iter_mut().find(|shard| shard.shard == second.shard) {
                *shard = second;
            }
        }
        Ok(ScrubReply { shards: found })
    }

    async fn scrub_once(
        self: &Arc<Self>,
        state: &MetaState,
        wanted: &[&GroupPlacement],
        deadline: Instant,
    ) -> Result<Vec<ShardDigests>, RequestError> {
        let scrub_id = (uuid::Uuid::new_v4().as_u128() as u64).max(1);
        let entry = ShardCommand::Scrub { scrub_id };
        let propose_by = deadline.min(Instant::now() + PROPOSE_WITHIN);
        let proposals = wanted.iter().map(|g| self.propose_to_shard(g.group, &entry, propose_by));
        try_join_all(proposals).await?;
        let mut found = self.collect(state, wanted, scrub_id).await;
        let mut pause = PAUSE;
        while found.iter().any(|s| !s.problem.is_empty()) && Instant::now() + pause < deadline {
            let unreachable = found.iter().all(|s| !s.problem.contains("no digest yet"));
            if unreachable {
                break;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
            found = self.collect(state, wanted, scrub_id).await;
        }
        Ok(found)
    }

    async fn collect(
        self: &Arc<Self>,
        state: &MetaState,
        wanted: &[&GroupPlacement],
        scrub_id: u64,
    ) -> Vec<ShardDigests> {
        let ask = |node: &NodeAddress| {
            let (id, address) = (node.id, node.address.clone());
            async move { (id, self.ask_status(id, &address, scrub_id).await) }
        };
        let answers = join_all(state.nodes.iter().map(ask)).await;
        wanted.iter().map(|group| compare(group, &answers)).collect()
    }

    async fn ask_status(
        self: &Arc<Self>,
        id: u64,
        address: &str,
        scrub_id: u64,
    ) -> Result<NodeStatus, RequestError> {
        let request = GetNodeStatusRequest { with_digest: false, scrub_id };
        if id == self.config.node_id {
            let node = self.clone();
            let asked = tokio::task::spawn_blocking(move || node.status(&request)).await;
            return asked.map_err(|e| {
                RequestError::new(evershard_proto::v1::ErrorKind::Internal, format!("own status: {e}"))
            });
        }
        let mut client = self.peers.admin(address)?;
        match client.get_node_status(request).await {
            Ok(reply) => Ok(reply.into_inner()),
            Err(status) => Err(RequestError::from_status(&status)),
        }
    }
}

fn compare(group: &GroupPlacement, answers: &[(u64, Result<NodeStatus, RequestError>)]) -> ShardDigests {
    let mut shard = ShardDigests { shard: group.shard, ..Default::default() };
    let mut problems = Vec::new();
    let mut indexes = Vec::new();
    for placed in group.replicas.iter().filter(|r| r.created) {
        let node = placed.node;
        let status = match answers.iter().find(|(id, _)| *id == node) {
            Some((_, Ok(status))) => status,
            Some((_, Err(error))) => {
                problems.push(format!("node {node} gave no answer: {error}"));
                continue;
            }
            None => continue,
        };
        match status.replicas.iter().find(|r| r.replica == placed.replica) {
            Some(replica) if matches!(replica.role.as_str(), "quarantined" | "stopped") => {
                problems.push(format!(
                    "its replica on node {node} is quarantined: {}",
                    replica.quarantine_reason
                ));
            }
            Some(replica) if replica.digest == "skipped" => {
                let reason = match replica.quarantine_reason.as_str() {
                    // Of an older build.
                    "" => "skipped the scrub",
                    reason => reason,
                };
                problems.push(format!("its replica on node {node} {reason}"));
            }
            Some(replica) if !replica.digest.is_empty() => {
                indexes.push(replica.digest_index);
                shard.digests.push(ReplicaDigest { node, digest: replica.digest.clone() });
            }
            _ => problems.push(format!("no digest yet from node {node}")),
        }
    }
    shard.index = indexes.first().copied().unwrap_or(0);
    if indexes.iter().any(|index| *index != shard.index) {
        problems.push("digests are of different indexes".into());
    }
    let first = shard.digests.first().map(|d| d.digest.clone());
    let same = shard.digests.iter().all(|d| Some(&d.digest) == first.as_ref());
    shard.equal = problems.is_empty() && same && !shard.digests.is_empty();
    shard.problem = problems.join("; ");
    shard
}

#[cfg(test)]
mod tests {
    use super::*;
    use evershard_proto::v1::{ReplicaPlacement, ReplicaStatus};

    fn answer(node: u64, digest: &str) -> (u64, Result<NodeStatus, RequestError>) {
        let replica =
            ReplicaStatus { replica: node, digest: digest.into(), digest_index: 9, ..Default::default() };
        (node, Ok(NodeStatus { node, replicas: vec![replica], ..Default::default() }))
    }

    #[test]
    fn equal_only_when_every_replica_gave_the_same_digest() {
        let placed = |n| ReplicaPlacement { replica: n, node: n, created: true, replaces: 0, making: 0 };
        let group = GroupPlacement { group: 1, replicas: vec![placed(1), placed(2)], ..Default::default() };
        assert!(compare(&group, &[answer(1, "aa"), answer(2, "aa")]).equal);
        assert!(!compare(&group, &[answer(1, "aa"), answer(2, "ab")]).equal);
        let (_, mut skipped) = answer(2, "skipped");
        if let Ok(status) = &mut skipped {
            status.replicas[0].quarantine_reason = crate::shard::SkipReason::ReadFailed.to_string();
        }
        let skipped = compare(&group, &[answer(1, "aa"), (2, skipped)]);
        assert!(!skipped.equal && skipped.problem.contains("could not read its rows"), "{}", skipped.problem);
        let missing = compare(&group, &[answer(1, "aa"), answer(2, "")]);
        assert!(!missing.equal && missing.problem.contains("node 2"));
    }
}
