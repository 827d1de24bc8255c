//! What follows from a difference that a second scrub has confirmed: the minority's replica is quarantined where it is, and
//! rebuilt from its peers under a new id, like any replica that is lost.
//!
//! Invariants:
//! - a replica is quarantined only when it differed twice, every replica of the group gave a digest, and more than half of
//!   them are equal without it: who is wrong is never guessed;
//! - never while a replacement in the group is under way: a group loses one replica at a time;
//! - the order names the replica's id, so a successor is never meant.
//!
//! Not here: computing and comparing digests (`scrub`), replacing what is quarantined (`admission`, `membership`).

use std::collections::BTreeMap;
use std::sync::Arc;

use evershard_proto::v1::{
    ErrorKind, GroupPlacement, MetaState, QuarantineReplicaRequest, ReplicaPlacement, ShardDigests,
};

use super::node::Node;
use crate::service::RequestError;

/// The replicas whose digest is not the one that most of the group have; none when there is no such digest, when a replica
/// gave none, or when the group is being changed.
pub(super) fn minority<'a>(group: &'a GroupPlacement, shard: &ShardDigests) -> Vec<&'a ReplicaPlacement> {
    let is_changing = group.replicas.iter().any(|r| r.replaces != 0 || !r.created);
    if !shard.problem.is_empty() || is_changing || shard.digests.len() != group.replicas.len() {
        return Vec::new();
    }
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for digest in &shard.digests {
        *counts.entry(&digest.digest).or_default() += 1;
    }
    let Some((right, _)) = counts.into_iter().find(|(_, count)| count * 2 > group.replicas.len()) else {
        return Vec::new();
    };
    let is_wrong =
        |r: &&ReplicaPlacement| shard.digests.iter().any(|d| d.node == r.node && d.digest != right);
    group.replicas.iter().filter(is_wrong).collect()
}

impl Node {
    /// Quarantines the replicas that were in the minority in both scrubs, and notes them in the second.
    pub(super) async fn quarantine_minorities(
        self: &Arc<Self>,
        state: &MetaState,
        first: &[ShardDigests],
        second: &mut [ShardDigests],
    ) -> Result<(), RequestError> {
        for shard in second {
            let group = state.groups.iter().find(|g| g.shard == shard.shard);
            let before = first.iter().find(|known| known.shard == shard.shard);
            let (Some(group), Some(before)) = (group, before) else { continue };
            let differed_before = minority(group, before);
            let mut differ_twice = minority(group, shard);
            differ_twice.retain(|replica| differed_before.contains(replica));
            for replica in differ_twice {
                let reason = format!(
                    "its digest at index {} and at index {} is not that of the other replicas",
                    before.index, shard.index
                );
                self.order_quarantine(state, group, replica, reason).await?;
                shard.quarantined.push(replica.node);
            }
        }
        Ok(())
    }

    async fn order_quarantine(
        self: &Arc<Self>,
        state: &MetaState,
        group: &GroupPlacement,
        replica: &ReplicaPlacement,
        reason: String,
    ) -> Result<(), RequestError> {
        let (node, id) = (replica.node, replica.replica);
        tracing::warn!(shard = group.shard, group = group.group, node, replica = id, %reason, "a minority replica is quarantined");
        let request = QuarantineReplicaRequest {
            cluster_id: state.cluster_id.clone(),
            node,
            group: group.group,
            replica: id,
            reason,
        };
        if node == self.config.node_id {
            return self.quarantine_replica(&request).await;
        }
        let address = state.nodes.iter().find(|n| n.id == node).map(|n| n.address.as_str());
        let address = address.ok_or_else(|| {
            RequestError::new(ErrorKind::Internal, format!("node {node} has no address"))
                .in_group(group.group)
        })?;
        let mut client = self.peers.node(address)?;
        match client.quarantine_replica(request).await {
            Ok(_) => Ok(()),
            Err(status) => Err(RequestError::from_status(&status)),
        }
    }

    /// Quarantines a replica of this node for what others found out about it. Fine when it is quarantined already.
    ///
    /// # Errors
    /// INVALID when it is not here, or its group has lost another replica already.
    pub async fn quarantine_replica(
        self: &Arc<Self>,
        request: &QuarantineReplicaRequest,
    ) -> Result<(), RequestError> {
        let invalid = |what: String| Err(RequestError::new(ErrorKind::Invalid, what).in_group(request.group));
        if request.node != self.config.node_id {
            return invalid(format!("this is node {}, not {}", self.config.node_id, request.node));
        }
        let state = self.meta_state();
        let is_changing =
            |g: &&GroupPlacement| g.group == request.group && g.replicas.iter().any(|r| r.replaces != 0);
        if state.groups.iter().any(|g| is_changing(&g)) {
            return invalid(format!("group {} is replacing a replica already", request.group));
        }
        let listed = self.listed();
        let listed = listed.iter().find(|r| r.group == request.group && r.replica == request.replica);
        match listed {
            None => invalid(format!("replica {} is not on node {}", request.replica, request.node)),
            Some(listed) if listed.damaged => Ok(()),
            Some(listed) => Ok(self.lose_for(*listed, request.reason.clone()).await?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evershard_proto::v1::ReplicaDigest;

    fn group(replicas: u64) -> GroupPlacement {
        let placed = |n| ReplicaPlacement { replica: n + 10, node: n, created: true, replaces: 0, making: 0 };
        GroupPlacement { group: 1, replicas: (1..=replicas).map(placed).collect(), ..Default::default() }
    }

    fn shard(digests: &[&str]) -> ShardDigests {
        let digests = (1..).zip(digests).map(|(node, d)| ReplicaDigest { node, digest: (*d).to_owned() });
        ShardDigests { digests: digests.collect(), ..Default::default() }
    }

    fn wrong(group: &GroupPlacement, shard: &ShardDigests) -> Vec<u64> {
        minority(group, shard).iter().map(|r| r.replica).collect()
    }

    const NOBODY: [u64; 0] = [];

    #[test]
    fn only_a_minority_beside_an_equal_majority_is_wrong() {
        assert_eq!(wrong(&group(3), &shard(&["a", "b", "a"])), [12]);
        assert_eq!(wrong(&group(5), &shard(&["a", "b", "a", "c", "a"])), [12, 14]);
        assert_eq!(wrong(&group(3), &shard(&["a", "a", "a"])), NOBODY);
        for undecided in [&["a", "b", "c"][..], &["a", "a", "b", "b"], &["a", "b"]] {
            assert_eq!(wrong(&group(undecided.len() as u64), &shard(undecided)), NOBODY, "{undecided:?}");
        }
    }

    #[test]
    fn nobody_is_wrong_while_somebody_is_missing() {
        let problem = ShardDigests { problem: "node 3 gave no answer".into(), ..shard(&["a", "b", "a"]) };
        assert_eq!(wrong(&group(3), &problem), NOBODY);
        // Two of three answered.
        assert_eq!(wrong(&group(3), &shard(&["a", "b"])), NOBODY);
        let mut changing = group(3);
        changing.replicas[0].replaces = 9;
        assert_eq!(wrong(&changing, &shard(&["a", "b", "a"])), NOBODY);
        let mut being_made = group(3);
        being_made.replicas[2].created = false;
        assert_eq!(wrong(&being_made, &shard(&["a", "b", "a"])), NOBODY);
    }
}
