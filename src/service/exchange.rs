//! One client's stream: requests are taken in order, answered as they finish.
//!
//! Invariants:
//! - pushes of a stream are proposed in the order they came; their answers are waited for apart;
//! - the bytes of requests being answered and of their replies, until the transport has taken them, are bounded for each stream
//!   and for the node: above the bound the stream is not read (back-pressure by HTTP/2 flow control);
//! - a client that leaves its replies lying is cut off (`replies`): what is held for it is wanted by others;
//! - every spawned answer is owned by the stream's task and ends with it.

use std::sync::Arc;

use evershard_proto::limits::PULL_REPLY_BYTES_MAX;
use evershard_proto::v1::exchange_reply::Reply;
use evershard_proto::v1::exchange_request::Request;
use evershard_proto::v1::{ErrorKind, ExchangeReply, ExchangeRequest, PullRequest, PushPullReply};
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tonic::{Status, Streaming};

use super::RequestError;
use super::parameter::ParameterDoor;
use super::replies::{Held, Permits, Replies, replies};
use crate::telemetry::metric_definitions as metric;

/// Serves one stream until the client or the node ends it.
pub(super) fn serve(door: ParameterDoor, mut requests: Streaming<ExchangeRequest>) -> Replies {
    let (sender, receiver, watch) = replies();
    let tasks = door.tasks.clone();
    tasks.spawn(async move {
        let stuck = watch.stuck(door.bounds.reply_patience);
        let mut stuck = std::pin::pin!(stuck);
        let budget = Arc::new(Semaphore::new(door.bounds.stream_bytes));
        let mut answers = JoinSet::new();
        loop {
            // Whatever became of the request before: what has been answered is not kept.
            while answers.try_join_next().is_some() {}
            let next = async {
                let request = requests.message().await?;
                Ok::<_, Status>(match request {
                    Some(request) => door.admit(&request, &budget).await.map(|permits| (request, permits)),
                    None => None,
                })
            };
            let next = tokio::select! {
                () = door.stop.cancelled() => break,
                () = sender.closed() => break,
                () = &mut stuck => {
                    metrics::counter!(metric::STREAMS_CUT_TOTAL).increment(1);
                    tracing::warn!("a client does not take its replies: its stream ends");
                    break;
                }
                next = next => next,
            };
            let (request, permits) = match next {
                Ok(Some(next)) => next,
                Ok(None) => break,
                Err(status) => {
                    tracing::debug!(%status, "a client's stream broke");
                    break;
                }
            };
            let replies = sender.clone();
            let door = door.clone();
            let id = request.id;
            // An answer in time is worth nothing when the client is of another history.
            if let Err(error) = door.recovery.expect(request.recovery_epoch) {
                answers.spawn(async move { send(&replies, id, Err(error), permits).await });
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
                Some(Request::Contribute(part)) => {
                    let taken = door.contribute(&part).map(Reply::Contribute);
                    drop(part);
                    answers.spawn(async move { send(&replies, id, taken, permits).await });
                }
                Some(Request::Step(step)) => {
                    answers.spawn(async move {
                        send(&replies, id, door.step(step).await.map(Reply::Step), permits).await;
                    });
                }
                Some(Request::Scan(scan)) => {
                    answers.spawn(async move {
                        send(&replies, id, door.scan(scan).await.map(Reply::Scan), permits).await;
                    });
                }
                Some(Request::Size(size)) => {
                    answers.spawn(async move {
                        send(&replies, id, door.size(size).await.map(Reply::Size), permits).await;
                    });
                }
                None => {
                    let what = "an exchange request of a newer version";
                    let error = RequestError::new(ErrorKind::Invalid, what);
                    answers.spawn(async move { send(&replies, id, Err(error), permits).await });
                }
            }
        }
        // Dropping the set ends what is still being answered: the client is gone, and what is in the log stays.
    });
    receiver
}

impl ParameterDoor {
    /// Waits until the stream and the node have room for a request and its reply; `None` when the node is shutting down.
    async fn admit(&self, request: &ExchangeRequest, stream: &Arc<Semaphore>) -> Option<Permits> {
        let reply_bytes = match &request.request {
            Some(Request::Pull(pull)) => self.reply_bytes(pull),
            Some(Request::PushPull(both)) => both.pull.as_ref().map_or(0, |pull| self.reply_bytes(pull)),
            Some(Request::Scan(_)) => PULL_REPLY_BYTES_MAX,
            Some(Request::Push(_) | Request::Contribute(_) | Request::Step(_) | Request::Size(_)) | None => 0,
        };
        let cost = request.encoded_len() + reply_bytes;
        let ours =
            Arc::clone(stream).acquire_many_owned(permits(cost, self.bounds.stream_bytes)).await.ok()?;
        Some((ours, self.admit_to_node(cost).await?))
    }

    /// Waits until the node has room for `cost` bytes; `None` when it is shutting down.
    pub(super) async fn admit_to_node(&self, cost: usize) -> Option<OwnedSemaphorePermit> {
        // In the order of asking: a large request is not passed by small ones for ever.
        let admitted =
            Arc::clone(&self.node_budget).acquire_many_owned(permits(cost, self.bounds.node_bytes));
        tokio::select! {
            () = self.stop.cancelled() => None,
            admitted = admitted => admitted.ok(),
        }
    }

    /// About how long a pull's reply is.
    pub(super) fn reply_bytes(&self, pull: &PullRequest) -> usize {
        let row_bytes =
            self.replicas.shard(pull.group).ok().and_then(|replica| {
                replica.reader.schema(pull.table).map(|schema| schema.dim() as usize * 4)
            });
        (pull.keys.len() / 8).saturating_mul(row_bytes.unwrap_or(0)).min(PULL_REPLY_BYTES_MAX)
    }
}

/// What a request of `cost` bytes takes of a bound: at least 1 KiB, so that empty ones are bounded too; one that is larger
/// than the bound goes alone.
pub(super) fn permits(cost: usize, bound: usize) -> u32 {
    // Fits: bounds are at most what a semaphore can count.
    cost.max(1024).min(bound) as u32
}

async fn send(replies: &mpsc::Sender<Held>, id: u64, reply: Result<Reply, RequestError>, permits: Permits) {
    let reply = reply.unwrap_or_else(|error| Reply::Error(*error.0));
    if replies.send((ExchangeReply { id, reply: Some(reply) }, permits)).await.is_err() {
        tracing::debug!(id, "the client was gone before its answer");
    }
}
