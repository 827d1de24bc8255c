//! The gRPC doors: each call is decoded, given to one room, and its answer encoded.
//!
//! Not here: what a call means.

mod admin;
mod checkpoint;
mod consistency;
mod error;
mod exchange;
mod job;
mod late_raft;
mod node;
mod non_finite;
mod parameter;
mod read_pool;
mod replies;
mod scan;
mod step;

pub use admin::AdminDoor;
pub use checkpoint::CheckpointDoor;
pub use error::RequestError;
pub use job::JobDoor;
pub use late_raft::LateRaftService;
pub use node::NodeDoor;
pub use parameter::{ClientBounds, ParameterDoor};
pub use read_pool::{ReadPool, ReadPoolError};
