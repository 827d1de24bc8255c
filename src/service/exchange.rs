//! One client's stream: requests are taken in order, answered as they finish.
//!
//! Invariants:
//! - pushes of a stream are proposed in the order they came; their answers are waited for apart;
//! - the bytes of requests being answered are bounded: above the bound the stream is not read (back-pressure by HTTP/2
//!   flow control);
//! - every spawned answer is owned by the stream's task and ends with it.

use std::sync::Arc;

use evershard_proto::v1::exchange_reply::Reply;
use evershard_proto::v1::exchange_request::Request;
use evershard_proto::v1::{ErrorKind, ExchangeReply, ExchangeRequest, PushPullReply};
use prost::Message;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::RequestError;
use super::parameter::ParameterDoor;

/// What the client receives.
pub(super) type Replies = ReceiverStream<Result<ExchangeReply, Status>>;

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
            // At least 1 KiB a request, so that empty ones are bounded too.
            let cost = request.encoded_len().max(1024).min(door.stream_in_flight_bytes);
            let Ok(permit) = Arc::clone(&budget).acquire_many_owned(cost as u32).await else { break };
            let replies = replies.clone();
            let door = door.clone();
            let id = request.id;
            match request.request {
                Some(Request::Push(push)) => {
                    let begun = door.begin_push(&push);
                    drop(push);
                    answers.spawn(async move {
                        let reply = match begun {
                            Ok(begun) => ParameterDoor::finish_push(begun).await.map(Reply::Push),
                            Err(error) => Err(error),
                        };
                        send(&replies, id, reply).await;
                        drop(permit);
                    });
                }
                Some(Request::Pull(pull)) => {
                    answers.spawn(async move {
                        send(&replies, id, door.pull_rows(pull).await.map(Reply::Pull)).await;
                        drop(permit);
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
                        send(&replies, id, reply).await;
                        drop(permit);
                    });
                }
                None => {
                    let what = "an exchange request of a newer version";
                    send(&replies, id, Err(RequestError::new(ErrorKind::Invalid, what))).await;
                }
            }
            while answers.try_join_next().is_some() {}
        }
        // Dropping the set ends what is still being answered: the client is gone, and what is in the log stays.
    });
    ReceiverStream::new(receiver)
}

async fn send(
    replies: &mpsc::Sender<Result<ExchangeReply, Status>>,
    id: u64,
    reply: Result<Reply, RequestError>,
) {
    let reply = reply.unwrap_or_else(|error| Reply::Error(*error.0));
    if replies.send(Ok(ExchangeReply { id, reply: Some(reply) })).await.is_err() {
        tracing::debug!(id, "the client was gone before its answer");
    }
}
