//! How a push gets into the log: the order of a session's messages, then the proposal; what is summed first waits here.
//!
//! Not here: checks of the message itself (`apply::validate`), what it does (`apply`).

mod sequence_door;
mod step_buffer;

pub use sequence_door::{OutOfOrder, SequenceDoor};
pub use step_buffer::{StepBuffer, StepPart, StepRefusal};
