//! Every key and every name that a replica's store has on disk, in one place.
//!
//! - [`DiskKey`]: keys in RocksDB;
//! - [`ReplicaFile`]: names in a replica's folder.
//!
//! Each is written and read here only, and each round-trips (proptests). The log's files are named in `log`.
//!
//! Not here: values (`codec`), the meta record (`rocks`).

mod disk_key;
mod replica_file;

pub use disk_key::{DiskKey, DiskKeyError};
pub use replica_file::ReplicaFile;
