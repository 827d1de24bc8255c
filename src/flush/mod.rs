//! Moving what changed in memory to the store, in the background: the flush.
//!
//! A cycle ([`flush_replica`]) walks the three steps of design 5: note the applied index `s` with the small state, begin a
//! flush of every table -> copy dirty rows out, whole, into a sorted run -> wait for the log to be durable up to the
//! highest version, commit the run with `replay_from = s`. Then the snapshot mark moves, and the log may be purged.
//!
//! The [`Flusher`] is one thread per node over all its replicas.
//!
//! Invariants:
//! - no version in a run, no `complete_at` and no `replay_from` exceeds the locally durable log (design 14.2);
//! - a row changed after it was copied stays dirty; a failed cycle leaves everything dirty;
//! - an error that is not transient ends the replica: it is reported, never swallowed.
//!
//! Not here: the steps on disk and their crash points (`evershard_storage::rocks`), purging (the raft crate).

mod cycle;
mod durable_index;
mod flusher;
mod pacer;

pub use cycle::{FlushReport, flush_replica};
pub use durable_index::DurableIndex;
pub use flusher::{Flusher, OnFailed, OnFlushed};
