//! Pushing: a batch becomes messages, messages become an outcome.
//!
//! Invariants:
//! - repetitions of an id are summed in order of appearance (set: the last one counts), so an optimizer runs once per id;
//! - messages of one shard are handed over in the order of the calls.

use std::sync::Arc;
use std::time::Instant;

use evershard_proto::limits::PUSH_BODY_BYTES_MAX;
use evershard_proto::push_body::{Encoding, HEADER_BYTES, Operation, PushBodyBuilder, SECTION_BYTES};
use evershard_proto::v1::{ErrorKind, NonFinitePolicy};
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::batch::{Batch, add_row, put_row};
use crate::client::{Client, Inner};
use crate::push_lane::{ParkedPush, Settled, Submission};
use crate::{Error, PartialPush};

/// How to push.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PushOptions {
    /// Learning rate for this push only.
    pub lr: Option<f32>,
    /// The worker's step count; 0 outside a job.
    pub clock: u64,
}

/// A push that was acknowledged as a whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PushReceipt {
    /// Messages it took.
    pub messages: usize,
    /// Distinct rows in it.
    pub rows: usize,
}

/// One message of a push under way.
#[derive(Debug)]
struct Part {
    ids: Vec<u64>,
    waiting: Waiting,
}

#[derive(Debug)]
enum Waiting {
    Settles(oneshot::Receiver<Settled>),
    Parked(ParkedPush),
}

/// A push that was begun; await it for its outcome. Dropping it does not take the push back.
#[derive(Debug)]
#[must_use = "a push may fail"]
pub struct PushHandle {
    inner: Arc<Inner>,
    parts: Vec<Part>,
    /// Ids that earlier waits settled.
    applied: Vec<u64>,
    refused: Vec<u64>,
    first_refusal: Option<(ErrorKind, String)>,
    receipt: PushReceipt,
    since: Instant,
}

/// One table's part of a push, checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Content<'a> {
    pub(crate) table: u32,
    pub(crate) name: &'a str,
    pub(crate) dim: usize,
    pub(crate) operation: Operation,
    pub(crate) ids: &'a [u64],
    /// `ids.len() x dim`; empty for a removal.
    pub(crate) values: &'a [f32],
    /// What the table does with values that are not finite.
    pub(crate) non_finite: NonFinitePolicy,
}

impl Content<'_> {
    fn check(&self) -> Result<(), Error> {
        let expected = if self.operation == Operation::Remove { 0 } else { self.ids.len() * self.dim };
        if self.values.len() == expected {
            return self.check_finite();
        }
        let what = format!(
            "table {:?}: {} ids of dim {} need {expected} values, {} were given",
            self.name,
            self.ids.len(),
            self.dim,
            self.values.len()
        );
        Err(Error::refused(ErrorKind::LengthMismatch, what))
    }

    /// Refuses the push whole, before a part of it is sent: the servers, each of which sees its shard's rows only, would
    /// refuse some messages and apply others.
    fn check_finite(&self) -> Result<(), Error> {
        if self.non_finite != NonFinitePolicy::Reject || all_finite(self.values) {
            return Ok(());
        }
        let at = self.values.iter().position(|value| !value.is_finite()).unwrap_or_default();
        let (row, column) = (at / self.dim, at % self.dim);
        let what = format!(
            "table {:?}: column {column} of row {row} (id {}) is {}, and the table takes finite values only",
            self.name, self.ids[row], self.values[at]
        );
        Err(Error::refused(ErrorKind::NonFinite, what))
    }
}

/// Whether no value is NaN or infinite: without a branch per value, so that it costs a read of the memory.
fn all_finite(values: &[f32]) -> bool {
    const INFINITY_BITS: u32 = f32::INFINITY.to_bits();
    let largest = |block: &[f32]| block.iter().fold(0, |most, v| most.max(v.to_bits() & 0x7fff_ffff));
    values.chunks(4096).all(|block| largest(block) < INFINITY_BITS)
}

/// Refuses what cannot be meant, before anything of it is sent.
pub(crate) fn check(contents: &[Content<'_>]) -> Result<(), Error> {
    for (position, content) in contents.iter().enumerate() {
        content.check()?;
        if contents[..position].iter().any(|c| c.table == content.table) {
            return Err(Error::invalid(format!("table {:?} is twice in one push", content.name)));
        }
    }
    Ok(())
}

/// Begins a push of several tables: sections of one message a shard where they fit.
pub(crate) async fn begin(
    inner: &Arc<Inner>,
    contents: &[Content<'_>],
    options: PushOptions,
) -> Result<PushHandle, Error> {
    check(contents)?;
    let deadline = Client::deadline(inner);
    let mut handle = PushHandle {
        inner: inner.clone(),
        parts: Vec::new(),
        applied: Vec::new(),
        refused: Vec::new(),
        first_refusal: None,
        receipt: PushReceipt::default(),
        since: Instant::now(),
    };
    if contents.iter().all(|c| c.ids.is_empty()) {
        return Ok(handle);
    }
    let routing = inner.routing.table(deadline).await?;
    let mut messages: Vec<(u64, PushBodyBuilder, Vec<u64>)> = Vec::new();
    for content in contents.iter().filter(|c| !c.ids.is_empty()) {
        let row_bytes = if content.operation == Operation::Remove { 0 } else { content.dim * 4 };
        let batch = Batch::new(content.table, content.ids);
        handle.receipt.rows += batch.len();
        let room = PUSH_BODY_BYTES_MAX - HEADER_BYTES - SECTION_BYTES;
        for part in batch.split(&routing, row_bytes + 8, room) {
            let bytes = SECTION_BYTES + part.distinct.len() * (row_bytes + 8);
            // Sections of several tables share a message while they fit.
            let open = messages.iter_mut().find(|(group, builder, _)| {
                *group == part.group
                    && contents.len() > 1
                    && builder.len() + bytes <= PUSH_BODY_BYTES_MAX
                    && !builder.has_table(content.table)
            });
            let (builder, ids) = match open {
                Some((_, builder, ids)) => (builder, ids),
                None => {
                    messages.push((part.group, PushBodyBuilder::new(HEADER_BYTES + bytes), Vec::new()));
                    let last = messages.len() - 1;
                    let (_, builder, ids) = &mut messages[last];
                    (builder, ids)
                }
            };
            fill(builder, content, &batch, &part.distinct, options.lr);
            ids.extend(
                part.distinct.iter().filter_map(|d| batch.rows(*d).next()).map(|row| content.ids[row]),
            );
        }
    }
    for (group, builder, ids) in messages {
        let bytes = (builder.len().min(inner.options.push_bytes_in_flight)) as u32;
        let permit = inner.push_bytes.clone().acquire_many_owned(bytes).await.map_err(|_| Error::Closed)?;
        let (done, settles) = oneshot::channel();
        let rows = ids.len() as u64;
        let submission = Submission { builder, clock: options.clock, rows, deadline, done, permit };
        inner.lanes.submit(group, submission).await;
        handle.receipt.messages += 1;
        handle.parts.push(Part { ids, waiting: Waiting::Settles(settles) });
    }
    Ok(handle)
}

fn fill(
    builder: &mut PushBodyBuilder,
    content: &Content<'_>,
    batch: &Batch,
    distinct: &[u32],
    lr: Option<f32>,
) {
    let keys: Vec<u64> = distinct.iter().map(|d| batch.key(*d)).collect();
    let dim = content.dim;
    let payload = builder.section(content.table, content.operation, Encoding::F32, dim as u32, lr, &keys);
    if content.operation == Operation::Remove {
        return;
    }
    let row = |at: usize| &content.values[at * dim..(at + 1) * dim];
    for (d, place) in distinct.iter().zip(payload.chunks_exact_mut(dim * 4)) {
        if content.operation == Operation::Set {
            put_row(place, row(batch.last_row(*d)));
            continue;
        }
        let mut rows = batch.rows(*d);
        if let Some(first) = rows.next() {
            put_row(place, row(first));
        }
        for again in rows {
            add_row(place, row(again));
        }
    }
}

impl PushHandle {
    /// Waits until every message is settled.
    ///
    /// # Errors
    /// [`Error::Refused`] when all of it was refused; [`Error::Unavailable`] when none of it was sent;
    /// [`Error::PartialPush`] otherwise, with what is known of each id and a way to ask again.
    pub async fn wait(mut self) -> Result<PushReceipt, Error> {
        let deadline = Client::deadline(&self.inner);
        let parts = std::mem::take(&mut self.parts);
        let settled = join_all(parts.into_iter().map(|part| async move {
            let closed =
                || Settled::Expired("the client was closed while the push was not acknowledged".into());
            let settled = match part.waiting {
                Waiting::Settles(settles) => settles.await.unwrap_or_else(|_| closed()),
                Waiting::Parked(parked) => parked.retry(deadline).await,
            };
            (part.ids, settled)
        }))
        .await;
        self.conclude(settled)
    }

    fn conclude(mut self, settled: Vec<(Vec<u64>, Settled)>) -> Result<PushReceipt, Error> {
        let mut unsent = Vec::new();
        let mut unknown = Vec::new();
        let mut cause = None;
        let mut parked = Vec::new();
        for (ids, settled) in settled {
            match settled {
                Settled::Applied => self.applied.extend(ids),
                Settled::Refused(refusal) => {
                    self.refused.extend(ids);
                    self.first_refusal.get_or_insert((refusal.kind, refusal.message));
                }
                Settled::Unsent(why) => {
                    cause.get_or_insert(why);
                    unsent.extend(ids);
                }
                Settled::Expired(why) => {
                    cause.get_or_insert(why);
                    unknown.extend(ids);
                }
                Settled::Parked(token) => {
                    cause.get_or_insert(token.cause.clone());
                    unknown.extend(ids.iter().copied());
                    parked.push(Part { ids, waiting: Waiting::Parked(token) });
                }
            }
        }
        if self.refused.is_empty() && unsent.is_empty() && unknown.is_empty() {
            self.inner.stats.answered(self.since);
            return Ok(self.receipt);
        }
        if self.applied.is_empty() && unknown.is_empty() {
            if unsent.is_empty()
                && let Some((kind, message)) = self.first_refusal
            {
                return Err(Error::refused(kind, message));
            }
            if self.refused.is_empty() {
                return Err(Error::Unavailable {
                    operation: "push".into(),
                    tried: self.inner.routing.addresses(),
                    last: cause.unwrap_or_default(),
                    elapsed: self.since.elapsed(),
                });
            }
        }
        let kind = self.first_refusal.as_ref().map(|(kind, _)| *kind);
        let message = self.first_refusal.as_ref().map(|(_, message)| message.clone());
        // Unsent ids changed nothing; they count as refused, so that applied + refused + unknown is all of the push.
        let mut refused = self.refused.clone();
        refused.extend(unsent);
        let partial = PartialPush {
            applied: self.applied.clone(),
            refused,
            unknown,
            cause: message.or(cause).unwrap_or_default(),
            kind,
            retry: None,
        };
        let retry = (!parked.is_empty()).then(|| {
            self.parts = parked;
            Arc::new(Mutex::new(Some(self)))
        });
        Err(Error::PartialPush(Box::new(PartialPush { retry, ..partial })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_value_that_is_not_finite_is_found_wherever_it_is() {
        let finite = [0.0, -0.0, f32::MAX, f32::MIN, f32::MIN_POSITIVE, -1e-45];
        assert!(all_finite(&finite) && all_finite(&[]));
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 4095, 4096, 9999] {
                let mut values = vec![1.0; 10_000];
                values[at] = bad;
                assert!(!all_finite(&values), "{bad} at {at}");
            }
        }
    }
}
