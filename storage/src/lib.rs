//! Evershard's bytes at rest: log segments, rows in memory, rows in RocksDB.
//!
//! Depends on nothing of ours. The only crate that names `rocksdb`.
//!
//! - [`table`]: rows in memory, found by key in batches, with the dirty bits of the flush.
//!
//! Not here: what a row or a log entry means (the server), agreement (the raft crate).

pub mod table;
