//! Why a table definition is refused.

use evershard_proto::v1::ErrorKind;

/// A table definition that cannot be used, with the field to mend.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SchemaError {
    /// A name is 1 to 128 bytes, without control characters and without blanks at its ends.
    #[error("table name {name:?} is refused: {reason}")]
    Name {
        /// As given, at most its first 128 characters.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A row has 1 to `DIM_MAX` values.
    #[error("table {table}: dim is {dim}, must be between 1 and {limit}")]
    Dim {
        /// The table's name.
        table: String,
        /// As given.
        dim: u32,
        /// The most there may be.
        limit: u32,
    },
    /// A hyper-parameter is outside its range, or not finite.
    #[error("table {table}: {field} is {value}, must be {must}")]
    Value {
        /// The table's name.
        table: String,
        /// Which field.
        field: &'static str,
        /// As given.
        value: f32,
        /// What it must be.
        must: &'static str,
    },
    /// A message that must say which of several kinds it is does not, or names one this build does not know.
    #[error("table {table}: {field} is of an unknown kind")]
    Kind {
        /// The table's name.
        table: String,
        /// Which field.
        field: &'static str,
    },
    /// A dense tensor that cannot be.
    #[error("tensor {table}: {what}")]
    Tensor {
        /// The tensor's name.
        table: String,
        /// What is wrong with it.
        what: String,
    },
    /// A schema entry without a definition.
    #[error("table {number} comes without a definition")]
    Missing {
        /// The table's number.
        number: u32,
    },
}

impl SchemaError {
    /// How the error travels.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Invalid
    }
}
