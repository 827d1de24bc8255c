//! A simulated network: every lane between two nodes is an ordered stream with random delays that breaks now and then,
//! and nodes can be cut off or down.
//!
//! Like a TCP connection, a lane loses nothing in its middle: it delivers in order, or breaks and fails everything under
//! way. What was delivered before a break may have been handled; its answer is lost.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use evershard_raft::transport::{
    Body, Connection, FrameKind, IncomingFrame, Lane, ReplyFrame, ReplyFuture, Router, Target, Transport,
    TransportError,
};
use evershard_raft::{Peer, Runtime};
use openraft_rt_sim::{SimInstant, SimRuntime};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// The simulated time.
pub fn now() -> SimInstant {
    SimInstant::try_now().expect("inside a simulation")
}

/// Seeded numbers for faults and delays.
#[derive(Clone)]
pub struct Dice(Arc<Mutex<u64>>);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(seed)))
    }

    pub fn next(&self) -> u64 {
        let mut state = self.0.lock();
        *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub fn chance(&self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }

    pub fn micros(&self, from: u64, to: u64) -> Duration {
        Duration::from_micros(from + self.below(to - from))
    }
}

pub struct SimNet {
    dice: Dice,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    routers: BTreeMap<u64, Arc<Router<SimRuntime>>>,
    cut: BTreeSet<(u64, u64)>,
    links: BTreeMap<(u64, u64, Lane), Link>,
}

struct Link {
    queue: mpsc::UnboundedSender<Sent>,
    last_at: SimInstant,
    broken: CancellationToken,
}

struct Sent {
    at: SimInstant,
    frame: IncomingFrame,
    answer: oneshot::Sender<Result<Bytes, TransportError>>,
}

impl SimNet {
    pub fn new(dice: Dice) -> Arc<Self> {
        Arc::new(Self { dice, state: Mutex::new(State::default()) })
    }

    pub fn up(&self, node: u64, router: Arc<Router<SimRuntime>>) {
        self.state.lock().routers.insert(node, router);
    }

    /// Nothing goes in or out any more, from this instant.
    pub fn down(&self, node: u64) {
        let mut state = self.state.lock();
        state.routers.remove(&node);
        state.break_links(|from, to| from == node || to == node);
    }

    /// Cuts (or mends) one direction.
    pub fn cut(&self, from: u64, to: u64, cut: bool) {
        let mut state = self.state.lock();
        if cut {
            state.cut.insert((from, to));
            state.break_links(|f, t| (f, t) == (from, to) || (t, f) == (from, to));
        } else {
            state.cut.remove(&(from, to));
        }
    }

    pub fn mend(&self) {
        self.state.lock().cut.clear();
    }

    /// The transport of one node.
    pub fn transport(self: &Arc<Self>, node: u64) -> Arc<dyn Transport> {
        Arc::new(SimTransport { net: Arc::clone(self), node })
    }

    fn send(&self, from: u64, peer: &Peer, lane: Lane, frame: IncomingFrame) -> ReplyFuture {
        let to = peer.node;
        let unreachable = TransportError::Unreachable { peer: peer.clone(), reason: "simulated".to_owned() };
        let mut state = self.state.lock();
        let down = !state.routers.contains_key(&from) || !state.routers.contains_key(&to);
        // A cut direction loses requests one way and answers the other: either way nobody gets an answer.
        let is_cut = state.cut.contains(&(from, to)) || state.cut.contains(&(to, from));
        if self.dice.chance(400) {
            state.break_links(|f, t| (f, t) == (from, to));
        }
        if down || is_cut {
            let pause = self.dice.micros(100, 5_000);
            return Box::pin(async move {
                SimRuntime::sleep(pause).await;
                Err(unreachable)
            });
        }
        let delay =
            if self.dice.chance(50) { self.dice.micros(1_000, 60_000) } else { self.dice.micros(50, 2_000) };
        let link = state.link(&self.dice, from, to, lane);
        link.last_at = link.last_at.max(now() + delay);
        let (answer, outcome) = oneshot::channel();
        let _ = link.queue.send(Sent { at: link.last_at, frame, answer });
        Box::pin(async move { outcome.await.unwrap_or(Err(unreachable)) })
    }
}

impl State {
    fn break_links(&mut self, which: impl Fn(u64, u64) -> bool) {
        self.links.retain(|(from, to, _), link| {
            let breaks = which(*from, *to);
            if breaks {
                link.broken.cancel();
            }
            !breaks
        });
    }

    fn link(&mut self, dice: &Dice, from: u64, to: u64, lane: Lane) -> &mut Link {
        let router = self.routers.get(&to).map(Arc::clone);
        self.links.entry((from, to, lane)).or_insert_with(|| {
            let (queue, frames) = mpsc::unbounded_channel();
            let broken = CancellationToken::new();
            if let Some(router) = router {
                let running = run_link(router, lane, frames, dice.clone());
                let token = broken.clone();
                drop(SimRuntime::spawn(async move {
                    let running = std::pin::pin!(running);
                    let cancelled = std::pin::pin!(token.cancelled());
                    futures_util::future::select(cancelled, running).await;
                }));
            }
            Link { queue, last_at: now(), broken }
        })
    }
}

async fn run_link(
    router: Arc<Router<SimRuntime>>,
    lane: Lane,
    mut frames: mpsc::UnboundedReceiver<Sent>,
    dice: Dice,
) {
    let (replies, mut answered) = mpsc::channel::<ReplyFrame>(1024);
    let mut connection = Connection::new(router, lane, replies);
    let waiting = Mutex::new(BTreeMap::new());
    let peer = Peer::default();
    let inbound = async {
        let mut next_id = 0u64;
        while let Some(mut sent) = frames.recv().await {
            SimRuntime::sleep_until(sent.at).await;
            next_id += 1;
            sent.frame.id = next_id;
            waiting.lock().insert(next_id, sent.answer);
            connection.accept(sent.frame).await;
        }
    };
    let outbound = async {
        while let Some(reply) = answered.recv().await {
            SimRuntime::sleep(dice.micros(20, 300)).await;
            let answer: Option<oneshot::Sender<_>> = waiting.lock().remove(&reply.id);
            let result =
                reply.result.map_err(|refusal| TransportError::Refused { peer: peer.clone(), refusal });
            if let Some(answer) = answer {
                let _ = answer.send(result);
            }
        }
    };
    futures_util::future::join(inbound, outbound).await;
}

struct SimTransport {
    net: Arc<SimNet>,
    node: u64,
}

impl Transport for SimTransport {
    fn call(&self, target: &Target, lane: Lane, kind: FrameKind, body: Body) -> ReplyFuture {
        let frame = IncomingFrame {
            id: 0,
            group: target.group,
            replica: target.replica,
            kind,
            body: body.into_bytes(),
        };
        self.net.send(self.node, &target.peer, lane, frame)
    }
}
