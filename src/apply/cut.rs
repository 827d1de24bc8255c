//! Applying a cut: from here on what was removed is remembered for the checkpoint that builds upon this one, and whoever writes
//! the shard's part is given the state as of this entry.
//!
//! Invariants:
//! - a cut builds only upon one since which every removal is remembered; with another it is refused, and nothing changes;
//! - what is remembered grows back to the cut that this one builds upon, and not to this one: its checkpoint may come to nothing;
//!   a base gives up what came before, since nothing builds upon that any more unless the base comes to nothing too, and then
//!   the next is a base again;
//! - no row changes.
//!
//! Not here: the rows (`crate::shard`, its `cut`), forgetting tombstones (`evershard_storage::rocks`).

use std::sync::Arc;

use super::Target;
use crate::model::{CommandOutcome, SessionTable};
use crate::shard::{CutBegun, SkipReason, SmallState, cleared_above};

/// The entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut {
    pub(super) checkpoint: u64,
    pub(super) above: u64,
}

/// Applies one cut.
pub(super) fn apply(target: &Target<'_>, cut: Cut) -> CommandOutcome {
    let index = target.index;
    let above = Some(cut.above).filter(|above| *above > 0);
    let small = {
        let mut state = target.small.lock();
        let remembered = state.small.kept_above;
        if above.is_some_and(|above| above >= index || remembered.is_none_or(|known| above < known)) {
            drop(state);
            target.cuts.tell(cut.checkpoint, target.rows, || Err(SkipReason::CutTooOld));
            return CommandOutcome::CutTooOld;
        }
        state.small.kept_above = Some(above.unwrap_or(index));
        // Sessions end with a restore, and are most of it.
        SmallState {
            sessions: SessionTable::default(),
            schemas: Arc::clone(&state.small.schemas),
            dropped: state.small.dropped.clone(),
            clock_ms: state.small.clock_ms.max(target.clock_ms),
            steps: state.small.steps.clone(),
            floors: state.small.floors.clone(),
            clocks: state.small.clocks.clone(),
            kept_above: state.small.kept_above,
        }
    };
    target.cuts.tell(cut.checkpoint, target.rows, || {
        target.rows.begin_cut(cut.checkpoint, index, cut.above)?;
        let cleared = above.map(|above| cleared_above(&small.floors, above)).unwrap_or_default();
        Ok(CutBegun { index, term: target.term, above, small_state: small.encode(), cleared })
    });
    CommandOutcome::Done
}
