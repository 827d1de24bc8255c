//! The admin door: looking at a cluster and changing it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::v1::admin_service_server::AdminService;
use evershard_proto::v1::{
    CreateTableRequest, DropTableReply, DropTableRequest, ErrorKind, GetNodeStatusRequest, GetNonFiniteReply,
    GetNonFiniteRequest, GetRoutingRequest, InitClusterReply, InitClusterRequest, NodeStatus,
    OpenSessionReply, OpenSessionRequest, RaiseVersionReply, RaiseVersionRequest, RenewSessionReply,
    RenewSessionRequest, Routing, ScrubReply, ScrubRequest, SetOptimizerRequest, TableDescription,
    TransferLeaderReply, TransferLeaderRequest, UnsafeRecoverReply, UnsafeRecoverRequest, WorkerIdentity,
};
use tonic::{Request, Response, Status};

use super::RequestError;
use super::non_finite::of_replica;
use crate::cluster::node::Node;
use crate::meta::state::META_SHARD;
use crate::routing::routing_table;

const TRANSFER_WITHIN: Duration = Duration::from_secs(5);

/// The admin service.
#[derive(Clone)]
pub struct AdminDoor {
    node: Arc<Node>,
}

impl AdminDoor {
    /// A door to `node`.
    #[must_use]
    pub fn new(node: Arc<Node>) -> Self {
        AdminDoor { node }
    }

    async fn renew(&self, session: u64) -> Result<(), RequestError> {
        let error = match self.node.renew_session_here(session) {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        let leader = error.0.leader_address.clone();
        if error.kind() != ErrorKind::NotLeader || leader.is_empty() || leader == self.node.config.advertise {
            return Err(error);
        }
        let mut client = self.node.peers.admin(&leader)?;
        match client.renew_session(RenewSessionRequest { session }).await {
            Ok(_) => Ok(()),
            Err(status) => Err(RequestError::from_status(&status)),
        }
    }

    async fn transfer(&self, request: TransferLeaderRequest) -> Result<(), RequestError> {
        self.node.require_cluster()?;
        let state = self.node.meta_state();
        let shard = request.shard;
        let group = state
            .groups
            .iter()
            .find(|g| g.shard == shard && g.shard != META_SHARD)
            .ok_or_else(|| RequestError::new(ErrorKind::Invalid, format!("there is no shard {shard}")))?;
        let to = group.replicas.iter().find(|r| r.node == request.to_node).ok_or_else(|| {
            let what = format!("shard {shard} has no replica on node {}", request.to_node);
            RequestError::new(ErrorKind::Invalid, what)
        })?;
        let local = self.node.replicas.raft(group.group);
        let leadership = local.as_ref().map(evershard_raft::Group::leadership).unwrap_or_default();
        match (local, leadership.leader) {
            (_, Some((replica, _))) if replica == to.replica => Ok(()),
            (Some(raft), _) if leadership.is_self => {
                let moved = raft.transfer_leader(to.replica, TRANSFER_WITHIN).await;
                moved.map_err(|e| RequestError::from_group(group.group, &e))
            }
            (_, Some((_, peer))) if peer.node != self.node.config.node_id => {
                let mut client = self.node.peers.admin(&peer.address)?;
                match client.transfer_leader(request).await {
                    Ok(_) => Ok(()),
                    Err(status) => Err(RequestError::from_status(&status)),
                }
            }
            (None, _) => {
                let on = group.replicas.iter().filter(|r| r.node != self.node.config.node_id).map(|r| r.node);
                let address =
                    on.filter_map(|n| state.nodes.iter().find(|d| d.id == n)).map(|n| &n.address).next();
                let address = address.ok_or_else(|| RequestError::not_leader(group.group, None))?;
                let mut client = self.node.peers.admin(address)?;
                match client.transfer_leader(request).await {
                    Ok(_) => Ok(()),
                    Err(status) => Err(RequestError::from_status(&status)),
                }
            }
            _ => Err(RequestError::not_leader(group.group, None)),
        }
    }
}

#[tonic::async_trait]
impl AdminService for AdminDoor {
    async fn init_cluster(
        &self,
        request: Request<InitClusterRequest>,
    ) -> Result<Response<InitClusterReply>, Status> {
        let cluster_id = self.node.init_cluster(request.into_inner()).await?;
        Ok(Response::new(InitClusterReply { cluster_id }))
    }

    async fn get_routing(&self, request: Request<GetRoutingRequest>) -> Result<Response<Routing>, Status> {
        self.node.require_cluster()?;
        if request.get_ref().confirmed {
            self.node.confirm_meta_state().await?;
        }
        let leaders = self.node.leaders();
        // The epoch first: a table is never said to be newer than it is.
        let recovery_epoch = self.node.recovery.get();
        let table = routing_table(&self.node.meta_state(), &leaders, |node| self.node.hears_of(node));
        Ok(Response::new(Routing { recovery_epoch, ..table }))
    }

    async fn get_non_finite(
        &self,
        request: Request<GetNonFiniteRequest>,
    ) -> Result<Response<GetNonFiniteReply>, Status> {
        let table = request.into_inner().table;
        let state = self.node.meta_state();
        let workers = state.sessions.iter().filter_map(|known| Some((known.session, known.worker?)));
        let workers: HashMap<u64, WorkerIdentity> = workers.collect();
        let worker_of = |session| workers.get(&session).copied();
        let replicas = self.node.replicas.shards();
        let replicas = replicas.iter().map(|replica| of_replica(replica, table, worker_of)).collect();
        Ok(Response::new(GetNonFiniteReply { replicas }))
    }

    async fn create_table(
        &self,
        request: Request<CreateTableRequest>,
    ) -> Result<Response<TableDescription>, Status> {
        let definition = request
            .into_inner()
            .definition
            .ok_or_else(|| RequestError::new(ErrorKind::Invalid, "create_table needs a definition"))?;
        Ok(Response::new(self.node.create_table(definition).await?))
    }

    async fn set_optimizer(
        &self,
        request: Request<SetOptimizerRequest>,
    ) -> Result<Response<TableDescription>, Status> {
        Ok(Response::new(self.node.set_optimizer(request.into_inner()).await?))
    }

    async fn drop_table(
        &self,
        request: Request<DropTableRequest>,
    ) -> Result<Response<DropTableReply>, Status> {
        let DropTableRequest { name, number } = request.into_inner();
        let number = match number {
            0 => self.node.find_table_to_drop(&name).await?,
            _ => {
                self.node.drop_table(&name, number).await?;
                number
            }
        };
        Ok(Response::new(DropTableReply { number }))
    }

    async fn open_session(
        &self,
        request: Request<OpenSessionRequest>,
    ) -> Result<Response<OpenSessionReply>, Status> {
        let OpenSessionRequest { nonce, worker } = request.into_inner();
        let session = self.node.open_session(nonce, worker).await?;
        Ok(Response::new(OpenSessionReply { session, lease_seconds: self.node.config.session_lease_seconds }))
    }

    async fn renew_session(
        &self,
        request: Request<RenewSessionRequest>,
    ) -> Result<Response<RenewSessionReply>, Status> {
        self.renew(request.get_ref().session).await?;
        Ok(Response::new(RenewSessionReply { lease_seconds: self.node.config.session_lease_seconds }))
    }

    async fn get_node_status(
        &self,
        request: Request<GetNodeStatusRequest>,
    ) -> Result<Response<NodeStatus>, Status> {
        let request = request.into_inner();
        let node = self.node.clone();
        let status = tokio::task::spawn_blocking(move || node.status(&request));
        Ok(Response::new(status.await.map_err(|_| Status::internal("the status could not be read"))?))
    }

    async fn scrub(&self, request: Request<ScrubRequest>) -> Result<Response<ScrubReply>, Status> {
        self.node.require_cluster()?;
        let deadline = Instant::now() + Duration::from_secs(120);
        let ScrubRequest { shards, repair } = request.into_inner();
        Ok(Response::new(self.node.scrub(&shards, repair, deadline).await?))
    }

    async fn transfer_leader(
        &self,
        request: Request<TransferLeaderRequest>,
    ) -> Result<Response<TransferLeaderReply>, Status> {
        self.transfer(request.into_inner()).await?;
        Ok(Response::new(TransferLeaderReply {}))
    }

    async fn raise_version(
        &self,
        request: Request<RaiseVersionRequest>,
    ) -> Result<Response<RaiseVersionReply>, Status> {
        let version = self.node.raise_cluster_version(request.into_inner().version).await?;
        Ok(Response::new(RaiseVersionReply { version }))
    }

    async fn unsafe_recover(
        &self,
        request: Request<UnsafeRecoverRequest>,
    ) -> Result<Response<UnsafeRecoverReply>, Status> {
        Ok(Response::new(self.node.unsafe_recover(request.get_ref()).await?))
    }
}
