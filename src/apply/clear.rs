//! Clearing a table: all of its rows on this shard are removed by one entry.
//!
//! Removing leaves a tombstone a row, so that replay does not bring it back. Clearing leaves one number a table: its floor, the
//! entry's index, in the small state. A row whose version is below its table's floor is no row, wherever it is: on disk it may
//! lie until compaction comes across it.
//!
//! Invariants:
//! - a row that replay has ahead of the entry, from a flush before the crash, stays: its version is above the floor;
//! - the floor is in the small state as of the entry, so in every record and snapshot that reaches it; rows without it are of
//!   a state before, which the replica replays from.
//!
//! Not here: forgetting rows on disk (`evershard_storage::rocks`).

use super::Target;

/// Clears a table that is there: its number was checked.
pub(super) fn apply(target: &Target<'_>, table: u32) {
    let mut state = target.small.lock();
    state.small.floors.insert(table, target.index);
    target.rows.clear_table(table, target.index);
}
