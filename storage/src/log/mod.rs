//! The node-wide log: one append-only segmented log for all groups of a node.
//!
//! An append walks: [`GroupLog::append`] puts the entries into the group's index (`group_index`: readable at once) and
//! an operation into the `queue`; the `writer` takes all that is queued, turns it into records (`batch`, `record`),
//! writes them with one gather write and syncs once for all groups; then each group is told where its records are, and
//! each callback is called, in order. Later `retire` lets segments go that nobody needs. After a restart `recovery`
//! scans the segments, judges what is torn and what is damaged, and replays the rest.
//!
//! Invariants:
//! - What was acknowledged with [`Durability::Fsync`] survives a power cut, with [`Durability::Memory`] a `kill -9`.
//! - A record that was synced and cannot be read is noticed, and its group quarantined; it is never forgotten silently.
//! - The first failed write or sync stops the log; nothing is acknowledged after it. A full disk is no failure: what
//!   cannot be written waits (`room`).
//! - The writer's code is the same whoever drives it ([`Driver`]) and on whatever [`crate::disk::Disk`].
//!
//! Not here: what a payload or a vote means, when to purge (the raft crate).

mod anchors;
mod batch;
mod chores;
mod entry;
mod error;
mod floor;
#[cfg(test)]
mod formats_test;
mod group;
mod group_index;
mod group_log;
mod node_log;
mod options;
mod queue;
mod reader;
mod record;
mod recovery;
mod retire;
mod room;
mod segment;
mod segment_set;
mod shared;
mod stall;
mod writer;

pub use entry::{Entry, EntryId, GroupKey, GroupLogState, QuarantineCause};
pub use error::LogError;
pub use group_log::{DurableCallback, GroupLog};
pub use node_log::{Log, LogStats, QuarantinedGroup, RecoveredGroup, Recovery};
pub use options::{Driver, Durability, LogOptions, system_boot_id};
pub use record::BODY_BYTES_MAX;
pub use room::LogRoom;
