//! One long-lived stream to one node, shared by everything this client asks of it.
//!
//! Invariants:
//! - requests reach the node in the order they were given;
//! - when the stream breaks, every unanswered request fails at once: nobody waits for a dead node;
//! - the next request after a break connects anew; a node that does not accept fails everything that waits for it.
//!
//! Not here: deciding where to send, and sending again.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use evershard_proto::limits::MESSAGE_BYTES_MAX;
use evershard_proto::v1::exchange_reply::Reply;
use evershard_proto::v1::exchange_request::Request;
use evershard_proto::v1::parameter_service_client::ParameterServiceClient;
use evershard_proto::v1::{ErrorDetail, ErrorKind, ExchangeRequest};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

const WINDOW_BYTES: u32 = 32 << 20;
/// Requests queued for a node.
const QUEUE_MAX: usize = 1024;
/// A node that does not answer a ping in this time is given up: its stream breaks.
const PING: Duration = Duration::from_secs(1);

struct Outgoing {
    request: Request,
    reply: oneshot::Sender<Result<Reply, ErrorDetail>>,
}

/// The ways to all nodes.
#[derive(Debug)]
pub(crate) struct NodeChannels {
    connect_timeout: Duration,
    queues: Mutex<HashMap<String, mpsc::Sender<Outgoing>>>,
    recovery: Arc<AtomicU64>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// The answer to come.
pub(crate) type Pending = oneshot::Receiver<Result<Reply, ErrorDetail>>;

impl NodeChannels {
    pub(crate) fn new(connect_timeout: Duration, tasks: TaskTracker, stop: CancellationToken) -> Arc<Self> {
        Arc::new(NodeChannels {
            connect_timeout,
            queues: Mutex::default(),
            recovery: Arc::default(),
            tasks,
            stop,
        })
    }

    /// Everything is asked under this recovery epoch; it never falls. True when it rose.
    pub(crate) fn raise_recovery_epoch(&self, epoch: u64) -> bool {
        self.recovery.fetch_max(epoch, Ordering::SeqCst) < epoch
    }

    pub(crate) fn recovery_epoch(&self) -> u64 {
        self.recovery.load(Ordering::SeqCst)
    }

    /// Runs `task` until it ends or the client is closed.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = task => {}
            }
        });
    }

    /// A plain channel for unary calls, made lazily.
    pub(crate) fn endpoint(&self, address: &str) -> Result<Endpoint, ErrorDetail> {
        let endpoint = Endpoint::from_shared(address.to_string())
            .map_err(|e| passing(format!("address {address:?}: {e}")))?;
        Ok(endpoint
            .connect_timeout(self.connect_timeout)
            .tcp_nodelay(true)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .http2_keep_alive_interval(PING)
            .keep_alive_timeout(PING)
            .keep_alive_while_idle(true))
    }

    /// Queues a request for the node at `address`.
    pub(crate) async fn send(self: &Arc<Self>, address: &str, request: Request) -> Pending {
        let (reply, pending) = oneshot::channel();
        let queue = self.queue(address);
        // A send that fails drops the reply's sender: the caller sees a closed channel and tries again.
        let _ = queue.send(Outgoing { request, reply }).await;
        pending
    }

    fn queue(self: &Arc<Self>, address: &str) -> mpsc::Sender<Outgoing> {
        let mut queues = self.queues.lock();
        if let Some(queue) = queues.get(address)
            && !queue.is_closed()
        {
            return queue.clone();
        }
        let (queue, waiting) = mpsc::channel(QUEUE_MAX);
        queues.insert(address.to_string(), queue.clone());
        let channels = self.clone();
        let address = address.to_string();
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = channels.run(&address, waiting) => {}
            }
        });
        queue
    }

    /// Connects when there is something to send, exchanges until the stream breaks, and again.
    async fn run(&self, address: &str, mut waiting: mpsc::Receiver<Outgoing>) {
        while let Some(first) = waiting.recv().await {
            match self.connect(address).await {
                Ok((requests, replies)) => {
                    exchange(address, first, &mut waiting, requests, replies, &self.recovery).await;
                }
                Err(error) => {
                    fail(first, &error);
                    while let Ok(next) = waiting.try_recv() {
                        fail(next, &error);
                    }
                }
            }
        }
    }

    async fn connect(
        &self,
        address: &str,
    ) -> Result<(mpsc::Sender<ExchangeRequest>, Streaming<evershard_proto::v1::ExchangeReply>), ErrorDetail>
    {
        let unreachable = |e: &dyn std::error::Error| passing(format!("{address}: {}", innermost(e)));
        let endpoint = self.endpoint(address)?;
        let connecting = tokio::time::timeout(self.connect_timeout, endpoint.connect());
        let channel: Channel = connecting
            .await
            .map_err(|_| passing(format!("{address}: no connection within {:?}", self.connect_timeout)))?
            .map_err(|e| unreachable(&e))?;
        let (requests, outgoing) = mpsc::channel(QUEUE_MAX);
        let mut client = ParameterServiceClient::new(channel)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let opened =
            tokio::time::timeout(self.connect_timeout, client.exchange(ReceiverStream::new(outgoing)));
        let replies = opened
            .await
            .map_err(|_| passing(format!("{address}: no stream within {:?}", self.connect_timeout)))?
            .map_err(|status| crate::error::detail_of(&status))?;
        Ok((requests, replies.into_inner()))
    }
}

async fn exchange(
    address: &str,
    first: Outgoing,
    waiting: &mut mpsc::Receiver<Outgoing>,
    requests: mpsc::Sender<ExchangeRequest>,
    mut replies: Streaming<evershard_proto::v1::ExchangeReply>,
    recovery: &AtomicU64,
) {
    let mut unanswered: HashMap<u64, oneshot::Sender<Result<Reply, ErrorDetail>>> = HashMap::new();
    let mut next_id = 0;
    let mut outgoing = Some(first);
    let why = loop {
        if let Some(Outgoing { request, reply }) = outgoing.take() {
            next_id += 1;
            unanswered.insert(next_id, reply);
            let message = ExchangeRequest {
                id: next_id,
                request: Some(request),
                recovery_epoch: recovery.load(Ordering::SeqCst),
            };
            // Replies must be read while the node does not take more: else both ends could wait for each other.
            let mut sending = std::pin::pin!(requests.send(message));
            loop {
                tokio::select! {
                    sent = &mut sending => {
                        if sent.is_err() {
                            tracing::debug!(address, "the stream takes no more requests");
                        }
                        break;
                    }
                    reply = replies.message() => match reply {
                        Ok(Some(reply)) => answer(&mut unanswered, reply),
                        Ok(None) | Err(_) => break,
                    },
                }
            }
        }
        tokio::select! {
            next = waiting.recv() => match next {
                Some(next) => outgoing = Some(next),
                None => return,
            },
            reply = replies.message() => match reply {
                Ok(Some(reply)) => answer(&mut unanswered, reply),
                Ok(None) => break "the node ended the stream".to_string(),
                Err(status) => break format!("{}: {}", status.code(), status.message()),
            },
        }
    };
    let error = passing(format!("{address}: the connection broke: {why}"));
    if let Some(next) = outgoing {
        fail(next, &error);
    }
    for (_, reply) in unanswered {
        let _ = reply.send(Err(error.clone()));
    }
}

fn answer(
    unanswered: &mut HashMap<u64, oneshot::Sender<Result<Reply, ErrorDetail>>>,
    reply: evershard_proto::v1::ExchangeReply,
) {
    let Some(waiting) = unanswered.remove(&reply.id) else { return };
    let result = match reply.reply {
        Some(Reply::Error(detail)) => Err(detail),
        Some(other) => Ok(other),
        None => Err(passing("an answer of a newer version".into())),
    };
    // Whoever asked may have stopped waiting.
    let _ = waiting.send(result);
}

fn fail(outgoing: Outgoing, error: &ErrorDetail) {
    let _ = outgoing.reply.send(Err(error.clone()));
}

/// A failure that may be over at the next try.
pub(crate) fn passing(message: String) -> ErrorDetail {
    ErrorDetail { kind: ErrorKind::Unavailable as i32, message, ..Default::default() }
}

fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
