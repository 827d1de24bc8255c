//! The manifest of a checkpoint: which files it is made of, and everything about it that is not rows.
//!
//! ```text
//! {"format": "evershard-checkpoint", "version": 1, "checksum": "<32 digits>", "content": {...}}
//! ```
//!
//! The checksum is the hash ([`FileHash`](crate::hash::FileHash)) of the content's bytes exactly as they stand in the file. Keys and ranges are hexadecimal
//! text, since a number of JSON is a double for most who read it; bytes are base64. Fields may be added: an older build leaves them
//! out of account. What an older build must not leave out of account raises the version.
//!
//! Invariants ([`Content::check`], of every manifest that is read or written):
//! - the shards cover all keys, each once: a part that is missing is no empty part;
//! - a chain of links begins with a base, and its cuts ascend; the last is the shard's cut;
//! - every run lies in its shard's range, and is of a table of the checkpoint or of one that is gone;
//! - a file has one size and one crc32 wherever it is named, and `bytes_total` is the sum over all files.
//!
//! Not here: where a manifest lies and how it gets there (`crate::target`), what files hold (`crate::run`).

mod check;
mod codec;
mod content;
mod error;
#[cfg(test)]
mod fuzz;
mod part;
#[cfg(test)]
mod tests;
mod text;

pub use codec::{decode, encode};
pub use content::{Content, JobEntry, TableEntry, WorkerEntry};
pub use error::ManifestError;
pub use part::{FileEntry, FileKind, Link, LinkKind, RunEntry, ShardEntry, StateEntry};
#[cfg(test)]
pub(crate) use tests::sample;

/// Bytes of a manifest.
pub const MANIFEST_BYTES_MAX: usize = 512 << 20;
/// Links of a chain. Who writes begins anew long before.
pub const LINKS_MAX: usize = 1000;
/// Runs of a checkpoint: 32 TiB.
pub const RUNS_MAX: usize = 1 << 20;
/// Entries of user metadata.
pub const METADATA_ENTRIES_MAX: usize = 1000;
/// Bytes of user metadata, names and values together.
pub const METADATA_BYTES_MAX: usize = 1 << 20;
/// Bytes of a shard's small state.
pub const STATE_BYTES_MAX: u64 = 256 << 20;
