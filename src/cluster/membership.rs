//! Making a group's membership what the meta group decided: done by each group's leader, one step at a time.
//!
//! A lost replica's successor is added as a learner, catches up, takes the vote of the lost one in one change, and only
//! then is the lost one forgotten. Each step may be repeated; a new leader goes on where the old one stopped.
//!
//! Not here: deciding that a replica is lost (`agent.rs`, at the Join of its node).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::v1::{
    FinishReplacement, GroupPlacement, MetaState, ReplicaPlacement, meta_command::Command,
};
use evershard_raft::{Group, GroupError, Members, Peer};

use super::node::Node;

/// How long a node leaves making a group to the replica whose turn it is.
const OTHERS_INITIALIZE_AFTER: Duration = Duration::from_secs(5);
/// For a change of one group's membership.
const CHANGE_WITHIN: Duration = Duration::from_secs(10);
/// Entries that a learner may lack when it is made a voter.
const CAUGHT_UP_LAG: u64 = 64;

impl Node {
    /// One step for every group that this node leads.
    pub(super) async fn reconcile_memberships(self: &Arc<Self>) {
        let state = self.meta_state();
        for placement in &state.groups {
            let Some(raft) = self.replicas.raft(placement.group) else { continue };
            let leadership = raft.leadership();
            if !leadership.is_self || !leadership.is_ready {
                continue;
            }
            // Without a quorum a change waits; the other groups must not wait with it.
            let reconciled = self.reconcile_group(&state, placement, &raft);
            match tokio::time::timeout(CHANGE_WITHIN, reconciled).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::warn!(group = placement.group, %error, "the membership is not yet as decided");
                }
                Err(_) => tracing::warn!(
                    group = placement.group,
                    "the membership did not change within {CHANGE_WITHIN:?}"
                ),
            }
        }
    }

    async fn reconcile_group(
        self: &Arc<Self>,
        state: &MetaState,
        placement: &GroupPlacement,
        raft: &Group,
    ) -> Result<(), GroupError> {
        let members = raft.members();
        for learner in members.learners.keys() {
            if placement.replicas.iter().all(|r| r.replica != *learner) {
                return raft.remove_learner(*learner).await;
            }
        }
        for placed in &placement.replicas {
            let (Some(known), Some(peer)) = (members.peer(placed.replica), peer_of(state, placed)) else {
                continue;
            };
            if *known != peer {
                tracing::info!(group = placement.group, replica = placed.replica, %peer, "a member moved");
                return raft.set_address(placed.replica, peer).await;
            }
        }
        for replacement in placement.replicas.iter().filter(|r| r.replaces != 0 && r.created) {
            let new = replacement.replica;
            if members.voters.contains_key(&new) && !members.voters.contains_key(&replacement.replaces) {
                self.finish_replacement(placement.group, replacement.replaces, new).await;
            } else if members.peer(new).is_none() {
                let Some(peer) = peer_of(state, replacement) else { continue };
                tracing::info!(group = placement.group, replica = new, "adds a learner for a lost replica");
                return raft.add_learner(new, peer).await;
            } else if raft.lag(new).is_some_and(|lag| lag <= CAUGHT_UP_LAG) {
                let voters = voters_with(placement, replacement, &members);
                tracing::info!(
                    group = placement.group,
                    replica = new,
                    ?voters,
                    "the learner caught up and votes"
                );
                // One change a time: the next one has to see what this one made of the members, or takes a vote away again.
                return raft.change_membership(voters).await;
            }
        }
        Ok(())
    }

    async fn finish_replacement(self: &Arc<Self>, group: u64, old: u64, new: u64) {
        let finish = Command::FinishReplacement(FinishReplacement { group, old, new });
        let deadline = Instant::now() + Duration::from_secs(5);
        match self.propose_meta(finish, deadline).await {
            Ok(_) => tracing::info!(group, replica = old, "a lost replica is replaced"),
            Err(error) => {
                tracing::warn!(group, replica = old, %error, "a replacement is still to be recorded")
            }
        }
    }

    /// Makes the groups of a new cluster: each is initialised with its first replicas, by any of them. All propose the same
    /// first membership, so it does not matter who, or how many; nor that one of them was lost meanwhile.
    pub(super) async fn initialize_groups(self: &Arc<Self>) {
        let state = self.meta_state();
        for placement in &state.groups {
            let Some(raft) = self.replicas.raft(placement.group) else { continue };
            // A lost replica stays in the placement until its successor votes, and that is after this.
            let firsts: Vec<&ReplicaPlacement> =
                placement.replicas.iter().filter(|r| r.replaces == 0).collect();
            let own = firsts.iter().position(|r| r.replica == raft.replica() && r.created);
            let Some(own) = own.filter(|_| !raft.is_initialized()) else { continue };
            // One begins; the others follow when it does not.
            let preferred = placement.shard as usize % firsts.len();
            if own != preferred && self.started.elapsed() < OTHERS_INITIALIZE_AFTER {
                continue;
            }
            let members: BTreeMap<u64, Peer> =
                firsts.iter().filter_map(|r| Some((r.replica, peer_of(&state, r)?))).collect();
            if let Err(error) = raft.initialize(members).await {
                tracing::warn!(group = placement.group, %error, "a group could not be made");
            }
        }
    }
}

fn peer_of(state: &MetaState, replica: &ReplicaPlacement) -> Option<Peer> {
    let node = state.nodes.iter().find(|n| n.id == replica.node)?;
    Some(Peer { node: node.id, address: node.address.clone() })
}

/// The voters once `replacement` has taken its place: everybody placed, without the replaced one and without those that
/// are still catching up.
fn voters_with(
    placement: &GroupPlacement,
    replacement: &ReplicaPlacement,
    members: &Members,
) -> BTreeSet<u64> {
    let votes = |r: &&ReplicaPlacement| {
        let pending =
            r.replaces != 0 && r.replica != replacement.replica && !members.voters.contains_key(&r.replica);
        // After an unsafe recovery lost replicas are placed still, and members no more.
        r.replica != replacement.replaces && !pending && members.peer(r.replica).is_some()
    };
    placement.replicas.iter().filter(votes).map(|r| r.replica).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(replica: u64, replaces: u64) -> ReplicaPlacement {
        ReplicaPlacement { replica, node: replica, created: true, replaces, making: 0 }
    }

    #[test]
    fn a_replacement_takes_the_vote_of_the_lost_one_and_of_nobody_else() {
        let replicas = vec![placed(1, 0), placed(2, 0), placed(3, 0), placed(7, 3), placed(8, 2)];
        let placement = GroupPlacement { group: 1, replicas: replicas.clone(), ..Default::default() };
        let peer = Peer { node: 1, address: "http://a:1".into() };
        let members = Members {
            voters: [1, 2, 3].into_iter().map(|r| (r, peer.clone())).collect(),
            learners: [7, 8].into_iter().map(|r| (r, peer.clone())).collect(),
            ..Members::default()
        };
        assert_eq!(voters_with(&placement, &replicas[3], &members), BTreeSet::from([1, 2, 7]));
        assert_eq!(voters_with(&placement, &replicas[4], &members), BTreeSet::from([1, 3, 8]));

        // 2 and 3 were given up.
        let mut recovered = members.clone();
        recovered.voters.retain(|replica, _| *replica == 1);
        assert_eq!(voters_with(&placement, &replicas[3], &recovered), BTreeSet::from([1, 7]));
    }
}
