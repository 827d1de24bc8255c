//! The node door: what other nodes ask of this one.

use std::sync::Arc;

use evershard_proto::v1::node_service_server::NodeService;
use evershard_proto::v1::{
    CreateReplicaReply, CreateReplicaRequest, ErrorKind, JoinReply, JoinRequest, ProposeReply, ProposeRequest,
};
use prost::Message;
use tonic::{Request, Response, Status};

use super::RequestError;
use crate::cluster::node::Node;

/// The node service.
#[derive(Clone)]
pub struct NodeDoor {
    node: Arc<Node>,
}

impl NodeDoor {
    /// A door to `node`.
    #[must_use]
    pub fn new(node: Arc<Node>) -> Self {
        NodeDoor { node }
    }

    fn check_cluster(&self, asked: &str) -> Result<(), RequestError> {
        let own = self.node.cluster_id();
        if own == asked {
            return Ok(());
        }
        let node = self.node.config.node_id;
        let what = format!("node {node} belongs to cluster {own:?}, the request is of cluster {asked:?}");
        Err(RequestError::new(ErrorKind::WrongCluster, what))
    }
}

#[tonic::async_trait]
impl NodeService for NodeDoor {
    async fn create_replica(
        &self,
        request: Request<CreateReplicaRequest>,
    ) -> Result<Response<CreateReplicaReply>, Status> {
        self.node.hold_replica(request.into_inner()).await.map_err(RequestError::from)?;
        Ok(Response::new(CreateReplicaReply {}))
    }

    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinReply>, Status> {
        let request = request.into_inner();
        self.node.require_cluster()?;
        if !request.cluster_id.is_empty() {
            self.check_cluster(&request.cluster_id)?;
        }
        self.node.admit_node(&request).await?;
        let state = self.node.meta_state();
        Ok(Response::new(JoinReply {
            cluster_id: state.cluster_id.clone(),
            meta_state: state.encode_to_vec().into(),
        }))
    }

    async fn propose(&self, request: Request<ProposeRequest>) -> Result<Response<ProposeReply>, Status> {
        let request = request.into_inner();
        self.check_cluster(&request.cluster_id)?;
        let answer = self.node.propose_here(request.group, request.command).await?;
        Ok(Response::new(ProposeReply { answer }))
    }
}
