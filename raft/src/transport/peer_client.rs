//! The sending end of the lanes: per peer and lane one connection, one stream, many frames in flight.
//!
//! A lane is a task: it connects when there is something to send, lays frames out when the connection takes them,
//! matches answers by id, and fails everything under way at once when the connection breaks. Then it waits a little
//! before it connects again, refusing calls meanwhile.
//!
//! Invariants:
//! - frames go out in the order of the calls, each at most once;
//! - every call is answered or failed; none waits for a connection longer than the connect timeout;
//! - queues are bounded: a full lane refuses.
//!
//! Not here: what frames mean (`codec`, `network`), timeouts of answers (their callers).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use evershard_proto::limits::MESSAGE_BYTES_MAX;
use evershard_proto::v1::LaneFrame;
use evershard_proto::v1::raft_service_client::RaftServiceClient;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataValue;
use tonic::transport::Endpoint;
use tonic::{Request, Streaming};

use super::peer_service::{CLUSTER_KEY, LANE_KEY, RECOVERY_KEY, SOURCE_KEY, TARGET_KEY, WINDOW_BYTES};
use super::{Body, FrameKind, Lane, Refusal, ReplyFuture, Target, Transport, TransportError};
use crate::options::RaftOptions;
use crate::type_config::Peer;

/// Calls that wait for a lane.
const QUEUE_MAX: usize = 4096;
/// Frames laid out and not yet taken by the connection.
const LAID_OUT_MAX: usize = 4;
const BACKOFF_MIN: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_millis(500);
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(2);
const KEEP_ALIVE_WITHIN: Duration = Duration::from_secs(2);

/// All lanes of this node; see the module.
pub(crate) struct PeerPool {
    cluster_id: String,
    recovery: Arc<AtomicU64>,
    node: u64,
    connect_timeout: Duration,
    lanes: Mutex<HashMap<(Peer, Lane), mpsc::Sender<Call>>>,
    /// Where nodes are, as far as this node was told: openraft keeps the address it began a replication with.
    addresses: Mutex<HashMap<u64, String>>,
    tasks: Mutex<JoinSet<()>>,
    stop: CancellationToken,
}

type Outcome = Result<Bytes, TransportError>;

struct Call {
    group: u64,
    replica: u64,
    kind: FrameKind,
    body: Body,
    answer: oneshot::Sender<Outcome>,
}

impl PeerPool {
    /// `recovery`: this node's recovery epoch, said to each peer when a lane connects.
    pub(crate) fn new(options: &RaftOptions, recovery: Arc<AtomicU64>) -> Arc<Self> {
        Arc::new(Self {
            cluster_id: options.cluster_id.clone(),
            recovery,
            node: options.node,
            connect_timeout: options.timing.connect_timeout,
            lanes: Mutex::new(HashMap::new()),
            addresses: Mutex::default(),
            tasks: Mutex::new(JoinSet::new()),
            stop: CancellationToken::new(),
        })
    }

    /// Ends all lanes and waits for their tasks.
    pub(crate) async fn close(&self) {
        self.stop.cancel();
        self.lanes.lock().clear();
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        while tasks.join_next().await.is_some() {}
    }

    /// From now on this node is reached there, whatever address a call names.
    pub(crate) fn learn_address(&self, node: u64, address: &str) {
        let known = self.addresses.lock().insert(node, address.to_owned());
        if known.as_deref() != Some(address) {
            self.lanes.lock().retain(|(peer, _), _| peer.node != node || peer.address == address);
        }
    }

    fn present(&self, peer: &Peer) -> Peer {
        match self.addresses.lock().get(&peer.node) {
            Some(address) => Peer { node: peer.node, address: address.clone() },
            None => peer.clone(),
        }
    }

    fn lane(&self, peer: &Peer, lane: Lane) -> mpsc::Sender<Call> {
        let mut lanes = self.lanes.lock();
        let key = (peer.clone(), lane);
        if let Some(calls) = lanes.get(&key) {
            return calls.clone();
        }
        let (calls, queue) = mpsc::channel(QUEUE_MAX);
        let task = LaneTask {
            peer: peer.clone(),
            lane,
            cluster_id: self.cluster_id.clone(),
            recovery: Arc::clone(&self.recovery),
            node: self.node,
            connect_timeout: self.connect_timeout,
            queue,
            waiting: HashMap::new(),
            next_id: 1,
        };
        let stop = self.stop.clone();
        self.tasks.lock().spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = task.run() => {}
            }
        });
        lanes.insert(key, calls.clone());
        calls
    }
}

impl Transport for PeerPool {
    fn call(&self, target: &Target, lane: Lane, kind: FrameKind, body: Body) -> ReplyFuture {
        let peer = self.present(&target.peer);
        if self.stop.is_cancelled() {
            let reason = "this node is shutting down".to_owned();
            return Box::pin(std::future::ready(Err(TransportError::Unreachable { peer, reason })));
        }
        let (answer, outcome) = oneshot::channel();
        let call = Call { group: target.group, replica: target.replica, kind, body, answer };
        match self.lane(&peer, lane).try_send(call) {
            Ok(()) => Box::pin(async move {
                outcome.await.unwrap_or_else(|_| {
                    Err(TransportError::Unreachable { peer, reason: "the lane ended".to_owned() })
                })
            }),
            Err(_) => Box::pin(std::future::ready(Err(TransportError::Full { peer, lane }))),
        }
    }
}

struct LaneTask {
    peer: Peer,
    lane: Lane,
    cluster_id: String,
    recovery: Arc<AtomicU64>,
    node: u64,
    connect_timeout: Duration,
    queue: mpsc::Receiver<Call>,
    waiting: HashMap<u64, oneshot::Sender<Outcome>>,
    next_id: u64,
}

impl LaneTask {
    async fn run(mut self) {
        let mut backoff = BACKOFF_MIN;
        while let Some(first) = self.queue.recv().await {
            let reason = match self.connect().await {
                Ok((frames, replies)) => {
                    tracing::debug!(peer = %self.peer, lane = self.lane.name(), "connected");
                    backoff = BACKOFF_MIN;
                    match self.serve(first, frames, replies).await {
                        Some(reason) => reason,
                        None => return,
                    }
                }
                Err(reason) => {
                    self.fail(first.answer, &reason);
                    reason
                }
            };
            tracing::debug!(peer = %self.peer, lane = self.lane.name(), %reason, "not connected");
            self.refuse_for(backoff, &reason).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    async fn connect(&self) -> Result<(mpsc::Sender<LaneFrame>, Streaming<LaneFrame>), String> {
        let endpoint = Endpoint::from_shared(self.peer.address.clone())
            .map_err(|error| format!("address {:?}: {error}", self.peer.address))?
            .connect_timeout(self.connect_timeout)
            .tcp_nodelay(true)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .http2_keep_alive_interval(KEEP_ALIVE_EVERY)
            .keep_alive_timeout(KEEP_ALIVE_WITHIN)
            .keep_alive_while_idle(true);
        let opening = async {
            let channel = endpoint.connect().await.map_err(|error| chain(&error))?;
            let mut client = RaftServiceClient::new(channel)
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX);
            let (frames, laid_out) = mpsc::channel(LAID_OUT_MAX);
            let mut request = Request::new(ReceiverStream::new(laid_out));
            let metadata = request.metadata_mut();
            let cluster =
                MetadataValue::try_from(self.cluster_id.as_str()).map_err(|error| error.to_string())?;
            metadata.insert(CLUSTER_KEY, cluster);
            metadata.insert(RECOVERY_KEY, MetadataValue::from(self.recovery.load(Ordering::SeqCst)));
            metadata.insert(LANE_KEY, MetadataValue::from_static(self.lane.name()));
            metadata.insert(SOURCE_KEY, MetadataValue::from(self.node));
            metadata.insert(TARGET_KEY, MetadataValue::from(self.peer.node));
            let replies = client.lane(request).await.map_err(|status| status.to_string())?;
            Ok((frames, replies.into_inner()))
        };
        tokio::time::timeout(2 * self.connect_timeout, opening)
            .await
            .unwrap_or_else(|_| Err("no connection in time".to_owned()))
    }

    /// Sends and receives until the connection breaks; answers why, or `None` when nobody calls any more.
    async fn serve(
        &mut self,
        first: Call,
        frames: mpsc::Sender<LaneFrame>,
        mut replies: Streaming<LaneFrame>,
    ) -> Option<String> {
        let mut next = Some(first);
        let reason = loop {
            let room = frames.reserve();
            tokio::select! {
                biased;
                reply = replies.message() => match reply {
                    Ok(Some(frame)) => self.answered(frame),
                    Ok(None) => break "the peer closed the lane".to_owned(),
                    Err(status) => break status.to_string(),
                },
                permit = room, if next.is_some() => match permit {
                    Ok(permit) => {
                        if let Some(call) = next.take()
                            && let Some(frame) = self.lay_out(call)
                        {
                            permit.send(frame);
                        }
                    }
                    Err(_) => break "the connection ended".to_owned(),
                },
                call = self.queue.recv(), if next.is_none() => match call {
                    Some(call) => next = Some(call),
                    None => return None,
                },
            }
        };
        if let Some(call) = next {
            self.fail(call.answer, &reason);
        }
        for (_, answer) in std::mem::take(&mut self.waiting) {
            self.fail(answer, &reason);
        }
        Some(reason)
    }

    fn lay_out(&mut self, call: Call) -> Option<LaneFrame> {
        if call.answer.is_closed() {
            return None;
        }
        if self.waiting.len() >= QUEUE_MAX {
            // Callers that timed out left theirs behind.
            self.waiting.retain(|_, answer| !answer.is_closed());
            if self.waiting.len() >= 2 * QUEUE_MAX {
                let full = TransportError::Full { peer: self.peer.clone(), lane: self.lane };
                let _ = call.answer.send(Err(full));
                return None;
            }
        }
        let id = self.next_id;
        self.next_id += 1;
        self.waiting.insert(id, call.answer);
        let body = call.body.into_bytes();
        let body_crc32 = crc32fast::hash(&body);
        Some(LaneFrame {
            id,
            group: call.group,
            replica: call.replica,
            kind: call.kind as u32,
            body,
            body_crc32,
        })
    }

    fn answered(&mut self, frame: LaneFrame) {
        // Nobody waits for an answer that came too late.
        let Some(answer) = self.waiting.remove(&frame.id) else { return };
        let damaged = |reason: String| TransportError::Damaged { peer: self.peer.clone(), reason };
        let found = crc32fast::hash(&frame.body);
        let outcome = if found != frame.body_crc32 {
            Err(damaged(format!("crc32 {found:08x}, expected {:08x}", frame.body_crc32)))
        } else {
            match FrameKind::of(frame.kind) {
                Some(FrameKind::Reply) => Ok(frame.body),
                Some(FrameKind::Refused) => Err(match Refusal::decode(frame.body) {
                    Ok(refusal) => TransportError::Refused { peer: self.peer.clone(), refusal },
                    Err(error) => damaged(error.to_string()),
                }),
                _ => Err(damaged(format!("an answer of kind {}", frame.kind))),
            }
        };
        let _ = answer.send(outcome);
    }

    /// Fails what is called for, for a while.
    async fn refuse_for(&mut self, pause: Duration, reason: &str) {
        let over = tokio::time::sleep(pause);
        tokio::pin!(over);
        loop {
            tokio::select! {
                () = &mut over => return,
                call = self.queue.recv() => match call {
                    Some(call) => self.fail(call.answer, reason),
                    None => return,
                },
            }
        }
    }

    fn fail(&self, answer: oneshot::Sender<Outcome>, reason: &str) {
        let _ = answer
            .send(Err(TransportError::Unreachable { peer: self.peer.clone(), reason: reason.to_owned() }));
    }
}

/// An error with its causes: tonic's own text does not name them.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
