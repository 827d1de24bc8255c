//! What a node shows of itself: its replicas, how far they are, their digests.
//!
//! Not here: putting the nodes' answers together (`evershardctl status`).

use evershard_proto::v1::{GetNodeStatusRequest, NodeStatus, ReplicaStatus, TableCount};
use evershard_raft::{Group, Role};

use super::identity::ListedReplica;
use super::node::Node;
use super::replicas::ShardReplica;
use crate::model::CLUSTER_VERSION_MAX;
use crate::shard::ScrubResult;

impl Node {
    /// This node's replicas. Blocks while digests are computed, when they are asked for.
    #[must_use]
    pub fn status(&self, request: &GetNodeStatusRequest) -> NodeStatus {
        let quarantined = self.replicas.quarantined();
        let shards = self.replicas.shards();
        let mut replicas: Vec<ReplicaStatus> = Vec::new();
        for listed in self.listed() {
            if let Some(found) = quarantined.iter().find(|q| q.listed.replica == listed.replica) {
                let quarantine_reason = found.reason.clone();
                // Admission gives a successor to what is quarantined, and to nothing else.
                let role = if found.is_lost { "quarantined" } else { "stopped" };
                replicas.push(ReplicaStatus { role: role.into(), quarantine_reason, ..named(listed) });
            } else if let Some(shard) = shards.iter().find(|s| s.listed.replica == listed.replica) {
                replicas.push(shard_status(shard, request));
            } else if let Some(meta) = self.replicas.meta().filter(|m| m.listed.replica == listed.replica) {
                let mut status = raft_status(listed, &meta.raft);
                status.applied = meta.machine.applied_index();
                status.flushed = meta.machine.flushed_index();
                replicas.push(status);
            } else {
                replicas.push(ReplicaStatus { role: "starting".into(), ..named(listed) });
            }
        }
        NodeStatus {
            node: self.config.node_id,
            cluster_id: self.cluster_id(),
            replicas,
            software_version: env!("CARGO_PKG_VERSION").into(),
            ready: self.readiness.problem().is_none(),
            given_up: self.given_up(),
            cluster_version_max: CLUSTER_VERSION_MAX,
            disk: Some(self.disk.status(self.config.node_id)),
            uptime_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        }
    }
}

fn named(listed: ListedReplica) -> ReplicaStatus {
    ReplicaStatus { group: listed.group, shard: listed.shard, replica: listed.replica, ..Default::default() }
}

fn raft_status(listed: ListedReplica, raft: &Group) -> ReplicaStatus {
    let status = raft.status();
    let role = match status.role {
        Role::Leader => "leader",
        Role::Follower => "follower",
        Role::Learner => "learner",
        Role::Candidate => "candidate",
        Role::Stopped => "starting",
    };
    ReplicaStatus {
        role: role.into(),
        term: status.term,
        last_index: status.last_index.unwrap_or(0),
        committed: status.committed.unwrap_or(0),
        applied: status.applied.map_or(0, |p| p.index),
        leader_node: status.leader.map_or(0, |(_, peer)| peer.node),
        purged: status.purged.unwrap_or(0),
        ..named(listed)
    }
}

fn shard_status(replica: &ShardReplica, request: &GetNodeStatusRequest) -> ReplicaStatus {
    let mut status = raft_status(replica.listed, &replica.raft);
    let shard = replica.machine.status();
    status.applied = shard.applied;
    status.flushed = shard.flushed;
    let count = |t: &crate::shard::TableStatus| TableCount {
        table: t.table,
        rows: t.rows,
        memory_bytes: t.memory_bytes,
        resident: t.resident,
        free_bytes: t.free_bytes,
        overhead_bytes: t.overhead_bytes,
        uncounted: !t.is_counted,
    };
    status.tables = shard.tables.iter().map(count).collect();
    let digest = if request.scrub_id != 0 {
        match replica.machine.scrub_result(request.scrub_id) {
            Some(ScrubResult::Done { index, digest }) => Some((index, digest.to_string())),
            Some(ScrubResult::Skipped(reason)) => {
                status.quarantine_reason = reason.to_string();
                Some((0, String::new()))
            }
            Some(ScrubResult::Pending) | None => None,
        }
    } else if request.with_digest {
        replica.machine.digest().map(|(index, digest)| (index, digest.to_string()))
    } else {
        None
    };
    if let Some((index, digest)) = digest {
        status.digest_index = index;
        // A scrub that a replica skipped says so, and the reason why.
        status.digest = if digest.is_empty() { "skipped".into() } else { digest };
    }
    status
}
