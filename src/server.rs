//! The server: builds the rooms of a node in order, runs them, and shuts them down in reverse.
//!
//! Order: ports (so that a taken one is said before anything is touched) -> data directory and log -> replicas -> doors ->
//! agent. Down: doors close, leadership moves, groups end, flusher ends, log closes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use evershard_proto::limits::MESSAGE_BYTES_MAX;
use evershard_proto::v1::FILE_DESCRIPTORS;
use evershard_proto::v1::admin_service_server::AdminServiceServer;
use evershard_proto::v1::checkpoint_service_server::CheckpointServiceServer;
use evershard_proto::v1::job_service_server::JobServiceServer;
use evershard_proto::v1::node_service_server::NodeServiceServer;
use evershard_proto::v1::parameter_service_server::ParameterServiceServer;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Status};

use crate::cluster::error::NodeError;
use crate::cluster::node::Node;
use crate::cluster::{agent, disk_keeper, evictions, freshness, scrub_schedule};
use crate::config::ServerConfig;
use crate::service::{AdminDoor, CheckpointDoor, ClientBounds, JobDoor, NodeDoor, ParameterDoor, ReadPool};
use crate::telemetry::{HttpError, HttpServer, Readiness};

/// Streams and calls of one connection at a time.
const STREAMS_PER_CONNECTION_MAX: u32 = 4096;
/// How long the doors may take to close.
const DOORS_CLOSE_WITHIN: Duration = Duration::from_secs(3);
/// For the agents to end what they are at.
const AGENTS_END_WITHIN: Duration = Duration::from_secs(2);

/// The server could not start or run.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The gRPC address is taken or not ours.
    #[error("cannot listen on {address}: {source}; is another node running there? choose another --listen")]
    Bind {
        /// The configured address.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// Metrics and health.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The node itself.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// Threads could not be started, or a signal not be waited for.
    #[error("cannot start: {0}")]
    System(#[from] std::io::Error),
    /// The gRPC server ended.
    #[error("the gRPC server ended: {0}")]
    Grpc(#[from] tonic::transport::Error),
}

/// Runs a node until `stop`.
///
/// # Errors
/// [`ServerError`]; when it could not start, nothing was changed.
pub async fn run(config: ServerConfig, stop: CancellationToken) -> Result<(), ServerError> {
    let address = config.listen;
    let listener =
        TcpListener::bind(address).await.map_err(|source| ServerError::Bind { address, source })?;
    let readiness = Readiness::starting();
    let http = HttpServer::bind(config.http, readiness.clone()).await?;
    let read_pool = Arc::new(ReadPool::start("read", config.read_threads)?);
    let cold_pool = Arc::new(ReadPool::start("cold", config.read_threads)?);
    // What a semaphore can count.
    let in_flight = |bytes: u64| usize::try_from(bytes.min(u32::MAX.into())).unwrap_or(usize::MAX);
    let bounds = ClientBounds {
        stream_bytes: in_flight(config.stream_in_flight_bytes),
        node_bytes: in_flight(config.node_in_flight_bytes),
        step_bytes: in_flight(config.step_buffer_bytes),
        reply_patience: Duration::from_secs(config.reply_patience_seconds.into()),
    };
    let node = open_node(config, readiness).await?;

    let doors_stop = CancellationToken::new();
    let agents_stop = CancellationToken::new();
    let tasks = TaskTracker::new();
    let http = tasks.spawn(http.serve(doors_stop.clone()));
    // The lanes open before the replicas start, so that peers find them as soon as they are there.
    let known = node.clone();
    let parameter = ParameterDoor::new(
        (node.replicas.clone(), node.freshness.clone()),
        node.push_gate.clone(),
        (read_pool, cold_pool),
        tasks.clone(),
        doors_stop.clone(),
        bounds,
        (Arc::new(move || known.meta_state()), node.recovery.clone()),
    );
    let grpc = tasks.spawn(serve_doors(node.clone(), parameter, listener, doors_stop.clone()));
    node.ask_for_recoveries().await;
    start_listed(&node).await;
    let agents = [
        tasks.spawn(agent::run_local(node.clone(), agents_stop.clone())),
        tasks.spawn(agent::run_cluster(node.clone(), agents_stop.clone())),
        tasks.spawn(agent::run_hearing(node.clone(), agents_stop.clone())),
        tasks.spawn(disk_keeper::run_disk(node.clone(), agents_stop.clone())),
        tasks.spawn(freshness::run_freshness(node.clone(), agents_stop.clone())),
        tasks.spawn(scrub_schedule::run_scrubs(node.clone(), agents_stop.clone())),
        tasks.spawn(evictions::run_evictions(node.clone(), agents_stop.clone())),
    ];
    tracing::info!(node = node.config.node_id, listen = %address, http = %node.config.http, "started");

    stop.cancelled().await;
    tracing::info!("stopping: leadership moves first");
    agents_stop.cancel();
    for mut agent in agents {
        match tokio::time::timeout(AGENTS_END_WITHIN, &mut agent).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => tracing::error!("an agent panicked"),
            // It waits for something that may not come, such as a quorum.
            Err(_) => agent.abort(),
        }
    }
    // Clients are answered while leadership moves; then the doors close.
    node.shutdown().await;
    doors_stop.cancel();
    tasks.close();
    if tokio::time::timeout(DOORS_CLOSE_WITHIN, tasks.wait()).await.is_err() {
        tracing::warn!("some connections did not end in time");
    }
    for (what, served) in [("gRPC", join(grpc).await), ("HTTP", join(http).await)] {
        if let Some(error) = served {
            tracing::error!(what, error, "a door ended with an error");
        }
    }
    Ok(())
}

async fn join<E: std::fmt::Display>(door: tokio::task::JoinHandle<Result<(), E>>) -> Option<String> {
    if !door.is_finished() {
        door.abort();
        return None;
    }
    match door.await {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(error) => Some(error.to_string()),
    }
}

async fn open_node(config: ServerConfig, readiness: Readiness) -> Result<Arc<Node>, ServerError> {
    let opened = tokio::task::spawn_blocking(move || Node::open(config, readiness)).await;
    Ok(opened.map_err(|_| NodeError::Unfinished { what: "opening the data directory" })??)
}

/// Starts the replicas that took part before: they need nobody's leave. One that cannot be opened now is tried again by the
/// agent, and does not keep the others down.
async fn start_listed(node: &Arc<Node>) {
    for listed in node.listed().into_iter().filter(|r| r.started) {
        if let Err(error) = node.start_replica(listed).await {
            tracing::error!(group = listed.group, replica = listed.replica, %error, "a replica does not start; tried again");
        }
    }
}

async fn serve_doors(
    node: Arc<Node>,
    parameter: ParameterDoor,
    listener: TcpListener,
    stop: CancellationToken,
) -> Result<(), ServerError> {
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<ParameterServiceServer<ParameterDoor>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTORS)
        .build_v1()
        .map_err(|e| std::io::Error::other(e.to_string()))?;
    let bounded = MESSAGE_BYTES_MAX;
    let recovery = node.recovery.clone();
    let admit = move |request: Request<()>| -> Result<Request<()>, Status> {
        recovery.admit(request.metadata())?;
        Ok(request)
    };
    // The builder's own `tcp_nodelay` does not reach connections of a listener that is handed in: without it here, small
    // frames wait for acknowledgements, and p99 of a push is 40 ms.
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    evershard_raft::tuned(tonic::transport::Server::builder())
        .max_concurrent_streams(Some(STREAMS_PER_CONNECTION_MAX))
        .add_service(health_service)
        .add_service(reflection)
        .add_service(InterceptedService::new(
            ParameterServiceServer::new(parameter)
                .max_decoding_message_size(bounded)
                .max_encoding_message_size(bounded),
            admit.clone(),
        ))
        .add_service(InterceptedService::new(
            AdminServiceServer::new(AdminDoor::new(node.clone())).max_decoding_message_size(bounded),
            admit.clone(),
        ))
        .add_service(InterceptedService::new(
            JobServiceServer::new(JobDoor::new(node.clone())).max_decoding_message_size(bounded),
            admit.clone(),
        ))
        .add_service(InterceptedService::new(
            CheckpointServiceServer::new(CheckpointDoor::new(node.clone()))
                .max_decoding_message_size(bounded),
            admit.clone(),
        ))
        .add_service(InterceptedService::new(
            NodeServiceServer::new(NodeDoor::new(node.clone())).max_decoding_message_size(bounded),
            admit,
        ))
        .add_service(node.lanes.clone())
        .serve_with_incoming_shutdown(incoming, async move { stop.cancelled().await })
        .await?;
    Ok(())
}
