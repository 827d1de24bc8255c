//! Unsafe recovery: the majority of the replicas is lost for good, and the one that is left goes on alone, by an operator's
//! decision. What only the lost ones had acknowledged is lost with them.
//!
//! The walk, on the surviving node: check that it is meant and true; then for each group that lost its majority, the meta
//! group first: the group ends, an entry in its log makes this replica the only voter, the group opens again and elects
//! itself. From there all goes its usual way: wiped nodes join, get successors for what they lost, catch up and vote.
//!
//! Invariants:
//! - nothing happens unless the request names this cluster and all the nodes whose replicas are given up;
//! - a group whose living voters are a majority is left alone, and so is one in which another voter lives;
//! - the replicas that are given up are written down before the first group is touched (`recoveries.rs`);
//! - a node that is named as lost and still answers with a voter of such a group is not lost: nothing happens at all;
//! - what was done is in the log, as a warning, a line for each group.
//!
//! Not here: the entry itself (`evershard_raft::make_sole_voter`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::v1::{
    ErrorKind, GetNodeStatusRequest, NodeStatus, RecoveredGroup, UnsafeRecoverReply, UnsafeRecoverRequest,
};
use evershard_raft::{Members, Peer, make_sole_voter};

use super::identity::ListedReplica;
use super::node::Node;
use crate::meta::state::META_GROUP;
use crate::service::RequestError;

/// For a node that is said to be lost.
const ASK_WITHIN: Duration = Duration::from_secs(3);
/// For opening a recovered replica again.
const OPEN_WITHIN: Duration = Duration::from_secs(10);
const OPEN_PAUSE: Duration = Duration::from_millis(200);

/// What is to become of a group.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// Most of its voters live.
    HasQuorum,
    /// This replica is the last one.
    Recover,
    /// Others live too: one of them may hold more than this one.
    OthersLive(Vec<u64>),
    /// This replica does not vote: it may lack anything.
    NotAVoter,
}

fn verdict(members: &Members, own: u64, lost_nodes: &[u64]) -> Verdict {
    let living: Vec<(&u64, &Peer)> =
        members.voters.iter().filter(|(_, peer)| !lost_nodes.contains(&peer.node)).collect();
    if living.len() * 2 > members.voters.len() {
        return Verdict::HasQuorum;
    }
    if !members.voters.contains_key(&own) {
        return Verdict::NotAVoter;
    }
    let others: Vec<u64> = living.iter().filter(|(id, _)| **id != own).map(|(_, peer)| peer.node).collect();
    if others.is_empty() { Verdict::Recover } else { Verdict::OthersLive(others) }
}

impl Node {
    /// Makes this node's replicas the only voters of the groups that lost their majority with `lost_nodes`.
    ///
    /// # Errors
    /// WRONG_CLUSTER or INVALID when the request is not meant for this node or not true; nothing was changed then.
    pub async fn unsafe_recover(
        self: &Arc<Self>,
        request: &UnsafeRecoverRequest,
    ) -> Result<UnsafeRecoverReply, RequestError> {
        let own_cluster = self.cluster_id();
        if own_cluster.is_empty() || request.cluster_id != own_cluster {
            let what = format!("this node is of cluster {own_cluster:?}, not {:?}", request.cluster_id);
            return Err(RequestError::new(ErrorKind::WrongCluster, what));
        }
        let invalid = |what: String| Err(RequestError::new(ErrorKind::Invalid, what));
        if request.lost_nodes.is_empty() || request.lost_nodes.contains(&self.config.node_id) {
            return invalid("name the nodes that are lost; this one is not".to_owned());
        }
        let mut to_recover = Vec::new();
        for listed in self.listed() {
            let Some(raft) = self.replicas.raft(listed.group).filter(|r| r.replica() == listed.replica)
            else {
                continue;
            };
            match verdict(&raft.members(), listed.replica, &request.lost_nodes) {
                Verdict::HasQuorum => {}
                Verdict::Recover => to_recover.push((listed, raft.members())),
                Verdict::OthersLive(nodes) => {
                    return invalid(format!(
                        "group {} has voters on nodes {nodes:?} too, which are not named as lost: start them",
                        listed.group
                    ));
                }
                Verdict::NotAVoter => {
                    return invalid(format!("the replica of group {} here does not vote", listed.group));
                }
            }
        }
        for lost in &request.lost_nodes {
            self.expect_lost(*lost, &to_recover).await?;
        }
        // Before anything else, and durably: from here on their old nodes find nobody who talks to them.
        let given_up: Vec<u64> = to_recover
            .iter()
            .flat_map(|(listed, m)| {
                m.voters.keys().chain(m.learners.keys()).filter(|id| **id != listed.replica)
            })
            .copied()
            .collect();
        self.give_up(&given_up).await?;
        // The meta group first: the others' placements are in it.
        to_recover.sort_by_key(|(listed, _)| listed.group);
        let mut groups = Vec::new();
        for (listed, members) in to_recover {
            groups.push(self.recover_group(listed, &members).await?);
        }
        Ok(UnsafeRecoverReply { groups })
    }

    /// A lost node may answer again, wiped; but not with the voters that are to be given up.
    async fn expect_lost(
        self: &Arc<Self>,
        lost: u64,
        to_recover: &[(ListedReplica, Members)],
    ) -> Result<(), RequestError> {
        let state = self.meta_state();
        let Some(address) = state.nodes.iter().find(|n| n.id == lost).map(|n| n.address.clone()) else {
            return Err(RequestError::new(ErrorKind::Invalid, format!("there is no node {lost}")));
        };
        let mut asking = tonic::Request::new(GetNodeStatusRequest::default());
        asking.set_timeout(ASK_WITHIN);
        let Ok(answer) = self.peers.admin(&address)?.get_node_status(asking).await else { return Ok(()) };
        let status: NodeStatus = answer.into_inner();
        let holds = |replica: &u64| {
            status.replicas.iter().any(|held| held.replica == *replica && held.role != "quarantined")
        };
        let living = to_recover.iter().flat_map(|(_, members)| members.voters.keys()).find(|id| holds(id));
        match living {
            Some(replica) if status.node == lost => {
                let what =
                    format!("node {lost} is not lost: it answers at {address} and holds replica {replica}");
                Err(RequestError::new(ErrorKind::Invalid, what))
            }
            _ => Ok(()),
        }
    }

    /// Whoever still reads the closed replica lets it go in a moment; until then its store cannot be opened.
    async fn open_again(self: &Arc<Self>, listed: ListedReplica) -> Result<(), RequestError> {
        let deadline = Instant::now() + OPEN_WITHIN;
        loop {
            match self.start_replica(listed).await {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() >= deadline => return Err(error.into()),
                Err(error) => {
                    tracing::info!(group = listed.group, %error, "the recovered replica is not open yet")
                }
            }
            tokio::time::sleep(OPEN_PAUSE).await;
        }
    }

    async fn recover_group(
        self: &Arc<Self>,
        listed: ListedReplica,
        members: &Members,
    ) -> Result<RecoveredGroup, RequestError> {
        let (group, replica) = (listed.group, listed.replica);
        let internal = |what: String| RequestError::new(ErrorKind::Internal, what).in_group(group);
        let registry = self.registry()?;
        let lost: Vec<String> = members
            .voters
            .iter()
            .filter(|(id, _)| **id != replica)
            .map(|(id, peer)| format!("{id} on {peer}"))
            .collect();
        let before = self.log.group(group, replica).map_err(|e| internal(e.to_string()))?.state().last;
        let last_index = before.map_or(0, |last| last.index);
        tracing::warn!(
            group,
            replica,
            last_index,
            ?lost,
            "UNSAFE RECOVERY: the replicas of this group on lost nodes are given up; what only they had acknowledged is lost"
        );
        {
            // Nobody opens it meanwhile.
            let _one_at_a_time = self.changing.lock().await;
            if group == META_GROUP {
                // What this node knows of the cluster until the group is open again.
                *self.mirrored.write() = self.meta_state();
            }
            self.flusher.remove(group, replica).await;
            self.replicas.remove(listed);
            registry.close(group).await.map_err(|e| RequestError::from_group(group, &e))?;
            let peer = Peer { node: self.config.node_id, address: self.config.advertise.clone() };
            let log = self.log.group(group, replica).map_err(|e| internal(e.to_string()))?;
            let index = make_sole_voter(&log, replica, peer).await.map_err(|e| internal(e.to_string()))?;
            tracing::warn!(
                group,
                replica,
                index,
                "UNSAFE RECOVERY: this replica is the only voter of its group"
            );
        }
        self.open_again(listed).await?;
        Ok(RecoveredGroup { group, shard: listed.shard, replica, last_index })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(voters: &[(u64, u64)]) -> Members {
        let peer = |node| Peer { node, address: format!("http://node{node}:1") };
        Members { voters: voters.iter().map(|(id, node)| (*id, peer(*node))).collect(), ..Members::default() }
    }

    #[test]
    fn only_the_last_voter_of_a_lost_majority_goes_on() {
        let three = members(&[(11, 1), (12, 2), (13, 3)]);
        assert_eq!(verdict(&three, 11, &[2, 3]), Verdict::Recover);
        assert_eq!(verdict(&three, 11, &[3]), Verdict::HasQuorum);
        assert_eq!(verdict(&three, 14, &[2, 3]), Verdict::NotAVoter);
        let five = members(&[(11, 1), (12, 2), (13, 3), (14, 4), (15, 5)]);
        assert_eq!(verdict(&five, 11, &[3, 4, 5]), Verdict::OthersLive(vec![2]));
        let alone = members(&[(11, 1)]);
        assert_eq!(verdict(&alone, 11, &[2, 3]), Verdict::HasQuorum, "done before");
    }
}
