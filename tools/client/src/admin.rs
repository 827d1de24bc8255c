//! Looking at a cluster and changing it: typed calls to the admin service of any node.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::limits::MESSAGE_BYTES_MAX;
use evershard_proto::v1::admin_service_client::AdminServiceClient;
use evershard_proto::v1::{
    CreateTableRequest, DropTableRequest, GetNodeStatusRequest, GetRoutingRequest, NodeStatus, Routing,
    ScrubReply, ScrubRequest, SetOptimizerRequest, TableDefinition, TableDescription, TransferLeaderRequest,
};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Response, Status};

use crate::Error;
use crate::error::detail_of;
use crate::routing_cache::RoutingCache;
use crate::unary::{AskUnder, Asked, Asker};

type Client = AdminServiceClient<Asked>;

/// The admin service behind `channel`, asked under `recovery_epoch`.
pub(crate) fn client(channel: Channel, recovery_epoch: u64) -> Client {
    of_channel(InterceptedService::new(channel, AskUnder(recovery_epoch)))
}

fn of_channel(channel: Asked) -> Client {
    Client::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX)
}

/// Admin calls; cheap to clone. Each asks the nodes in turn until one answers or the deadline is over.
#[derive(Debug, Clone)]
pub struct Admin {
    routing: Arc<RoutingCache>,
    asker: Asker,
    deadline: Duration,
}

impl Admin {
    pub(crate) fn new(routing: Arc<RoutingCache>, deadline: Duration) -> Self {
        Admin { asker: Asker::new(routing.clone()), routing, deadline }
    }

    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.deadline
    }

    /// The routing table, fresh.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn routing(&self) -> Result<Routing, Error> {
        Ok(self.routing.refresh_until(self.deadline()).await?.routing.clone())
    }

    /// The routing table as of now, from the meta group's leader: other nodes answer with what they have heard.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the meta group has no leader in time.
    pub(crate) async fn confirmed_routing(&self) -> Result<Routing, Error> {
        let asked = self.call("ask for the routing table", self.deadline(), |mut client| async move {
            client.get_routing(GetRoutingRequest { confirmed: true }).await
        });
        Ok(self.routing.adopt_confirmed(asked.await?)?.routing.clone())
    }

    /// Creates a table, or finds it as defined.
    ///
    /// # Errors
    /// [`Error::Refused`] with CONFLICT when it exists with another definition.
    pub async fn create_table(&self, definition: TableDefinition) -> Result<TableDescription, Error> {
        self.call("create a table", self.deadline(), |mut client| {
            let request = CreateTableRequest { definition: Some(definition.clone()) };
            async move { client.create_table(request).await }
        })
        .await
    }

    /// Gives a table other hyper-parameters; they are in force on every shard when this returns.
    ///
    /// # Errors
    /// [`Error::Refused`] with CONFLICT for another kind of optimizer or another version than expected, INVALID, UNKNOWN_TABLE;
    /// [`Error::Unavailable`]: it may be changed or not.
    pub async fn set_optimizer(&self, request: SetOptimizerRequest) -> Result<TableDescription, Error> {
        self.call("set an optimizer", self.deadline(), |mut client| {
            let request = request.clone();
            async move { client.set_optimizer(request).await }
        })
        .await
    }

    /// Drops a table and its rows: the one that had the name when this was called, however often the call has to be
    /// made again.
    ///
    /// # Errors
    /// [`Error::Refused`] with UNKNOWN_TABLE; [`Error::Unavailable`]: it may be dropped or not.
    pub async fn drop_table(&self, name: &str) -> Result<(), Error> {
        let deadline = self.deadline();
        let ask = |number| {
            self.call("drop a table", deadline, move |mut client| {
                let request = DropTableRequest { name: name.into(), number };
                async move { client.drop_table(request).await }
            })
        };
        let number = ask(0).await?.number;
        ask(number).await.map(|_| ())
    }

    /// Digests of all replicas of all shards.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when a shard has no leader in time.
    pub async fn scrub(&self) -> Result<ScrubReply, Error> {
        self.call("scrub", Instant::now() + Duration::from_secs(150), |mut client| async move {
            client.scrub(ScrubRequest::default()).await
        })
        .await
    }

    /// Moves a shard's leadership.
    ///
    /// # Errors
    /// [`Error::Refused`] when the shard has no replica there.
    pub async fn transfer_leader(&self, shard: u32, to_node: u64) -> Result<(), Error> {
        self.call("transfer a leader", self.deadline(), |mut client| async move {
            client.transfer_leader(TransferLeaderRequest { shard, to_node }).await
        })
        .await
        .map(|_| ())
    }

    /// What one node says of its replicas.
    ///
    /// # Errors
    /// [`Error::Unavailable`] naming the address; it is asked once.
    pub async fn node_status(
        &self,
        address: &str,
        request: GetNodeStatusRequest,
    ) -> Result<NodeStatus, Error> {
        let started = Instant::now();
        let unavailable = |last: String| Error::Unavailable {
            operation: "ask a node for its status".into(),
            tried: vec![address.to_string()],
            last,
            elapsed: started.elapsed(),
        };
        let channel = self.routing.unary_channel(address).map_err(|e| unavailable(e.message))?;
        // Of whatever epoch it is: this only looks.
        let mut client = client(channel, 0);
        match tokio::time::timeout(self.deadline, client.get_node_status(request)).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(unavailable(detail_of(&status).message)),
            Err(_) => Err(unavailable("no answer in time".into())),
        }
    }

    /// Calls nodes in turn until one answers, or the deadline is over.
    pub(crate) async fn call<T, F>(
        &self,
        operation: &str,
        deadline: Instant,
        ask: impl Fn(Client) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let left = deadline.saturating_duration_since(Instant::now());
        self.asker.ask(operation, deadline, left, |channel| ask(of_channel(channel))).await
    }
}
