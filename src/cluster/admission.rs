//! Admitting a node that asks to join: a new one, one that moved, one whose disk was wiped or is damaged.
//!
//! Invariant: whether a replica is lost is decided by what the node itself says when it is called back at its address, not
//! by what a request says that may be old: a replica is never replaced while its node holds it.
//!
//! Not here: making the successors (`agent.rs` on the node) and their membership (`membership.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::v1::{
    ErrorKind, GetNodeStatusRequest, GroupPlacement, JoinRequest, NodeAddress, RegisterNode, ReplaceReplica,
    meta_command::Command,
};

use super::node::Node;
use crate::service::RequestError;

const DEADLINE: Duration = Duration::from_secs(4);

impl Node {
    /// Lets the node of `request` into the cluster: registers its address, and gives every replica that it lost a
    /// successor.
    ///
    /// # Errors
    /// UNAVAILABLE when the node cannot be called back or the meta group takes no command; WRONG_CLUSTER.
    pub async fn admit_node(self: &Arc<Self>, request: &JoinRequest) -> Result<(), RequestError> {
        let deadline = Instant::now() + DEADLINE;
        let state = self.meta_state();
        let address = NodeAddress { id: request.node, address: request.address.clone() };
        if !state.nodes.contains(&address) {
            let register = Command::RegisterNode(RegisterNode { node: Some(address) });
            self.propose_meta(register, deadline).await?;
        }
        let placed: Vec<(u64, u64)> = state
            .groups
            .iter()
            .flat_map(|g| g.replicas.iter().map(move |r| (g.group, r)))
            .filter(|(_, r)| r.node == request.node && r.created)
            .map(|(group, r)| (group, r.replica))
            .collect();
        let held =
            |(_, replica): &(u64, u64)| request.held.iter().any(|h| h.replica == *replica && !h.quarantined);
        if placed.iter().all(held) {
            return Ok(());
        }
        let mut client = self.peers.admin(&request.address)?;
        let asked = GetNodeStatusRequest { with_digest: false, scrub_id: 0 };
        let status =
            client.get_node_status(asked).await.map_err(|s| RequestError::from_status(&s))?.into_inner();
        if status.node != request.node {
            let what = format!("{} is node {}, not {}", request.address, status.node, request.node);
            return Err(RequestError::new(ErrorKind::Conflict, what));
        }
        if !status.cluster_id.is_empty() && status.cluster_id != state.cluster_id {
            let what = format!("node {} belongs to cluster {}", status.node, status.cluster_id);
            return Err(RequestError::new(ErrorKind::WrongCluster, what));
        }
        // What it holds and does not list as quarantined is alive, started or not.
        for (group, replica) in placed {
            if status.replicas.iter().any(|r| r.replica == replica && r.role != "quarantined") {
                continue;
            }
            let has_successor =
                |g: &&GroupPlacement| g.group == group && g.replicas.iter().any(|r| r.replaces == replica);
            if state.groups.iter().any(|g| has_successor(&g)) {
                continue;
            }
            tracing::warn!(node = request.node, group, replica, "a replica is lost: it gets a successor");
            let replace = Command::ReplaceReplica(ReplaceReplica { group, old: replica });
            match self.propose_meta(replace, deadline).await {
                Ok(_) => {}
                // It was replaced meanwhile.
                Err(error) if error.kind() == ErrorKind::Invalid => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
