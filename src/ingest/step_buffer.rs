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
//! - bytes are bounded by the permits that parts hold, and what nobody will ask for any more is swept out;
//! - whoever waits is woken by what may let a step go on, and by nothing that a waiting call does itself.
//!
//! Not here: sums (`apply::step_sum`), proposing (`service::step`).

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use bytes::Bytes;
use evershard_proto::limits::JOBS_MAX;
use evershard_proto::push_body::checksum_of;
use evershard_proto::v1::{StepPublication, WorkerIdentity};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, watch};

/// A step that failed is not tried again before: whoever waits hears why.
const AFTER_FAILURE: Duration = Duration::from_millis(500);

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
    /// The call is slower than an election.
    #[error("a call of term {term}, and it is term {current}")]
    OldTerm {
        /// The call's.
        term: u64,
        /// The newest.
        current: u64,
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
    /// All of `whole` was here when that was last looked at.
    is_complete: bool,
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
    /// Why it was not applied, and when.
    failed: Option<(Instant, String)>,
    touched: Option<Instant>,
}

#[derive(Debug, Default)]
struct State {
    term: u64,
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
    /// Whether this very part is here.
    ///
    /// # Errors
    /// [`StepRefusal`].
    pub fn has(
        &self,
        term: u64,
        worker: &WorkerIdentity,
        step: u64,
        (place, checksum): (u32, u32),
    ) -> Result<bool, StepRefusal> {
        let mut state = self.state.lock();
        let parts = &state.contribution(term, worker, step)?.parts;
        Ok(parts.get(&place).is_some_and(|part| checksum_of(&part.body) == checksum))
    }

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
        let contribution = state.contribution(term, worker, step)?;
        contribution.is_complete = false;
        contribution.parts.insert(place, part);
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
            contribution.is_complete = false;
        }
        // Of an earlier, longer list: a push was withdrawn.
        contribution.parts.split_off(&(wanted.len() as u32));
        let was_complete = std::mem::replace(&mut contribution.is_complete, missing.is_empty());
        if missing.is_empty() && !was_complete {
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
        let has_just_failed = collected.failed.as_ref().is_some_and(|(at, _)| at.elapsed() < AFTER_FAILURE);
        if collected.step != publication.step || collected.is_proposed || has_just_failed {
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

    /// Why a step that was given away was not applied, if that was a moment ago.
    #[must_use]
    pub fn failure(&self, term: u64, job: u64, step: u64) -> Option<String> {
        let state = self.state.lock();
        let collected = state.jobs.get(&job).filter(|known| state.term == term && known.step == step)?;
        let failed = collected.failed.as_ref().filter(|(at, _)| at.elapsed() < AFTER_FAILURE);
        failed.map(|(_, why)| why.clone())
    }

    /// Lets go of what nobody will ask for: everything when this replica does not lead in its term (`led`), steps that are
    /// `over`, and jobs of which nothing was heard for `idle`. Whoever is still there sends its parts again.
    pub fn sweep(&self, led: Option<u64>, over: impl Fn(u64, u64) -> bool, idle: Duration) {
        let mut state = self.state.lock();
        if led != Some(state.term) {
            state.jobs.clear();
            return;
        }
        state.jobs.retain(|job, known| {
            let is_idle = known.touched.is_none_or(|at| at.elapsed() > idle);
            known.is_proposed || !(is_idle || over(*job, known.step))
        });
    }

    /// A proposer has done with a step: it is applied, and what was kept for it goes; or it is not, and another may try, after a
    /// while when that says why.
    pub fn finish(&self, term: u64, job: u64, step: u64, outcome: Result<(), Option<String>>) {
        let mut state = self.state.lock();
        if state.term == term
            && let Some(collected) = state.jobs.get_mut(&job)
            && collected.step == step
        {
            collected.is_proposed = false;
            match outcome {
                Ok(()) => drop(state.jobs.remove(&job)),
                Err(why) => collected.failed = why.map(|why| (Instant::now(), why)),
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
        if term < self.term {
            return Err(StepRefusal::OldTerm { term, current: self.term });
        }
        if self.term != term {
            *self = State { term, jobs: HashMap::new() };
        }
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
        collected.touched = Some(Instant::now());
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
        buffer.finish(3, 1, 5, Err(None));
        assert!(buffer.take(3, &both).is_some(), "it failed: another may try");
        buffer.finish(3, 1, 5, Err(Some("why".into())));
        assert_eq!(buffer.failure(3, 1, 5), Some("why".into()));
        assert!(buffer.take(3, &both).is_none(), "not at once");
        std::thread::sleep(AFTER_FAILURE);
        assert_eq!(buffer.failure(3, 1, 5), None);
        assert!(buffer.take(3, &both).is_some());
        buffer.finish(3, 1, 5, Ok(()));
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

    #[test]
    fn waiting_calls_do_not_wake_one_another() {
        let buffer = StepBuffer::default();
        buffer.put(3, &worker(0, 7), 5, 0, part(1)).unwrap();
        let mut changes = buffer.watch();
        let wanted = [checksum(1)];
        buffer.missing(3, &worker(0, 7), 5, &wanted).unwrap();
        assert!(changes.has_changed().unwrap(), "all of it is here");
        changes.mark_unchanged();
        buffer.missing(3, &worker(0, 7), 5, &wanted).unwrap();
        assert!(!changes.has_changed().unwrap(), "as before");
        buffer.put(3, &worker(0, 7), 5, 0, part(1)).unwrap();
        buffer.missing(3, &worker(0, 7), 5, &wanted).unwrap();
        assert!(changes.has_changed().unwrap(), "it came again, and may be what somebody waits for");
        assert_eq!(buffer.has(3, &worker(0, 7), 5, (0, checksum(1))), Ok(true));
        assert_eq!(buffer.has(3, &worker(0, 7), 5, (0, checksum(2))), Ok(false));
    }

    #[test]
    fn what_nobody_will_ask_for_gives_its_bytes_back() {
        let budget = Arc::new(Semaphore::new(10));
        let buffer = StepBuffer::default();
        let long = Duration::from_secs(600);
        let fill = |term| {
            let held = Arc::clone(&budget).try_acquire_many_owned(4).unwrap();
            let body = PushBodyBuilder::new(0).finish(0, 1, 5);
            buffer.put(term, &worker(0, 7), 5, 0, StepPart::new(body, held)).unwrap();
        };
        fill(3);
        buffer.sweep(Some(3), |_, _| false, long);
        assert_eq!(budget.available_permits(), 6, "it is wanted");
        buffer.sweep(None, |_, _| false, long);
        assert_eq!(budget.available_permits(), 10, "another node leads");
        fill(4);
        buffer.sweep(Some(4), |job, step| (job, step) == (1, 5), long);
        assert_eq!(budget.available_permits(), 10, "the step is over");
        fill(4);
        buffer.sweep(Some(4), |_, _| false, Duration::ZERO);
        assert_eq!(budget.available_permits(), 10, "its job is no more");
        let late = buffer.missing(3, &worker(0, 7), 5, &[]);
        assert_eq!(late, Err(StepRefusal::OldTerm { term: 3, current: 4 }));
    }
}
