//! A proposal's way back: openraft's responder over a oneshot, holding what the proposal occupies of the group's
//! in-flight budget until the answer is known.
//!
//! Invariants:
//! - the budget is given back exactly when openraft is done with the proposal, also when its caller stopped waiting, and
//!   before its caller hears of it: whoever has an answer can propose as much again;
//! - a responder dropped unanswered (the core stopped) closes the oneshot, which reads as "outcome unknown".
//!
//! Not here: what an answer means (`group`).

use openraft::raft::responder::Responder;
use openraft::{OptionalSend, RaftTypeConfig};
use tokio::sync::oneshot;

use crate::budget::InFlight;

/// See the module.
pub(crate) struct Reply<T> {
    sender: oneshot::Sender<T>,
    held: Option<InFlight>,
}

impl<T> Reply<T> {
    /// A responder that holds `held`, and the end that waits for it.
    pub(crate) fn pair(held: Option<InFlight>) -> (Self, oneshot::Receiver<T>) {
        let (sender, receiver) = oneshot::channel();
        (Self { sender, held }, receiver)
    }
}

impl<C, T> Responder<C, T> for Reply<T>
where
    C: RaftTypeConfig,
    T: OptionalSend + 'static,
{
    fn on_complete(self, result: T) {
        drop(self.held);
        // The caller may have given up; the entry stands all the same.
        let _ = self.sender.send(result);
    }
}
