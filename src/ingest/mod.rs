//! How a push gets into the log: the order of a session's messages, then the proposal.
//!
//! Not here: checks of the message itself (`apply::validate`), what it does (`apply`).

mod sequence_door;

pub use sequence_door::{OutOfOrder, SequenceDoor};
