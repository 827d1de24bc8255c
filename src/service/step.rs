//! Steps of jobs that sum their gradients: workers' parts are taken in, and a published step goes through the log.
//!
//! A step walks: parts from every worker -> every worker tells all its checksums -> the publication, by whichever worker comes
//! first -> the sums -> one entry a key range -> apply -> every worker that waits is answered.
//!
//! Invariants:
//! - a step is proposed for a publication alone, and only when all of its parts are here;
//! - "applied" is said from the replicated state of a leader that serves, never from what was proposed;
//! - whoever proposes goes on although the client that came first is gone.
//!
//! Not here: who contributes (the meta group), what is kept (`ingest::step_buffer`), sums (`apply::step_sum`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use evershard_proto::push_body::{Operation, PushBodyError, checksum_of};
use evershard_proto::shard_command::ShardCommand;
use evershard_proto::v1::{
    Aggregation, ContributeReply, ContributeRequest, ErrorKind, StepPublication, StepReply, StepRequest,
    WorkerIdentity,
};
use evershard_raft::{Answer, ProposeError};

use super::RequestError;
use super::non_finite::note_step;
use super::parameter::{ParameterDoor, checked};
use crate::apply::StepSum;
use crate::cluster::replicas::ShardReplica;
use crate::cluster::steps::forget_steps;
use crate::ingest::{StepPart, StepRefusal};
use crate::model::CommandOutcome;
use crate::telemetry::metric_definitions as metric;

/// A call waits no longer than this for its step.
const WAIT_MAX: Duration = Duration::from_secs(2);
/// A waiting call looks this often whether its node still leads.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// For the log to take a step.
const PROPOSE_WITHIN: Duration = Duration::from_secs(10);
/// Before a full log is asked again.
const PAUSE: Duration = Duration::from_millis(5);
/// Parts that are cut and under way together.
const PARTS_AT_ONCE: u32 = 16;
/// What the smallest part takes of the bound.
const PART_BYTES_MIN: usize = 1024;

/// A step that is this node's to propose.
struct Taken {
    replica: Arc<ShardReplica>,
    term: u64,
    publication: StepPublication,
    contributions: Vec<Vec<Bytes>>,
}

fn refused(group: u64, refusal: &StepRefusal) -> RequestError {
    let kind = match refusal {
        StepRefusal::Fenced { .. } => ErrorKind::Fenced,
        StepRefusal::Over { .. } => ErrorKind::Invalid,
        StepRefusal::OldTerm { .. } => ErrorKind::Unavailable,
    };
    RequestError::new(kind, refusal.to_string()).in_group(group)
}

impl ParameterDoor {
    /// Takes in a part of a worker's step.
    pub(super) fn contribute(&self, request: &ContributeRequest) -> Result<ContributeReply, RequestError> {
        let (group, worker) = (request.group, RequestError::need_worker(request.worker)?);
        let (replica, term) = self.leading(group)?;
        self.push_gate.check(group)?;
        let invalid = |what: &str| RequestError::new(ErrorKind::Invalid, what).in_group(group);
        let body = checked(&replica, &request.body, Some(&worker))?;
        if body.sections().any(|section| section.operation != Operation::Gradient || section.lr.is_some()) {
            return Err(invalid("a part of a step has gradients alone, at the table's own learning rate"));
        }
        let place = body.seq.checked_sub(1).and_then(|place| u32::try_from(place).ok());
        let place = place.ok_or_else(|| invalid("a part's place is from 1 on"))?;
        let step = body.clock;
        if replica.machine.step_progress(worker.job).is_some_and(|known| known.has(step)) {
            // Nobody will ask for it.
            return Ok(ContributeReply {});
        }
        let checksum = checksum_of(&request.body);
        let has = replica.steps.has(term, &worker, step, (place, checksum));
        if has.map_err(|refusal| refused(group, &refusal))? {
            return Ok(ContributeReply {});
        }
        let cost = u32::try_from(request.body.len().max(PART_BYTES_MIN)).unwrap_or(u32::MAX);
        let acquire = || Arc::clone(&self.step_budget).try_acquire_many_owned(cost);
        let held = acquire().or_else(|_| {
            forget_steps(&self.replicas);
            acquire()
        });
        let Ok(held) = held else {
            let what = "the node holds as much of steps that are not complete as it may (step_buffer_bytes)";
            return Err(RequestError::new(ErrorKind::Exhausted, what).in_group(group).retry_soon());
        };
        replica
            .steps
            .put(term, &worker, step, place, StepPart::new(request.body.clone(), held))
            .map_err(|refusal| refused(group, &refusal))?;
        metrics::counter!(metric::STEP_BYTES_TOTAL).increment(request.body.len() as u64);
        Ok(ContributeReply {})
    }

    /// Says how far a step is; with a publication, gets it applied.
    pub(super) async fn step(&self, request: StepRequest) -> Result<StepReply, RequestError> {
        let (group, worker) = (request.group, RequestError::need_worker(request.worker)?);
        let until = Instant::now() + Duration::from_millis(request.wait_ms.into()).min(WAIT_MAX);
        if let Some(publication) = &request.publication
            && !is_of(publication, &worker, request.step)
        {
            let what = "the publication is not of this step and worker";
            return Err(RequestError::new(ErrorKind::Invalid, what).in_group(group));
        }
        loop {
            let (replica, term) = self.leading(group)?;
            let mut changes = replica.steps.watch();
            if replica.machine.step_progress(worker.job).is_some_and(|known| known.has(request.step)) {
                let applied_index = replica.reader.applied();
                return Ok(StepReply { applied: true, missing: Vec::new(), applied_index });
            }
            let missing = replica
                .steps
                .missing(term, &worker, request.step, &request.parts)
                .map_err(|refusal| refused(group, &refusal))?;
            if !missing.is_empty() {
                return Ok(StepReply { missing, ..StepReply::default() });
            }
            if let Some(publication) = &request.publication {
                self.push_gate.check(group)?;
                if let Some(why) = replica.steps.failure(term, worker.job, request.step) {
                    return Err(RequestError::new(ErrorKind::Internal, why).in_group(group));
                }
                if let Some(contributions) = replica.steps.take(term, publication) {
                    let publication = publication.clone();
                    let door = self.clone();
                    let taken = Taken { replica, term, publication, contributions };
                    self.tasks.spawn(async move { door.propose(taken).await });
                }
            }
            let now = Instant::now();
            if now >= until || request.publication.is_none() {
                return Ok(StepReply::default());
            }
            let look = LOOK_EVERY.min(until - now);
            // That nothing changed meanwhile is fine: it is looked again.
            let _ = tokio::time::timeout(look, changes.changed()).await;
        }
    }

    async fn propose(&self, taken: Taken) {
        let (replica, term) = (Arc::clone(&taken.replica), taken.term);
        let (job, step) = (taken.publication.job, taken.publication.step);
        let proposed = tokio::select! {
            () = self.stop.cancelled() => Err(RequestError::new(ErrorKind::Unavailable, "the node is shutting down")),
            proposed = self.propose_parts(taken) => proposed,
        };
        let outcome = proposed.map_err(|error| {
            let group = replica.listed.group;
            tracing::warn!(group, job, step, %error, "a step was not applied; its workers try again");
            // What passes by itself is waited for; anything else would fail again, and is told.
            let passes =
                matches!(error.kind(), ErrorKind::NotLeader | ErrorKind::Unavailable | ErrorKind::Exhausted);
            (!passes).then(|| error.to_string())
        });
        if outcome.is_err() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        replica.steps.finish(term, job, step, outcome);
    }

    async fn propose_parts(&self, taken: Taken) -> Result<(), RequestError> {
        let Taken { replica, publication, contributions, .. } = taken;
        let group = replica.listed.group;
        let (job, step) = (publication.job, publication.step);
        let internal = |what: String| RequestError::new(ErrorKind::Internal, what).in_group(group);
        let deadline = Instant::now() + PROPOSE_WITHIN;
        let mean_over = (publication.aggregation() == Aggregation::Mean)
            .then(|| u32::try_from(publication.contributors.len()).unwrap_or(u32::MAX));
        let machine = Arc::clone(&replica.machine);
        let rows = Arc::clone(machine.rows());
        let add = move || {
            let sum = StepSum::of(&contributions, mean_over, &rows.schemas(), rows.scope().range)?;
            let parts = sum.parts();
            Ok((Arc::new(sum), parts))
        };
        let added: Result<_, PushBodyError> =
            self.read_pool.run(add).await.map_err(|error| busy(group, error))?;
        let (sum, parts) =
            added.map_err(|error| internal(format!("a part of step {step} of job {job}: {error}")))?;
        while Instant::now() < deadline {
            let known = machine.step_progress(job).unwrap_or_default();
            if known.has(step) {
                note_step(&replica, job, &publication.contributors, sum.offences());
                return Ok(());
            }
            // Parts that an earlier leader got through stay, and fix how the others are cut.
            let is_begun = known.steps == step && known.of > 0;
            let (of, first) = if is_begun { (known.of, known.parts) } else { (parts, 0) };
            for from in (first..of).step_by(PARTS_AT_ONCE as usize) {
                self.propose_some(&replica, &sum, (job, step), (from, of), deadline).await?;
            }
        }
        Err(RequestError::new(ErrorKind::Unavailable, format!("step {step} of job {job} took too long")))
    }

    /// Cuts some parts, from `from` on, and sees them applied.
    async fn propose_some(
        &self,
        replica: &ShardReplica,
        sum: &Arc<StepSum>,
        (job, step): (u64, u64),
        (from, of): (u32, u32),
        deadline: Instant,
    ) -> Result<(), RequestError> {
        let group = replica.listed.group;
        let internal = |what: String| RequestError::new(ErrorKind::Internal, what).in_group(group);
        let cut = Arc::clone(sum);
        let commands = move || {
            let bodies = cut.cut(of, from, from + PARTS_AT_ONCE, step).into_iter().zip(from..);
            let command = |(body, part)| ShardCommand::Step { job, step, part, of, body }.encode();
            bodies.map(command).collect::<Vec<_>>()
        };
        let commands = self.read_pool.run(commands).await.map_err(|error| busy(group, error))?;
        let mut answers = Vec::with_capacity(commands.len());
        for command in commands {
            answers.push(propose_one(replica, &command, deadline).await?);
        }
        for answer in answers {
            let answer = answer.await.map_err(|error| RequestError::from_propose(group, &error))?;
            match CommandOutcome::decode(&answer) {
                // Out of order: what was proposed before, and was still on its way, was cut otherwise.
                Ok(CommandOutcome::Done | CommandOutcome::OutOfOrder) => {}
                Ok(other) => return Err(internal(format!("step {step} of job {job}: {other:?}"))),
                Err(error) => return Err(internal(error.to_string())),
            }
        }
        Ok(())
    }
}

fn busy(group: u64, error: super::ReadPoolError) -> RequestError {
    RequestError::new(ErrorKind::Exhausted, error.to_string()).in_group(group)
}

fn is_of(publication: &StepPublication, worker: &WorkerIdentity, step: u64) -> bool {
    let contributors = &publication.contributors;
    (publication.job, publication.step) == (worker.job, step)
        && contributors.iter().any(|one| (one.rank, one.epoch) == (worker.rank, worker.epoch))
        && contributors.windows(2).all(|pair| pair[0].rank < pair[1].rank)
}

/// Waits for room in the log, so that parts keep their order.
async fn propose_one(
    replica: &ShardReplica,
    command: &Bytes,
    deadline: Instant,
) -> Result<Answer, RequestError> {
    loop {
        match replica.raft.propose(command.clone()) {
            Ok(answer) => return Ok(answer),
            Err(ProposeError::Exhausted { .. }) if Instant::now() < deadline => {
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return Err(RequestError::from_propose(replica.listed.group, &error)),
        }
    }
}
