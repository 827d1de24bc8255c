//! Pushing: a batch becomes messages, messages become an outcome.
//!
//! Invariants:
//! - repetitions of an id are summed in order of appearance (set: the last one counts), so an optimizer runs once per id;
//! - messages of one shard are handed over in the order of the calls;
//! - handing over ends at the push's deadline: what found no room until then is unsent, and kept for a retry.
//!
//! `content.rs` is what a caller gives, checked; `packing.rs` makes messages of it, with the rows of an id as `row_sum.rs` adds
//! them and `row_encoder.rs` encodes the sum, in the bytes of `encode.rs`; what that left out is in `residuals.rs`; `id_order.rs`
//! says which rows are named by ids; `handle.rs` waits for what becomes of messages; this file begins a push.

mod content;
mod encode;
mod handle;
mod id_order;
mod packing;
mod residuals;
mod row_encoder;
mod row_sum;

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::oneshot;

pub(crate) use content::{Content, check};
use evershard_proto::push_body::{Encoding, PushBodyBuilder};
use evershard_proto::v1::ErrorKind;
pub use handle::PushHandle;
pub(crate) use residuals::Residuals;

use crate::Error;
use crate::client::{Client, Inner};
use crate::non_finite::Found;
use crate::push_lane::{MessageContent, Settled, Submission, Unsent};

/// How to push.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PushOptions {
    /// Learning rate for this push only.
    pub lr: Option<f32>,
    /// How the gradients travel and are logged; the table handle's own by default.
    pub encoding: Option<Encoding>,
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

/// Begins a push of several tables: sections of one message a shard where they fit.
pub(crate) async fn begin(
    inner: &Arc<Inner>,
    contents: &[Content<'_>],
    options: PushOptions,
) -> Result<PushHandle, Error> {
    let deadline = Client::deadline(inner);
    let mut handle = PushHandle::new(inner.clone());
    let (messages, rows) = check_and_pack(inner, contents, options, deadline).await?;
    handle.receipt = PushReceipt { messages: messages.len(), rows };
    for message in messages {
        let rows = message.ids.len() as u64;
        let content = MessageContent { builder: message.builder, clock: options.clock, rows };
        let settles = submit(inner, message.group, content, deadline).await?;
        handle.add(message.group, message.ids, settles);
    }
    Ok(handle)
}

/// Packs a push that is checked, and tells the servers what is not finite of it and does not reach them.
async fn check_and_pack(
    inner: &Arc<Inner>,
    contents: &[Content<'_>],
    options: PushOptions,
    deadline: Instant,
) -> Result<(Vec<packing::Packed>, usize), Error> {
    // A message has NaN where it has none, and the servers look at the others: here, so that nothing of the push is applied.
    if let Some(lr) = options.lr.filter(|lr| !(lr.is_finite() && *lr >= 0.0)) {
        let what = format!("push refused: learning rate {lr} must be finite and at least 0");
        return Err(Error::refused(ErrorKind::Invalid, what));
    }
    let mut found = Found::default();
    if let Err(refused) = check(contents, &mut found) {
        inner.reports.tell_refusal(found).await;
        return Err(refused);
    }
    if contents.iter().all(|c| c.ids.is_empty()) {
        return Ok((Vec::new(), 0));
    }
    let routing = inner.routing.table(deadline).await?;
    let packed = if contents.iter().any(Content::touches_residuals) {
        packing::pack(contents, &routing, options.lr, &mut inner.residuals.lock(), &mut found)
    } else {
        // Pushes of other threads are packed at the same time.
        packing::pack(contents, &routing, options.lr, &mut Residuals::new(0), &mut found)
    };
    match packed {
        Ok(packed) => {
            inner.reports.tell(found);
            Ok(packed)
        }
        Err(refused) => {
            inner.reports.tell_refusal(found).await;
            Err(refused)
        }
    }
}

/// Begins to clear a table: a message to every shard.
pub(crate) async fn clear(inner: &Arc<Inner>, table: u32) -> Result<PushHandle, Error> {
    let deadline = Client::deadline(inner);
    let routing = inner.routing.table(deadline).await?;
    let mut handle = PushHandle::new(inner.clone());
    handle.receipt = PushReceipt { messages: routing.shards.len(), rows: 0 };
    inner.residuals.lock().forget_table(table);
    for shard in &routing.shards {
        let mut builder = PushBodyBuilder::new(0);
        builder.clear(table);
        let content = MessageContent { builder, clock: 0, rows: 0 };
        let settles = submit(inner, shard.group, content, deadline).await?;
        handle.add(shard.group, Vec::new(), settles);
    }
    Ok(handle)
}

/// Packs a push for a step that is summed: a message and its group each, in the order to send them.
///
/// # Errors
/// As a push that is refused before it is sent.
pub(crate) async fn pack_for_step(
    inner: &Arc<Inner>,
    contents: &[Content<'_>],
    options: PushOptions,
) -> Result<(Vec<(u64, PushBodyBuilder)>, PushReceipt), Error> {
    let deadline = Client::deadline(inner);
    let (messages, rows) = check_and_pack(inner, contents, options, deadline).await?;
    let receipt = PushReceipt { messages: messages.len(), rows };
    Ok((messages.into_iter().map(|message| (message.group, message.builder)).collect(), receipt))
}

/// Hands a message to its group's lane, as soon as there is room for its bytes.
async fn submit(
    inner: &Inner,
    group: u64,
    content: MessageContent,
    deadline: Instant,
) -> Result<oneshot::Receiver<Settled>, Error> {
    let (done, settles) = oneshot::channel();
    let bytes = content.builder.len().min(inner.options.push_bytes_in_flight) as u32;
    let acquiring = inner.push_bytes.clone().acquire_many_owned(bytes);
    match tokio::time::timeout_at(deadline.into(), acquiring).await {
        Ok(Ok(permit)) => {
            inner.lanes.submit(group, Submission { content, deadline, done, permit }).await;
        }
        Ok(Err(_)) => return Err(Error::Closed),
        Err(_) => {
            let why = format!(
                "{} bytes of earlier pushes were not acknowledged until the deadline, and no more are sent",
                inner.options.push_bytes_in_flight
            );
            // The receiver is at hand.
            let _ = done.send(Settled::Unsent(Unsent { content, why }));
        }
    }
    Ok(settles)
}
