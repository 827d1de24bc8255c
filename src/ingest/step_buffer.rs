//! What workers contribute to the steps of their jobs, at a shard's leader, until a step is applied.
//!
//! Volatile: a leader that dies or is deposed loses it, and the workers, who keep their parts until the step is over, send it
//! again. Nothing here decides whose gradients count: that is said by the publication of the meta group, and what is here is only
//! given away for one.
//!
//! Invariants:
//! - what is kept is of one term, of one step a job, and of one incarnation a rank: the newest that was heard of;
//! - a step is given away only when every contributor's every part is here, as their own lists of checksums say, and to one
//!   proposer at a time;
//! - bytes are bounded by the permits that parts hold.
//!
//! Not here: sums (`apply::step_sum`), proposing (`service::step`).

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use evershard_proto::limits::JOBS_MAX;
use evershard_proto::push_body::checksum_of;
use evershard_proto::v1::{StepPublication, WorkerIdentity};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, watch};

/// A part, with what it takes of the node's bound.
#[derive(Debug)]
pub struct StepPart {
    body: Bytes,
    _held: OwnedSemaphorePermit,
}

impl StepPart {
    /// A checked part.
    #[must_use]
    pub fn new(body: Bytes, held: OwnedSemaphorePermit) -> Self {
        StepPart { body, _held: held }
    }
}

/// Why something is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StepRefusal {
    /// Another incarnation has the rank.
    #[error("worker {rank} of job {job} is fenced: epoch {epoch} has its rank")]
    Fenced {
        /// The job.
        job: u64,
        /// The rank.
        rank: u32,
        /// The newest epoch that was heard of.
        epoch: u64,
    },
    /// The step is over.
    #[error("step {step} of job {job} is over, {current} is being summed")]
    Over {
        /// The job.
        job: u64,
        /// What was told.
        step: u64,
        /// What is kept.
        current: u64,
    },
}

#[derive(Debug, Default)]
struct Contribution {
    epoch: u64,
    parts: BTreeMap<u32, StepPart>,
    /// Checksums of all there are, once told.
    whole: Option<Vec<u32>>,
}

impl Contribution {
    fn missing(&self, wanted: &[u32]) -> Vec<u32> {
        let has = |place: &u32, checksum: &u32| {
            self.parts.get(place).is_some_and(|part| checksum_of(&part.body) == *checksum)
        };
        (0..).zip(wanted).filter(|(place, checksum)| !has(place, checksum)).map(|(place, _)| place).collect()
    }

    fn bodies(&self) -> Option<Vec<Bytes>> {
        let whole = self.whole.as_ref()?;
        if !self.missing(whole).is_empty() {
            return None;
        }
        Some(self.parts.values().take(whole.len()).map(|part| part.body.clone()).collect())
    }
}

#[derive(Debug, Default)]
struct Collected {
    step: u64,
    ranks: BTreeMap<u32, Contribution>,
    is_proposed: bool,
    /// When it was last asked for, in calls.
    touched: u64,
}

#[derive(Debug, Default)]
struct State {
    term: u64,
    calls: u64,
    jobs: HashMap<u64, Collected>,
}

/// See the module.
#[derive(Debug)]
pub struct StepBuffer {
    state: Mutex<State>,
    changes: watch::Sender<u64>,
}

impl Default for StepBuffer {
    fn default() -> Self {
        StepBuffer { state: Mutex::default(), changes: watch::channel(0).0 }
    }
}

impl StepBuffer {
    /// Keeps a part of `worker` for `step`; one of the same place is replaced.
    ///
    /// # Errors
    /// [`StepRefusal`].
    pub fn put(
        &self,
        term: u64,
        worker: &WorkerIdentity,
        step: u64,
        place: u32,
        part: StepPart,
    ) -> Result<(), StepRefusal> {
        let mut state = self.state.lock();
        state.contribution(term, worker, step)?.parts.insert(place, part);
        Ok(())
    }

    /// Hears of all that `worker` contributes to `step`, and answers the places of what is not here.
    ///
    /// # Errors
    /// [`StepRefusal`].
    pub fn missing(
        &self,
        term: u64,
        worker: &WorkerIdentity,
        step: u64,
        wanted: &[u32],
    ) -> Result<Vec<u32>, StepRefusal> {
        let mut state = self.state.lock();
        let contribution = state.contribution(term, worker, step)?;
        let missing = contribution.missing(wanted);
        if contribution.whole.as_deref() != Some(wanted) {
            contribution.whole = Some(wanted.to_vec());
        }
        if missing.is_empty() {
            // Of an earlier, longer list.
            contribution.parts.split_off(&(wanted.len() as u32));
            drop(state);
            self.changed();
        }
        Ok(missing)
    }

    /// Gives away the parts of a published step, by rank, when all are here and nobody else has them. They stay here until
    /// [`StepBuffer::finish`].
    #[must_use]
    pub fn take(&self, term: u64, publication: &StepPublication) -> Option<Vec<Vec<Bytes>>> {
        let mut state = self.state.lock();
        if state.term != term {
            return None;
        }
        let collected = state.jobs.get_mut(&publication.job)?;
        if collected.step != publication.step || collected.is_proposed {
            return None;
        }
        let parts_of = |contributor: &evershard_proto::v1::StepContributor| {
            let contribution = collected.ranks.get(&contributor.rank)?;
            if contribution.epoch != contributor.epoch {
                return None;
            }
            contribution.bodies()
        };
        let all = publication.contributors.iter().map(parts_of).collect::<Option<Vec<_>>>()?;
        collected.is_proposed = true;
        Some(all)
    }

    /// A proposer has done with a step: it is `applied`, and what was kept for it goes; or it is not, and another may try.
    pub fn finish(&self, term: u64, job: u64, step: u64, applied: bool) {
        let mut state = self.state.lock();
        if state.term == term
            && let Some(collected) = state.jobs.get_mut(&job)
            && collected.step == step
        {
            collected.is_proposed = false;
            if applied {
                state.jobs.remove(&job);
            }
        }
        drop(state);
        self.changed();
    }

    /// Told of every change that may be worth another look.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn changed(&self) {
        self.changes.send_modify(|changes| *changes = changes.wrapping_add(1));
    }
}

impl State {
    fn contribution(
        &mut self,
        term: u64,
        worker: &WorkerIdentity,
        step: u64,
    ) -> Result<&mut Contribution, StepRefusal> {
        if self.term != term {
            // A call that is slower than an election brings nothing back.
            *self = State { term, calls: self.calls, jobs: HashMap::new() };
        }
        self.calls += 1;
        let touched = self.calls;
        let job = worker.job;
        if !self.jobs.contains_key(&job)
            && self.jobs.len() >= JOBS_MAX
            && let Some(oldest) = self.jobs.iter().min_by_key(|(_, known)| known.touched).map(|(job, _)| *job)
        {
            // Jobs that are no more. One that is sends its parts again.
            self.jobs.remove(&oldest);
        }
        let collected = self.jobs.entry(job).or_insert_with(|| Collected { step, ..Collected::default() });
        if collected.step > step {
            return Err(StepRefusal::Over { job, step, current: collected.step });
        }
        if collected.step < step {
            *collected = Collected { step, ..Collected::default() };
        }
        collected.touched = touched;
        let contribution = collected.ranks.entry(worker.rank).or_default();
        if contribution.epoch > worker.epoch {
            let epoch = contribution.epoch;
            return Err(StepRefusal::Fenced { job, rank: worker.rank, epoch });
        }
        if contribution.epoch < worker.epoch {
            *contribution = Contribution { epoch: worker.epoch, ..Contribution::default() };
        }
        Ok(contribution)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use evershard_proto::push_body::PushBodyBuilder;
    use evershard_proto::v1::StepContributor;
    use tokio::sync::Semaphore;

    use super::*;

    fn part(seq: u64) -> StepPart {
        let held = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        StepPart::new(PushBodyBuilder::new(0).finish(0, seq, 5), held)
    }

    fn checksum(seq: u64) -> u32 {
        checksum_of(&part(seq).body)
    }

    fn worker(rank: u32, epoch: u64) -> WorkerIdentity {
        WorkerIdentity { job: 1, rank, epoch }
    }

    fn publication(contributors: &[(u32, u64)]) -> StepPublication {
        let contributors =
            contributors.iter().map(|(rank, epoch)| StepContributor { rank: *rank, epoch: *epoch }).collect();
        StepPublication { job: 1, step: 5, number: 1, contributors, aggregation: 0 }
    }

    #[test]
    fn a_step_is_given_away_when_every_part_of_every_contributor_is_here() {
        let buffer = StepBuffer::default();
        let both = publication(&[(0, 7), (1, 8)]);
        buffer.put(3, &worker(0, 7), 5, 0, part(1)).unwrap();
        let wanted = [checksum(1), checksum(2)];
        assert_eq!(buffer.missing(3, &worker(0, 7), 5, &wanted), Ok(vec![1]));
        assert_eq!(buffer.missing(3, &worker(1, 8), 5, &[]), Ok(vec![]));
        assert!(buffer.take(3, &both).is_none(), "a part is missing");
        buffer.put(3, &worker(0, 7), 5, 1, part(9)).unwrap();
        assert_eq!(buffer.missing(3, &worker(0, 7), 5, &wanted), Ok(vec![1]), "another part in its place");
        buffer.put(3, &worker(0, 7), 5, 1, part(2)).unwrap();
        buffer.put(3, &worker(0, 7), 5, 2, part(3)).unwrap();
        assert_eq!(buffer.missing(3, &worker(0, 7), 5, &wanted), Ok(vec![]));
        assert!(
            buffer.take(3, &publication(&[(0, 7), (1, 8), (2, 9)])).is_none(),
            "a contributor is missing"
        );
        assert!(buffer.take(3, &publication(&[(0, 6), (1, 8)])).is_none(), "of another incarnation");
        let taken = buffer.take(3, &both).expect("all is here");
        assert_eq!(taken.iter().map(Vec::len).collect::<Vec<_>>(), [2, 0], "what was withdrawn is not in it");
        assert!(buffer.take(3, &both).is_none(), "one proposer at a time");
        buffer.finish(3, 1, 5, false);
        assert!(buffer.take(3, &both).is_some(), "it failed: another may try");
        buffer.finish(3, 1, 5, true);
        assert!(buffer.take(3, &both).is_none());
    }

    #[test]
    fn a_new_term_and_a_new_incarnation_begin_with_nothing() {
        let buffer = StepBuffer::default();
        let mine = publication(&[(0, 7)]);
        let all = |term, epoch| {
            buffer.put(term, &worker(0, epoch), 5, 0, part(1)).unwrap();
            assert_eq!(buffer.missing(term, &worker(0, epoch), 5, &[checksum(1)]), Ok(vec![]));
        };
        all(3, 7);
        assert_eq!(buffer.missing(4, &worker(0, 7), 5, &[checksum(1)]), Ok(vec![0]), "another term");
        assert!(buffer.take(3, &mine).is_none());
        all(4, 7);
        assert_eq!(buffer.missing(4, &worker(0, 9), 5, &[checksum(1)]), Ok(vec![0]), "another incarnation");
        assert!(buffer.take(4, &mine).is_none());
        let fenced = buffer.put(4, &worker(0, 7), 5, 0, part(1)).unwrap_err();
        assert_eq!(fenced, StepRefusal::Fenced { job: 1, rank: 0, epoch: 9 });
        assert_eq!(buffer.missing(4, &worker(0, 9), 6, &[]), Ok(vec![]), "the next step");
        let over = buffer.put(4, &worker(0, 9), 5, 0, part(1)).unwrap_err();
        assert_eq!(over, StepRefusal::Over { job: 1, step: 5, current: 6 });
    }
}
