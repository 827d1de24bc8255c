//! A replica's store: RocksDB behind the flush, and the meta record that says what counts.
//!
//! RocksDB is never on the commit path: it takes in the sorted run of a flush cycle, answers cold reads and is linked for raft
//! snapshots and checkpoints. One instance per replica, WAL off, nothing through memtables; what they share per node is
//! [`RocksShared`].
//!
//! A flush cycle's walk: [`ReplicaStore::begin_run`] -> [`RunWriter::put`] in (table, key) order -> [`ReplicaStore::commit`]:
//! raise `complete_at`, ingest, move `replay_from`, each durable before the next.
//!
//! A snapshot's walk: [`ReplicaStore::link_to`] at the sender -> files over the wire -> [`ReplicaStore::replace_with`] at the
//! receiver.
//!
//! Not here: rows in memory (`table`), the log (`log`), what the small state holds (the server).

mod database;
mod dead_rows;
mod durable;
mod error;
mod folder;
mod install;
mod meta_record;
mod options;
mod run;
mod state;
mod store;
#[cfg(test)]
mod tests;

pub use error::StoreError;
pub use options::{RocksOptions, RocksShared};
pub use run::RunWriter;
pub use state::{FlushedState, Position, ReplicaIdentity};
pub use store::{ReplicaStore, StoreMetrics};
