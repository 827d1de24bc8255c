//! The Evershard server: what a push and a pull mean, and the node that serves them.
//!
//! `server.rs` builds the rooms in order and shuts them down in reverse. A push walks `service` -> `ingest` -> the raft
//! crate -> `apply`; a pull walks `service` -> `read`. docs/architecture walks through each.

pub mod apply;
pub mod checkpoint;
pub mod cluster;
pub mod config;
pub mod dev;
pub mod durable_file;
mod eviction;
pub mod failpoints;
pub mod flush;
pub mod ingest;
pub mod memory;
pub mod meta;
pub mod model;
pub mod open_files;
pub mod optimizer;
pub mod read;
pub mod routing;
pub mod server;
pub mod service;
pub mod shard;
pub mod telemetry;

/// Counts what decoders take.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: evershard_formats::Counting = evershard_formats::Counting;

#[cfg(test)]
#[test]
fn allocations_are_counted() {
    assert!(evershard_formats::allocation::is_counting());
}
