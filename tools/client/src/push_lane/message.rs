//! What travels in a lane, and what becomes of it.

use std::time::Instant;

use bytes::Bytes;
use evershard_proto::push_body::PushBodyBuilder;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::Refusal;

/// A message that has no number yet.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) builder: PushBodyBuilder,
    pub(crate) clock: u64,
    pub(crate) rows: u64,
    pub(crate) deadline: Instant,
    pub(crate) done: oneshot::Sender<Settled>,
    pub(crate) permit: OwnedSemaphorePermit,
}

/// What became of a message.
#[derive(Debug)]
pub(crate) enum Settled {
    /// Applied, once.
    Applied,
    /// Refused: nothing was changed.
    Refused(Refusal),
    /// Never sent: nothing was changed.
    Unsent(String),
    /// Its session ended: the outcome stays unknown.
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
    /// It was refused at a door: its number is used up by an empty body, which is what `body` is then.
    pub(super) refusal: Option<Refusal>,
    pub(super) last: String,
    pub(super) _permit: OwnedSemaphorePermit,
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
    pub(super) control: Option<mpsc::Sender<Control>>,
    pub(crate) cause: String,
}

impl ParkedPush {
    /// Waits for the message until another deadline, under its old number.
    pub(crate) async fn retry(mut self, deadline: Instant) -> Settled {
        let expired = || Settled::Expired("the client was closed while the push was not acknowledged".into());
        let (done, settled) = oneshot::channel();
        let Some(control) = self.control.take() else { return expired() };
        let retry = Control::Retry { session: self.session, seq: self.seq, deadline, done };
        if control.send(retry).await.is_err() {
            return expired();
        }
        settled.await.unwrap_or_else(|_| expired())
    }
}

impl Drop for ParkedPush {
    fn drop(&mut self) {
        if let Some(control) = self.control.take() {
            let give_up = Control::GiveUp { session: self.session, seq: self.seq };
            if control.try_send(give_up).is_err() {
                tracing::debug!(seq = self.seq, "a parked push outlives its token: its lane is gone or busy");
            }
        }
    }
}
