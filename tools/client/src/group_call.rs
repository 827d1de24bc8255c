//! One question to a shard's leader, asked until it is answered or the deadline is over: whoever leads meanwhile.
//!
//! For what may be asked twice: pulls, and parts of steps, which have names of their own. (Pushes go through `push_lane`.)

use std::time::{Duration, Instant};

use evershard_proto::v1::exchange_reply::Reply;
use evershard_proto::v1::exchange_request::Request;
use evershard_proto::v1::{ErrorDetail, ErrorKind};

use crate::Error;
use crate::backoff::Backoff;
use crate::client::Inner;
use crate::error::is_passing;
use crate::node_channel::passing;

/// Who is asked.
#[derive(Debug, Clone)]
pub(crate) enum To {
    /// The group's leader, whoever that is.
    Leader,
    /// This node.
    Address(String),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct GroupCall {
    /// For people: "pull from".
    pub(crate) operation: &'static str,
    pub(crate) group: u64,
    pub(crate) to: To,
    pub(crate) deadline: Instant,
}

impl GroupCall {
    /// Asks; `take` makes an answer of a reply, or says what is wrong with it.
    ///
    /// # Errors
    /// [`Error::Refused`]: no other try would be answered otherwise; [`Error::Unavailable`] when the deadline is over.
    pub(crate) async fn ask<T>(
        &self,
        inner: &Inner,
        request: Request,
        take: impl Fn(Reply) -> Result<T, String>,
    ) -> Result<T, Error> {
        let started = Instant::now();
        let group = self.group;
        let mut backoff = Backoff::default();
        let mut tried: Vec<String> = Vec::new();
        loop {
            let address = match &self.to {
                To::Address(address) => address.clone(),
                To::Leader => inner.routing.leader(group).unwrap_or_default(),
            };
            let detail = if address.is_empty() {
                passing(format!("no replica of group {group} is known"))
            } else {
                if !tried.contains(&address) {
                    tried.push(address.clone());
                }
                let reply =
                    self.attempt(inner, &address, request.clone(), inner.options.attempt_timeout).await;
                let taken =
                    reply.and_then(|reply| take(reply).map_err(|what| passing(format!("{address}: {what}"))));
                match taken {
                    Ok(taken) => return Ok(taken),
                    Err(detail) => detail,
                }
            };
            let kind = detail.kind();
            if !is_passing(kind) && kind != ErrorKind::Corrupt {
                return Err(Error::refused(kind, detail.message));
            }
            inner.stats.retried();
            // A full queue is no reason to look for another leader.
            if !inner.routing.hear_of_recovery(&detail) && kind != ErrorKind::Exhausted {
                inner.routing.hint(group, &address, Some(&detail.leader_address));
            }
            let pause = backoff.pause(detail.retry_after_ms);
            if Instant::now() + pause >= self.deadline {
                return Err(Error::Unavailable {
                    operation: format!("{} group {group}", self.operation),
                    tried,
                    last: detail.message,
                    elapsed: started.elapsed(),
                });
            }
            tokio::time::sleep(pause).await;
            if kind != ErrorKind::Exhausted && detail.leader_address.is_empty() {
                // Whoever answers knows more than we do; nobody answering is known at the next try.
                let _ = inner.routing.refresh(self.deadline).await;
            }
        }
    }

    /// One try at one node.
    pub(crate) async fn attempt(
        &self,
        inner: &Inner,
        address: &str,
        request: Request,
        within: Duration,
    ) -> Result<Reply, ErrorDetail> {
        let left = self.deadline.saturating_duration_since(Instant::now()).min(within);
        let exchanged = async {
            let pending = inner.channels.send(address, request).await;
            pending.await.unwrap_or_else(|_| Err(passing(format!("{address}: the connection broke"))))
        };
        match tokio::time::timeout(left, exchanged).await {
            Ok(reply) => reply,
            Err(_) => Err(passing(format!("{address}: no answer within {left:.1?}"))),
        }
    }
}
