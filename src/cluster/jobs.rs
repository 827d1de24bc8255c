//! Jobs at the meta group's leader: workers join and tick here, wait here for one another, and are dead when they were not
//! heard of here for their lease.
//!
//! Invariants:
//! - leases are volatile: a new meta leader gives every worker a fresh one, so a worker dies late, never early;
//! - a worker that waits is heard of as long as its call lasts;
//! - a call waits for a bounded time, and its worker asks again: nobody waits at a node that does not lead any more;
//! - a rank is given only when no shard takes a push of whoever had it before;
//! - a worker is declared dead only by a leader that a quorum has just confirmed: one that was frozen or cut off has heard
//!   of nobody.
//!
//! Not here: what the commands do (`meta::jobs`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::v1::meta_command::Command;
use evershard_proto::v1::{
    self, EndWorker, ErrorKind, JobDefinition, JobDescription, JoinJobReply, JoinJobRequest, JoinMetaJob,
    MetaState, RecordTick, TickReply, TickRequest, WorkerIdentity, WorkerState,
};
use parking_lot::Mutex;

use super::node::Node;
use crate::meta::state::META_GROUP;
use crate::meta::{jobs, steps};
use crate::service::RequestError;

/// For what is recorded through the log.
pub(super) const RECORD_WITHIN: Duration = Duration::from_secs(5);
/// The same, by the agent.
const AGENT_WITHIN: Duration = Duration::from_secs(1);
/// A call waits no longer than this for other workers: then its worker asks again.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(5);
/// A waiting call looks this often whether its node still leads.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(250);

/// When each worker was last heard of, on the meta leader.
#[derive(Debug, Default)]
pub struct WorkerLeases {
    heard: Mutex<Heard>,
}

#[derive(Debug, Default)]
struct Heard {
    term: u64,
    at: HashMap<(u64, u32), (u64, Instant)>,
}

impl WorkerLeases {
    /// Hears of a worker in the meta leader's term `term`.
    pub(super) fn renew(&self, term: u64, worker: &WorkerIdentity) {
        let mut heard = self.heard.lock();
        heard.enter(term);
        heard.at.insert((worker.job, worker.rank), (worker.epoch, Instant::now()));
    }

    /// The live workers of `state` that were not heard of for their lease; one seen for the first time in this term is
    /// heard of now.
    fn expired(&self, term: u64, state: &MetaState) -> Vec<WorkerIdentity> {
        let now = Instant::now();
        let mut heard = self.heard.lock();
        heard.enter(term);
        let mut live = HashMap::new();
        let mut expired = Vec::new();
        for job in &state.jobs {
            let lease = job.definition.as_ref().map_or(0, |definition| definition.lease_ms);
            let lease = Duration::from_millis(u64::from(lease));
            for (rank, worker) in (0..).zip(&job.workers).filter(|(_, w)| w.state() == WorkerState::Live) {
                let key = (job.number, rank);
                // An earlier incarnation may have been heard of last.
                let known = heard.at.get(&key).filter(|(epoch, _)| *epoch == worker.epoch);
                let at = known.map_or(now, |(_, at)| *at);
                live.insert(key, (worker.epoch, at));
                if now.duration_since(at) > lease {
                    expired.push(WorkerIdentity { job: job.number, rank, epoch: worker.epoch });
                }
            }
        }
        // What is remembered is bounded by the workers there are.
        heard.at = live;
        expired
    }
}

impl Heard {
    fn enter(&mut self, term: u64) {
        if self.term != term {
            *self = Heard { term, at: HashMap::new() };
        }
    }
}

impl Node {
    /// The term in which this node leads the meta group and serves.
    pub(super) fn leading_meta(&self) -> Result<u64, RequestError> {
        self.require_cluster()?;
        let meta = self.replicas.meta();
        let leadership = meta.as_ref().map(|m| m.raft.leadership()).unwrap_or_default();
        let serves = meta.as_ref().is_some_and(|m| m.raft.serving_lease().is_ok());
        if leadership.is_self && serves {
            return Ok(leadership.term);
        }
        Err(RequestError::not_leader(0, leadership.leader.filter(|_| !leadership.is_self).as_ref()))
    }

    /// The address of the node that leads the meta group, when that is another.
    #[must_use]
    pub fn meta_leader_elsewhere(&self) -> Option<String> {
        match self.replicas.meta() {
            Some(meta) => {
                let leadership = meta.raft.leadership();
                leadership.leader.filter(|_| !leadership.is_self).map(|(_, peer)| peer.address)
            }
            None => self.addresses_of_group(META_GROUP).into_iter().next(),
        }
    }

    /// Returns when this node's meta state has everything that was acknowledged before the call.
    ///
    /// # Errors
    /// NOT_LEADER elsewhere, also when no quorum confirms that this node leads.
    pub async fn confirm_meta_state(&self) -> Result<(), RequestError> {
        self.leading_meta()?;
        let meta = self.replicas.meta().ok_or_else(|| RequestError::not_leader(0, None))?;
        let confirmed = tokio::time::timeout(RECORD_WITHIN, meta.raft.read_index()).await;
        match confirmed {
            Ok(read) => read.map(|_| ()).map_err(|e| RequestError::from_not_serving(0, &e)),
            Err(_) => Err(RequestError::not_leader(0, None)),
        }
    }

    /// Creates a job, or finds it as defined. May be asked of any node.
    ///
    /// # Errors
    /// INVALID, CONFLICT, UNAVAILABLE.
    pub async fn create_job(self: &Arc<Self>, definition: JobDefinition) -> Result<(), RequestError> {
        self.require_cluster()?;
        jobs::check_definition(&definition).map_err(|what| RequestError::new(ErrorKind::Invalid, what))?;
        let create = Command::CreateJob(v1::CreateJob { definition: Some(definition) });
        self.propose_meta(create, Instant::now() + RECORD_WITHIN).await.map(|_| ())
    }

    /// Removes a job; its workers are fenced. May be asked of any node.
    ///
    /// # Errors
    /// UNKNOWN_JOB, UNAVAILABLE.
    pub async fn remove_job(self: &Arc<Self>, name: String) -> Result<(), RequestError> {
        self.require_cluster()?;
        let remove = Command::RemoveJob(v1::RemoveMetaJob { name });
        self.propose_meta(remove, Instant::now() + RECORD_WITHIN).await.map(|_| ())
    }

    /// The jobs there are, or the one of a name, as the meta leader knows them.
    ///
    /// # Errors
    /// NOT_LEADER elsewhere.
    pub fn jobs_here(&self, name: &str, with_cursors: bool) -> Result<Vec<JobDescription>, RequestError> {
        self.leading_meta()?;
        let state = self.meta_state();
        let named = |job: &&v1::MetaJob| {
            name.is_empty() || job.definition.as_ref().is_some_and(|definition| definition.name == name)
        };
        Ok(state.jobs.iter().filter(named).map(|job| jobs::describe(job, with_cursors)).collect())
    }

    /// Gives a rank to a new incarnation of its worker. When this has returned, no shard takes a push of the one before.
    ///
    /// # Errors
    /// NOT_LEADER elsewhere; UNKNOWN_JOB, JOB_ABORTED, INVALID; UNAVAILABLE: the rank is taken or not, and the same call may
    /// be made again.
    pub async fn join_job_here(
        self: &Arc<Self>,
        request: JoinJobRequest,
    ) -> Result<JoinJobReply, RequestError> {
        let term = self.leading_meta()?;
        let deadline = Instant::now() + RECORD_WITHIN;
        let JoinJobRequest { job, rank, nonce, name } = request;
        let join = Command::JoinJob(JoinMetaJob { job, rank, nonce, name });
        let outcome = self.propose_meta(join, deadline).await?;
        let worker = outcome
            .worker
            .ok_or_else(|| RequestError::new(ErrorKind::Internal, "the meta group joined nobody"))?;
        // The worker renews its lease once it knows that it has one: until then this call does.
        let mut ended = std::pin::pin!(self.end_sessions(Vec::new(), deadline));
        loop {
            self.worker_leases.renew(term, &worker);
            if let Ok(ended) = tokio::time::timeout(LOOK_EVERY, ended.as_mut()).await {
                ended?;
                break;
            }
        }
        self.worker_leases.renew(term, &worker);
        let state = self.meta_state();
        let (job, known) = live(&state, &worker)?;
        Ok(JoinJobReply {
            worker: Some(worker),
            clock: known.clock,
            barriers: known.barriers,
            cursor: known.cursor.clone(),
            definition: job.definition.clone(),
        })
    }

    /// Records how far a worker is, and waits until it may go on, or for as long as it asked.
    ///
    /// # Errors
    /// NOT_LEADER elsewhere; FENCED, JOB_ABORTED, UNKNOWN_JOB, INVALID; UNAVAILABLE.
    pub async fn tick_here(self: &Arc<Self>, request: TickRequest) -> Result<TickReply, RequestError> {
        let term = self.leading_meta()?;
        let worker = RequestError::need_worker(request.worker)?;
        let is_new = {
            let state = self.meta_state();
            let (job, known) = live(&state, &worker)?;
            let sums = job.definition.as_ref().is_some_and(steps::sums_steps);
            let is_step = if sums { request.clock > known.clock } else { request.clock != known.clock };
            is_step || request.barriers != known.barriers
        };
        self.worker_leases.renew(term, &worker);
        if is_new {
            let TickRequest { clock, barriers, cursor, .. } = request;
            let tick = Command::Tick(RecordTick { worker: Some(worker), clock, barriers, cursor });
            self.propose_meta(tick, Instant::now() + RECORD_WITHIN).await?;
        }
        let wait = Duration::from_millis(request.wait_ms.into()).min(WAIT_MAX);
        self.wait_for_others(&worker, Instant::now() + wait).await
    }

    async fn wait_for_others(
        &self,
        worker: &WorkerIdentity,
        until: Instant,
    ) -> Result<TickReply, RequestError> {
        self.watch_job(worker, until, |job| {
            let waits_for = jobs::waits_for(job, worker.rank);
            let slowest = jobs::slowest(job).unwrap_or(0);
            // Barriers of a job that sums its steps change no row.
            let sums = job.definition.as_ref().is_some_and(steps::sums_steps);
            let is_held = !sums && self.holds.is_held_at_tick(worker);
            let may_go_on = waits_for.is_empty() && !is_held;
            (may_go_on, TickReply { may_go_on, slowest, waits_for })
        })
        .await
    }

    /// Looks at a worker's job whenever something changes, until `look` says that its answer is final or `until` is over.
    /// The worker is heard of all the while.
    ///
    /// # Errors
    /// NOT_LEADER when this node leads no longer; FENCED, JOB_ABORTED, UNKNOWN_JOB.
    pub(super) async fn watch_job<T>(
        &self,
        worker: &WorkerIdentity,
        until: Instant,
        look: impl Fn(&v1::MetaJob) -> (bool, T),
    ) -> Result<T, RequestError> {
        let meta = self.replicas.meta().ok_or_else(|| RequestError::not_leader(0, None))?;
        let mut changes = meta.machine.watch();
        loop {
            let term = self.leading_meta()?;
            let (is_final, answer) = look(live(&changes.borrow_and_update(), worker)?.0);
            self.worker_leases.renew(term, worker);
            let now = Instant::now();
            if is_final || now >= until {
                return Ok(answer);
            }
            // That nothing changed meanwhile is fine: it is looked again. A machine that is gone is seen above.
            let _ = tokio::time::timeout(LOOK_EVERY.min(until - now), changes.changed()).await;
        }
    }

    /// Hears of a worker that is busy.
    ///
    /// # Errors
    /// As [`Node::tick_here`].
    pub fn renew_worker_here(&self, worker: &WorkerIdentity) -> Result<(), RequestError> {
        let term = self.leading_meta()?;
        live(&self.meta_state(), worker)?;
        self.worker_leases.renew(term, worker);
        Ok(())
    }

    /// A worker has done its part.
    ///
    /// # Errors
    /// NOT_LEADER elsewhere; FENCED when another has its rank, UNAVAILABLE.
    pub async fn leave_job_here(self: &Arc<Self>, worker: WorkerIdentity) -> Result<(), RequestError> {
        self.leading_meta()?;
        let state = self.meta_state();
        let job = state.jobs.iter().find(|job| job.number == worker.job);
        let own = job.and_then(|job| job.workers.get(worker.rank as usize));
        // A call that is made again.
        if own.is_some_and(|own| own.epoch == worker.epoch && own.state() == WorkerState::Done) {
            return Ok(());
        }
        live(&state, &worker)?;
        let end = Command::EndWorker(EndWorker { worker: Some(worker), left: true });
        self.propose_meta(end, Instant::now() + RECORD_WITHIN).await.map(|_| ())
    }

    /// Declares dead who was not heard of for its lease, and ends the sessions of whoever is fenced. Done by the meta
    /// leader's agent, again and again.
    pub(super) async fn end_dead_workers(self: &Arc<Self>, term: u64) {
        let state = self.meta_state();
        let dead = self.worker_leases.expired(term, &state);
        // Short: the agent has more to do, and comes back. A shard without a leader is told then.
        let deadline = Instant::now() + AGENT_WITHIN;
        if !dead.is_empty() {
            let Some(meta) = self.replicas.meta() else { return };
            if meta.raft.read_index().await.is_err() || meta.raft.leadership().term != term {
                return;
            }
        }
        for worker in dead {
            tracing::warn!(
                job = worker.job,
                rank = worker.rank,
                epoch = worker.epoch,
                "a worker was not heard of for its lease"
            );
            let end = Command::EndWorker(EndWorker { worker: Some(worker), left: false });
            if let Err(error) = self.propose_meta(end, deadline).await {
                tracing::warn!(%error, "a dead worker is still listed; tried again");
                return;
            }
        }
        if self.meta_state().sessions.iter().any(|session| session.ending)
            && let Err(error) = self.end_sessions(Vec::new(), deadline).await
        {
            tracing::warn!(%error, "sessions of fenced workers are still listed; tried again");
        }
    }
}

pub(super) fn live<'a>(
    state: &'a MetaState,
    worker: &WorkerIdentity,
) -> Result<(&'a v1::MetaJob, &'a v1::MetaWorker), RequestError> {
    jobs::live_worker(state, worker).map_err(|(kind, what)| RequestError::new(kind, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(lease_ms: u32, epoch: u64) -> MetaState {
        let worker =
            |epoch, state: WorkerState| v1::MetaWorker { epoch, state: state.into(), ..Default::default() };
        let workers = vec![worker(epoch, WorkerState::Live), worker(9, WorkerState::Dead)];
        let definition = JobDefinition { lease_ms, ..Default::default() };
        let job = v1::MetaJob { number: 1, definition: Some(definition), workers, ..Default::default() };
        MetaState { jobs: vec![job], ..Default::default() }
    }

    #[test]
    fn a_worker_dies_when_its_incarnation_was_not_heard_of_in_this_term() {
        let leases = WorkerLeases::default();
        let worker = |epoch| WorkerIdentity { job: 1, rank: 0, epoch };
        leases.renew(3, &worker(5));
        std::thread::sleep(Duration::from_millis(3));
        assert_eq!(leases.expired(3, &state(1, 5)), [worker(5)]);
        assert!(leases.expired(3, &state(60_000, 5)).is_empty());
        assert!(leases.expired(3, &state(1, 6)).is_empty(), "a new incarnation is heard of now");
        assert!(leases.expired(4, &state(0, 6)).is_empty(), "a new term knows nobody");
        assert!(leases.expired(4, &MetaState::default()).is_empty());
        assert!(leases.heard.lock().at.is_empty(), "who is gone is not remembered");
    }
}
