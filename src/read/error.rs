//! Why a pull is refused.

use evershard_proto::v1::{ErrorDetail, ErrorKind};

use crate::model::KeyRange;

/// A pull that cannot be answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// No such table here.
    #[error("pull refused by shard {shard}: there is no table {table}")]
    UnknownTable {
        /// The shard that refuses.
        shard: u32,
        /// As the client named it.
        table: u32,
    },
    /// A key that lives in another shard.
    #[error(
        "pull refused by shard {shard}: id {id} of table {table} (key {key:016x}) is outside its range {range}"
    )]
    WrongRange {
        /// The shard that refuses.
        shard: u32,
        /// The table.
        table: u32,
        /// The id.
        id: u64,
        /// Its key.
        key: u64,
        /// What the shard owns.
        range: KeyRange,
    },
    /// A block beyond the end of a dense tensor.
    #[error(
        "pull refused by shard {shard}: there is no block {block} in tensor {table} ({name:?}), which has {blocks}"
    )]
    OutOfRange {
        /// The shard that refuses.
        shard: u32,
        /// The tensor.
        table: u32,
        /// Its name.
        name: String,
        /// As asked for.
        block: u64,
        /// How many there are.
        blocks: u64,
    },
    /// Keys are 8 bytes each.
    #[error(
        "pull refused by shard {shard}: {bytes} bytes of keys for table {table} are no whole number of keys"
    )]
    KeyBytes {
        /// The shard that refuses.
        shard: u32,
        /// The table.
        table: u32,
        /// As given.
        bytes: usize,
    },
    /// The reply would be over the limit.
    #[error(
        "pull refused by shard {shard}: {keys} rows of table {table} (dim {dim}) are over the {limit} bytes of one reply"
    )]
    TooLarge {
        /// The shard that refuses.
        shard: u32,
        /// The table.
        table: u32,
        /// Rows asked for.
        keys: usize,
        /// The table's dim.
        dim: u32,
        /// The limit.
        limit: usize,
    },
    /// The replica has been restarted and still replays.
    #[error("shard {shard}: this replica is still replaying its log ({applied} of {complete_at})")]
    NotReady {
        /// The shard.
        shard: u32,
        /// Replayed so far.
        applied: u64,
        /// Where it can serve.
        complete_at: u64,
    },
    /// A row that is on disk only cannot be read.
    #[error("pull from table {table}: {reason}")]
    Disk {
        /// The table.
        table: u32,
        /// What the store said.
        reason: String,
    },
}

impl ReadError {
    /// How the error travels.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            ReadError::UnknownTable { .. } => ErrorKind::UnknownTable,
            ReadError::WrongRange { .. } => ErrorKind::WrongRange,
            ReadError::OutOfRange { .. } => ErrorKind::OutOfRange,
            ReadError::KeyBytes { .. } => ErrorKind::LengthMismatch,
            ReadError::TooLarge { .. } => ErrorKind::TooLarge,
            // Another replica may answer: a damaged one is taken out of service.
            ReadError::NotReady { .. } | ReadError::Disk { .. } => ErrorKind::Unavailable,
        }
    }

    /// The error for the wire, with its message.
    #[must_use]
    pub fn detail(&self) -> ErrorDetail {
        let table = match *self {
            ReadError::UnknownTable { table, .. }
            | ReadError::WrongRange { table, .. }
            | ReadError::OutOfRange { table, .. }
            | ReadError::KeyBytes { table, .. }
            | ReadError::TooLarge { table, .. }
            | ReadError::Disk { table, .. } => table,
            ReadError::NotReady { .. } => 0,
        };
        ErrorDetail { kind: self.kind() as i32, message: self.to_string(), table, ..Default::default() }
    }
}
