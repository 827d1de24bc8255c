//! What a worker contributes to a step of a job that sums its steps: parts for every shard, kept until the step is over.
//!
//! A leader keeps parts in memory only, so they are sent again to whoever leads next; that is noticed when the step ends, by the
//! checksums of all parts.
//!
//! Invariants:
//! - parts of a shard are numbered from 1 on in the order of the pushes, so that the same pushes give the same sums;
//! - a push counts as a whole or not at all: one that a shard refuses, or that is not taken in time, is withdrawn everywhere;
//! - an empty contribution is told to every shard, too.
//!
//! Not here: when a step ends (`worker`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use evershard_proto::push_body::{checksum_of, renumbered};
use evershard_proto::v1::exchange_reply::Reply;
use evershard_proto::v1::exchange_request::Request;
use evershard_proto::v1::{
    ContributeReply, ContributeRequest, StepPublication, StepReply, StepRequest, WorkerIdentity,
};
use futures_util::future::{join_all, try_join_all};
use parking_lot::Mutex;

use crate::Error;
use crate::client::{Client, Inner};
use crate::group_call::{GroupCall, To};
use crate::push::{Content, PushOptions, PushReceipt, pack_for_step};

/// How long a leader is asked to wait until a step is applied.
const WAIT_MS: u32 = 500;
/// For telling the shards that a push was withdrawn.
const TELL_WITHIN: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Part {
    /// Of which push, to take it back.
    push: u64,
    body: Bytes,
}

#[derive(Debug, Default)]
struct Kept {
    step: u64,
    pushes: u64,
    /// By group, in the order of the pushes.
    parts: BTreeMap<u64, Vec<Part>>,
}

impl Kept {
    /// Gives every part its place and the step as they are now.
    fn renumber(&mut self) {
        for parts in self.parts.values_mut() {
            for (seq, part) in (1..).zip(parts) {
                part.body = renumbered(&part.body, seq, self.step);
            }
        }
    }
}

/// Everything of one worker's step. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Contribution {
    worker: WorkerIdentity,
    kept: Arc<Mutex<Kept>>,
}

/// A push whose parts are kept, and not yet taken in by the shards.
/// Dropped before every shard has it, it is withdrawn: whoever stopped waiting may push the same again.
#[derive(Debug)]
pub(crate) struct Begun {
    contribution: Contribution,
    push: u64,
    parts: Vec<(u64, Bytes)>,
    receipt: PushReceipt,
    is_settled: bool,
}

impl Begun {
    fn withdraw(&mut self) {
        if !std::mem::replace(&mut self.is_settled, true) {
            self.contribution.withdraw(self.push);
        }
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.withdraw();
    }
}

impl Contribution {
    pub(crate) fn new(worker: WorkerIdentity, step: u64) -> Self {
        Contribution { worker, kept: Arc::new(Mutex::new(Kept { step, ..Kept::default() })) }
    }

    /// Keeps a push as part of the step.
    ///
    /// # Errors
    /// As a push that is refused before it is sent.
    pub(crate) async fn begin(
        &self,
        inner: &Arc<Inner>,
        contents: &[Content<'_>],
        options: PushOptions,
    ) -> Result<Begun, Error> {
        let (messages, receipt) = pack_for_step(inner, contents, options).await?;
        let mut kept = self.kept.lock();
        kept.pushes += 1;
        let (push, step) = (kept.pushes, kept.step);
        let mut parts = Vec::with_capacity(messages.len());
        for (group, builder) in messages {
            let of_group = kept.parts.entry(group).or_default();
            let body = builder.finish(0, of_group.len() as u64 + 1, step);
            of_group.push(Part { push, body: body.clone() });
            parts.push((group, body));
        }
        Ok(Begun { contribution: self.clone(), push, parts, receipt, is_settled: false })
    }

    /// True when nothing is kept.
    pub(crate) fn is_empty(&self) -> bool {
        self.kept.lock().parts.values().all(Vec::is_empty)
    }

    /// Another step: the same content for it, or nothing yet.
    pub(crate) fn move_to(&self, step: u64, with_content: bool) {
        let mut kept = self.kept.lock();
        kept.step = step;
        if !with_content {
            kept.parts.clear();
        }
        kept.renumber();
    }

    fn withdraw(&self, push: u64) {
        let mut kept = self.kept.lock();
        kept.parts.values_mut().for_each(|parts| parts.retain(|part| part.push != push));
        kept.renumber();
    }

    /// Sees to it that every shard has every part.
    ///
    /// # Errors
    /// What a shard refused; [`Error::Unavailable`].
    pub(crate) async fn deliver(&self, inner: &Arc<Inner>) -> Result<(), Error> {
        let deadline = Client::deadline(inner);
        let routing = inner.routing.table(deadline).await?;
        let groups = routing.shards.iter().map(|shard| self.tell(inner, shard.group, None, deadline));
        try_join_all(groups).await.map(|_| ())
    }

    /// Has every shard apply a published step; false when some did not in time, because parts of others are missing there.
    ///
    /// # Errors
    /// As [`Contribution::deliver`].
    pub(crate) async fn apply(
        &self,
        inner: &Arc<Inner>,
        publication: &StepPublication,
    ) -> Result<bool, Error> {
        let deadline = Client::deadline(inner);
        let routing = inner.routing.table(deadline).await?;
        let told =
            routing.shards.iter().map(|shard| self.tell(inner, shard.group, Some(publication), deadline));
        Ok(try_join_all(told).await?.into_iter().all(|applied| applied))
    }

    /// Tells a shard what there is, sends what it lacks, and says whether it has applied the step.
    async fn tell(
        &self,
        inner: &Arc<Inner>,
        group: u64,
        publication: Option<&StepPublication>,
        deadline: Instant,
    ) -> Result<bool, Error> {
        loop {
            let (applied, lacking) = self.ask(inner, group, publication, deadline).await?;
            if applied || lacking.is_empty() {
                return Ok(applied);
            }
            let sent = lacking.into_iter().map(|body| self.send(inner, group, body, deadline));
            try_join_all(sent).await?;
        }
    }

    /// Tells a shard what there is; answers whether it has applied the step, and what it lacks.
    async fn ask(
        &self,
        inner: &Inner,
        group: u64,
        publication: Option<&StepPublication>,
        deadline: Instant,
    ) -> Result<(bool, Vec<Bytes>), Error> {
        let (step, bodies) = {
            let kept = self.kept.lock();
            let of_group = kept.parts.get(&group);
            let bodies: Vec<Bytes> = of_group.into_iter().flatten().map(|part| part.body.clone()).collect();
            (kept.step, bodies)
        };
        let request = StepRequest {
            group,
            worker: Some(self.worker),
            step,
            parts: bodies.iter().map(|body| checksum_of(body)).collect(),
            publication: publication.cloned(),
            wait_ms: if publication.is_some() { WAIT_MS } else { 0 },
        };
        let call = GroupCall { operation: "end a step at", group, to: To::Leader, deadline };
        let StepReply { applied, missing, applied_index } = call
            .ask(inner, Request::Step(request), |reply| match reply {
                Reply::Step(reply) => Ok(reply),
                _ => Err("an answer to another question".into()),
            })
            .await?;
        if applied {
            inner.routing.acked.note(group, 0, applied_index);
        }
        Ok((applied, missing.iter().filter_map(|place| bodies.get(*place as usize).cloned()).collect()))
    }

    async fn send(&self, inner: &Inner, group: u64, body: Bytes, deadline: Instant) -> Result<(), Error> {
        let request = ContributeRequest { group, worker: Some(self.worker), body };
        let call = GroupCall { operation: "contribute to a step at", group, to: To::Leader, deadline };
        call.ask(inner, Request::Contribute(request), |reply| match reply {
            Reply::Contribute(ContributeReply {}) => Ok(()),
            _ => Err("an answer to another question".into()),
        })
        .await
    }
}

impl Begun {
    /// Waits until the leaders of all its shards have it in memory.
    ///
    /// # Errors
    /// What a shard refused, or [`Error::Unavailable`]: the push is not part of the step, on no shard.
    pub(crate) async fn wait(mut self, inner: Arc<Inner>) -> Result<PushReceipt, Error> {
        let deadline = Client::deadline(&inner);
        let sent = self
            .parts
            .iter()
            .map(|(group, body)| self.contribution.send(&inner, *group, body.clone(), deadline));
        if let Err(error) = try_join_all(sent).await {
            self.withdraw();
            // So that the shards give back the room that its parts take. One that does not hear of it hears of it at the tick.
            let deadline = Instant::now() + TELL_WITHIN;
            let groups = self.parts.iter().map(|(group, _)| *group).collect::<BTreeSet<_>>();
            let told = groups.into_iter().map(|group| self.contribution.ask(&inner, group, None, deadline));
            join_all(told).await;
            return Err(error);
        }
        self.is_settled = true;
        inner.stats.acked(self.receipt.rows as u64);
        Ok(self.receipt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evershard_proto::push_body::{Encoding, Operation, PushBody, PushBodyBuilder};

    fn body(key: u64) -> PushBodyBuilder {
        let mut builder = PushBodyBuilder::new(0);
        builder.section(1, Operation::Gradient, Encoding::F32, 1, None, &[key]).fill(1);
        builder
    }

    fn keys(contribution: &Contribution, group: u64) -> Vec<(u64, u64, u64)> {
        let kept = contribution.kept.lock();
        let of_group = &kept.parts[&group];
        let parsed = of_group.iter().map(|part| PushBody::parse(&part.body).expect("sealed"));
        parsed
            .map(|body| {
                (body.seq, body.clock, body.sections().next().and_then(|s| s.keys().next()).unwrap_or(0))
            })
            .collect()
    }

    #[test]
    fn a_withdrawn_push_leaves_no_gap_and_another_step_takes_the_rest_along() {
        let contribution = Contribution::new(WorkerIdentity::default(), 4);
        for push in 1..=3 {
            let mut kept = contribution.kept.lock();
            let seq = kept.parts.entry(9).or_default().len() as u64 + 1;
            let body = body(push * 10).finish(0, seq, 4);
            kept.parts.entry(9).or_default().push(Part { push, body });
        }
        assert_eq!(keys(&contribution, 9), [(1, 4, 10), (2, 4, 20), (3, 4, 30)]);
        contribution.withdraw(2);
        assert_eq!(keys(&contribution, 9), [(1, 4, 10), (2, 4, 30)]);
        contribution.move_to(5, true);
        assert_eq!(keys(&contribution, 9), [(1, 5, 10), (2, 5, 30)]);
        contribution.move_to(6, false);
        assert!(contribution.kept.lock().parts.is_empty());
    }
}
