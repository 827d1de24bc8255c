//! Holding all jobs between two steps, for the moment of a checkpoint's cut. On the meta group's leader.
//!
//! A job that sums its steps is held by not recording that its workers arrive: then no step is published, and none is applied. A worker
//! of another job is held when it has ended its step: its pushes are acknowledged, and it is not told to go on.
//!
//! Invariants:
//! - while a hold lasts, no step of any job begins that was not under way when it began: once all are held, nothing that a worker
//!   does changes a row;
//! - holds are volatile: a new meta leader knows of none, so whoever holds asks a quorum before it believes in its hold
//!   (`checkpoints`);
//! - a hold ends when its guard goes.
//!
//! Not here: cutting (`checkpoints`), steps and ticks (`steps`, `jobs`).

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::v1::{MetaState, WorkerIdentity, WorkerState};
use parking_lot::Mutex;

use super::node::Node;
use crate::meta::steps;

/// Between two looks at whether all are held: jobs change a few times a second, and ticks come without a change.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Who is held.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    is_held: bool,
    /// Workers that have ended their step since the hold began: job, rank, epoch.
    workers: HashSet<(u64, u32, u64)>,
    /// Arrivals that are being recorded.
    recording: usize,
}

/// All jobs are held while it lives.
#[derive(Debug)]
pub(crate) struct Held(Arc<Mutex<State>>);

/// An arrival is being recorded.
#[derive(Debug)]
pub(crate) struct Recording(Arc<Mutex<State>>);

/// Where a job's workers are: equal before and after the cuts, or the checkpoint is not exact.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Place {
    job: u64,
    step: u64,
    publications: u64,
    is_published: bool,
    /// State, epoch, clock, barriers.
    workers: Vec<(i32, u64, u64, u64)>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.is_held = false;
        state.workers.clear();
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.0.lock().recording -= 1;
    }
}

impl Holds {
    /// Begins to hold; `None` while another does.
    pub(crate) fn begin(&self) -> Option<Held> {
        let mut state = self.state.lock();
        if state.is_held {
            return None;
        }
        state.is_held = true;
        Some(Held(Arc::clone(&self.state)))
    }

    /// A worker of a job that sums its steps arrives: `None` when that must wait until a hold is over.
    pub(crate) fn record(&self) -> Option<Recording> {
        let mut state = self.state.lock();
        if state.is_held {
            return None;
        }
        state.recording += 1;
        Some(Recording(Arc::clone(&self.state)))
    }

    /// A worker has ended its step; whether it must wait until a hold is over.
    pub(crate) fn is_held_at_tick(&self, worker: &WorkerIdentity) -> bool {
        let mut state = self.state.lock();
        if state.is_held {
            state.workers.insert((worker.job, worker.rank, worker.epoch));
        }
        state.is_held
    }

    /// Whether every job stands between two steps; else what is waited for.
    fn look(&self, state: &MetaState) -> Result<(), String> {
        let holds = self.state.lock();
        if holds.recording > 0 {
            return Err("what workers do is still being recorded".into());
        }
        let mut missing = Vec::new();
        for job in &state.jobs {
            let name = job.definition.as_ref().map_or("", |definition| &definition.name);
            if job.definition.as_ref().is_some_and(steps::sums_steps) {
                if job.publication.is_some() {
                    missing.push(format!("step {} of job {name:?}", job.step));
                }
                continue;
            }
            for (rank, worker) in (0..).zip(&job.workers) {
                let is_held = holds.workers.contains(&(job.number, rank, worker.epoch));
                if worker.state() == WorkerState::Live && !is_held {
                    missing.push(format!("worker {rank} of job {name:?}"));
                }
            }
        }
        if missing.is_empty() { Ok(()) } else { Err(format!("{} did not end yet", missing.join(", "))) }
    }
}

/// Where all workers are.
pub(crate) fn places(state: &MetaState) -> Vec<Place> {
    let place = |job: &evershard_proto::v1::MetaJob| Place {
        job: job.number,
        step: job.step,
        publications: job.publications,
        is_published: job.publication.is_some(),
        workers: job.workers.iter().map(|w| (w.state, w.epoch, w.clock, w.barriers)).collect(),
    };
    state.jobs.iter().map(place).collect()
}

impl Node {
    /// Waits until every job is held, or the deadline; answers who was waited for then.
    pub(super) async fn wait_until_held(&self, deadline: Instant) -> Result<(), String> {
        loop {
            let Err(missing) = self.holds.look(&self.meta_state()) else { return Ok(()) };
            if Instant::now() >= deadline {
                return Err(missing);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use evershard_proto::v1::{Aggregation, JobDefinition, MetaJob, MetaWorker, StepPublication};

    use super::*;

    fn state(aggregation: Aggregation, published: bool) -> MetaState {
        let definition = JobDefinition { aggregation: aggregation.into(), ..Default::default() };
        let worker = MetaWorker { epoch: 5, state: WorkerState::Live.into(), ..Default::default() };
        let job = MetaJob {
            number: 1,
            definition: Some(definition),
            workers: vec![worker],
            publication: published.then(StepPublication::default),
            ..Default::default()
        };
        MetaState { jobs: vec![job], ..Default::default() }
    }

    #[test]
    fn a_job_that_sums_is_held_when_nothing_of_it_is_published_or_being_recorded() {
        let holds = Holds::default();
        let recording = holds.record().expect("nothing is held");
        let held = holds.begin().expect("nothing is held");
        assert!(holds.begin().is_none() && holds.record().is_none());
        let state_of = |published| state(Aggregation::Sum, published);
        assert!(holds.look(&state_of(false)).is_err(), "an arrival may publish the step");
        drop(recording);
        assert!(holds.look(&state_of(true)).is_err());
        assert_eq!(holds.look(&state_of(false)), Ok(()));
        drop(held);
        assert!(holds.record().is_some() && holds.begin().is_some());
    }

    #[test]
    fn another_job_is_held_when_each_live_incarnation_has_ended_its_step() {
        let holds = Holds::default();
        let worker = |epoch| WorkerIdentity { job: 1, rank: 0, epoch };
        assert!(!holds.is_held_at_tick(&worker(5)));
        let held = holds.begin().expect("nothing is held");
        let state = state(Aggregation::Apart, false);
        assert!(holds.look(&state).is_err(), "what was before the hold does not count");
        assert!(holds.is_held_at_tick(&worker(4)));
        assert!(holds.look(&state).is_err(), "an earlier incarnation");
        assert!(holds.is_held_at_tick(&worker(5)));
        assert_eq!(holds.look(&state), Ok(()));
        drop(held);
        assert!(!holds.is_held_at_tick(&worker(5)));
    }
}
