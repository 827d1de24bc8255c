//! Steps of jobs that sum their gradients (staleness 0), in the meta group's state: who has arrived, whose gradients count, when
//! a step is over.
//!
//! A worker arrives when all that it contributes is on every shard. When all who count have arrived, the step is published: from
//! then on the shards may apply it. It is over when some worker has seen it applied by every shard; clocks and cursors of its
//! contributors advance in that moment, and not before: who takes a rank over earlier does its batch again.
//!
//! Invariants:
//! - a step is published only when every worker that counts has arrived, and for those alone;
//! - a publication stays until its step is over, although a contributor dies: shards may have all of it. Only when a shard turns
//!   out to lack parts, or none of the contributors is left, does another one take its place, of the same ranks or fewer: who
//!   came later is not in shards that have applied the first one;
//! - steps are over one after the other.
//!
//! Not here: leases and ranks (`jobs`), waiting (`cluster::steps`).

use evershard_proto::limits::CURSOR_BYTES_MAX;
use evershard_proto::v1::{
    self, Aggregation, DeadWorkerPolicy, JobDefinition, MetaJob, MetaOutcome, MetaState, StepContributor,
    StepPublication, WorkerState,
};

use super::jobs::{counts, live_worker, of_kind};
use super::state::refused;

/// Whether a job's gradients are summed over its workers before they are applied. Said by the definition, and not by its staleness:
/// jobs of builds that summed nothing go on as they began.
#[must_use]
pub fn sums_steps(definition: &JobDefinition) -> bool {
    definition.aggregation() != Aggregation::Apart
}

/// The same, of a job.
pub(super) fn job_sums_steps(job: &MetaJob) -> bool {
    job.definition.as_ref().is_some_and(sums_steps)
}

/// How many contributors of a publication still have their ranks.
fn holding(job: &MetaJob, publication: &StepPublication) -> usize {
    let holds = |one: &&StepContributor| {
        let worker = job.workers.get(one.rank as usize);
        worker.is_some_and(|worker| worker.epoch == one.epoch && worker.state() == WorkerState::Live)
    };
    publication.contributors.iter().filter(holds).count()
}

/// Whether a contributor of what is published is dead or was replaced: only then can a step be stuck for good.
#[must_use]
pub fn lacks_contributors(job: &MetaJob) -> bool {
    job.publication.as_ref().is_some_and(|known| holding(job, known) < known.contributors.len())
}

/// Publishes the job's step if everybody is there. With something published already: only if a contributor of it is gone, and
/// either all of them are or the step is `stuck`.
pub(super) fn publish(job: &mut MetaJob, stuck: bool) {
    let Some(definition) = job.definition.clone() else { return };
    if !sums_steps(&definition) || !job.aborted.is_empty() {
        return;
    }
    let policy: DeadWorkerPolicy = definition.dead_worker();
    let mut former: Vec<u32> = Vec::new();
    if let Some(publication) = &job.publication {
        let holding = holding(job, publication);
        if holding == publication.contributors.len() || (holding > 0 && !stuck) {
            return;
        }
        former = publication.contributors.iter().map(|one| one.rank).collect();
        let may_come =
            |rank: &u32| job.workers.get(*rank as usize).is_some_and(|worker| counts(worker, policy));
        if !former.iter().any(may_come) {
            // Nobody of them is left or waited for.
            former.clear();
        }
    }
    let is_eligible = |rank: u32| former.is_empty() || former.contains(&rank);
    let ranks = || (0..).zip(&job.workers).filter(|(rank, _)| is_eligible(*rank));
    if ranks().any(|(_, worker)| counts(worker, policy) && !worker.arrived) {
        return;
    }
    let contributors: Vec<StepContributor> = ranks()
        .filter(|(_, worker)| worker.state() == WorkerState::Live && worker.arrived)
        .map(|(rank, worker)| StepContributor { rank, epoch: worker.epoch })
        .collect();
    if contributors.is_empty() {
        return;
    }
    job.publications += 1;
    job.publication = Some(StepPublication {
        job: job.number,
        step: job.step,
        number: job.publications,
        contributors,
        aggregation: definition.aggregation,
    });
}

pub(super) fn apply_arrive(state: &mut MetaState, arrive: v1::RecordArrival) -> MetaOutcome {
    let Some(identity) = arrive.worker else { return refused("an arrival without a worker") };
    if let Err((kind, error)) = live_worker(state, &identity) {
        return of_kind(kind, error);
    }
    if arrive.cursor.len() > CURSOR_BYTES_MAX {
        return refused(format!(
            "a cursor has at most {CURSOR_BYTES_MAX} bytes, not {}",
            arrive.cursor.len()
        ));
    }
    let Some(job) = state.jobs.iter_mut().find(|job| job.number == identity.job) else {
        return refused("the job is no more");
    };
    if !job_sums_steps(job) {
        return refused("the job does not sum its steps: they end with Tick");
    }
    if arrive.step > job.step {
        let (rank, step, at) = (identity.rank, arrive.step, job.step);
        return refused(format!("worker {rank} arrives at step {step}; its job is at {at}"));
    }
    if arrive.step < job.step {
        // A call whose answer was lost, or who came too late for it.
        return MetaOutcome::default();
    }
    let worker = &mut job.workers[identity.rank as usize];
    if !worker.arrived {
        worker.arrived = true;
        worker.arriving_cursor = arrive.cursor;
    }
    publish(job, arrive.stuck);
    MetaOutcome::default()
}

pub(super) fn apply_step_done(state: &mut MetaState, done: &v1::RecordStepDone) -> MetaOutcome {
    let Some(job) = state.jobs.iter_mut().find(|job| job.number == done.job) else {
        return MetaOutcome::default();
    };
    if done.step < job.step {
        return MetaOutcome::default();
    }
    let Some(publication) = job.publication.take_if(|known| known.step == done.step) else {
        return refused(format!("step {} was not published: its job is at {}", done.step, job.step));
    };
    job.step += 1;
    let step = job.step;
    for one in &publication.contributors {
        if let Some(worker) = job.workers.get_mut(one.rank as usize) {
            worker.cursor = std::mem::take(&mut worker.arriving_cursor);
            worker.clock = step;
        }
    }
    for worker in &mut job.workers {
        worker.arrived = false;
        worker.arriving_cursor.clear();
        if worker.state() == WorkerState::Live {
            worker.clock = step;
        }
    }
    job.last_contributors = publication.contributors.iter().map(|one| one.rank).collect();
    MetaOutcome::default()
}

#[cfg(test)]
mod tests;
