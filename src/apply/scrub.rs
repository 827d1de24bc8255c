//! Applying a scrub entry: from here on a digest of the state as of this index is being taken, beside everything else.
//!
//! Invariant: nothing replicated changes; a replica that cannot take the digest says so when it is asked.

use super::Target;
use crate::model::CommandOutcome;
use crate::shard::ScanId;

/// Applies one scrub entry.
pub(super) fn apply(target: &Target<'_>, scrub_id: u64) -> CommandOutcome {
    target.rows.begin_scan(ScanId::Scrub(scrub_id), target.index);
    CommandOutcome::Done
}
