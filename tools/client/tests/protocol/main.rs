//! The protocol of a push, as transcripts: a client talks to nodes that do what the test says, message by message.
//!
//! `fake_node.rs` is such a node; `refusals.rs` what refusals come to; `order.rs` numbers, leaders and windows; `retry.rs`
//! what a push that failed in part can still become; `pauses.rs` pauses that a node asks for; `sessions.rs` leases;
//! `drops.rs` tables that are dropped; `tables.rs` tables that a node has not heard of; `clusters.rs` whose nodes they are.

mod clusters;
mod drops;
mod fake_node;
mod order;
mod pauses;
mod refusals;
mod retry;
mod sessions;
mod tables;
