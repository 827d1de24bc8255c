//! What travels in a lane, and what becomes of it.
//!
//! Invariant: what was never sent is handed back whole ([`Unsent`]), so that it can be sent later.

use std::time::Instant;

use bytes::Bytes;
use evershard_proto::push_body::PushBodyBuilder;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::Refusal;

/// What a message says, as long as it has no number.
#[derive(Debug)]
pub(crate) struct MessageContent {
    pub(crate) builder: PushBodyBuilder,
    pub(crate) clock: u64,
    pub(crate) rows: u64,
}

/// A message that has no number yet.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) content: MessageContent,
    pub(crate) deadline: Instant,
    pub(crate) done: oneshot::Sender<Settled>,
    pub(crate) permit: OwnedSemaphorePermit,
}

impl Submission {
    /// Hands the content back to whoever waits; the permit goes back to its semaphore.
    pub(super) fn return_unsent(self, why: impl Into<String>) {
        // With nobody to take it, the content goes away unsent.
        let _ = self.done.send(Settled::Unsent(Unsent { content: self.content, why: why.into() }));
    }
}

/// A message that was never sent.
#[derive(Debug)]
pub(crate) struct Unsent {
    pub(crate) content: MessageContent,
    pub(crate) why: String,
}

/// What became of a message.
#[derive(Debug)]
pub(crate) enum Settled {
    /// Applied, once.
    Applied,
    /// Refused: nothing was changed.
    Refused(Refusal),
    /// Never sent: nothing was changed.
    Unsent(Unsent),
    /// The outcome stays unknown: its session ended, or its result is not kept any more.
    Expired(String),
    /// Not settled until its deadline; the lane goes on trying, and the token can ask again.
    Parked(ParkedPush),
}

/// A message that has a number, until it is settled.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) seq: u64,
    pub(super) body: Bytes,
    pub(super) rows: u64,
    /// `None` once parked.
    pub(super) waiter: Option<(Instant, oneshot::Sender<Settled>)>,
    /// Times its content was sent.
    pub(super) attempts: u32,
    /// Times its body, as it is now, was answered by what settles nothing and should not happen (CORRUPT, INTERNAL).
    pub(super) failures: u32,
    /// It was refused: its number is used up by an empty body, which is what `body` is then.
    pub(super) refusal: Option<Refusal>,
    pub(super) last: String,
    /// Given back once parked: nobody waits then, and a shard that is gone must not hold up pushes to the others. The lane's
    /// window bounds the bytes of parked messages.
    pub(super) permit: Option<OwnedSemaphorePermit>,
}

/// What a parked message's token asks of the lane.
#[derive(Debug)]
pub(super) enum Control {
    Retry { session: u64, seq: u64, deadline: Instant, done: oneshot::Sender<Settled> },
    GiveUp { session: u64, seq: u64 },
}

/// The right to ask again for a message that was not acknowledged in time. Dropping it gives the message up: the lane's
/// session ends, and the outcome stays unknown.
#[derive(Debug)]
pub(crate) struct ParkedPush {
    pub(super) session: u64,
    pub(super) seq: u64,
    /// Unbounded, and yet bounded: a token says one thing in its life, and none may be lost.
    pub(super) control: Option<mpsc::UnboundedSender<Control>>,
    pub(crate) cause: String,
}

impl ParkedPush {
    /// Asks for the message until another deadline, under its old number. The receiver fails when the client was closed.
    pub(crate) fn retry(mut self, deadline: Instant) -> oneshot::Receiver<Settled> {
        let (done, settled) = oneshot::channel();
        if let Some(control) = self.control.take() {
            let retry = Control::Retry { session: self.session, seq: self.seq, deadline, done };
            // A lane that has ended drops `done`, and the receiver says so.
            let _ = control.send(retry);
        }
        settled
    }
}

impl Drop for ParkedPush {
    fn drop(&mut self) {
        if let Some(control) = self.control.take() {
            // A lane that has ended has nothing to give up.
            let _ = control.send(Control::GiveUp { session: self.session, seq: self.seq });
        }
    }
}
