//! A job as it is shown: the JSON of `job list`, `job show` and `status`, and its words for people.

use evershard_proto::v1::{Aggregation, DeadWorkerPolicy, JobDescription, WorkerDescription, WorkerState};
use serde::Serialize;

/// One training run.
#[derive(Debug, Serialize)]
pub(crate) struct JobView {
    pub(crate) name: String,
    pub(crate) number: u64,
    /// How far the fastest may be ahead of the slowest; null: nobody waits.
    pub(crate) staleness: Option<u32>,
    /// "sum" or "mean" of the workers' gradients is applied at the end of a step; null: each when it comes.
    pub(crate) aggregation: Option<&'static str>,
    /// "continue", "wait" or "abort".
    pub(crate) dead_worker: &'static str,
    pub(crate) lease_ms: u32,
    /// Null when it goes on.
    pub(crate) aborted: Option<String>,
    /// Clocks of the workers that are live.
    pub(crate) slowest: Option<u64>,
    pub(crate) fastest: Option<u64>,
    pub(crate) workers: Vec<WorkerView>,
}

/// One worker of it.
#[derive(Debug, Serialize)]
pub(crate) struct WorkerView {
    pub(crate) rank: u32,
    /// "absent", "live", "dead" or "done".
    pub(crate) state: &'static str,
    pub(crate) epoch: u64,
    pub(crate) clock: u64,
    /// Steps behind the fastest.
    pub(crate) lag: u64,
    pub(crate) barriers: u64,
    pub(crate) waits_for: Vec<u32>,
    pub(crate) name: String,
}

impl JobView {
    pub(crate) fn of(job: &JobDescription) -> Self {
        let definition = job.definition.clone().unwrap_or_default();
        let live = job.workers.iter().filter(|worker| worker.state() == WorkerState::Live);
        let clocks: Vec<u64> = live.map(|worker| worker.clock).collect();
        let fastest = job.workers.iter().map(|worker| worker.clock).max().unwrap_or(0);
        JobView {
            number: job.number,
            staleness: (!definition.asynchronous).then_some(definition.staleness),
            aggregation: {
                match definition.aggregation() {
                    Aggregation::Apart => None,
                    Aggregation::Sum => Some("sum"),
                    Aggregation::Mean => Some("mean"),
                }
            },
            dead_worker: match definition.dead_worker() {
                DeadWorkerPolicy::Continue => "continue",
                DeadWorkerPolicy::Wait => "wait",
                DeadWorkerPolicy::Abort => "abort",
            },
            lease_ms: definition.lease_ms,
            aborted: Some(job.aborted.clone()).filter(|why| !why.is_empty()),
            slowest: clocks.iter().min().copied(),
            fastest: clocks.iter().max().copied(),
            workers: job.workers.iter().map(|worker| WorkerView::of(worker, fastest)).collect(),
            name: definition.name,
        }
    }

    /// "staleness 2" and the like.
    pub(crate) fn mode(&self) -> String {
        match self.staleness {
            None => "asynchronous".to_owned(),
            Some(0) => format!("synchronous, {}", self.aggregation.unwrap_or("apart")),
            Some(staleness) => format!("staleness {staleness}"),
        }
    }

    /// "3 live, 1 dead" and the like.
    pub(crate) fn head_count(&self) -> String {
        let count = |state| self.workers.iter().filter(|worker| worker.state == state).count();
        let parts = ["live", "dead", "absent", "done"].map(|state| (count(state), state));
        let parts =
            parts.iter().filter(|(count, _)| *count > 0).map(|(count, state)| format!("{count} {state}"));
        parts.collect::<Vec<_>>().join(", ")
    }
}

impl WorkerView {
    fn of(worker: &WorkerDescription, fastest: u64) -> Self {
        WorkerView {
            rank: worker.rank,
            state: match worker.state() {
                WorkerState::Absent => "absent",
                WorkerState::Live => "live",
                WorkerState::Dead => "dead",
                WorkerState::Done => "done",
            },
            epoch: worker.epoch,
            clock: worker.clock,
            lag: fastest - worker.clock,
            barriers: worker.barriers,
            waits_for: worker.waits_for.clone(),
            name: worker.name.clone(),
        }
    }
}
