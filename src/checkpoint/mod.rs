//! A shard's part of a checkpoint, written by one of its replicas: rows as of the cut, in runs, and the small state.
//!
//! A part walks: rows as of the cut (`crate::shard`'s `CutTicket`), on a thread of their own -> `part`: runs of 8 MiB, sorted -> the
//! target. `plan` says upon which cut it builds.
//!
//! Invariant: a part names only files that are at the target, whole and durable.
//!
//! Not here: rows as of the cut (`crate::shard`), who writes which part and when jobs are held (`crate::cluster`), formats and targets (the
//! crate `evershard-checkpoint`).

mod part;
mod plan;

pub use part::{Part, PartError, Written, write_part};
pub use plan::{LINKS_MAX, builds_upon};
