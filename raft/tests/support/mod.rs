//! What the tests of this crate share.
#![allow(dead_code, missing_docs, unreachable_pub)]

pub mod adder;
pub mod adder_world;
pub mod cluster;
pub mod oracle;
pub mod sim_net;
pub mod world;
