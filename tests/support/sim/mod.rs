//! The server's state machine in simulated time: what `tests/simulation.rs` is made of.
//!
//! Nodes, network and the promises that hold for any state machine are those of the raft crate's own simulation.

#![allow(dead_code, missing_docs, unreachable_pub)]

#[path = "../../../raft/tests/support/oracle.rs"]
pub mod oracle;
#[path = "../../../raft/tests/support/sim_net.rs"]
pub mod sim_net;
#[path = "../../../raft/tests/support/world.rs"]
pub mod world;

pub mod client;
pub mod flush;
pub mod model;
pub mod shard;
