//! Evershard's bytes at rest: log segments, rows in memory, rows in RocksDB.
//!
//! Depends on nothing of ours. The only crate that names `rocksdb`.
//!
//! - [`disk`]: the file system behind a trait.
//! - [`log`]: the node-wide segmented log of all groups.
//! - [`testing`]: a simulated disk that loses, tears and flips.
//! - [`table`]: rows in memory, found by key in batches, with the dirty bits of the flush.
//! - [`rocks`]: a replica's store: RocksDB and the meta record.
//! - [`keyspace`]: every key and name in a replica's store.
//! - [`codec`]: how values become bytes.
//!
//! Not here: what a row or a log entry means (the server), agreement (the raft crate).

pub mod codec;
pub mod disk;
pub mod keyspace;
pub mod log;
pub mod rocks;
pub mod table;
pub mod testing;

/// Counts what decoders take.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: evershard_formats::Counting = evershard_formats::Counting;
