//! One question that any replica of a shard may answer: its followers in turn, then its leader.
//!
//! Followers are asked once each, beginning with another one each time; one that failed is left alone for a while. What none
//! of them answers, the leader does (`group_call`): its word on errors counts, since a follower may lag behind.
//!
//! Not here: what is asked.

use std::time::{Duration, Instant};

use evershard_proto::v1::Consistency;
use evershard_proto::v1::exchange_reply::Reply;
use evershard_proto::v1::exchange_request::Request;

use crate::Error;
use crate::acked::ONLY_THE_LEADER;
use crate::client::Inner;
use crate::group_call::{GroupCall, To};

/// A follower that has not answered by then may be gone: another one is asked.
const FOLLOWER_WITHIN: Duration = Duration::from_secs(1);

/// How fresh what is read must be, and who may answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ReadTerms {
    pub(crate) consistency: Consistency,
    pub(crate) max_staleness_ms: u32,
    /// This node's replica, and no other.
    pub(crate) node: Option<u64>,
    /// What the reader knows of the group already.
    pub(crate) min_index: u64,
}

/// The part of a request that says how fresh its answer must be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AskedTerms {
    pub(crate) consistency: i32,
    pub(crate) max_staleness_ms: u32,
    pub(crate) min_index: u64,
}

impl ReadTerms {
    /// Refuses terms that make no sense.
    ///
    /// # Errors
    /// [`Error::Refused`] with INVALID.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.consistency {
            Consistency::Bounded if self.max_staleness_ms == 0 => {
                Err(Error::invalid("a bounded read needs max_staleness_ms above 0"))
            }
            Consistency::Leader | Consistency::Linearizable if self.node.is_some() => {
                Err(Error::invalid("only the leader answers such a read: a node cannot be chosen"))
            }
            _ => Ok(()),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct ReplicaCall {
    /// For people: "pull from".
    pub(crate) operation: &'static str,
    pub(crate) group: u64,
    pub(crate) terms: ReadTerms,
    pub(crate) deadline: Instant,
}

impl ReplicaCall {
    /// Asks; `request` is made for each who is asked, `take` makes an answer of a reply, or says what is wrong with it.
    ///
    /// # Errors
    /// As [`GroupCall::ask`].
    pub(crate) async fn ask<T>(
        &self,
        inner: &Inner,
        request: impl Fn(AskedTerms) -> Request,
        take: impl Fn(Reply) -> Result<T, String>,
    ) -> Result<T, Error> {
        let ReplicaCall { operation, group, terms, deadline } = *self;
        let own = match terms.consistency {
            Consistency::Bounded => inner.routing.acked.of(group),
            Consistency::Leader | Consistency::Any | Consistency::Linearizable => 0,
        };
        let min_index = terms.min_index.max(own);
        let asked = AskedTerms {
            consistency: terms.consistency as i32,
            max_staleness_ms: terms.max_staleness_ms,
            min_index,
        };
        let call = |to| GroupCall { operation, group, to, deadline };
        if let Some(node) = terms.node {
            let address = inner.routing.address_of(node);
            let address = address.ok_or_else(|| Error::invalid(format!("there is no node {node}")))?;
            return call(To::Address(address)).ask(inner, request(asked), take).await;
        }
        if matches!(terms.consistency, Consistency::Any | Consistency::Bounded)
            && min_index != ONLY_THE_LEADER
        {
            for address in inner.routing.followers(group) {
                let within = FOLLOWER_WITHIN.min(deadline.saturating_duration_since(Instant::now()));
                let reply = call(To::Leader).attempt(inner, &address, request(asked), within).await;
                let taken = reply.map_err(|detail| {
                    inner.routing.hear_of_recovery(&detail);
                    detail.message
                });
                match taken.and_then(&take) {
                    Ok(taken) => return Ok(taken),
                    Err(reason) => {
                        tracing::debug!(group, address, reason, "a follower does not answer a read");
                        inner.routing.avoid(group, &address);
                    }
                }
            }
        }
        // Whoever leads has everything, by its lease. When nobody does, `any` takes any replica still.
        let of_leader = match terms.consistency {
            Consistency::Bounded => {
                // Its lease says that it has all that was acknowledged to anybody.
                let min_index = terms.min_index;
                AskedTerms { consistency: Consistency::Leader as i32, max_staleness_ms: 0, min_index }
            }
            Consistency::Leader | Consistency::Any | Consistency::Linearizable => asked,
        };
        call(To::Leader).ask(inner, request(of_leader), take).await
    }
}
