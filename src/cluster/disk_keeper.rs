//! What a node does about its disk: a full or a hung one leads nothing that another could lead, and a full one takes no
//! pushes.
//!
//! | the disk | leaderships | elections | pushes | pulls |
//! |---|---|---|---|---|
//! | below the low-water mark | handed to a node with room | stands only where no node with room can lead | EXHAUSTED | go on |
//! | hung | handed over; else no more heartbeats | does not stand | refused while leadership moves | by the new leader |
//!
//! A leader also refuses pushes when so many of its followers' disks are below their marks that only they could make the
//! quorum: what those have left is for what a group needs to live.
//!
//! Invariants:
//! - nothing here waits for the disk;
//! - a full node goes on voting, and following while its log has room (`evershard_raft`, `Refusal::NoRoom`);
//! - all of it ends by itself when the disk is well again.
//!
//! Not here: looking at the disk (`disk_watch.rs`), the log's reserve (`evershard_storage::log`).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_raft::{Group, Leadership, Peer};
use evershard_storage::log::LogRoom;
use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;

use super::disk_watch::DiskView;
use super::node::Node;

const PAUSE: Duration = Duration::from_millis(50);
/// For one leadership to move.
const HAND_OVER_WITHIN: Duration = Duration::from_millis(500);
/// Before the same group's leadership is tried again.
const HAND_OVER_PAUSE: Duration = Duration::from_secs(2);
/// A hung leader that could not hand over within this falls silent.
const SILENT_AFTER: Duration = Duration::from_millis(500);
/// A full node stands after all when a group has had no leader for this many election timeouts.
const LEADERLESS_TIMEOUTS: u32 = 8;
/// A message of a push, about: without room for it a log takes none.
const PUSH_BYTES: u64 = 256 << 10;
/// Entries that a successor may lack.
const CAUGHT_UP_LAG: u64 = 64;

/// What the loop remembers of the groups.
#[derive(Default)]
struct Memory {
    /// Since when a group has had no leader that this node knows of.
    leaderless: HashMap<u64, Instant>,
    /// When to try again to hand a group over.
    hand_over_at: HashMap<u64, Instant>,
    /// Since when the disk hangs.
    stalled_since: Option<Instant>,
    /// Some disk was in trouble at the last look: there is something to take back when none is.
    was_troubled: bool,
}

/// Runs until `stop`.
pub async fn run_disk(node: Arc<Node>, stop: CancellationToken) {
    let mut memory = Memory::default();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(PAUSE) => {}
        }
        node.keep_to_disk(&mut memory).await;
    }
}

impl Node {
    async fn keep_to_disk(&self, memory: &mut Memory) {
        let view = self.disk.view();
        self.disk.measure(&view);
        self.show_disk(&view);
        memory.note_stall(view.is_stalled);
        let is_troubled = view.is_low || view.is_stalled || self.hears_of_full();
        if !is_troubled && !std::mem::replace(&mut memory.was_troubled, is_troubled) {
            memory.leaderless.clear();
            return;
        }
        memory.was_troubled = is_troubled;
        let mut shut = HashMap::new();
        let mut moving = Vec::new();
        let shards = self.replicas.shards();
        let meta = self.replicas.meta();
        let groups = shards.iter().map(|r| &r.raft).chain(meta.iter().map(|m| &m.raft));
        for raft in groups {
            let leadership = raft.leadership();
            let leaderless = memory.leaderless_for(raft.group(), &leadership);
            let others: Vec<u64> = raft.members().voters.values().map(|peer| peer.node).collect();
            let can_others = others.iter().any(|other| self.has_room(*other));
            let waited = Duration::from_millis(self.config.election_max_ms) * LEADERLESS_TIMEOUTS;
            raft.set_may_stand(!view.is_stalled && (!view.is_low || !can_others || leaderless > waited));
            // With everybody in trouble, a silent leader would only take the reads away too.
            raft.set_heartbeats(!(can_others && memory.is_stalled_for(SILENT_AFTER)));
            if !leadership.is_self {
                continue;
            }
            if let Some(reason) = self.full_reason(&view, &others) {
                shut.insert(raft.group(), reason);
            }
            if (view.is_low || view.is_stalled) && memory.is_hand_over_due(raft.group()) {
                moving.push(raft.clone());
            }
        }
        self.push_gate.set(shut);
        let moved = moving.into_iter().filter_map(|raft| {
            let to = raft.successor_among(|peer: &Peer| self.has_room(peer.node))?;
            // One that lags would leave the group without a leader until it has caught up.
            raft.lag(to).filter(|lag| view.is_stalled || *lag <= CAUGHT_UP_LAG)?;
            memory.hand_over_at.insert(raft.group(), Instant::now() + HAND_OVER_PAUSE);
            Some(hand_over(raft, to, if view.is_stalled { "hung" } else { "full" }))
        });
        let moved: Vec<_> = moved.collect();
        join_all(moved).await;
    }

    /// Why a group led here takes no pushes.
    fn full_reason(&self, view: &DiskView, voters: &[u64]) -> Option<String> {
        let own = self.config.node_id;
        if view.is_low {
            return self.disk.note(own, view);
        }
        let full: BTreeMap<u64, String> = voters
            .iter()
            .filter(|node| **node != own)
            .filter_map(|node| Some((*node, self.full_note_of(*node)?)))
            .collect();
        let quorum = voters.len() / 2 + 1;
        let is_short = !full.is_empty() && voters.len() - full.len() < quorum;
        is_short.then(|| full.into_values().collect::<Vec<_>>().join("; "))
    }

    fn show_disk(&self, view: &DiskView) {
        let note = self.disk.note(self.config.node_id, view);
        let keeps_nothing = match view.room {
            LogRoom::Ample => false,
            LogRoom::Reserve { bytes } => bytes < self.config.log_segment_bytes / 2 + PUSH_BYTES,
            LogRoom::Out => true,
        };
        if view.is_stalled || keeps_nothing {
            self.readiness.set_disk(note, None);
        } else {
            self.readiness.set_disk(None, note);
        }
    }
}

async fn hand_over(raft: Group, to: u64, disk: &'static str) {
    let group = raft.group();
    tracing::warn!(group, to, "the disk is {disk}: leadership is handed over");
    // The core of a group on a hung disk may not even answer.
    let moved = tokio::time::timeout(2 * HAND_OVER_WITHIN, raft.transfer_leader(to, HAND_OVER_WITHIN));
    match moved.await {
        Ok(Ok(())) => tracing::info!(group, to, "leadership was handed over"),
        Ok(Err(error)) => tracing::warn!(group, to, %error, "leadership was not handed over yet"),
        Err(_) => tracing::warn!(group, to, "the group did not answer"),
    }
}

impl Memory {
    fn note_stall(&mut self, is_stalled: bool) {
        self.stalled_since = is_stalled.then(|| self.stalled_since.unwrap_or_else(Instant::now));
    }

    fn is_stalled_for(&self, time: Duration) -> bool {
        self.stalled_since.is_some_and(|since| since.elapsed() >= time)
    }

    fn leaderless_for(&mut self, group: u64, leadership: &Leadership) -> Duration {
        if leadership.leader.is_some() {
            self.leaderless.remove(&group);
            return Duration::ZERO;
        }
        self.leaderless.entry(group).or_insert_with(Instant::now).elapsed()
    }

    fn is_hand_over_due(&self, group: u64) -> bool {
        self.hand_over_at.get(&group).is_none_or(|at| *at <= Instant::now())
    }
}
