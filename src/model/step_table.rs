//! Steps of jobs that sum their gradients: how far each job is on this shard. Replicated state.
//!
//! A step's sums come in parts, one a key range, so that no entry is too long. The first part fixes how many there are: whoever
//! goes on after a failover cuts the ranges alike, whatever set of contributors it sums, and no key is in two parts.
//!
//! Invariants:
//! - a part is applied once, and only after all parts before it;
//! - steps are applied in order, each at most once. One may be passed over: a shard that lost the end of its log to an unsafe
//!   recovery goes on with the step that the meta group is at;
//! - what is kept is bounded: of more than [`JOBS_KEPT`] jobs, those that made no step for longest are forgotten, unless in the
//!   middle of one. Which they are follows from the log alone.

use std::collections::BTreeMap;

use evershard_proto::limits::JOBS_MAX;

/// Jobs that are remembered: removed ones, too, for a while.
const JOBS_KEPT: usize = 4 * JOBS_MAX;

/// How far a job is on this shard.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepProgress {
    /// Steps applied whole.
    pub steps: u64,
    /// Parts of the next step that are applied.
    pub parts: u32,
    /// Of how many; 0 when none is.
    pub of: u32,
    /// The entry that changed this last.
    pub index: u64,
}

impl StepProgress {
    /// Whether the state has the whole of a step.
    #[must_use]
    pub fn has(&self, step: u64) -> bool {
        self.steps > step
    }
}

/// What to do with a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepAdmission {
    /// Apply it, then [`StepTable::record`].
    Next,
    /// It is applied already.
    Before,
    /// Parts before it are missing, or the step was cut otherwise.
    OutOfOrder,
}

/// By job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepTable {
    jobs: BTreeMap<u64, StepProgress>,
}

impl StepTable {
    /// How far a job is; nothing is known of a job that made no step here.
    #[must_use]
    pub fn progress(&self, job: u64) -> Option<StepProgress> {
        self.jobs.get(&job).copied()
    }

    /// Decides what a part is, without changing anything.
    #[must_use]
    pub fn admit(&self, job: u64, step: u64, part: u32, of: u32) -> StepAdmission {
        let Some(known) = self.jobs.get(&job) else {
            return if part == 0 { StepAdmission::Next } else { StepAdmission::OutOfOrder };
        };
        if known.has(step) {
            return StepAdmission::Before;
        }
        if step > known.steps {
            return if part == 0 { StepAdmission::Next } else { StepAdmission::OutOfOrder };
        }
        if known.of != 0 && known.of != of {
            return StepAdmission::OutOfOrder;
        }
        match part.cmp(&known.parts) {
            std::cmp::Ordering::Less => StepAdmission::Before,
            std::cmp::Ordering::Equal => StepAdmission::Next,
            std::cmp::Ordering::Greater => StepAdmission::OutOfOrder,
        }
    }

    /// Remembers a part that was admitted as the next one.
    pub fn record(&mut self, job: u64, step: u64, part: u32, of: u32, index: u64) {
        let is_whole = part + 1 >= of;
        let progress = if is_whole {
            StepProgress { steps: step + 1, parts: 0, of: 0, index }
        } else {
            StepProgress { steps: step, parts: part + 1, of, index }
        };
        self.jobs.insert(job, progress);
        if self.jobs.len() > JOBS_KEPT
            && let Some(oldest) = self.oldest()
        {
            self.jobs.remove(&oldest);
        }
    }

    fn oldest(&self) -> Option<u64> {
        let between_steps = self.jobs.iter().filter(|(_, known)| known.of == 0);
        between_steps.min_by_key(|(_, known)| known.index).map(|(job, _)| *job)
    }

    /// Everything, ascending by job.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (u64, StepProgress)> + '_ {
        self.jobs.iter().map(|(job, progress)| (*job, *progress))
    }

    /// As [`StepTable::iter`] gave it.
    #[must_use]
    pub fn restore(jobs: BTreeMap<u64, StepProgress>) -> Self {
        StepTable { jobs }
    }

    /// True when no job made a step here.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_applied_once_and_in_order_whoever_sends_them() {
        let mut table = StepTable::default();
        assert_eq!(table.admit(1, 5, 1, 2), StepAdmission::OutOfOrder, "a job begins with a first part");
        for (step, of) in [(5, 3), (6, 1), (7, 2)] {
            for part in 0..of {
                assert_eq!(table.admit(1, step, part, of), StepAdmission::Next);
                table.record(1, step, part, of, 10 + step);
                assert_eq!(table.admit(1, step, part, of), StepAdmission::Before, "a repetition");
                if part + 1 < of {
                    assert_eq!(table.admit(1, step, part + 1, of + 1), StepAdmission::OutOfOrder);
                    assert_eq!(table.admit(1, step, part + 2, of), StepAdmission::OutOfOrder);
                    assert_eq!(table.admit(1, step + 1, 1, 2), StepAdmission::OutOfOrder);
                }
            }
        }
        assert_eq!(table.admit(1, 5, 0, 9), StepAdmission::Before, "however it is cut");
        assert_eq!(table.admit(1, 9, 1, 2), StepAdmission::OutOfOrder);
        assert_eq!(table.admit(1, 9, 0, 1), StepAdmission::Next, "this shard's step 8 was lost");
        table.record(1, 9, 0, 1, 20);
        assert_eq!(table.admit(1, 8, 0, 1), StepAdmission::Before, "and comes no more");
        assert_eq!(table.admit(2, 9, 0, 1), StepAdmission::Next, "another job");
    }

    #[test]
    fn jobs_without_steps_are_forgotten_first() {
        let mut table = StepTable::default();
        for index in 0..3 * JOBS_KEPT as u64 {
            table.record(7, index, 0, 1, 2 * index);
            table.record(1000 + index, 0, 0, 1, 2 * index + 1);
            assert!(table.iter().len() <= JOBS_KEPT);
        }
        assert_eq!(table.progress(7).map(|known| known.steps), Some(3 * JOBS_KEPT as u64));
        assert_eq!(table.progress(1000), None);
    }
}
