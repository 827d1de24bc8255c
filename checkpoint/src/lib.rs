//! Checkpoints: rows as of the cut, in sorted runs, in a directory or a bucket. Reading one takes no server and no RocksDB.
//!
//! - [`run`]: a file of rows. [`manifest`]: what a checkpoint is made of. [`target`]: where both lie.
//! - [`reader`]: the rows of a table, merged over the links of each part.
//! - [`verify`], [`diff`], [`prune`]: what is done with whole checkpoints.
//!
//! Not here: cutting and scanning (the server), the command line (`evershardctl checkpoint`).

pub mod diff;
pub mod hash;
pub mod manifest;
pub mod name;
pub mod prune;
pub mod reader;
pub mod run;
pub mod target;
#[cfg(test)]
mod testing;
pub mod verify;

/// Counts what decoders take.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: evershard_formats::Counting = evershard_formats::Counting;
