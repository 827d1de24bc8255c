//! The receiving end of the lanes: a gRPC service that the node's server mounts.
//!
//! Invariants:
//! - a stream of another cluster or recovery epoch, for another node, or of an unknown lane is refused before its first frame;
//! - no frame of a stream is taken once this node's recovery epoch is another than the one it was opened under;
//! - a damaged frame is refused, not guessed at;
//! - a stream's tasks end with it.
//!
//! Not here: what frames mean (`router`, `endpoint`), TLS (the server).

use std::pin::Pin;
use std::sync::Arc;

use evershard_proto::limits::MESSAGE_BYTES_MAX;
use evershard_proto::v1::LaneFrame;
use evershard_proto::v1::raft_service_server::{RaftService, RaftServiceServer};
use futures_util::{Stream, StreamExt};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};

use super::{Connection, FrameKind, IncomingFrame, Lane, Refusal, ReplyFrame, Router};
use crate::options::RaftOptions;
use crate::type_config::Tokio;

pub(crate) const CLUSTER_KEY: &str = "evershard-cluster";
/// The sender's recovery epoch; nodes that were built before there was one send none, and are of epoch 0.
pub(crate) const RECOVERY_KEY: &str = evershard_proto::RECOVERY_METADATA;
pub(crate) const LANE_KEY: &str = "evershard-lane";
pub(crate) const SOURCE_KEY: &str = "evershard-source-node";
pub(crate) const TARGET_KEY: &str = "evershard-target-node";

/// HTTP/2 windows on both ends of a lane.
pub(crate) const WINDOW_BYTES: u32 = 32 * 1024 * 1024;
const FRAME_BYTES: u32 = 1024 * 1024;
/// Answers of one connection that wait to be written.
const REPLIES_MAX: usize = 1024;

/// See the module.
pub struct PeerService {
    cluster_id: String,
    node: u64,
    router: Arc<Router<Tokio>>,
}

/// HTTP/2 settings for a server that carries lanes: large windows and frames, no Nagle, keep-alive.
///
/// With `serve_with_incoming` tonic does not apply `tcp_nodelay`: the incoming connections must have it set
/// (`TcpIncoming::with_nodelay`), else every other answer waits 40 ms for a delayed acknowledgement.
#[must_use]
pub fn tuned(server: tonic::transport::Server) -> tonic::transport::Server {
    server
        .tcp_nodelay(true)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .http2_keepalive_interval(Some(std::time::Duration::from_secs(10)))
        .http2_keepalive_timeout(Some(std::time::Duration::from_secs(5)))
}

impl PeerService {
    pub(crate) fn new(options: &RaftOptions, router: Arc<Router<Tokio>>) -> Self {
        Self { cluster_id: options.cluster_id.clone(), node: options.node, router }
    }

    pub(crate) fn into_server(self) -> RaftServiceServer<Self> {
        RaftServiceServer::new(self)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }

    fn check(&self, metadata: &MetadataMap, recovery_epoch: u64) -> Result<Lane, Status> {
        let text = |key: &'static str| {
            let value = metadata.get(key).and_then(|value| value.to_str().ok());
            value.ok_or_else(|| Status::invalid_argument(format!("metadata {key} is missing")))
        };
        let cluster = text(CLUSTER_KEY)?;
        if cluster != self.cluster_id {
            return Err(Status::failed_precondition(format!(
                "this node belongs to cluster {}, not {cluster}",
                self.cluster_id
            )));
        }
        let recovery = metadata.get(RECOVERY_KEY).map_or("0", |value| value.to_str().unwrap_or("unreadable"));
        if recovery != recovery_epoch.to_string() {
            return Err(Status::failed_precondition(format!(
                "this node is of recovery epoch {recovery_epoch}, not {recovery}: one of them has not heard of an unsafe recovery"
            )));
        }
        let target = text(TARGET_KEY)?;
        if target != self.node.to_string() {
            return Err(Status::failed_precondition(format!("this is node {}, not {target}", self.node)));
        }
        let lane = text(LANE_KEY)?;
        Lane::of(lane).ok_or_else(|| Status::invalid_argument(format!("unknown lane {lane:?}")))
    }
}

#[tonic::async_trait]
impl RaftService for PeerService {
    type LaneStream = Pin<Box<dyn Stream<Item = Result<LaneFrame, Status>> + Send>>;

    async fn lane(
        &self,
        request: Request<Streaming<LaneFrame>>,
    ) -> Result<Response<Self::LaneStream>, Status> {
        let recovery_epoch = self.router.recovery_epoch();
        let lane = self.check(request.metadata(), recovery_epoch)?;
        if self.router.closed().is_cancelled() {
            return Err(Status::unavailable("this node is shutting down"));
        }
        let (replies, answered) = mpsc::channel(REPLIES_MAX);
        let connection = Connection::new(Arc::clone(&self.router), lane, replies.clone());
        let router = Arc::clone(&self.router);
        tokio::spawn(receive(connection, request.into_inner(), replies, router, recovery_epoch));
        let frames = ReceiverStream::new(answered).map(|reply| Ok(lay_out(reply)));
        Ok(Response::new(Box::pin(frames)))
    }
}

/// Reads one stream until it ends; the connection's sessions end with it.
async fn receive(
    mut connection: Connection<Tokio>,
    mut frames: Streaming<LaneFrame>,
    replies: mpsc::Sender<ReplyFrame>,
    router: Arc<Router<Tokio>>,
    recovery_epoch: u64,
) {
    loop {
        let frame = tokio::select! {
            frame = frames.message() => frame,
            // The peer is gone: its reading end was dropped.
            () = replies.closed() => return,
            () = router.closed().cancelled() => return,
        };
        let frame = match frame {
            Ok(Some(frame)) => frame,
            Ok(None) => return,
            Err(status) => {
                tracing::debug!(%status, "a peer's stream ended");
                return;
            }
        };
        if router.recovery_epoch() != recovery_epoch {
            tracing::info!("a peer's stream ends: it was opened before an unsafe recovery");
            return;
        }
        let (id, group, replica) = (frame.id, frame.group, frame.replica);
        match checked(frame) {
            Ok(frame) => connection.accept(frame).await,
            Err(reason) => {
                let result = Err(Refusal::Unreadable(reason));
                if replies.send(ReplyFrame { id, group, replica, result }).await.is_err() {
                    return;
                }
            }
        }
    }
}

fn checked(frame: LaneFrame) -> Result<IncomingFrame, String> {
    let found = crc32fast::hash(&frame.body);
    if found != frame.body_crc32 {
        return Err(format!("crc32 {found:08x}, expected {:08x}", frame.body_crc32));
    }
    let kind = FrameKind::of(frame.kind).ok_or_else(|| format!("kind {}", frame.kind))?;
    let LaneFrame { id, group, replica, body, .. } = frame;
    Ok(IncomingFrame { id, group, replica, kind, body })
}

fn lay_out(reply: ReplyFrame) -> LaneFrame {
    let (kind, body) = match reply.result {
        Ok(body) => (FrameKind::Reply, body),
        Err(refusal) => (FrameKind::Refused, refusal.encode()),
    };
    let body_crc32 = crc32fast::hash(&body);
    LaneFrame {
        id: reply.id,
        group: reply.group,
        replica: reply.replica,
        kind: kind as u32,
        body,
        body_crc32,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use tonic::metadata::MetadataValue;

    use super::*;

    #[test]
    fn a_lane_of_another_recovery_epoch_is_refused() {
        let router = Arc::new(Router::<Tokio>::default());
        let service = PeerService::new(&RaftOptions::new("c", 1, "data"), Arc::clone(&router));
        let from = |recovery: Option<u64>| {
            let mut metadata = MetadataMap::new();
            metadata.insert(CLUSTER_KEY, MetadataValue::from_static("c"));
            metadata.insert(TARGET_KEY, MetadataValue::from_static("1"));
            metadata.insert(LANE_KEY, MetadataValue::from_static("log"));
            if let Some(epoch) = recovery {
                metadata.insert(RECOVERY_KEY, MetadataValue::from(epoch));
            }
            service.check(&metadata, router.recovery_epoch())
        };
        assert!(from(None).is_ok() && from(Some(0)).is_ok());
        let refused = from(Some(2)).expect_err("it has heard of what this node has not");
        assert!(refused.message().contains("recovery epoch 0, not 2"), "{refused}");
        router.recovery().store(2, Ordering::SeqCst);
        assert!(from(Some(2)).is_ok());
        assert!(from(None).is_err() && from(Some(0)).is_err(), "it has not heard");
    }
}
