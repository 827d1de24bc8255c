//! Applying a scrub entry: from here on a digest of the state as of this index is being taken, beside everything else: of
//! the small state at once (replicas that disagree on what was applied would double or lose a push later), then of the rows.
//!
//! Invariant: nothing replicated changes; a replica that cannot take the digest says so when it is asked.

use super::Target;
use crate::model::CommandOutcome;
use crate::read::Digest;
use crate::shard::ScanId;

/// Applies one scrub entry.
pub(super) fn apply(target: &Target<'_>, scrub_id: u64) -> CommandOutcome {
    let mut small = Digest::default();
    small.add_small_state(&target.small.lock().small.encode());
    target.rows.begin_scan(ScanId::Scrub(scrub_id), target.index, small);
    CommandOutcome::Done
}
