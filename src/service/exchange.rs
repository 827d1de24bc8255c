//! One client's stream: requests are taken in order, answered as they finish.
//!
//! Invariants:
//! - pushes of a stream are proposed in the order they came; their answers are waited for apart;
//! - the bytes of requests being answered and of their replies, until the transport has taken them, are bounded for each stream
//!   and for the node: above the bound the stream is not read (back-pressure by HTTP/2 flow control);
//! - every spawned answer is owned by the stream's task and ends with it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use evershard_proto::limits::PULL_REPLY_BYTES_MAX;
use evershard_proto::v1::exchange_reply::Reply;
use evershard_proto::v1::exchange_request::Request;
use evershard_proto::v1::{ErrorKind, ExchangeReply, ExchangeRequest, PullRequest, PushPullReply};
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_stream::Stream;
use tonic::{Status, Streaming};

use super::RequestError;
use super::parameter::ParameterDoor;

/// What the client receives. What a reply takes of the bounds is given back when the transport takes the reply.
#[derive(Debug)]
pub struct Replies(mpsc::Receiver<(ExchangeReply, Permits)>);

/// A request's part of its stream's bound and of the node's.
type Permits = (OwnedSemaphorePermit, OwnedSemaphorePermit);

impl Stream for Replies {
    type Item = Result<ExchangeReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context).map(|next| next.map(|(reply, _permits)| Ok(reply)))
    }
}

/// Replies waiting for the client to read them.
const REPLIES_MAX: usize = 256;

/// Serves one stream until the client or the node ends it.
pub(super) fn serve(door: ParameterDoor, mut requests: Streaming<ExchangeRequest>) -> Replies {
    let (replies, receiver) = mpsc::channel(REPLIES_MAX);
    let tasks = door.tasks.clone();
    tasks.spawn(async move {
        let budget = Arc::new(Semaphore::new(door.stream_in_flight_bytes));
        let mut answers = JoinSet::new();
        loop {
            let next = tokio::select! {
                () = door.stop.cancelled() => break,
                () = replies.closed() => break,
                next = requests.message() => next,
            };
            let request = match next {
                Ok(Some(request)) => request,
                Ok(None) => break,
                Err(status) => {
                    tracing::debug!(%status, "a client's stream broke");
                    break;
                }
            };
            let Some(permits) = door.admit(&request, &budget).await else { break };
            let replies = replies.clone();
            let door = door.clone();
            let id = request.id;
            // An answer in time is worth nothing when the client is of another history.
            if let Err(error) = door.recovery.expect(request.recovery_epoch) {
                send(&replies, id, Err(error), permits).await;
                continue;
            }
            match request.request {
                Some(Request::Push(push)) => {
                    let begun = door.begin_push(&push);
                    drop(push);
                    answers.spawn(async move {
                        let reply = match begun {
                            Ok(begun) => ParameterDoor::finish_push(begun).await.map(Reply::Push),
                            Err(error) => Err(error),
                        };
                        send(&replies, id, reply, permits).await;
                    });
                }
                Some(Request::Pull(pull)) => {
                    answers.spawn(async move {
                        send(&replies, id, door.pull_rows(pull).await.map(Reply::Pull), permits).await;
                    });
                }
                Some(Request::PushPull(both)) => {
                    // Waits for the rows before the next request is taken, so that the push keeps its place.
                    let begun = door.pull_then_begin(both).await;
                    answers.spawn(async move {
                        let reply = match begun {
                            Ok((rows, begun)) => ParameterDoor::finish_push(begun).await.map(|push| {
                                Reply::PushPull(PushPullReply { pull: Some(rows), push: Some(push) })
                            }),
                            Err(error) => Err(error),
                        };
                        send(&replies, id, reply, permits).await;
                    });
                }
                None => {
                    let what = "an exchange request of a newer version";
                    send(&replies, id, Err(RequestError::new(ErrorKind::Invalid, what)), permits).await;
                }
            }
            while answers.try_join_next().is_some() {}
        }
        // Dropping the set ends what is still being answered: the client is gone, and what is in the log stays.
    });
    Replies(receiver)
}

impl ParameterDoor {
    /// Waits until the stream and the node have room for a request and its reply; `None` when the node is shutting down.
    async fn admit(&self, request: &ExchangeRequest, stream: &Arc<Semaphore>) -> Option<Permits> {
        let reply_bytes = match &request.request {
            Some(Request::Pull(pull)) => self.reply_bytes(pull),
            Some(Request::PushPull(both)) => both.pull.as_ref().map_or(0, |pull| self.reply_bytes(pull)),
            Some(Request::Push(_)) | None => 0,
        };
        // At least 1 KiB a request, so that empty ones are bounded too.
        let cost = (request.encoded_len() + reply_bytes).max(1024);
        // One that is larger than the bound goes alone. Fits: bounds are at most what a semaphore can count.
        let of_stream = cost.min(self.stream_in_flight_bytes) as u32;
        let of_node = cost.min(self.node_in_flight_bytes) as u32;
        let ours = Arc::clone(stream).acquire_many_owned(of_stream).await.ok()?;
        // In the order of asking: a large request is not passed by small ones for ever.
        let nodes = tokio::select! {
            () = self.stop.cancelled() => return None,
            nodes = Arc::clone(&self.node_budget).acquire_many_owned(of_node) => nodes.ok()?,
        };
        Some((ours, nodes))
    }

    /// About how long a pull's reply is.
    fn reply_bytes(&self, pull: &PullRequest) -> usize {
        let row_bytes =
            self.replicas.shard(pull.group).ok().and_then(|replica| {
                replica.reader.schema(pull.table).map(|schema| schema.dim() as usize * 4)
            });
        (pull.keys.len() / 8).saturating_mul(row_bytes.unwrap_or(0)).min(PULL_REPLY_BYTES_MAX)
    }
}

async fn send(
    replies: &mpsc::Sender<(ExchangeReply, Permits)>,
    id: u64,
    reply: Result<Reply, RequestError>,
    permits: Permits,
) {
    let reply = reply.unwrap_or_else(|error| Reply::Error(*error.0));
    if replies.send((ExchangeReply { id, reply: Some(reply) }, permits)).await.is_err() {
        tracing::debug!(id, "the client was gone before its answer");
    }
}
