//! A stream of AppendEntries, many in flight, answered in order.
//!
//! Invariants:
//! - requests are queued on the lane in order, and results are yielded in that order;
//! - at most `bytes_max` (or one request) and `REQUESTS_MAX` are unanswered;
//! - no answer for `idle_max` while something is unanswered ends the stream with a timeout.
//!
//! Not here: reading the log (openraft's replication does, bounded by `log_store`).

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use openraft::errors::{RPCError, Timeout};
use openraft::raft::{AppendEntriesRequest, StreamAppendResult};
use openraft::{Instant as _, RPCTypes};

use super::codec::{append_bytes, decode_append_reply, encode_append};
use super::network::rpc_error;
use super::{Body, FrameKind, Lane, ReplyFuture, Target, Transport, TransportError};
use crate::type_config::{Runtime, TypeConfig};

/// Unanswered requests at most. The receiver's session queue is as long.
pub(crate) const REQUESTS_MAX: usize = 64;

/// See the module.
pub(crate) struct Pipeline<RT: Runtime, S> {
    input: Option<S>,
    transport: Arc<dyn Transport>,
    sender: u64,
    target: Target,
    unanswered: VecDeque<(usize, ReplyFuture)>,
    unanswered_bytes: usize,
    bytes_max: usize,
    idle_max: Duration,
    progress_at: RT::Instant,
    idle: Option<Pin<Box<RT::Sleep>>>,
}

impl<RT, S> Pipeline<RT, S>
where
    RT: Runtime,
    S: Stream<Item = AppendEntriesRequest<TypeConfig<RT>>> + Send + Unpin + 'static,
{
    pub(crate) fn new(
        input: S,
        transport: Arc<dyn Transport>,
        sender: u64,
        target: Target,
        bytes_max: usize,
        idle_max: Duration,
    ) -> Self {
        Self {
            input: Some(input),
            transport,
            sender,
            target,
            unanswered: VecDeque::new(),
            unanswered_bytes: 0,
            bytes_max,
            idle_max,
            progress_at: RT::Instant::now(),
            idle: None,
        }
    }

    fn send_ready(&mut self, cx: &mut Context<'_>) {
        while self.unanswered_bytes < self.bytes_max && self.unanswered.len() < REQUESTS_MAX {
            let Some(input) = &mut self.input else { return };
            match input.poll_next_unpin(cx) {
                Poll::Ready(Some(request)) => {
                    if self.unanswered.is_empty() {
                        self.progress_at = RT::Instant::now();
                    }
                    let bytes = append_bytes(&request);
                    let body = Body::lazy(move || encode_append(&request));
                    let reply = self.transport.call(&self.target, Lane::Log, FrameKind::Append, body);
                    self.unanswered_bytes += bytes;
                    self.unanswered.push_back((bytes, reply));
                }
                Poll::Ready(None) => self.input = None,
                Poll::Pending => return,
            }
        }
    }

    /// Ready when nothing was answered for too long.
    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let deadline = self.progress_at + self.idle_max;
            let sleep = self.idle.get_or_insert_with(|| Box::pin(RT::sleep_until(deadline)));
            if sleep.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            self.idle = None;
            if RT::Instant::now() >= deadline {
                return Poll::Ready(());
            }
        }
    }

    fn decoded(
        &self,
        answer: Result<bytes::Bytes, TransportError>,
    ) -> Result<StreamAppendResult<TypeConfig<RT>>, RPCError<TypeConfig<RT>>> {
        let body = answer.map_err(rpc_error)?;
        decode_append_reply(body).map_err(|error| {
            rpc_error(TransportError::Damaged { peer: self.target.peer.clone(), reason: error.to_string() })
        })
    }
}

impl<RT, S> Stream for Pipeline<RT, S>
where
    RT: Runtime,
    S: Stream<Item = AppendEntriesRequest<TypeConfig<RT>>> + Send + Unpin + 'static,
{
    type Item = Result<StreamAppendResult<TypeConfig<RT>>, RPCError<TypeConfig<RT>>>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        this.send_ready(cx);
        let Some((_, front)) = this.unanswered.front_mut() else {
            return if this.input.is_none() { Poll::Ready(None) } else { Poll::Pending };
        };
        match front.as_mut().poll(cx) {
            Poll::Ready(answer) => {
                if let Some((bytes, _)) = this.unanswered.pop_front() {
                    this.unanswered_bytes -= bytes;
                }
                this.progress_at = RT::Instant::now();
                Poll::Ready(Some(this.decoded(answer)))
            }
            Poll::Pending => match this.poll_idle(cx) {
                Poll::Pending => Poll::Pending,
                Poll::Ready(()) => {
                    this.input = None;
                    this.unanswered.clear();
                    this.unanswered_bytes = 0;
                    Poll::Ready(Some(Err(RPCError::Timeout(Timeout {
                        action: RPCTypes::AppendEntries,
                        id: this.sender,
                        target: this.target.replica,
                        timeout: this.idle_max,
                    }))))
                }
            },
        }
    }
}

impl<RT: Runtime, S> Unpin for Pipeline<RT, S> {}
