//! The node door: what other nodes ask of this one.

use std::sync::Arc;

use bytes::Bytes;
use evershard_proto::limits::SHARDS_MAX;
use evershard_proto::push_body::KIND_PUSH;
use evershard_proto::shard_command::ShardCommand;
use evershard_proto::v1::node_service_server::NodeService;
use evershard_proto::v1::{
    CreateReplicaReply, CreateReplicaRequest, ErrorKind, JoinReply, JoinRequest, MetaCommand, ProposeReply,
    ProposeRequest, QuarantineReplicaReply, QuarantineReplicaRequest, ReadPointsReply, ReadPointsRequest,
    WritePartEvent, WritePartRequest,
};
use prost::Message;
use tonic::{Request, Response, Status};

use super::RequestError;
use super::checkpoint::{Events, events_of};
use crate::cluster::node::Node;
use crate::meta::state::META_GROUP;

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
        check_command(request.group, &request.command)?;
        let answer = self.node.propose_here(request.group, request.command).await?;
        Ok(Response::new(ProposeReply { answer }))
    }

    async fn quarantine_replica(
        &self,
        request: Request<QuarantineReplicaRequest>,
    ) -> Result<Response<QuarantineReplicaReply>, Status> {
        let request = request.into_inner();
        self.check_cluster(&request.cluster_id)?;
        self.node.quarantine_replica(&request).await?;
        Ok(Response::new(QuarantineReplicaReply {}))
    }

    type WritePartStream = Events<WritePartEvent>;

    async fn write_part(
        &self,
        request: Request<WritePartRequest>,
    ) -> Result<Response<Self::WritePartStream>, Status> {
        // Of another history the same index is another state.
        self.node.recovery.expect_same(request.metadata())?;
        let request = request.into_inner();
        self.check_cluster(&request.cluster_id)?;
        let node = self.node.clone();
        let events = events_of(|events| async move { node.write_part_here(request, &events).await });
        Ok(Response::new(events))
    }

    async fn read_points(
        &self,
        request: Request<ReadPointsRequest>,
    ) -> Result<Response<ReadPointsReply>, Status> {
        // Of another history the same index is another state.
        self.node.recovery.expect_same(request.metadata())?;
        let request = request.into_inner();
        self.check_cluster(&request.cluster_id)?;
        if request.groups.len() > SHARDS_MAX as usize {
            let what = format!("{} groups asked for, there are at most {SHARDS_MAX}", request.groups.len());
            return Err(RequestError::new(ErrorKind::TooLarge, what).into());
        }
        Ok(Response::new(ReadPointsReply { points: self.node.read_points(&request.groups).await }))
    }
}

/// An entry that no replica can use halts them all (design 14.13), so nothing unknown gets into a log. Pushes have a door of
/// their own, which asks for their session.
fn check_command(group: u64, command: &Bytes) -> Result<(), RequestError> {
    let problem = if group == META_GROUP {
        match MetaCommand::decode(command.clone()) {
            Ok(MetaCommand { command: Some(_) }) => return Ok(()),
            Ok(MetaCommand { command: None }) => "a meta command of another version".to_owned(),
            Err(error) => format!("a meta command that does not decode: {error}"),
        }
    } else if command.first() == Some(&KIND_PUSH) {
        "a push, which goes to the parameter service".to_owned()
    } else {
        match ShardCommand::decode(command) {
            Ok(_) => return Ok(()),
            Err(error) => error.to_string(),
        }
    };
    Err(RequestError::new(ErrorKind::Invalid, format!("nothing that group {group} could apply: {problem}")))
}
