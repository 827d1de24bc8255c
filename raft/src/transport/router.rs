//! Frames that arrive: finds the replica, hands it the frame, answers.
//!
//! A [`Connection`] is one peer's lane. Appends of a replica on the log lane go through one session that keeps their
//! order and pipelines them into openraft; snapshot frames of a replica go one after the other; everything else is
//! handled on its own, so that a heartbeat waits for nobody.
//!
//! Invariants:
//! - a frame reaches only the replica that it names, and only in the group that it names;
//! - what is under way on a connection is bounded; when it is full the connection is not read;
//! - a session answers every frame it took, also those that openraft dropped after a conflict.
//!
//! Not here: bytes on the wire (`peer_service`), what a replica answers (`endpoint`).

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use bytes::Bytes;
use futures_util::StreamExt;
use openraft::async_runtime::Select2;
use openraft::raft::AppendEntriesRequest;
use parking_lot::RwLock;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use super::Lane;
use super::codec::{self, FrameKind, Refusal};
use super::pipeline::REQUESTS_MAX;
use crate::endpoint::Endpoint;
use crate::type_config::{Runtime, Tokio, TypeConfig};

/// Frames of one connection under way at once, outside of sessions.
const UNDER_WAY_MAX: usize = 1024;
/// Frames a session holds; twice what one sender has in flight, for a sender that starts over.
const SESSION_MAX: usize = 2 * REQUESTS_MAX;

/// A request as it arrived.
#[derive(Debug, Clone)]
pub struct IncomingFrame {
    /// Chosen by the sender, given back with the answer.
    pub id: u64,
    /// The group.
    pub group: u64,
    /// The replica it is for.
    pub replica: u64,
    /// What it asks.
    pub kind: FrameKind,
    /// Laid out by kind.
    pub body: Bytes,
}

/// An answer.
#[derive(Debug, Clone)]
pub struct ReplyFrame {
    /// The request's.
    pub id: u64,
    /// The group.
    pub group: u64,
    /// The replica it is from.
    pub replica: u64,
    /// The answer's body, or why there is none.
    pub result: Result<Bytes, Refusal>,
}

/// The replicas of this node, by id.
pub struct Router<RT: Runtime = Tokio> {
    replicas: RwLock<HashMap<u64, Arc<Endpoint<RT>>>>,
    closed: CancellationToken,
    recovery: Arc<AtomicU64>,
}

impl<RT: Runtime> Default for Router<RT> {
    fn default() -> Self {
        Self {
            replicas: RwLock::new(HashMap::new()),
            closed: CancellationToken::new(),
            recovery: Arc::default(),
        }
    }
}

impl<RT: Runtime> Router<RT> {
    pub(crate) fn add(&self, endpoint: Arc<Endpoint<RT>>) {
        self.replicas.write().insert(endpoint.replica(), endpoint);
    }

    pub(crate) fn remove(&self, replica: u64) {
        self.replicas.write().remove(&replica);
    }

    /// The recovery epoch of this node, shared with its lanes to others: only nodes of the same one talk.
    pub(crate) fn recovery(&self) -> &Arc<AtomicU64> {
        &self.recovery
    }

    pub(crate) fn recovery_epoch(&self) -> u64 {
        self.recovery.load(Ordering::SeqCst)
    }

    /// Ends all connections: the node shuts down.
    pub(crate) fn close(&self) {
        self.closed.cancel();
    }

    /// Cancelled when the node shuts down.
    pub(crate) fn closed(&self) -> &CancellationToken {
        &self.closed
    }

    fn find(&self, group: u64, replica: u64) -> Result<Arc<Endpoint<RT>>, Refusal> {
        let replicas = self.replicas.read();
        match replicas.get(&replica) {
            Some(endpoint) if endpoint.group() == group => Ok(Arc::clone(endpoint)),
            _ => Err(Refusal::Absent),
        }
    }
}

/// One peer's lane into this node; see the module. Dropping it ends its sessions.
pub struct Connection<RT: Runtime = Tokio> {
    router: Arc<Router<RT>>,
    lane: Lane,
    replies: mpsc::Sender<ReplyFrame>,
    under_way: Arc<Semaphore>,
    /// By replica. One ends when its replica is no longer here.
    sessions: HashMap<u64, Session<RT>>,
}

/// Frames of one replica that are answered in order.
struct Session<RT: Runtime> {
    queue: mpsc::Sender<IncomingFrame>,
    endpoint: Weak<Endpoint<RT>>,
}

impl<RT: Runtime> Connection<RT> {
    /// A lane whose answers go to `replies`.
    #[must_use]
    pub fn new(router: Arc<Router<RT>>, lane: Lane, replies: mpsc::Sender<ReplyFrame>) -> Self {
        Self {
            router,
            lane,
            replies,
            under_way: Arc::new(Semaphore::new(UNDER_WAY_MAX)),
            sessions: HashMap::new(),
        }
    }

    /// Takes the next frame of the lane. Waits when too much is under way.
    pub async fn accept(&mut self, frame: IncomingFrame) {
        let endpoint = match self.router.find(frame.group, frame.replica) {
            Ok(endpoint) => endpoint,
            Err(refusal) => {
                self.sessions.remove(&frame.replica);
                return refuse(&self.replies, &frame, refusal).await;
            }
        };
        let in_order = match (self.lane, frame.kind) {
            (Lane::Log, FrameKind::Append) => true,
            (Lane::Snapshot, _) => true,
            (Lane::Log | Lane::Control, _) => false,
        };
        if in_order {
            return self.queue(endpoint, frame).await;
        }
        let Ok(permit) = Arc::clone(&self.under_way).acquire_owned().await else { return };
        let replies = self.replies.clone();
        let task = async move {
            let result = endpoint.answer(frame.kind, frame.body.clone()).await;
            reply(&replies, &frame, result).await;
            drop(permit);
        };
        drop(RT::spawn(task));
    }

    async fn queue(&mut self, endpoint: Arc<Endpoint<RT>>, frame: IncomingFrame) {
        let replica = frame.replica;
        // One that was opened anew answers for itself.
        if self
            .sessions
            .get(&replica)
            .is_some_and(|session| session.endpoint.as_ptr() != Arc::as_ptr(&endpoint))
        {
            self.sessions.remove(&replica);
        }
        let session = self.sessions.entry(replica).or_insert_with(|| {
            let (queue, frames) = mpsc::channel(SESSION_MAX);
            let (replies, of) = (self.replies.clone(), Arc::downgrade(&endpoint));
            if self.lane == Lane::Log {
                drop(RT::spawn(run_appends(endpoint, frames, replies)));
            } else {
                drop(RT::spawn(run_in_turn(endpoint, frames, replies)));
            }
            Session { queue, endpoint: of }
        });
        match session.queue.try_send(frame) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(frame)) => {
                // A sender keeps fewer in flight: this one started over before its last attempt was worked off.
                refuse(&self.replies, &frame, Refusal::Busy).await;
            }
            Err(mpsc::error::TrySendError::Closed(frame)) => {
                self.sessions.remove(&replica);
                refuse(&self.replies, &frame, Refusal::Stopped("the session ended".to_owned())).await;
            }
        }
    }
}

async fn refuse(replies: &mpsc::Sender<ReplyFrame>, frame: &IncomingFrame, refusal: Refusal) {
    reply(replies, frame, Err(refusal)).await;
}

async fn reply(replies: &mpsc::Sender<ReplyFrame>, frame: &IncomingFrame, result: Result<Bytes, Refusal>) {
    let (id, group, replica) = (frame.id, frame.group, frame.replica);
    // A closed connection needs no answers.
    let _ = replies.send(ReplyFrame { id, group, replica, result }).await;
}

/// Snapshot frames of one replica, one after the other.
async fn run_in_turn<RT: Runtime>(
    endpoint: Arc<Endpoint<RT>>,
    mut frames: mpsc::Receiver<IncomingFrame>,
    replies: mpsc::Sender<ReplyFrame>,
) {
    while let Some(frame) = frames.recv().await {
        let result = endpoint.answer(frame.kind, frame.body.clone()).await;
        reply(&replies, &frame, result).await;
    }
}

/// Appends of one replica, pipelined in order.
async fn run_appends<RT: Runtime>(
    endpoint: Arc<Endpoint<RT>>,
    mut frames: mpsc::Receiver<IncomingFrame>,
    replies: mpsc::Sender<ReplyFrame>,
) {
    while let Some(first) = frames.recv().await {
        let run = AppendRun { endpoint: &endpoint, replies: &replies, taken: VecDeque::new() };
        if run.until_error(first, &mut frames).await.is_err() {
            return;
        }
    }
}

/// The replica stopped, or the connection closed.
struct SessionOver;

/// Appends until openraft answers one with an error, which ends its stream.
struct AppendRun<'a, RT: Runtime> {
    endpoint: &'a Endpoint<RT>,
    replies: &'a mpsc::Sender<ReplyFrame>,
    /// Frames that openraft has and did not answer.
    taken: VecDeque<IncomingFrame>,
}

impl<RT: Runtime> AppendRun<'_, RT> {
    async fn until_error(
        mut self,
        first: IncomingFrame,
        frames: &mut mpsc::Receiver<IncomingFrame>,
    ) -> Result<(), SessionOver> {
        let (input, requests) = mpsc::channel(REQUESTS_MAX);
        let mut results = Box::pin(self.endpoint.raft().stream_append(ReceiverStream::new(requests)));
        self.take(first, &input).await;
        loop {
            if self.taken.is_empty() {
                match frames.recv().await {
                    Some(frame) => self.take(frame, &input).await,
                    None => return Err(SessionOver),
                }
                continue;
            }
            let more = self.taken.len() < REQUESTS_MAX;
            let next_frame = async { if more { frames.recv().await } else { std::future::pending().await } };
            let next_frame = std::pin::pin!(next_frame);
            match RT::select2(results.next(), next_frame).await {
                Select2::Second(Some(frame)) => self.take(frame, &input).await,
                Select2::Second(None) => return Err(SessionOver),
                Select2::First(result) => {
                    let Some(frame) = self.taken.pop_front() else { return Err(SessionOver) };
                    match result {
                        Some(Ok(answer)) => {
                            let ended = answer.is_err();
                            let body = codec::encode_append_reply::<RT>(&answer);
                            reply(self.replies, &frame, Ok(body)).await;
                            if ended {
                                self.give_up(&Refusal::Superseded).await;
                                return Ok(());
                            }
                        }
                        Some(Err(fatal)) => return self.stopped(frame, fatal.to_string()).await,
                        None => return self.stopped(frame, "the replica stopped".to_owned()).await,
                    }
                }
            }
        }
    }

    async fn take(
        &mut self,
        frame: IncomingFrame,
        input: &mpsc::Sender<AppendEntriesRequest<TypeConfig<RT>>>,
    ) {
        match codec::decode_append::<RT>(frame.body.clone()) {
            Ok(request) if !self.endpoint.has_room(&request) => {
                refuse(self.replies, &frame, Refusal::NoRoom).await;
            }
            Ok(request) => {
                let slim = IncomingFrame { body: Bytes::new(), ..frame };
                // As long as the queue is, and `taken` is kept below that: there is room, unless openraft is gone,
                // which the results then say.
                let _ = input.send(request).await;
                self.taken.push_back(slim);
            }
            Err(error) => refuse(self.replies, &frame, Refusal::Unreadable(error.to_string())).await,
        }
    }

    async fn give_up(&mut self, refusal: &Refusal) {
        for frame in std::mem::take(&mut self.taken) {
            refuse(self.replies, &frame, refusal.clone()).await;
        }
    }

    async fn stopped(mut self, frame: IncomingFrame, reason: String) -> Result<(), SessionOver> {
        let refusal = Refusal::Stopped(reason);
        refuse(self.replies, &frame, refusal.clone()).await;
        self.give_up(&refusal).await;
        Err(SessionOver)
    }
}
