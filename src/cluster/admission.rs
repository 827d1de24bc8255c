//! Admitting a node that asks to join: a new one, one that moved, one whose disk was wiped or is damaged.
//!
//! Invariant: whether a replica is lost is decided by what the node itself says when it is called back at its address, not
//! by what a request says that may be old: a replica is never replaced while its node holds it, and nothing is registered
//! before. Of two servers with one id, the one that holds the replicas stays.
//!
//! Not here: making the successors (`agent.rs` on the node) and their membership (`membership.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::v1::{
    ErrorKind, GetNodeStatusRequest, GroupPlacement, JoinRequest, NodeAddress, NodeStatus, RegisterNode,
    ReplaceReplica, meta_command::Command,
};

use super::node::Node;
use crate::service::RequestError;

const DEADLINE: Duration = Duration::from_secs(4);
const ASK_WITHIN: Duration = Duration::from_secs(1);

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
        let placed: Vec<(u64, u64)> = state
            .groups
            .iter()
            .flat_map(|g| g.replicas.iter().map(move |r| (g.group, r)))
            .filter(|(_, r)| r.node == request.node && r.created)
            .map(|(group, r)| (group, r.replica))
            .collect();
        let held =
            |(_, replica): &(u64, u64)| request.held.iter().any(|h| h.replica == *replica && !h.quarantined);
        let known = state.nodes.iter().find(|n| n.id == request.node);
        if known == Some(&address) && placed.iter().all(held) {
            return Ok(());
        }
        let status = self.ask_at(&request.address).await?;
        if status.node != request.node {
            let what = format!("{} is node {}, not {}", request.address, status.node, request.node);
            return Err(RequestError::new(ErrorKind::Conflict, what));
        }
        if !status.cluster_id.is_empty() && status.cluster_id != state.cluster_id {
            let what = format!("node {} belongs to cluster {}", status.node, status.cluster_id);
            return Err(RequestError::new(ErrorKind::WrongCluster, what));
        }
        if status.cluster_version_max < state.cluster_version {
            let what = format!(
                "the build of node {} knows cluster versions up to {}, the cluster is of version {}",
                status.node, status.cluster_version_max, state.cluster_version
            );
            return Err(RequestError::new(ErrorKind::Conflict, what));
        }
        // What it holds and does not list as quarantined is alive, started or not.
        let holds =
            |replica: u64| status.replicas.iter().any(|r| r.replica == replica && r.role != "quarantined");
        if let Some(before) = known.filter(|n| n.address != request.address)
            && !placed.iter().all(|(_, replica)| holds(*replica))
            && self.ask_at(&before.address).await.is_ok_and(|answer| answer.node == request.node)
        {
            let what = format!(
                "node {} answers at {} and is not lost: give the server at {} an id of its own",
                request.node, before.address, request.address
            );
            return Err(RequestError::new(ErrorKind::Conflict, what));
        }
        if known != Some(&address) {
            let register = Command::RegisterNode(RegisterNode { node: Some(address) });
            self.propose_meta(register, deadline).await?;
        }
        for (group, replica) in placed {
            if holds(replica) {
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

    async fn ask_at(self: &Arc<Self>, address: &str) -> Result<NodeStatus, RequestError> {
        let mut request = tonic::Request::new(GetNodeStatusRequest::default());
        request.set_timeout(ASK_WITHIN);
        let status = self.peers.admin(address)?.get_node_status(request).await;
        status.map(tonic::Response::into_inner).map_err(|s| RequestError::from_status(&s))
    }
}
