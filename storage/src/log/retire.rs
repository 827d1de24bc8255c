//! Letting old segments go.
//!
//! Only the oldest segment can go, and only when recovery needs nothing in it: so what comes later in the log (a
//! truncation, a purge, a forgotten group) never goes before what it speaks about. A group that does not move would
//! hold its segment for ever; so what the oldest segment still holds is copied to the end when it is little, or when
//! more than half of the log is of no use.
//!
//! Invariants:
//! - Everything that made a segment useless is synced before the segment goes.
//! - The floor says durably that a segment is gone before it goes.
//!
//! Not here: what a relocated record means at recovery (`recovery::replay`).

use super::Durability;
use super::chores::sync_written;
use super::group::Group;
use super::queue::{Action, Operation};
use super::reader;
use super::shared::Shared;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes copied forward at a time.
const CHUNK_BYTES: u64 = 4 << 20;

/// Lets the segments go that nobody needs, and makes the next one useless if that is due.
pub(super) fn run(shared: &Shared) {
    // The active segment first: what a group publishes from now on lies there or later.
    let active = shared.progress.lock().active.number;
    let groups: Vec<Arc<Group>> = shared.groups.read().values().cloned().collect();
    let needed =
        groups.iter().filter_map(|group| group.lock().oldest_segment()).min().unwrap_or(active).min(active);
    let Some(oldest) = shared.segments.oldest() else { return };
    if oldest < needed {
        // With fsync, whatever a group published is synced. A sync from here would even do harm: the system tells of a
        // failed write-back once, and it would be this thread that hears it, not the writer who is about to acknowledge.
        if shared.options.durability == Durability::Memory {
            sync_written(shared);
        }
        if shared.has_failed() || !remove_before(shared, needed) {
            return;
        }
    }
    let is_relocating = shared.chores.relocations.load(Ordering::Acquire) > 0;
    if needed < active && !is_relocating && is_worth_moving(shared, &groups, needed, active) {
        relocate(shared, &groups, needed);
    }
}

fn remove_before(shared: &Shared, number: u64) -> bool {
    let mut floor = shared.floor.lock();
    if let Err(error) = floor.change(|floor| floor.first_segment = number) {
        shared.fail(floor.path(), &error);
        return false;
    }
    drop(floor);
    for segment in shared.segments.remove_before(number) {
        // While somebody reads it, it must not become another.
        let path = segment.path.clone();
        let is_kept =
            Arc::try_unwrap(segment).is_ok_and(|segment| shared.chores.offer_spare(shared, segment).is_ok());
        // A file that stays is removed when the log is opened next.
        if !is_kept && let Err(error) = shared.disk.remove_file(&path) {
            tracing::warn!(path = %path.display(), %error, "cannot remove a log segment");
        }
    }
    true
}

/// Whether to copy forward what this segment, the oldest, still holds: because it is next to nothing (a vote, a purge
/// marker), or because more than half of the whole log is of no use. Either way copying frees more than it writes.
fn is_worth_moving(shared: &Shared, groups: &[Arc<Group>], segment: u64, active: u64) -> bool {
    let (_, bytes) = shared.segments.totals();
    let live: u64 = groups.iter().map(|group| group.lock().live_bytes()).sum();
    if bytes > 2 * live + 2 * shared.options.segment_bytes {
        return true;
    }
    let live_here: u64 = groups.iter().map(|group| group.lock().live_bytes_in(segment)).sum();
    segment + 1 < active && live_here <= shared.options.segment_bytes / 8
}

/// Queues copies of what the groups still need of this segment, a chunk of it.
fn relocate(shared: &Shared, groups: &[Arc<Group>], segment: u64) {
    let mut budget = CHUNK_BYTES;
    for group in groups {
        let (entries, anchors) = {
            let index = group.lock();
            if index.is_destroyed {
                continue;
            }
            (index.entries_in(segment, budget), index.anchors.any_in(segment))
        };
        if entries.is_empty() && !anchors {
            continue;
        }
        let entries = match reader::read_for_relocation(shared, group, &entries) {
            Ok(entries) => entries,
            Err(error) => {
                // Damaged: the group is quarantined, and holds nothing back when that is durable.
                tracing::error!(group = %group.key, %error, "cannot copy log entries forward");
                continue;
            }
        };
        let operation =
            Operation { group: group.clone(), action: Action::Relocate { entries, anchors }, done: None };
        budget = budget.saturating_sub(operation.bytes());
        shared.chores.relocations.fetch_add(1, Ordering::AcqRel);
        if shared.queue.push(operation).is_err() {
            return;
        }
        if budget == 0 {
            return;
        }
    }
}
