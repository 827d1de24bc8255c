//! Jobs in the meta group's state: who has which rank, how far everyone is, and who may go on.
//!
//! A worker is an incarnation: (job, rank, epoch). Taking a rank gives a new epoch, so that whoever had the rank before is
//! told from whoever has it now. The sessions of a worker belong to its epoch, and end with it.
//!
//! Invariants:
//! - epochs only grow, over all ranks of a job and all incarnations of it;
//! - a clock never goes back, whoever has the rank: a replacement goes on with the clock and the cursor of the last tick;
//! - only the live incarnation of a rank moves its clock;
//! - whose rank is taken, or whose lease ended, has every session of it marked as ending in the same step.
//!
//! Pure, as all of the meta state: when a lease is over is its leader's decision, and comes as a command.
//!
//! Not here: leases, waiting, telling the shards of ended sessions (`cluster::jobs`).

use evershard_proto::limits::{
    CURSOR_BYTES_MAX, JOBS_MAX, TABLE_NAME_BYTES_MAX, WORKER_NAME_BYTES_MAX, WORKERS_MAX,
};
use evershard_proto::v1::{
    self, Aggregation, DeadWorkerPolicy, ErrorKind, JobDefinition, MetaJob, MetaOutcome, MetaState,
    MetaWorker, WorkerIdentity, WorkerState,
};

use super::state::{conflict, refused};
use super::steps::{job_sums_steps, publish, sums_steps};

/// The shortest lease a job may give: shorter ones end by themselves on a busy machine.
const LEASE_MS_MIN: u32 = 1000;
/// The longest.
const LEASE_MS_MAX: u32 = 24 * 3600 * 1000;

/// Why a worker's call is refused.
pub(super) fn of_kind(kind: ErrorKind, error: String) -> MetaOutcome {
    MetaOutcome { kind: kind as u32, ..refused(error) }
}

/// Checks a definition.
///
/// # Errors
/// What is wrong with it, naming the field.
pub fn check_definition(definition: &JobDefinition) -> Result<(), String> {
    let name = &definition.name;
    let is_bad = name.is_empty()
        || name.len() > TABLE_NAME_BYTES_MAX
        || name.chars().any(char::is_control)
        || name.trim() != name;
    if is_bad {
        return Err(format!(
            "a job's name has 1 to {TABLE_NAME_BYTES_MAX} bytes, no control characters, and no blanks at its ends: {name:?}"
        ));
    }
    if !(1..=WORKERS_MAX).contains(&definition.workers) {
        return Err(format!("job {name:?}: workers is {}, must be 1 to {WORKERS_MAX}", definition.workers));
    }
    if definition.asynchronous && definition.staleness != 0 {
        return Err(format!("job {name:?}: an asynchronous job has no staleness"));
    }
    if Aggregation::try_from(definition.aggregation).is_err() {
        return Err(format!("job {name:?}: aggregation {} is not known", definition.aggregation));
    }
    if sums_steps(definition) && (definition.asynchronous || definition.staleness != 0) {
        return Err(format!("job {name:?}: steps are summed over the workers of jobs with staleness 0"));
    }
    if DeadWorkerPolicy::try_from(definition.dead_worker).is_err() {
        return Err(format!("job {name:?}: dead_worker {} is not known", definition.dead_worker));
    }
    if !(LEASE_MS_MIN..=LEASE_MS_MAX).contains(&definition.lease_ms) {
        return Err(format!(
            "job {name:?}: lease_ms is {}, must be {LEASE_MS_MIN} to {LEASE_MS_MAX}",
            definition.lease_ms
        ));
    }
    Ok(())
}

/// A job by its name.
#[must_use]
pub fn find_job<'a>(state: &'a MetaState, name: &str) -> Option<&'a MetaJob> {
    state.jobs.iter().find(|job| name_of(job) == name)
}

fn name_of(job: &MetaJob) -> &str {
    job.definition.as_ref().map_or("", |definition| &definition.name)
}

/// The worker of an identity, if it has its rank and the job goes on.
///
/// # Errors
/// FENCED, JOB_ABORTED or UNKNOWN_JOB, for people.
pub fn live_worker<'a>(
    state: &'a MetaState,
    identity: &WorkerIdentity,
) -> Result<(&'a MetaJob, &'a MetaWorker), (ErrorKind, String)> {
    let Some(job) = state.jobs.iter().find(|job| job.number == identity.job) else {
        return Err((ErrorKind::UnknownJob, format!("job number {} is no more", identity.job)));
    };
    let (name, rank, epoch) = (name_of(job), identity.rank, identity.epoch);
    let worker = job.workers.get(rank as usize);
    match worker {
        Some(worker) if worker.epoch == epoch && worker.state() == WorkerState::Live => {
            if !job.aborted.is_empty() {
                return Err((ErrorKind::JobAborted, format!("job {name:?} was aborted: {}", job.aborted)));
            }
            Ok((job, worker))
        }
        Some(worker) if worker.epoch == epoch && worker.state() == WorkerState::Dead => {
            let what = format!(
                "worker {rank} of job {name:?} is fenced: it was not heard of for its lease (epoch {epoch}); join again"
            );
            Err((ErrorKind::Fenced, what))
        }
        Some(worker) if worker.epoch == epoch => {
            Err((ErrorKind::Fenced, format!("worker {rank} of job {name:?} has left (epoch {epoch})")))
        }
        Some(worker) => {
            let what = format!(
                "worker {rank} of job {name:?} is fenced: epoch {} has its rank, this is epoch {epoch}",
                worker.epoch
            );
            Err((ErrorKind::Fenced, what))
        }
        None => Err((ErrorKind::Invalid, format!("job {name:?} has no rank {rank}"))),
    }
}

/// Whether others wait for a worker: one that nobody ever was is still to come.
pub(super) fn counts(worker: &MetaWorker, policy: DeadWorkerPolicy) -> bool {
    match worker.state() {
        WorkerState::Absent | WorkerState::Live => true,
        WorkerState::Dead => policy == DeadWorkerPolicy::Wait,
        WorkerState::Done => false,
    }
}

/// The clock of the slowest worker that counts, `None` when none does.
#[must_use]
pub fn slowest(job: &MetaJob) -> Option<u64> {
    let policy = job.definition.as_ref().map_or(DeadWorkerPolicy::Continue, JobDefinition::dead_worker);
    job.workers.iter().filter(|worker| counts(worker, policy)).map(|worker| worker.clock).min()
}

/// Ranks that `rank` must wait for before it may go on: those that are more than the staleness behind it, and those that
/// have not come to its last barrier.
#[must_use]
pub fn waits_for(job: &MetaJob, rank: u32) -> Vec<u32> {
    let Some(definition) = &job.definition else { return Vec::new() };
    let Some(own) = job.workers.get(rank as usize) else { return Vec::new() };
    let policy = definition.dead_worker();
    let is_behind = |worker: &MetaWorker| {
        if sums_steps(definition) {
            return (own.arrived && !worker.arrived) || worker.barriers < own.barriers;
        }
        let lags = !definition.asynchronous
            && own.clock.saturating_sub(worker.clock) > u64::from(definition.staleness);
        lags || worker.barriers < own.barriers
    };
    (0..)
        .zip(&job.workers)
        .filter(|(other, worker)| *other != rank && counts(worker, policy) && is_behind(worker))
        .map(|(other, _)| other)
        .collect()
}

pub(super) fn apply_create(state: &mut MetaState, create: v1::CreateJob) -> MetaOutcome {
    let Some(definition) = create.definition else { return refused("create_job without a definition") };
    if let Err(error) = check_definition(&definition) {
        return refused(error);
    }
    if let Some(known) = find_job(state, &definition.name) {
        if known.definition.as_ref() != Some(&definition) {
            return conflict(format!(
                "job {:?} exists with another definition: it has {}, asked for was {}",
                definition.name,
                known.definition.as_ref().map(in_words).unwrap_or_default(),
                in_words(&definition)
            ));
        }
        return MetaOutcome::default();
    }
    if state.jobs.len() >= JOBS_MAX {
        return refused(format!("the cluster has {JOBS_MAX} jobs already: remove some"));
    }
    state.next_job += 1;
    let workers = vec![MetaWorker::default(); definition.workers as usize];
    let job = MetaJob { number: state.next_job, definition: Some(definition), workers, ..Default::default() };
    state.jobs.push(job);
    MetaOutcome::default()
}

fn in_words(definition: &JobDefinition) -> String {
    let mode = if definition.asynchronous {
        "no bound".to_owned()
    } else if definition.aggregation() != Aggregation::Apart {
        format!("staleness 0, {}", definition.aggregation().as_str_name().to_lowercase())
    } else {
        format!("staleness {}", definition.staleness)
    };
    let policy = match definition.dead_worker() {
        DeadWorkerPolicy::Continue => "continue",
        DeadWorkerPolicy::Wait => "wait",
        DeadWorkerPolicy::Abort => "abort",
    };
    format!("{} workers, {mode}, {policy}, a lease of {} ms", definition.workers, definition.lease_ms)
}

pub(super) fn apply_join(state: &mut MetaState, join: v1::JoinMetaJob) -> MetaOutcome {
    let name = &join.job;
    let Some(at) = state.jobs.iter().position(|job| name_of(job) == name) else {
        return of_kind(ErrorKind::UnknownJob, format!("there is no job {name:?}"));
    };
    if join.name.len() > WORKER_NAME_BYTES_MAX || join.nonce.len() != 16 {
        return refused(format!(
            "a worker has a nonce of 16 bytes and a name of at most {WORKER_NAME_BYTES_MAX}"
        ));
    }
    let job = &mut state.jobs[at];
    if !job.aborted.is_empty() {
        return of_kind(ErrorKind::JobAborted, format!("job {name:?} was aborted: {}", job.aborted));
    }
    let number = job.number;
    let joining_clock = if job_sums_steps(job) { Some(job.step) } else { slowest(job) };
    let count = job.workers.len();
    if join.rank as usize == count && join.rank < WORKERS_MAX {
        // One more: it begins with the slowest, so that it is neither waited for at once nor ahead.
        let (clock, barriers) = (
            joining_clock.unwrap_or_else(|| job.workers.iter().map(|worker| worker.clock).max().unwrap_or(0)),
            job.workers.iter().map(|worker| worker.barriers).max().unwrap_or(0),
        );
        job.workers.push(MetaWorker { clock, barriers, ..MetaWorker::default() });
    }
    let sums = job_sums_steps(job);
    let Some(worker) = job.workers.get_mut(join.rank as usize) else {
        return refused(format!(
            "job {name:?} has ranks 0 to {}; the next that may be added is {count}, not {}",
            count - 1,
            join.rank
        ));
    };
    let identity = |epoch| WorkerIdentity { job: number, rank: join.rank, epoch };
    if worker.nonce == join.nonce && worker.state() == WorkerState::Live {
        return MetaOutcome { worker: Some(identity(worker.epoch)), ..MetaOutcome::default() };
    }
    let former = identity(worker.epoch);
    job.next_epoch += 1;
    worker.epoch = job.next_epoch;
    worker.set_state(WorkerState::Live);
    worker.nonce = join.nonce;
    worker.name = join.name;
    worker.arrived = false;
    if let Some(step) = sums.then_some(job.step) {
        // What was summed without it is over: it goes on where the others are, with its own data.
        worker.clock = step;
    }
    let joined = identity(worker.epoch);
    end_sessions(state, &former);
    MetaOutcome { worker: Some(joined), ..MetaOutcome::default() }
}

/// Marks the sessions of a worker as ending.
fn end_sessions(state: &mut MetaState, worker: &WorkerIdentity) {
    for session in &mut state.sessions {
        session.ending |= session.worker.as_ref() == Some(worker);
    }
}

pub(super) fn apply_tick(state: &mut MetaState, tick: v1::RecordTick) -> MetaOutcome {
    let Some(identity) = tick.worker else { return refused("a tick without a worker") };
    if let Err((kind, error)) = live_worker(state, &identity) {
        return of_kind(kind, error);
    }
    if tick.cursor.len() > CURSOR_BYTES_MAX {
        return refused(format!("a cursor has at most {CURSOR_BYTES_MAX} bytes, not {}", tick.cursor.len()));
    }
    let Some(job) = state.jobs.iter_mut().find(|job| job.number == identity.job) else {
        return refused("the job is no more");
    };
    let mut tick = tick;
    if job_sums_steps(job) {
        let clock = job.workers[identity.rank as usize].clock;
        if tick.clock > clock {
            return refused("the job sums its steps: they end with ArriveAtStep");
        }
        // Who came too late for a step does not know yet that it is over.
        tick.clock = clock;
    }
    let worker = &mut job.workers[identity.rank as usize];
    let follows = |known: u64, told: u64| told == known || Some(told) == known.checked_add(1);
    // A call whose answer was lost, overtaken by the next.
    if tick.clock < worker.clock || tick.barriers < worker.barriers {
        return MetaOutcome::default();
    }
    if !follows(worker.clock, tick.clock) || !follows(worker.barriers, tick.barriers) {
        return refused(format!(
            "worker {} ticks to clock {} and barrier {}; it is at {} and {}",
            identity.rank, tick.clock, tick.barriers, worker.clock, worker.barriers
        ));
    }
    if tick.clock > worker.clock {
        worker.cursor = tick.cursor;
    }
    worker.clock = tick.clock;
    worker.barriers = tick.barriers;
    MetaOutcome::default()
}

pub(super) fn apply_end_worker(state: &mut MetaState, end: &v1::EndWorker) -> MetaOutcome {
    let Some(identity) = end.worker else { return refused("an end without a worker") };
    let Some(job) = state.jobs.iter_mut().find(|job| job.number == identity.job) else {
        return MetaOutcome::default();
    };
    let policy = job.definition.as_ref().map_or(DeadWorkerPolicy::Continue, JobDefinition::dead_worker);
    let Some(worker) = job.workers.get_mut(identity.rank as usize) else { return MetaOutcome::default() };
    // Somebody else has the rank meanwhile, or it ended already.
    if worker.epoch != identity.epoch || worker.state() != WorkerState::Live {
        return MetaOutcome::default();
    }
    worker.set_state(if end.left { WorkerState::Done } else { WorkerState::Dead });
    if !end.left && policy == DeadWorkerPolicy::Abort && job.aborted.is_empty() {
        job.aborted = format!("worker {} was not heard of for its lease", identity.rank);
    }
    job.workers[identity.rank as usize].arrived = false;
    // The others may have waited for it alone.
    publish(job, false);
    end_sessions(state, &identity);
    MetaOutcome::default()
}

pub(super) fn apply_remove(state: &mut MetaState, remove: &v1::RemoveMetaJob) -> MetaOutcome {
    let Some(at) = state.jobs.iter().position(|job| name_of(job) == remove.name) else {
        return of_kind(ErrorKind::UnknownJob, format!("there is no job {:?}", remove.name));
    };
    let number = state.jobs.remove(at).number;
    for session in &mut state.sessions {
        session.ending |= session.worker.as_ref().is_some_and(|worker| worker.job == number);
    }
    MetaOutcome::default()
}

/// A job as people and programs see it.
#[must_use]
pub fn describe(job: &MetaJob, with_cursors: bool) -> v1::JobDescription {
    let describe = |(rank, worker): (u32, &MetaWorker)| v1::WorkerDescription {
        rank,
        state: worker.state,
        epoch: worker.epoch,
        clock: worker.clock,
        barriers: worker.barriers,
        cursor: if with_cursors { worker.cursor.clone() } else { Default::default() },
        name: worker.name.clone(),
        waits_for: if worker.state() == WorkerState::Live { waits_for(job, rank) } else { Vec::new() },
    };
    v1::JobDescription {
        definition: job.definition.clone(),
        workers: (0..).zip(&job.workers).map(describe).collect(),
        aborted: job.aborted.clone(),
        number: job.number,
    }
}

#[cfg(test)]
mod tests;
