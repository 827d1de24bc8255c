//! Creating a cluster, exactly once: its id, the meta group on its nodes, and the first entry of the meta group.
//!
//! The walk: every meta node makes its (empty) meta replica and so belongs to the cluster; this node initialises the meta
//! group; the first entry places the shards; the agents make them.
//!
//! Invariant: the replicas of the meta group exist on disk before the group is initialised, so none of them is ever made
//! twice. Asking again, of any node that took part, ends in the same cluster or is refused.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::limits::SHARDS_MAX;
use evershard_proto::v1::{
    CreateReplicaRequest, ErrorKind, GetNodeStatusRequest, InitClusterRequest, NodeAddress, ReplicaStatus,
    meta_command::Command,
};
use evershard_raft::Peer;

use super::error::NodeError;
use super::identity::ListedReplica;
use super::node::Node;
use crate::meta::state::{META_GROUP, META_SHARD, plan_cluster};
use crate::model::CLUSTER_VERSION_MAX;
use crate::service::RequestError;

const DEADLINE: Duration = Duration::from_secs(30);
/// For another node's answer before anything is begun.
const ASK_WITHIN: Duration = Duration::from_secs(3);

impl From<NodeError> for RequestError {
    fn from(error: NodeError) -> Self {
        let kind = match &error {
            NodeError::WrongCluster { .. } => ErrorKind::WrongCluster,
            NodeError::WrongNode { .. } | NodeError::AlreadyHeld { .. } => ErrorKind::Conflict,
            NodeError::NoCluster { .. } => ErrorKind::NotInitialized,
            _ => ErrorKind::Internal,
        };
        RequestError::new(kind, error.to_string())
    }
}

impl Node {
    /// Creates a cluster of `request.nodes`, of which this is one; answers its id.
    ///
    /// # Errors
    /// INVALID for a request that makes no sense, CONFLICT when there is a cluster already, UNAVAILABLE naming a node
    /// that does not answer (ask again once it does).
    pub async fn init_cluster(self: &Arc<Self>, request: InitClusterRequest) -> Result<String, RequestError> {
        check(&request, self.config.node_id)?;
        let deadline = Instant::now() + DEADLINE;
        let existing = self.meta_state().cluster_id.clone();
        if !existing.is_empty() {
            return Err(RequestError::new(
                ErrorKind::Conflict,
                format!("the cluster exists already: {existing}"),
            ));
        }
        // Asked again after a crash half-way: the id this node has is gone on with.
        let mut cluster_id = self.cluster_id();
        if cluster_id.is_empty() {
            cluster_id = if self.config.cluster_id.is_empty() {
                uuid::Uuid::new_v4().to_string()
            } else {
                self.config.cluster_id.clone()
            };
        }
        if self.replicas.meta().is_none() {
            self.expect_no_cluster(&request.nodes).await?;
        }
        let init = plan_cluster(cluster_id.clone(), request.nodes, request.shards, request.replicas);
        let mut members = BTreeMap::new();
        for placed in &init.groups[0].replicas {
            let Some(node) = init.nodes.iter().find(|n| n.id == placed.node) else { continue };
            self.make_meta_replica(&cluster_id, node, placed.replica).await?;
            members.insert(placed.replica, Peer { node: node.id, address: node.address.clone() });
        }
        let meta = self.replicas.meta().ok_or_else(|| {
            RequestError::new(ErrorKind::Unavailable, "the meta group did not start on this node")
        })?;
        if !meta.raft.is_initialized() {
            meta.raft.initialize(members).await.map_err(|e| RequestError::from_group(META_GROUP, &e))?;
        }
        self.propose_meta(Command::Init(init), deadline).await?;
        self.wait_for_meta(deadline, |state| !state.cluster_id.is_empty()).await;
        let version = request.cluster_version.unwrap_or(CLUSTER_VERSION_MAX);
        if let Err(error) = self.require_cluster_version(version, deadline).await {
            // There is a cluster all the same, and it may be raised at any time.
            tracing::warn!(version, %error, "the new cluster is not of this version yet: `evershardctl cluster raise-version`");
        }
        Ok(cluster_id)
    }

    /// A node that holds nothing may have lost its disk: to begin anew, under the ids of then, would make a voter that
    /// forgot its log. So the others are asked whether there is a cluster, before anything is made.
    async fn expect_no_cluster(self: &Arc<Self>, nodes: &[NodeAddress]) -> Result<(), RequestError> {
        for other in nodes.iter().filter(|n| n.id != self.config.node_id) {
            let named = |error: RequestError| {
                let what = format!("node {} at {}: {error}", other.id, other.address);
                RequestError::new(ErrorKind::Unavailable, what)
            };
            let mut request = tonic::Request::new(GetNodeStatusRequest::default());
            request.set_timeout(ASK_WITHIN);
            let mut client = self.peers.admin(&other.address)?;
            let status = client.get_node_status(request).await;
            let status = status.map_err(|status| named(RequestError::from_status(&status)))?.into_inner();
            // A meta replica that an attempt of before left behind has heard of nothing yet.
            let is_begun = |r: &ReplicaStatus| r.group == META_GROUP && (r.term > 0 || r.last_index > 0);
            if status.replicas.iter().any(is_begun) {
                let what = format!(
                    "node {} belongs to cluster {} already; if the data of this node is lost, start it with \
                     --peers {}: it joins, and gets new replicas",
                    other.id, status.cluster_id, other.address
                );
                return Err(RequestError::new(ErrorKind::Conflict, what));
            }
        }
        Ok(())
    }

    async fn make_meta_replica(
        self: &Arc<Self>,
        cluster_id: &str,
        node: &NodeAddress,
        replica: u64,
    ) -> Result<(), RequestError> {
        let request = CreateReplicaRequest {
            cluster_id: cluster_id.into(),
            node: node.id,
            group: META_GROUP,
            shard: META_SHARD,
            replica,
        };
        if node.id == self.config.node_id {
            return self.hold_replica(request).await.map_err(RequestError::from);
        }
        let mut client = self.peers.node(&node.address)?;
        match client.create_replica(request).await {
            Ok(_) => Ok(()),
            Err(status) => {
                let mut error = RequestError::from_status(&status);
                error.0.message = format!("node {} at {}: {}", node.id, node.address, error.0.message);
                Err(error)
            }
        }
    }

    /// Makes and starts a replica of the meta group that a new cluster wants here.
    ///
    /// # Errors
    /// [`NodeError::WrongCluster`], [`NodeError::WrongNode`], [`NodeError::AlreadyHeld`].
    pub async fn hold_replica(self: &Arc<Self>, request: CreateReplicaRequest) -> Result<(), NodeError> {
        if request.node != self.config.node_id {
            return Err(NodeError::WrongNode { own: self.config.node_id, asked: request.node });
        }
        let node = self.clone();
        let cluster_id = request.cluster_id.clone();
        tokio::task::spawn_blocking(move || node.adopt(&cluster_id))
            .await
            .map_err(|_| NodeError::Unfinished { what: "joining the cluster" })??;
        let new = ListedReplica {
            group: request.group,
            shard: request.shard,
            replica: request.replica,
            range_start: 0,
            range_end: 0,
            started: false,
            making: 0,
            damaged: false,
        };
        self.create_replica(new).await?;
        let listed = self.listed().into_iter().find(|r| r.replica == request.replica).unwrap_or(new);
        self.start_replica(listed).await
    }
}

fn check(request: &InitClusterRequest, own: u64) -> Result<(), RequestError> {
    let invalid = |what: String| Err(RequestError::new(ErrorKind::Invalid, what));
    if request.shards == 0 || request.shards > SHARDS_MAX {
        return invalid(format!("{} shards: from 1 to {SHARDS_MAX} are possible", request.shards));
    }
    if request.replicas == 0 || request.replicas as usize > request.nodes.len() {
        return invalid(format!(
            "{} replicas on {} nodes: from 1 to the number of nodes are possible",
            request.replicas,
            request.nodes.len()
        ));
    }
    if let Some(version) = request.cluster_version.filter(|version| *version > CLUSTER_VERSION_MAX) {
        return invalid(format!("cluster version {version}: this build knows up to {CLUSTER_VERSION_MAX}"));
    }
    let mut ids: Vec<u64> = request.nodes.iter().map(|n| n.id).collect();
    ids.sort_unstable();
    ids.dedup();
    if ids.len() != request.nodes.len() || ids.first() == Some(&0) {
        return invalid("node ids must be different, and from 1".into());
    }
    if !ids.contains(&own) {
        return invalid(format!("node {own}, which was asked, is not among the nodes of the new cluster"));
    }
    Ok(())
}
