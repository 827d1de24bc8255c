//! Single calls that any node may answer, or that one node must: nodes are asked in turn, whom they point to first, until one
//! answers or the deadline is over.
//!
//! Not here: what is asked (`admin`, `job`), streams (`node_channel`).

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::RECOVERY_METADATA;
use evershard_proto::v1::ErrorKind;
use parking_lot::Mutex;
use tonic::metadata::MetadataValue;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use crate::Error;
use crate::backoff::Backoff;
use crate::error::{detail_of, is_passing};
use crate::routing_cache::RoutingCache;

/// A channel whose calls say under which recovery epoch they are made.
pub(crate) type Asked = InterceptedService<Channel, AskUnder>;

/// Says the recovery epoch that a call is made under: a node that has not heard of it refuses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AskUnder(pub(crate) u64);

impl Interceptor for AskUnder {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert(RECOVERY_METADATA, MetadataValue::from(self.0));
        Ok(request)
    }
}

/// Asks nodes in turn; cheap to clone. Clones share what they know of who answers.
#[derive(Debug, Clone)]
pub(crate) struct Asker {
    routing: Arc<RoutingCache>,
    /// Who answered last.
    answered: Arc<Mutex<Option<String>>>,
}

impl Asker {
    pub(crate) fn new(routing: Arc<RoutingCache>) -> Self {
        Asker { routing, answered: Arc::default() }
    }

    /// Asks until a node answers, or the deadline is over; each node for `patience` at the most.
    ///
    /// # Errors
    /// What a node refused for good, or [`Error::Unavailable`] with the last reason.
    pub(crate) async fn ask<T, F>(
        &self,
        operation: &str,
        deadline: Instant,
        patience: Duration,
        ask: impl Fn(Asked) -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let started = Instant::now();
        let mut backoff = Backoff::default();
        let mut last = String::from("nothing was tried");
        let mut tried: Vec<String> = Vec::new();
        loop {
            let mut asked_ms = 0;
            let mut turn: Vec<String> = self.answered.lock().clone().into_iter().collect();
            turn.extend(self.routing.addresses());
            let mut pointed = 0;
            let mut at = 0;
            while let Some(address) = turn.get(at).cloned() {
                // Once a turn: it may have asked for a pause.
                let was_asked = turn[..at].contains(&address);
                at += 1;
                if was_asked {
                    continue;
                }
                let left = deadline.saturating_duration_since(Instant::now()).min(patience);
                if left.is_zero() {
                    break;
                }
                if !tried.contains(&address) {
                    tried.push(address.clone());
                }
                let detail = match self.routing.unary_channel(&address) {
                    Err(detail) => detail,
                    Ok(channel) => {
                        let epoch = AskUnder(self.routing.recovery_epoch());
                        let asked = ask(InterceptedService::new(channel, epoch));
                        match tokio::time::timeout(left, asked).await {
                            Ok(Ok(reply)) => {
                                *self.answered.lock() = Some(address);
                                return Ok(reply.into_inner());
                            }
                            Ok(Err(status)) => detail_of(&status),
                            Err(_) => crate::node_channel::passing("no answer in time".into()),
                        }
                    }
                };
                match detail.kind() {
                    ErrorKind::SessionExpired => return Err(Error::SessionExpired(detail.message)),
                    kind if !is_passing(kind) => return Err(Error::refused(kind, detail.message)),
                    // Once or twice a turn: nodes that point at each other are not followed for ever.
                    ErrorKind::NotLeader if !detail.leader_address.is_empty() && pointed < 2 => {
                        pointed += 1;
                        turn.insert(at, detail.leader_address.clone());
                    }
                    _ => {}
                }
                // Whoever is asked after it may have nothing to say: the longest pause counts.
                asked_ms = asked_ms.max(detail.retry_after_ms);
                last = format!("{address}: {}", detail.message);
            }
            let pause = backoff.pause(asked_ms);
            if Instant::now() + pause >= deadline {
                let operation = operation.to_string();
                return Err(Error::Unavailable { operation, tried, last, elapsed: started.elapsed() });
            }
            tokio::time::sleep(pause).await;
        }
    }
}
