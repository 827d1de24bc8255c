//! Applying a sessions entry: the leader's decision that sessions have ended.
//!
//! Invariant: no replica looks at a clock; the numbers in the entry decide.

use super::Target;
use crate::model::CommandOutcome;

/// Applies one sessions entry.
pub(super) fn apply(target: &Target<'_>, floor: u64, live: &[u64]) -> CommandOutcome {
    target.small.lock().small.sessions.expire(floor, live);
    CommandOutcome::Done
}
