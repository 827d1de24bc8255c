//! Steps that are summed, at the meta group's leader: workers arrive here, and hear here that their step is published or over.
//!
//! Not here: what the commands do (`meta::steps`), leases and clocks (`jobs`), the shards (`service::step`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::v1::meta_command::Command;
use evershard_proto::v1::{
    ArriveAtStepReply, ArriveAtStepRequest, CompleteStepRequest, MetaJob, RecordArrival, RecordStepDone,
    WorkerIdentity,
};

use super::holds::Recording;
use super::jobs::{LOOK_EVERY, RECORD_WITHIN, WAIT_MAX, live};
use super::node::Node;
use super::replicas::Replicas;
use crate::meta::{jobs, steps};
use crate::service::RequestError;

/// A job of which nothing was heard for so long has no worker that waits for a step.
const IDLE: Duration = Duration::from_secs(120);

/// Lets go of what workers contributed to steps that nobody will ask this node for.
pub fn forget_steps(replicas: &Replicas) {
    for replica in replicas.shards() {
        let leadership = replica.raft.leadership();
        let led = leadership.is_self.then_some(leadership.term);
        let is_over = |job, step| replica.machine.step_progress(job).is_some_and(|known| known.has(step));
        replica.steps.sweep(led, is_over, IDLE);
    }
}

/// What a worker at `step` is told; with neither a publication nor the step's end it waits.
fn reply(job: &MetaJob, worker: &WorkerIdentity, step: u64) -> ArriveAtStepReply {
    if step < job.step {
        let counted = step + 1 == job.step && job.last_contributors.contains(&worker.rank);
        return ArriveAtStepReply { over: true, counted, step: job.step, ..Default::default() };
    }
    let is_in = |publication: &&evershard_proto::v1::StepPublication| {
        publication.contributors.iter().any(|one| (one.rank, one.epoch) == (worker.rank, worker.epoch))
    };
    ArriveAtStepReply {
        publication: job.publication.as_ref().filter(is_in).cloned(),
        step: job.step,
        waits_for: jobs::waits_for(job, worker.rank),
        ..Default::default()
    }
}

impl Node {
    /// Records that all which a worker contributes to its step is on the shards, and waits until the step is published or over,
    /// or for as long as it asked. Who asks again, hears of the publication as it is now.
    ///
    /// # Errors
    /// NOT_LEADER elsewhere; FENCED, JOB_ABORTED, UNKNOWN_JOB, INVALID; UNAVAILABLE.
    pub async fn arrive_here(
        self: &Arc<Self>,
        request: ArriveAtStepRequest,
    ) -> Result<ArriveAtStepReply, RequestError> {
        let term = self.leading_meta()?;
        let worker = RequestError::need_worker(request.worker)?;
        let is_new = {
            let state = self.meta_state();
            let (job, known) = live(&state, &worker)?;
            // What is over is not arrived at.
            let is_stuck = request.stuck && steps::lacks_contributors(job);
            request.step > job.step || (request.step == job.step && (!known.arrived || is_stuck))
        };
        self.worker_leases.renew(term, &worker);
        let ArriveAtStepRequest { step, cursor, stuck, .. } = request.clone();
        let until = Instant::now() + Duration::from_millis(request.wait_ms.into()).min(WAIT_MAX);
        let recording = if is_new { self.record_when_not_held(term, &worker, until).await } else { None };
        if is_new && recording.is_none() {
            // Held for a checkpoint still: its worker asks again.
            let state = self.meta_state();
            return Ok(reply(live(&state, &worker)?.0, &worker, request.step));
        }
        if is_new {
            let arrive = Command::Arrive(RecordArrival { worker: Some(worker), step, cursor, stuck });
            self.propose_meta(arrive, Instant::now() + RECORD_WITHIN).await?;
        }
        drop(recording);
        let look = |job: &MetaJob| {
            let reply = reply(job, &worker, step);
            (reply.over || reply.publication.is_some(), reply)
        };
        self.watch_job(&worker, until, look).await
    }

    /// Waits until no hold keeps an arrival from being recorded; `None` when that takes longer than the worker waits.
    async fn record_when_not_held(
        &self,
        term: u64,
        worker: &WorkerIdentity,
        until: Instant,
    ) -> Option<Recording> {
        const PAUSE: Duration = Duration::from_millis(1);
        loop {
            let recording = self.holds.record();
            if recording.is_some() || Instant::now() >= until {
                return recording;
            }
            self.worker_leases.renew(term, worker);
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// A worker has seen its step applied by every shard.
    ///
    /// # Errors
    /// As [`Node::arrive_here`].
    pub async fn complete_step_here(
        self: &Arc<Self>,
        request: CompleteStepRequest,
    ) -> Result<(), RequestError> {
        let term = self.leading_meta()?;
        let worker = RequestError::need_worker(request.worker)?;
        let is_first = {
            let state = self.meta_state();
            let (job, _) = live(&state, &worker)?;
            let lowest = job.publication.as_ref().and_then(|known| known.contributors.first());
            lowest.is_none_or(|lowest| lowest.rank == worker.rank)
        };
        self.worker_leases.renew(term, &worker);
        // All of them come at once: one entry is enough, and if its worker does not come, any will do.
        let patience = if is_first { Duration::ZERO } else { LOOK_EVERY };
        let look = |job: &MetaJob| (job.step > request.step, job.step > request.step);
        if self.watch_job(&worker, Instant::now() + patience, look).await? {
            return Ok(());
        }
        let done = Command::StepDone(RecordStepDone { job: worker.job, step: request.step });
        self.propose_meta(done, Instant::now() + RECORD_WITHIN).await.map(|_| ())
    }
}
