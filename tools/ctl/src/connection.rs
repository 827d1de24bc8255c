//! Talks to the nodes of a cluster: finds one that answers, asks each, and tries again elsewhere while time is left.

use std::future::Future;
use std::time::Duration;

use evershard_proto::limits::MESSAGE_BYTES_MAX;
use evershard_proto::v1::admin_service_client::AdminServiceClient;
use evershard_proto::v1::checkpoint_service_client::CheckpointServiceClient;
use evershard_proto::v1::job_service_client::JobServiceClient;
use evershard_proto::v1::parameter_service_client::ParameterServiceClient;
use evershard_proto::v1::{GetRoutingRequest, Routing};
use tokio::time::{Instant, sleep, timeout_at};
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};

use crate::cli::Global;
use crate::error::{CtlError, is_not_initialized, is_transient, words};

const CONNECT_MAX: Duration = Duration::from_secs(2);
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(1);

/// One node's services.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) address: String,
    channel: Channel,
}

impl Node {
    /// Connects on first use.
    pub(crate) fn new(address: &str) -> Result<Self, CtlError> {
        let bad = |reason: String| CtlError::Endpoint { endpoint: address.to_owned(), reason };
        let endpoint = Endpoint::from_shared(address.to_owned()).map_err(|error| bad(error.to_string()))?;
        let uri = endpoint.uri();
        if uri.scheme_str() != Some("http") || uri.host().is_none() {
            return Err(bad("it must begin with http:// and name a host".to_owned()));
        }
        let channel = endpoint.connect_timeout(CONNECT_MAX).tcp_nodelay(true).connect_lazy();
        Ok(Node { address: address.to_owned(), channel })
    }

    pub(crate) fn admin(&self) -> AdminServiceClient<Channel> {
        AdminServiceClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// Without a deadline of its own: a checkpoint takes as long as its target.
    pub(crate) fn checkpoints(&self) -> CheckpointServiceClient<Channel> {
        CheckpointServiceClient::new(self.channel.clone())
    }

    pub(crate) fn jobs(&self) -> JobServiceClient<Channel> {
        JobServiceClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    pub(crate) fn parameters(&self) -> ParameterServiceClient<Channel> {
        ParameterServiceClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }
}

/// A cluster, through those of its nodes that answer.
#[derive(Debug)]
pub(crate) struct Connection {
    /// The cluster as the first node that answered knows it.
    pub(crate) routing: Routing,
    nodes: Vec<Node>,
    deadline: Instant,
    seconds: u64,
}

impl Connection {
    /// Asks the endpoints, in turn and again, until one answers.
    pub(crate) async fn open(global: &Global) -> Result<Self, CtlError> {
        let deadline = Instant::now() + global.timeout();
        let endpoints = global
            .endpoints
            .iter()
            .map(|address| Node::new(address.trim()))
            .collect::<Result<Vec<_>, _>>()?;
        let (routing, _) =
            first(&endpoints, deadline, global.timeout, "tell its routing table", |node| async move {
                let routing = node.admin().get_routing(GetRoutingRequest::default()).await?;
                if routing.get_ref().cluster_id.is_empty() {
                    return Err(not_initialized());
                }
                Ok(routing)
            })
            .await?;
        // The node that answered stands for its own address; the cluster knows the others.
        let mut nodes = Vec::with_capacity(routing.nodes.len());
        for node in &routing.nodes {
            nodes.push(Node::new(&node.address)?);
        }
        Ok(Connection { routing, nodes, deadline, seconds: global.timeout })
    }

    /// Every node, by its number.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = (u64, &Node)> {
        self.routing.nodes.iter().map(|node| node.id).zip(&self.nodes)
    }

    /// A node, by its number.
    pub(crate) fn node(&self, id: u64) -> Option<&Node> {
        self.nodes().find(|(node, _)| *node == id).map(|(_, node)| node)
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    pub(crate) fn seconds(&self) -> u64 {
        self.seconds
    }

    /// The routing table now.
    pub(crate) async fn refresh(&mut self) -> Result<(), CtlError> {
        let (routing, _) = self
            .call("tell its routing table", |node| async move {
                node.admin().get_routing(GetRoutingRequest::default()).await
            })
            .await?;
        self.routing = routing;
        Ok(())
    }

    /// Asks any node; on trouble that may pass the next one, until one answers or time is up.
    pub(crate) async fn call<T, F>(
        &self,
        action: &'static str,
        ask: impl Fn(Node) -> F,
    ) -> Result<(T, String), CtlError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        first(&self.nodes, self.deadline, self.seconds, action, ask).await
    }
}

fn not_initialized() -> Status {
    use evershard_proto::v1::{ErrorDetail, ErrorKind};
    let detail = ErrorDetail { kind: ErrorKind::NotInitialized.into(), ..Default::default() };
    let bytes = prost::Message::encode_to_vec(&detail);
    Status::with_details(tonic::Code::FailedPrecondition, "no cluster yet", bytes.into())
}

async fn first<T, F>(
    nodes: &[Node],
    deadline: Instant,
    seconds: u64,
    action: &'static str,
    ask: impl Fn(Node) -> F,
) -> Result<(T, String), CtlError>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let mut backoff = BACKOFF_FIRST;
    let mut tried: Vec<(String, String)> = Vec::new();
    loop {
        let mut empty = None;
        let mut transient = 0;
        for node in nodes {
            let problem = match timeout_at(deadline, ask(node.clone())).await {
                Ok(Ok(reply)) => return Ok((reply.into_inner(), node.address.clone())),
                Ok(Err(status)) if is_not_initialized(&status) => {
                    empty.get_or_insert_with(|| node.address.clone());
                    continue;
                }
                Ok(Err(status)) if is_transient(&status) => words(&status),
                Ok(Err(status)) => {
                    return Err(CtlError::Refused {
                        address: node.address.clone(),
                        action,
                        message: words(&status),
                    });
                }
                Err(_) => "no answer".to_owned(),
            };
            transient += 1;
            tried.retain(|(address, _)| *address != node.address);
            tried.push((node.address.clone(), problem));
        }
        // Nodes that are not up yet may know a cluster; one that answers and knows none is the best there is.
        if let Some(address) = empty
            && (transient == 0 || Instant::now() >= deadline)
        {
            return Err(CtlError::NotInitialized { address });
        }
        if Instant::now() + backoff >= deadline {
            let tried: Vec<String> =
                tried.iter().map(|(address, problem)| format!("  {address}: {problem}")).collect();
            return Err(CtlError::Unavailable { seconds, tried: tried.join("\n") });
        }
        sleep(backoff).await;
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
}
