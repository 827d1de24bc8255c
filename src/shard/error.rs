//! What can go wrong with a shard's replica.

use evershard_storage::rocks::StoreError;

use super::small_codec::SmallStateError;

/// A replica that cannot be opened, flushed or installed.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// The store said no.
    #[error("shard {shard} (group {group}): {source}")]
    Store {
        /// The shard.
        shard: u32,
        /// Its group.
        group: u64,
        /// What the store said.
        source: StoreError,
    },
    /// The small state in the store's record does not decode.
    #[error("shard {shard} (group {group}): {source}")]
    SmallState {
        /// The shard.
        shard: u32,
        /// Its group.
        group: u64,
        /// What is wrong with it.
        source: SmallStateError,
    },
    /// A row in the store does not fit its table's schema, or has none although `replay_from` has passed it.
    #[error(
        "shard {shard} (group {group}): row {key:016x} of table {table} has {found} floats on disk, \
         its schema says {expected}"
    )]
    RowShape {
        /// The shard.
        shard: u32,
        /// Its group.
        group: u64,
        /// The table.
        table: u32,
        /// The row's key.
        key: u64,
        /// Floats on disk.
        found: usize,
        /// Floats by the schema.
        expected: usize,
    },
    /// The log did not become durable up to where the flush had to wait for it: the replica is being shut down, or its
    /// log has failed. Nothing was committed.
    #[error(
        "shard {shard} (group {group}): the log was not durable up to {index} in time, the flush is put off"
    )]
    LogNotDurable {
        /// The shard.
        shard: u32,
        /// Its group.
        group: u64,
        /// What the flush waited for.
        index: u64,
    },
}

impl ShardError {
    /// True when what is on disk is not what was written: the replica has lost something. Everything else (a full disk, no
    /// descriptors, a slow log, a snapshot in between) may pass, and nothing is lost while the log is kept.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            ShardError::LogNotDurable { .. } => false,
            ShardError::Store { source, .. } => source.is_damage(),
            ShardError::SmallState { .. } | ShardError::RowShape { .. } => true,
        }
    }
}
