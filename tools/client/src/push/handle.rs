//! A push under way, until every message of it is settled.
//!
//! Invariants:
//! - a push is acknowledged when every id of it is applied, over all its waits: what an earlier wait found refused or unknown
//!   stays so;
//! - a retry sends what was sent before under its old numbers, and what was never sent after that, in the order of the push.

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{PushReceipt, submit};
use crate::client::{Client, Inner};
use crate::push_lane::{MessageContent, ParkedPush, Settled};
use crate::{Error, PartialPush, Refusal};

/// One message of a push.
#[derive(Debug)]
struct Part {
    group: u64,
    ids: Vec<u64>,
    state: State,
}

#[derive(Debug)]
enum State {
    UnderWay(oneshot::Receiver<Settled>),
    /// Sent, and not settled in time.
    Parked(ParkedPush),
    /// Never sent.
    Unsent(MessageContent),
}

/// A push that was begun; await it for its outcome. Dropping it does not take the push back.
#[derive(Debug)]
#[must_use = "a push may fail"]
pub struct PushHandle {
    inner: Arc<Inner>,
    parts: Vec<Part>,
    /// Ids that were settled, by outcome.
    applied: Vec<u64>,
    refused: Vec<u64>,
    lost: Vec<u64>,
    /// Messages that were settled, by outcome: one that clears a table has no ids.
    settled: Settlements,
    first_refusal: Option<Refusal>,
    /// Why the first of the others is not applied.
    first_cause: Option<String>,
    pub(super) receipt: PushReceipt,
    since: Instant,
}

/// Messages by what became of them.
#[derive(Debug, Clone, Copy, Default)]
struct Settlements {
    applied: usize,
    refused: usize,
    lost: usize,
}

impl PushHandle {
    pub(super) fn new(inner: Arc<Inner>) -> Self {
        PushHandle {
            inner,
            parts: Vec::new(),
            applied: Vec::new(),
            refused: Vec::new(),
            lost: Vec::new(),
            settled: Settlements::default(),
            first_refusal: None,
            first_cause: None,
            receipt: PushReceipt::default(),
            since: Instant::now(),
        }
    }

    /// Adds a message that was handed over.
    pub(super) fn add(&mut self, group: u64, ids: Vec<u64>, settles: oneshot::Receiver<Settled>) {
        self.parts.push(Part { group, ids, state: State::UnderWay(settles) });
    }

    /// Waits until every message is settled.
    ///
    /// # Errors
    /// [`Error::Refused`] when all of it was refused; [`Error::Unavailable`] when none of it was sent;
    /// [`Error::PartialPush`] otherwise, with what is known of each id and a way to ask again.
    pub async fn wait(mut self) -> Result<PushReceipt, Error> {
        let parts = self.resume().await?;
        let settled = join_all(parts.into_iter().map(|(group, ids, settles)| async move {
            let closed =
                |_| Settled::Expired("the client was closed while the push was not acknowledged".into());
            (group, ids, settles.await.unwrap_or_else(closed))
        }))
        .await;
        for (group, ids, settled) in settled {
            self.take_in(group, ids, settled);
        }
        self.conclude()
    }

    /// Gets everything under way that is not: first what has numbers, then what has none.
    async fn resume(&mut self) -> Result<Vec<(u64, Vec<u64>, oneshot::Receiver<Settled>)>, Error> {
        let deadline = Client::deadline(&self.inner);
        if self.settled.lost == 0 {
            // What an earlier wait complained of is about to be tried again.
            self.first_cause = None;
        }
        let mut under_way = Vec::with_capacity(self.parts.len());
        let mut unsent = Vec::new();
        for part in std::mem::take(&mut self.parts) {
            match part.state {
                State::UnderWay(settles) => under_way.push((part.group, part.ids, settles)),
                State::Parked(parked) => under_way.push((part.group, part.ids, parked.retry(deadline))),
                State::Unsent(content) => unsent.push((part.group, part.ids, content)),
            }
        }
        for (group, ids, content) in unsent {
            let settles = submit(&self.inner, group, content, deadline).await?;
            under_way.push((group, ids, settles));
        }
        Ok(under_way)
    }

    fn take_in(&mut self, group: u64, ids: Vec<u64>, settled: Settled) {
        match settled {
            Settled::Applied => {
                self.settled.applied += 1;
                self.applied.extend(ids);
            }
            Settled::Refused(refusal) => {
                self.settled.refused += 1;
                self.refused.extend(ids);
                self.first_refusal.get_or_insert(refusal);
            }
            Settled::Expired(why) => {
                self.first_cause.get_or_insert(why);
                self.settled.lost += 1;
                self.lost.extend(ids);
            }
            Settled::Unsent(unsent) => {
                self.first_cause.get_or_insert(unsent.why);
                self.parts.push(Part { group, ids, state: State::Unsent(unsent.content) });
            }
            Settled::Parked(token) => {
                self.first_cause.get_or_insert_with(|| token.cause.clone());
                self.parts.push(Part { group, ids, state: State::Parked(token) });
            }
        }
    }

    fn conclude(self) -> Result<PushReceipt, Error> {
        let Settlements { applied, refused, lost } = self.settled;
        if self.parts.is_empty() && refused == 0 && lost == 0 {
            self.inner.stats.answered(self.since);
            return Ok(self.receipt);
        }
        let ids_where = |wanted: fn(&State) -> bool| -> Vec<u64> {
            self.parts.iter().filter(|p| wanted(&p.state)).flat_map(|p| p.ids.iter().copied()).collect()
        };
        let unsent = ids_where(|state| matches!(state, State::Unsent(_)));
        let parked = ids_where(|state| !matches!(state, State::Unsent(_)));
        let cause = self.first_cause.clone();
        let is_parked = self.parts.iter().any(|part| !matches!(part.state, State::Unsent(_)));
        if applied == 0 && lost == 0 && !is_parked {
            if self.parts.is_empty()
                && let Some(refusal) = self.first_refusal
            {
                return Err(Error::Refused(refusal));
            }
            if refused == 0 {
                return Err(Error::Unavailable {
                    operation: "push".into(),
                    tried: self.inner.routing.addresses(),
                    last: cause.unwrap_or_default(),
                    elapsed: self.since.elapsed(),
                });
            }
        }
        let unknown = [self.lost.as_slice(), &parked, &unsent].concat();
        let refusal = self.first_refusal.clone();
        let kind = refusal.as_ref().map(|refusal| refusal.kind);
        let cause = refusal.map(|refusal| refusal.message).or(cause).unwrap_or_default();
        let (applied, refused) = (self.applied.clone(), self.refused.clone());
        let retry = (!self.parts.is_empty()).then(|| Arc::new(Mutex::new(Some(self))));
        Err(Error::PartialPush(Box::new(PartialPush {
            applied,
            refused,
            unknown,
            unsent,
            cause,
            kind,
            retry,
        })))
    }
}
