//! How values become bytes on disk: bounded reading, and the value of a row.
//!
//! Rules: little-endian; every length is checked against what is there before memory is taken; every format starts with its
//! version; reading answers a typed error and never panics, whatever the bytes.
//!
//! Not here: keys (`keyspace`), files (`rocks`, `log`).

mod reader;
mod row_value;

pub use reader::{DecodeError, Reader};
pub use row_value::{RowValueError, decode_row, encode_row, row_value_bytes, row_version, tombstone_version};
