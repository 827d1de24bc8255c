//! Why a push is refused, in full: what the door tells the client. The session table keeps its [`Refusal`] only.

use evershard_proto::key::id_of;
use evershard_proto::push_body::PushBodyError;
use evershard_proto::v1::{ErrorDetail, ErrorKind};

use crate::model::{BadValue, KeyRange, Refusal, RefusalKind};

/// A push that cannot be applied; nothing was changed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PushRefusal {
    /// The body does not parse.
    #[error("push refused by shard {shard}: {source}")]
    Malformed {
        /// The shard that refuses.
        shard: u32,
        /// What does not add up.
        source: PushBodyError,
    },
    /// No such table here.
    #[error("push refused by shard {shard}: there is no table {table}")]
    UnknownTable {
        /// The shard that refuses.
        shard: u32,
        /// As the client named it.
        table: u32,
    },
    /// Another dim than the table's.
    #[error(
        "push refused by shard {shard}: table {table} ({name:?}) has dim {expected}, the push has {actual}"
    )]
    WrongDim {
        /// The shard that refuses.
        shard: u32,
        /// The table.
        table: u32,
        /// Its name.
        name: String,
        /// The table's dim.
        expected: u32,
        /// The push's dim.
        actual: u32,
    },
    /// A key that lives in another shard.
    #[error(
        "push refused by shard {shard}: id {id} of table {table} (key {key:016x}) is outside its range {range}"
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
    /// A value that is not finite.
    #[error(
        "push refused by shard {shard}: column {column} of id {id} of table {table} ({name:?}) is {value}, \
         and the table takes finite values only"
    )]
    NonFinite {
        /// The shard that refuses.
        shard: u32,
        /// The table.
        table: u32,
        /// Its name.
        name: String,
        /// The id.
        id: u64,
        /// The column.
        column: usize,
        /// The value.
        value: f32,
    },
    /// Finite values of one id whose sum is not.
    #[error(
        "push refused by shard {shard}: the values of id {id} of table {table} ({name:?}), summed, are not finite"
    )]
    NonFiniteSum {
        /// The shard that refuses.
        shard: u32,
        /// The table.
        table: u32,
        /// Its name.
        name: String,
        /// The id.
        id: u64,
        /// The column.
        column: usize,
        /// The sum.
        value: f32,
    },
    /// Gradients for a table that does not learn.
    #[error(
        "push refused by shard {shard}: table {table} ({name:?}) has no optimizer, so it takes no gradients"
    )]
    NoOptimizer {
        /// The shard that refuses.
        shard: u32,
        /// The table.
        table: u32,
        /// Its name.
        name: String,
    },
    /// Values, or a body of version 1, in another encoding than f32.
    #[error(
        "push refused by shard {shard}: the section of table {table} is {encoding}, which only gradients and additions of a body of version 2 may be"
    )]
    Encoding {
        /// The shard that refuses.
        shard: u32,
        /// The table.
        table: u32,
        /// The encoding's name.
        encoding: &'static str,
    },
    /// Occurrences for a table that does not count them.
    #[error(
        "push refused by shard {shard}: table {table} ({name:?}) does not count how often an id comes, and the push says so"
    )]
    Uncounted {
        /// The shard that refuses.
        shard: u32,
        /// The table.
        table: u32,
        /// Its name.
        name: String,
    },
    /// Two sections for one table: in which order they change a row would be ambiguous to replay.
    #[error("push refused by shard {shard}: two sections of one message name table {table}")]
    RepeatedTable {
        /// The shard that refuses.
        shard: u32,
        /// The table.
        table: u32,
    },
    /// A learning rate that makes no sense.
    #[error(
        "push refused by shard {shard}: learning rate {lr} for table {table} must be finite and at least 0"
    )]
    LearningRate {
        /// The shard that refuses.
        shard: u32,
        /// The table.
        table: u32,
        /// As given.
        lr: f32,
    },
    /// A block beyond the end of a dense tensor.
    #[error(
        "push refused by shard {shard}: there is no block {block} in tensor {table} ({name:?}), which has {blocks}"
    )]
    OutOfRange {
        /// The shard that refuses.
        shard: u32,
        /// The tensor.
        table: u32,
        /// Its name.
        name: String,
        /// As given.
        block: u64,
        /// How many there are.
        blocks: u64,
    },
    /// A dense tensor does not take that.
    #[error("push refused by shard {shard}: {what} of tensor {table} ({name:?})")]
    NotOfTensor {
        /// The shard that refuses.
        shard: u32,
        /// The tensor.
        table: u32,
        /// Its name.
        name: String,
        /// What was asked for.
        what: &'static str,
    },
    /// Sequence numbers start at 1.
    #[error("push refused by shard {shard}: sequence number 0 (they start at 1)")]
    SeqZero {
        /// The shard that refuses.
        shard: u32,
    },
}

impl PushRefusal {
    /// A key outside `range`.
    #[must_use]
    pub fn wrong_range(shard: u32, table: u32, key: u64, range: KeyRange) -> Self {
        PushRefusal::WrongRange { shard, table, id: id_of(table, key), key, range }
    }

    /// The table and the value, when it is refused for a value that is not finite.
    #[must_use]
    pub fn bad_value(&self) -> Option<(u32, BadValue)> {
        let (table, id, column, value, of_sum) = match *self {
            PushRefusal::NonFinite { table, id, column, value, .. } => (table, id, column, value, false),
            PushRefusal::NonFiniteSum { table, id, column, value, .. } => (table, id, column, value, true),
            _ => return None,
        };
        Some((table, BadValue { id, column: column as u32, value, of_sum }))
    }

    /// The short form that the session table keeps.
    #[must_use]
    pub fn refusal(&self) -> Refusal {
        let (kind, table) = match *self {
            PushRefusal::Malformed { .. } => (RefusalKind::Malformed, 0),
            PushRefusal::UnknownTable { table, .. } => (RefusalKind::UnknownTable, table),
            PushRefusal::WrongDim { table, .. } => (RefusalKind::WrongDim, table),
            PushRefusal::WrongRange { table, .. } => (RefusalKind::WrongRange, table),
            PushRefusal::NonFinite { table, .. } | PushRefusal::NonFiniteSum { table, .. } => {
                (RefusalKind::NonFinite, table)
            }
            PushRefusal::NoOptimizer { table, .. } => (RefusalKind::NoOptimizer, table),
            PushRefusal::Encoding { table, .. } | PushRefusal::Uncounted { table, .. } => {
                (RefusalKind::Encoding, table)
            }
            PushRefusal::RepeatedTable { table, .. } => (RefusalKind::RepeatedTable, table),
            PushRefusal::LearningRate { table, .. } => (RefusalKind::LearningRate, table),
            PushRefusal::OutOfRange { table, .. } => (RefusalKind::OutOfRange, table),
            PushRefusal::NotOfTensor { table, .. } => (RefusalKind::NotOfTensor, table),
            PushRefusal::SeqZero { .. } => (RefusalKind::SeqZero, 0),
        };
        Refusal { kind, table }
    }

    /// How the refusal travels: over a limit is told apart from damaged.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            PushRefusal::Malformed { source: PushBodyError::TooLarge { .. }, .. } => ErrorKind::TooLarge,
            PushRefusal::Malformed { source: PushBodyError::Malformed { .. }, .. } => {
                ErrorKind::LengthMismatch
            }
            _ => self.refusal().kind.error_kind(),
        }
    }

    /// The refusal for the wire, with its message.
    #[must_use]
    pub fn detail(&self) -> ErrorDetail {
        ErrorDetail {
            kind: self.kind() as i32,
            message: self.to_string(),
            table: self.refusal().table,
            ..Default::default()
        }
    }
}
