//! One lane a group: numbers push messages, keeps the unacknowledged ones in order, and sends them until they are settled.
//!
//! `lane.rs` is the lane itself; `message.rs` what travels in it; `verdict.rs` what answers mean; this file the lanes of a
//! client.
//!
//! Not here: making messages out of a batch (`push`), streams (`node_channel`).

mod lane;
mod message;
mod verdict;

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub(crate) use message::{MessageContent, ParkedPush, Settled, Submission, Unsent};

use crate::ClientOptions;
use crate::node_channel::NodeChannels;
use crate::routing_cache::RoutingCache;
use crate::session::Sessions;
use crate::stats::Stats;

/// What all lanes share.
#[derive(Debug)]
pub(crate) struct LaneContext {
    pub(crate) options: ClientOptions,
    pub(crate) routing: Arc<RoutingCache>,
    pub(crate) channels: Arc<NodeChannels>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) stats: Arc<Stats>,
}

/// The lanes of a client, made as they are needed.
#[derive(Debug)]
pub(crate) struct PushLanes {
    context: Arc<LaneContext>,
    tasks: TaskTracker,
    stop: CancellationToken,
    lanes: Mutex<HashMap<u64, mpsc::Sender<Submission>>>,
}

impl PushLanes {
    pub(crate) fn new(
        options: ClientOptions,
        routing: Arc<RoutingCache>,
        channels: Arc<NodeChannels>,
        sessions: Arc<Sessions>,
        stats: Arc<Stats>,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let context = Arc::new(LaneContext { options, routing, channels, sessions, stats });
        PushLanes { context, tasks, stop, lanes: Mutex::default() }
    }

    /// Hands a message to its lane, which settles it. Messages of one group are applied in the order of these calls. A lane
    /// that takes nothing until the message's deadline has it settled as unsent.
    pub(crate) async fn submit(&self, group: u64, submission: Submission) {
        let lane = self.lane(group);
        match tokio::time::timeout_at(submission.deadline.into(), lane.reserve()).await {
            Ok(Ok(place)) => place.send(submission),
            // A lane that has ended: whoever waits for the submission sees that it is dropped.
            Ok(Err(_)) => drop(submission),
            Err(_) => submission.return_unsent("its shard's lane took no more pushes until the deadline"),
        }
    }

    fn lane(&self, group: u64) -> mpsc::Sender<Submission> {
        let mut lanes = self.lanes.lock();
        lanes
            .entry(group)
            .or_insert_with(|| {
                // The lane takes at once what it is given: bytes are bounded before.
                let (lane, submissions) = mpsc::channel(1);
                let stop = self.stop.clone();
                let running = lane::Lane::new(group, self.context.clone(), submissions).run();
                self.tasks.spawn(async move {
                    tokio::select! {
                        () = stop.cancelled() => {}
                        () = running => {}
                    }
                });
                lane
            })
            .clone()
    }
}
