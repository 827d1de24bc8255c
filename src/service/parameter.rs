//! The parameter door: pulls and pushes, one by one or many on one stream.
//!
//! A push walks: the group's replica here -> is it the leader, and serving, with room on its disk? -> the body's checksum and lengths -> the
//! schemas -> the order of its session -> the log -> the answer of apply. A pull walks: the replica -> consistency ->
//! the table -> the disk, for rows that are not in memory.
//!
//! Invariants:
//! - nothing is proposed that was not checked whole;
//! - a push is proposed in [`ParameterDoor::begin_push`], which never waits: pushes of one stream enter the log in the
//!   order they came;
//! - a refused request leaves nothing behind.
//!
//! Not here: the stream itself (`exchange.rs`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use evershard_proto::push_body::{CLUSTER_VERSION_IDS, PUSH_VERSION_IDS, PushBody, PushBodyError};
use evershard_proto::v1::parameter_service_server::ParameterService;
use evershard_proto::v1::{
    ErrorKind, ExchangeRequest, MetaState, NonFiniteReport, NonFiniteReportReply, PullReply, PullRequest,
    PushPullReply, PushPullRequest, PushReply, PushRequest, WorkerIdentity,
};
use evershard_raft::Answer;
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};

use super::consistency::ReadTerms;
use super::exchange;
use super::non_finite::{note_refusal, source_of};
use super::replies::Replies;
use super::{ReadPool, ReadPoolError, RequestError};
use crate::apply::PushRefusal;
use crate::cluster::freshness::Freshness;
use crate::cluster::push_gate::PushGate;
use crate::cluster::recoveries::RecoveryEpoch;
use crate::cluster::replicas::{Replicas, ShardReplica};
use crate::ingest::OutOfOrder;
use crate::model::PushOutcome;
use crate::read::{ColdPull, Marks, PullInfo, ReadError};
use crate::telemetry::metric_definitions as metric;

/// A pull whose reply is at most this long is answered on the runtime's own thread.
const INLINE_PULL_BYTES_MAX: usize = 64 * 1024;
/// For room, by a call that is not on a stream.
const CALL_WAITS: Duration = Duration::from_secs(5);

/// The parameter service of a node. Cheap to clone.
#[derive(Clone)]
pub struct ParameterDoor {
    pub(super) replicas: Arc<Replicas>,
    pub(super) freshness: Arc<Freshness>,
    pub(super) push_gate: Arc<PushGate>,
    pub(super) read_pool: Arc<ReadPool>,
    /// For what must be read from disk.
    pub(super) cold_pool: Arc<ReadPool>,
    pub(super) tasks: TaskTracker,
    pub(super) stop: CancellationToken,
    pub(super) bounds: ClientBounds,
    /// What all streams and single calls of the node have in flight.
    pub(super) node_budget: Arc<Semaphore>,
    /// What pulls that wait for the disk may take of it, over all clients: half of what one client may have, so that a slow disk
    /// leaves room for all that needs none, in the same stream too.
    cold_budget: Arc<Semaphore>,
    /// What the node keeps of steps that are not complete.
    pub(super) step_budget: Arc<Semaphore>,
    pub(super) known: KnownCluster,
    pub(super) recovery: RecoveryEpoch,
}

/// What a node holds for its clients at the most.
#[derive(Debug, Clone, Copy)]
pub struct ClientBounds {
    /// Bytes in flight for one stream: requests being answered, and their replies until they are sent. At most `u32::MAX`.
    pub stream_bytes: usize,
    /// The same for all streams and single calls together. At most `u32::MAX`.
    pub node_bytes: usize,
    /// Bytes of gradients kept for steps that are not complete. At most `u32::MAX`.
    pub step_bytes: usize,
    /// How long a client may leave replies lying before its stream ends.
    pub reply_patience: Duration,
}

/// The meta group's state, as far as this node knows.
pub(super) type KnownCluster = Arc<dyn Fn() -> Arc<MetaState> + Send + Sync>;

/// A push on its way into the log.
pub(super) struct BegunPush {
    answer: Answer,
    replica: Arc<ShardReplica>,
    term: u64,
    session: u64,
    since: Instant,
}

impl ParameterDoor {
    /// A door to `replicas`, with threads for large pulls and threads for pulls that read the disk, and bounds of what is held
    /// for clients; what tells which sessions, cluster version and recovery epoch the node knows of. Streams end when `stop` is
    /// cancelled; `tasks` owns what they spawn.
    #[must_use]
    pub fn new(
        (replicas, freshness): (Arc<Replicas>, Arc<Freshness>),
        push_gate: Arc<PushGate>,
        (read_pool, cold_pool): (Arc<ReadPool>, Arc<ReadPool>),
        tasks: TaskTracker,
        stop: CancellationToken,
        bounds: ClientBounds,
        (known, recovery): (KnownCluster, RecoveryEpoch),
    ) -> Self {
        ParameterDoor {
            freshness,
            replicas,
            push_gate,
            read_pool,
            cold_pool,
            tasks,
            stop,
            node_budget: Arc::new(Semaphore::new(bounds.node_bytes)),
            cold_budget: Arc::new(Semaphore::new(cold_bytes(&bounds))),
            step_budget: Arc::new(Semaphore::new(bounds.step_bytes)),
            bounds,
            known,
            recovery,
        }
    }

    /// Waits, for a while, until the node has room for a single call: such a call has no stream that could stand still instead.
    async fn admit_call(&self, cost: usize) -> Result<OwnedSemaphorePermit, RequestError> {
        match tokio::time::timeout(CALL_WAITS, self.admit_to_node(cost)).await {
            Ok(Some(admitted)) => Ok(admitted),
            Ok(None) => {
                Err(RequestError::new(ErrorKind::Unavailable, "the node is shutting down").retry_soon())
            }
            Err(_) => {
                let what = "the node holds as much for its clients as it may (node_in_flight_bytes)";
                Err(RequestError::new(ErrorKind::Exhausted, what).retry_soon())
            }
        }
    }

    /// The replica of `group`, if it leads and serves, and its term.
    pub(super) fn leading(&self, group: u64) -> Result<(Arc<ShardReplica>, u64), RequestError> {
        let replica = self.replicas.shard(group)?;
        replica.raft.serving_lease().map_err(|error| RequestError::from_not_serving(group, &error))?;
        let term = replica.raft.leadership().term;
        Ok((replica, term))
    }

    /// Checks a push and hands it to the log, without waiting.
    pub(super) fn begin_push(&self, request: &PushRequest) -> Result<BegunPush, RequestError> {
        metrics::counter!(metric::PUSH_BYTES_TOTAL).increment(request.body.len() as u64);
        self.begin_push_unmeasured(request).inspect_err(|_| count_push("refused"))
    }

    fn begin_push_unmeasured(&self, request: &PushRequest) -> Result<BegunPush, RequestError> {
        let since = Instant::now();
        let group = request.group;
        let (replica, term) = self.leading(group)?;
        self.push_gate.check(group)?;
        let body = checked(&replica, &request.body, None)?;
        self.check_version(group, body.version)?;
        let mut is_first = false;
        let applied = || {
            let last = replica.machine.last_seq(body.session);
            is_first = last == 0;
            last
        };
        if let Err(refused) = replica.door.admit(term, body.session, body.seq, applied) {
            // An expired session has no next number: it is refused by name.
            if let Some(outcome) = replica.machine.recorded_outcome(body.session, body.seq) {
                return Err(outcome_reply(group, outcome)
                    .err()
                    .unwrap_or_else(|| out_of_order(group, refused)));
            }
            return Err(out_of_order(group, refused));
        }
        let session = body.session;
        if is_first && session >= (self.known)().next_session {
            // Made up, or so new that this node has not heard of it. Taken in, a made-up number would answer for the client
            // that is given it one day.
            replica.door.retract(term, session);
            let what = format!("session {session} is not known here yet: sessions are opened by OpenSession");
            return Err(RequestError::new(ErrorKind::Unavailable, what).in_group(group).retry_soon());
        }
        match replica.raft.propose(request.body.clone()) {
            Ok(answer) => Ok(BegunPush { answer, replica, term, session, since }),
            Err(error) => {
                replica.door.retract(term, session);
                Err(RequestError::from_propose(group, &error))
            }
        }
    }

    /// Whether a body of a version may go into the log: an older build halts at one with ids. A client that sends it has heard
    /// that no node is of such a build; this node may be about to hear it.
    fn check_version(&self, group: u64, version: u8) -> Result<(), RequestError> {
        if version != PUSH_VERSION_IDS {
            return Ok(());
        }
        let known = (self.known)().cluster_version;
        if known >= CLUSTER_VERSION_IDS {
            return Ok(());
        }
        let what = format!(
            "a push with ids in the place of keys needs cluster version {CLUSTER_VERSION_IDS}, this node knows of {known}"
        );
        Err(RequestError::new(ErrorKind::Unavailable, what).in_group(group).retry_soon())
    }

    /// Waits for what became of a begun push.
    pub(super) async fn finish_push(begun: BegunPush) -> Result<PushReply, RequestError> {
        let BegunPush { answer, replica, term, session, since } = begun;
        let group = replica.listed.group;
        let answer = answer.await.map_err(|error| {
            count_push("failed");
            replica.door.retract(term, session);
            RequestError::from_propose(group, &error)
        })?;
        let outcome = PushOutcome::decode(&answer).map_err(|e| {
            RequestError::new(ErrorKind::Internal, format!("group {group}: {e}")).in_group(group)
        })?;
        metrics::histogram!(metric::PUSH_SECONDS).record(since.elapsed().as_secs_f64());
        let applied_index = replica.reader.applied();
        let reply = outcome_reply(group, outcome).map(|reply| PushReply { applied_index, ..reply });
        count_push(match &reply {
            Ok(PushReply { index: 0, .. }) => "replayed",
            Ok(_) => "applied",
            Err(_) => "refused",
        });
        reply
    }

    /// Reads rows.
    pub(super) async fn pull_rows(&self, request: PullRequest) -> Result<PullReply, RequestError> {
        let since = Instant::now();
        let rows = request.keys.len() as u64 / 8;
        let reply = self.pull_unmeasured(request).await;
        let outcome = match &reply {
            Ok(_) => "ok",
            Err(error) if error.kind() == ErrorKind::Internal => "failed",
            Err(_) => "refused",
        };
        metrics::counter!(metric::PULLS_TOTAL, "outcome" => outcome).increment(1);
        metrics::counter!(metric::PULL_ROWS_TOTAL).increment(rows);
        metrics::histogram!(metric::PULL_SECONDS).record(since.elapsed().as_secs_f64());
        reply
    }

    async fn pull_unmeasured(&self, request: PullRequest) -> Result<PullReply, RequestError> {
        let group = request.group;
        let replica = self.replicas.shard(group)?;
        let terms = ReadTerms::of(&request)?;
        self.before_read(&replica, &terms).await?;
        let row_bytes = replica.reader.schema(request.table).map_or(0, |schema| schema.dim() as usize * 4);
        let busy = |e: ReadPoolError| {
            RequestError::new(ErrorKind::Exhausted, e.to_string()).in_group(group).retry_soon()
        };
        let read = if request.keys.len() / 8 * row_bytes <= INLINE_PULL_BYTES_MAX {
            read_resident(&replica, &request)?
        } else {
            let replica = Arc::clone(&replica);
            self.read_pool.run(move || read_resident(&replica, &request)).await.map_err(busy)??
        };
        let reply = if read.cold.is_none() {
            read.reply()
        } else {
            // Room and threads of their own: no pull of rows in memory waits for the disk behind this one.
            let _room = self.admit_cold(read.rows.len(), group)?;
            self.cold_pool.run(move || read.read_cold(group)).await.map_err(busy)??
        };
        self.after_read(&replica, &terms, reply.index)?;
        Ok(reply)
    }

    /// Room for a pull that must wait for the disk.
    pub(super) fn admit_cold(&self, bytes: usize, group: u64) -> Result<OwnedSemaphorePermit, RequestError> {
        let permits = exchange::permits(bytes, cold_bytes(&self.bounds));
        Arc::clone(&self.cold_budget).try_acquire_many_owned(permits).map_err(|_| {
            let what =
                "pulls that wait for the disk hold as much as they may (half of stream_in_flight_bytes)";
            RequestError::new(ErrorKind::Exhausted, what).in_group(group).retry_soon()
        })
    }

    /// Rows, then the push to them.
    pub(super) async fn pull_then_begin(
        &self,
        request: PushPullRequest,
    ) -> Result<(PullReply, BegunPush), RequestError> {
        let (Some(pull), Some(push)) = (request.pull, request.push) else {
            return Err(RequestError::new(ErrorKind::Invalid, "push_pull needs both a pull and a push"));
        };
        let rows = self.pull_rows(pull).await?;
        Ok((rows, self.begin_push(&push)?))
    }
}

fn count_push(outcome: &'static str) {
    metrics::counter!(metric::PUSHES_TOTAL, "outcome" => outcome).increment(1);
}

fn outcome_reply(group: u64, outcome: PushOutcome) -> Result<PushReply, RequestError> {
    match (outcome, outcome.detail()) {
        (PushOutcome::Applied { index }, _) => Ok(PushReply { index, applied_index: 0 }),
        (_, Some(detail)) => Err(RequestError::from(detail).in_group(group)),
        (_, None) => Err(RequestError::new(ErrorKind::Internal, format!("group {group}: no outcome"))),
    }
}

/// Everything that can be checked of a push body before it is proposed; `worker` contributes it to a step.
pub(super) fn checked<'a>(
    replica: &ShardReplica,
    bytes: &'a [u8],
    worker: Option<&WorkerIdentity>,
) -> Result<PushBody<'a>, RequestError> {
    let group = replica.listed.group;
    let body = PushBody::parse(bytes)
        .map_err(|error| RequestError::new(kind_of(&error), error.to_string()).in_group(group))?;
    let refused = |refusal: PushRefusal| {
        note_refusal(replica, source_of(body.session, worker), &refusal);
        RequestError::from(refusal.detail()).in_group(group)
    };
    replica.machine.check_push(&body).map_err(refused)?;
    Ok(body)
}

/// Only damage is worth sending again as it is.
fn kind_of(error: &PushBodyError) -> ErrorKind {
    match error {
        PushBodyError::Checksum { .. } => ErrorKind::Corrupt,
        PushBodyError::Malformed { .. } => ErrorKind::LengthMismatch,
        PushBodyError::TooLarge { .. } => ErrorKind::TooLarge,
        PushBodyError::Unknown { .. } => ErrorKind::Invalid,
    }
}

fn out_of_order(group: u64, refused: OutOfOrder) -> RequestError {
    let mut error = RequestError::new(ErrorKind::OutOfOrder, refused.to_string()).in_group(group);
    error.0.expected_seq = refused.expected;
    error
}

/// A pull whose rows in memory were read.
struct ResidentRead {
    info: PullInfo,
    rows: BytesMut,
    marks: Option<Marks>,
    /// Of the request: only rows that are marked are answered.
    is_partial: bool,
    cold: Option<ColdPull>,
}

impl ResidentRead {
    fn read_cold(mut self, group: u64) -> Result<PullReply, RequestError> {
        if let Some(cold) = self.cold.take() {
            metrics::counter!(metric::PULL_COLD_ROWS_TOTAL).increment(cold.len() as u64);
            cold.read(self.marks.as_mut(), &mut self.rows).map_err(|e| read_error(group, &e))?;
        }
        Ok(self.reply())
    }

    fn reply(self) -> PullReply {
        let rows = match &self.marks {
            Some(marks) if self.is_partial => marks.marked(&self.rows, self.info.dim as usize * 4),
            _ => self.rows,
        };
        let marks = self.marks.map(|marks| marks.into_bytes().freeze()).unwrap_or_default();
        let (exists, changed) = if self.is_partial { (Bytes::new(), marks) } else { (marks, Bytes::new()) };
        let rows_crc32 = crc32fast::hash(&rows);
        PullReply { index: self.info.index, rows: rows.freeze(), exists, rows_crc32, changed }
    }
}

fn read_resident(replica: &ShardReplica, request: &PullRequest) -> Result<ResidentRead, RequestError> {
    let is_partial = request.newer_than > 0;
    if is_partial && request.want_exists {
        let what = "a pull asks which rows exist or which are newer, not both";
        return Err(RequestError::new(ErrorKind::Invalid, what).in_group(request.group));
    }
    let mut rows = BytesMut::new();
    let mut marks = if is_partial {
        Some(Marks::newer_than(request.newer_than))
    } else {
        request.want_exists.then(Marks::exists)
    };
    let read = replica.reader.pull_resident(request.table, &request.keys, marks.as_mut(), &mut rows);
    let (info, cold) = read.map_err(|e| read_error(request.group, &e))?;
    Ok(ResidentRead { info, rows, marks, is_partial, cold })
}

pub(super) fn read_error(group: u64, error: &ReadError) -> RequestError {
    let error = RequestError::from(error.detail()).in_group(group);
    if error.kind() == ErrorKind::Unavailable { error.retry_soon() } else { error }
}

#[tonic::async_trait]
impl ParameterService for ParameterDoor {
    type ExchangeStream = Replies;

    async fn pull(&self, request: Request<PullRequest>) -> Result<Response<PullReply>, Status> {
        let request = request.into_inner();
        let _admitted = self.admit_call(request.encoded_len() + self.reply_bytes(&request)).await?;
        Ok(Response::new(self.pull_rows(request).await?))
    }

    async fn push(&self, request: Request<PushRequest>) -> Result<Response<PushReply>, Status> {
        let request = request.into_inner();
        let _admitted = self.admit_call(request.encoded_len()).await?;
        let begun = self.begin_push(&request)?;
        drop(request);
        Ok(Response::new(Self::finish_push(begun).await?))
    }

    async fn push_pull(&self, request: Request<PushPullRequest>) -> Result<Response<PushPullReply>, Status> {
        let request = request.into_inner();
        let reply_bytes = request.pull.as_ref().map_or(0, |pull| self.reply_bytes(pull));
        let _admitted = self.admit_call(request.encoded_len() + reply_bytes).await?;
        let (pull, begun) = self.pull_then_begin(request).await?;
        let push = Self::finish_push(begun).await?;
        Ok(Response::new(PushPullReply { pull: Some(pull), push: Some(push) }))
    }

    async fn report_non_finite(
        &self,
        request: Request<NonFiniteReport>,
    ) -> Result<Response<NonFiniteReportReply>, Status> {
        let request = request.into_inner();
        let _admitted = self.admit_call(request.encoded_len()).await?;
        Ok(Response::new(ParameterDoor::report_non_finite(self, &request)?))
    }

    async fn exchange(
        &self,
        request: Request<Streaming<ExchangeRequest>>,
    ) -> Result<Response<Self::ExchangeStream>, Status> {
        Ok(Response::new(exchange::serve(self.clone(), request.into_inner())))
    }
}

/// Room for pulls that wait for the disk.
fn cold_bytes(bounds: &ClientBounds) -> usize {
    bounds.node_bytes.min(bounds.stream_bytes) / 2
}
