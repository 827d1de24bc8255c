//! How fresh the replicas of this node are, by what the leaders said of their groups.
//!
//! A follower cannot tell how old it is: a heartbeat that it takes in now may have waited anywhere. So it asks. It notes the
//! time, asks the leader for a read point (an index that a quorum confirmed after it was asked), and gets it: whoever has
//! applied that index has everything that was acknowledged before the noted time. So
//!
//! ```text
//! asked at t0 -> leader: quorum -> index 71 -> applied 71 here: as fresh as t0, whenever the answer came, whatever any clock says
//! ```
//!
//! A replica that is cut off gets no more points, and what it has grows old by its own clock. All groups that one node leads
//! are asked for in one call, again and again while BOUNDED pulls come, at a part of their bound.
//!
//! Invariants:
//! - a point's time was noted before its question was sent;
//! - of two points of a group, the later asks for the higher index: others are of no use and forgotten;
//! - one call to a node is under way at a time, so one that hangs holds up no other;
//! - nothing is asked for a group that nobody reads.
//!
//! Not here: who may answer what (`crate::service`), the quorum (the raft crate).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use evershard_proto::v1::{ErrorKind, ReadPoint, ReadPointsReply, ReadPointsRequest};
use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::moment::Moment;
use super::node::Node;
use crate::service::RequestError;
use crate::telemetry::metric_definitions as metric;

/// Points are asked for at this part of the bound that is read with.
const INTERVALS_PER_BOUND: u32 = 4;
const INTERVAL_MIN: Duration = Duration::from_millis(10);
const INTERVAL_MAX: Duration = Duration::from_secs(1);
/// Between two questions for a group that somebody waits for.
const URGENT_INTERVAL: Duration = Duration::from_millis(2);
/// After the last BOUNDED pull of a group.
const WANTED_FOR: Duration = Duration::from_secs(5);
/// For the answer of a node.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// Points kept of a group, while it applies.
const POINTS_MAX: usize = 32;
/// Of them, those that it has applied.
const APPLIED_POINTS_MAX: usize = 8;

/// Who has applied `index` has everything that was acknowledged before `asked_at`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Point {
    index: u64,
    asked_at: Moment,
}

/// What is known of one group, and who wants to know.
#[derive(Debug)]
struct Known {
    /// Ascending in both.
    points: Vec<Point>,
    interval: Duration,
    /// Whoever needs `interval` was last here so long ago that another may be as good from then on.
    interval_until: Moment,
    wanted_until: Moment,
    asked_at: Option<Moment>,
    urgent: bool,
}

impl Known {
    fn new(interval: Duration, until: Moment) -> Self {
        Known {
            points: Vec::new(),
            interval,
            interval_until: until,
            wanted_until: until,
            asked_at: None,
            urgent: false,
        }
    }

    /// When to ask next.
    fn due(&self) -> Option<Moment> {
        let interval = if self.urgent { URGENT_INTERVAL } else { self.interval };
        self.asked_at.map(|asked_at| asked_at.after(interval))
    }

    fn take_in(&mut self, point: Point) {
        if self.points.last().is_some_and(|last| last.asked_at >= point.asked_at) {
            return;
        }
        self.points.retain(|known| known.index < point.index);
        if self.points.len() == POINTS_MAX {
            // The oldest ones are those that are applied first.
            self.points.pop();
        }
        self.points.push(point);
    }

    /// As fresh as whoever has applied `index` is. What is older is forgotten, but for some that slower readers may ask about.
    fn fresh_at(&mut self, index: u64) -> Option<Moment> {
        let applied = self.points.partition_point(|point| point.index <= index);
        let fresh_at = self.points[..applied].last().map(|point| point.asked_at);
        self.points.drain(..applied.saturating_sub(APPLIED_POINTS_MAX));
        fresh_at
    }
}

/// See the [module](self). Shared by the doors and the task that asks.
#[derive(Debug)]
pub struct Freshness {
    groups: Mutex<HashMap<u64, Known>>,
    wanted: Notify,
    /// Points taken in.
    heard: watch::Sender<u64>,
}

impl Default for Freshness {
    fn default() -> Self {
        Freshness { groups: Mutex::default(), wanted: Notify::new(), heard: watch::Sender::new(0) }
    }
}

impl Freshness {
    /// Somebody reads `group` with this bound: points are asked for from now on, for a while.
    pub fn want(&self, group: u64, bound: Duration) {
        let interval = (bound / INTERVALS_PER_BOUND).clamp(INTERVAL_MIN, INTERVAL_MAX);
        let now = Moment::now();
        let until = now.after(WANTED_FOR);
        let mut groups = self.groups.lock();
        let mut is_news = false;
        let known = groups.entry(group).or_insert_with(|| {
            is_news = true;
            Known::new(interval, until)
        });
        known.wanted_until = until;
        if interval < known.interval || known.interval_until < now {
            is_news |= interval < known.interval;
            known.interval = interval;
        }
        if interval <= known.interval {
            known.interval_until = until;
        }
        if is_news {
            self.wanted.notify_one();
        }
    }

    /// Somebody waits for the next point of `group`.
    pub fn hurry(&self, group: u64) {
        if let Some(known) = self.groups.lock().get_mut(&group)
            && !known.urgent
        {
            known.urgent = true;
            self.wanted.notify_one();
        }
    }

    /// How long ago everything was acknowledged that a replica of `group` may lack when it has applied `index`; `None` when
    /// that cannot be told. Measured now: rows read before are as old, at the most.
    #[must_use]
    pub fn age(&self, group: u64, index: u64) -> Option<Duration> {
        let fresh_at = self.groups.lock().get_mut(&group)?.fresh_at(index)?;
        Some(Moment::now().since(fresh_at))
    }

    /// The lowest index that would make a replica of `group` as fresh as `bound`, as far as is known.
    #[must_use]
    pub fn index_for(&self, group: u64, bound: Duration) -> Option<u64> {
        let now = Moment::now();
        let groups = self.groups.lock();
        let fresh = |point: &&Point| now.since(point.asked_at) <= bound;
        groups.get(&group)?.points.iter().find(fresh).map(|point| point.index)
    }

    /// Changes with each point that is taken in.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.heard.subscribe()
    }

    /// The groups to ask for now, and how long nothing else is to be asked.
    fn due(&self) -> (Vec<u64>, Duration) {
        let now = Moment::now();
        let mut groups = self.groups.lock();
        groups.retain(|_, known| known.wanted_until >= now);
        let mut pause = INTERVAL_MAX;
        let mut due = Vec::new();
        for (group, known) in groups.iter() {
            match known.due() {
                Some(at) if at > now => pause = pause.min(at.since(now)),
                _ => due.push(*group),
            }
        }
        (due, pause)
    }

    /// These are asked for now.
    fn set_asked(&self, asked: &[u64], at: Moment) {
        let mut groups = self.groups.lock();
        for group in asked {
            if let Some(known) = groups.get_mut(group) {
                known.asked_at = Some(at);
                known.urgent = false;
            }
        }
    }

    fn take_in(&self, points: &[ReadPoint], asked: &[u64], asked_at: Moment) {
        let mut groups = self.groups.lock();
        for ReadPoint { group, index } in points {
            // Nobody asked that node for others.
            if asked.contains(group)
                && let Some(known) = groups.get_mut(group)
            {
                known.take_in(Point { index: *index, asked_at });
            }
        }
        drop(groups);
        self.heard.send_modify(|heard| *heard += 1);
    }
}

impl Node {
    /// Read points of the groups that this node leads, of those whose quorum answers.
    pub async fn read_points(&self, groups: &[u64]) -> Vec<ReadPoint> {
        let asked = groups.iter().map(|group| async move {
            let replica = self.replicas.shard(*group).ok()?;
            match replica.raft.read_point().await {
                Ok(index) => Some(ReadPoint { group: *group, index }),
                Err(error) => {
                    tracing::debug!(group, %error, "no read point");
                    None
                }
            }
        });
        join_all(asked).await.into_iter().flatten().collect()
    }

    /// Where the leader of a group is, when it is not here.
    fn leader_elsewhere(&self, group: u64) -> Option<String> {
        let replica = self.replicas.shard(group).ok()?;
        let (_, peer) = replica.raft.leadership().leader?;
        (peer.address != self.config.advertise).then_some(peer.address)
    }

    async fn ask_read_points(&self, address: &str, groups: &[u64]) -> Result<ReadPointsReply, RequestError> {
        let request = ReadPointsRequest { cluster_id: self.cluster_id(), groups: groups.to_vec() };
        let mut client = self.peers.node(address)?;
        match tokio::time::timeout(ANSWER_WITHIN, client.read_points(request)).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(RequestError::from_status(&status)),
            Err(_) => Err(RequestError::new(ErrorKind::Unavailable, "no answer in time")),
        }
    }
}

/// Runs until `stop`: asks the leaders for what BOUNDED pulls on this node need.
pub async fn run_freshness(node: Arc<Node>, stop: CancellationToken) {
    let freshness = Arc::clone(&node.freshness);
    let mut asks = FuturesUnordered::new();
    let mut asking: HashSet<String> = HashSet::new();
    loop {
        let (due, pause) = freshness.due();
        let mut by_leader: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for group in due {
            match node.leader_elsewhere(group) {
                Some(address) => by_leader.entry(address).or_default().push(group),
                // Nobody to ask now.
                None => freshness.set_asked(&[group], Moment::now()),
            }
        }
        for (address, groups) in by_leader {
            if !asking.insert(address.clone()) {
                // Its turn comes when that call has ended.
                continue;
            }
            let node = &node;
            // Before the question leaves: what it is answered with is no older.
            let asked_at = Moment::now();
            freshness.set_asked(&groups, asked_at);
            asks.push(async move {
                let reply = node.ask_read_points(&address, &groups).await;
                (address, groups, asked_at, reply)
            });
        }
        tokio::select! {
            () = stop.cancelled() => return,
            Some((address, groups, asked_at, reply)) = asks.next(), if !asks.is_empty() => {
                asking.remove(&address);
                let outcome = if reply.is_ok() { "answered" } else { "failed" };
                metrics::counter!(metric::READ_POINTS_ASKED_TOTAL, "outcome" => outcome).increment(1);
                match reply {
                    Ok(reply) => freshness.take_in(&reply.points, &groups, asked_at),
                    Err(error) => tracing::debug!(address, %error, "no read points"),
                }
            }
            () = freshness.wanted.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const GROUP: u64 = 7;

    /// Points of one group that were asked for so many seconds ago.
    fn freshness(points: &[(u64, u32)]) -> Freshness {
        let freshness = Freshness::default();
        freshness.want(GROUP, SECOND);
        // Not before the machine came up.
        let start = Moment::now();
        for (index, seconds) in points {
            freshness.take_in(
                &[ReadPoint { group: GROUP, index: *index }],
                &[GROUP],
                start.after(SECOND * *seconds),
            );
        }
        freshness
    }

    fn points(freshness: &Freshness) -> Vec<u64> {
        freshness.groups.lock()[&GROUP].points.iter().map(|point| point.index).collect()
    }

    #[test]
    fn a_replica_is_as_fresh_as_the_latest_point_that_it_has_applied() {
        let known = freshness(&[(10, 0), (20, 100), (30, 200)]);
        assert_eq!(known.age(GROUP, 9), None, "it lacks what was acknowledged before the first of them");
        assert!(known.age(GROUP, 15).is_some_and(|age| age < SECOND * 50));
        // Points of the future stand for points of now.
        assert_eq!(known.age(GROUP, 25), Some(Duration::ZERO));
        assert_eq!(points(&known), [10, 20, 30], "a reader that began before may ask about the first one");
        let many: Vec<(u64, u32)> = (0..20).map(|number| (u64::from(number), number)).collect();
        let known = freshness(&many);
        assert!(known.age(GROUP, 15).is_some());
        assert_eq!(points(&known), [8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]);
        let known = freshness(&[(20, 100), (30, 200)]);
        assert_eq!((known.age(GROUP, 19), known.index_for(GROUP, SECOND)), (None, Some(20)));
        assert_eq!(known.age(8, 99), None);
    }

    #[test]
    fn of_two_points_the_later_one_counts_when_it_asks_for_no_more() {
        // The first was the entry that a leader began with, and that nobody else ever had.
        assert_eq!(points(&freshness(&[(5, 0), (10, 1), (9, 2)])), [5, 9]);
        assert_eq!(points(&freshness(&[(10, 0), (10, 1)])), [10]);
        assert_eq!(points(&freshness(&[(10, 3), (12, 3), (13, 2)])), [10], "an answer that was overtaken");
    }

    #[test]
    fn a_group_that_does_not_catch_up_keeps_the_points_that_it_reaches_first() {
        let many: Vec<(u64, u32)> = (0..100).map(|number| (u64::from(number) * 10, number)).collect();
        let known = points(&freshness(&many));
        assert_eq!(known.len(), POINTS_MAX);
        assert_eq!((known[0], known[POINTS_MAX - 2], known[POINTS_MAX - 1]), (0, 300, 990));
    }

    #[test]
    fn others_points_are_not_taken() {
        let known = freshness(&[]);
        known.take_in(&[ReadPoint { group: GROUP, index: 1 }], &[8], Moment::now());
        assert_eq!(known.age(GROUP, 1), None);
    }

    #[test]
    fn groups_are_asked_for_while_somebody_reads_them_and_at_once_when_somebody_waits() {
        let known = Freshness::default();
        assert_eq!(known.due().0, Vec::<u64>::new());
        known.want(GROUP, SECOND * 4);
        assert_eq!(known.due().0, [GROUP]);
        known.set_asked(&[GROUP], Moment::now().after(SECOND));
        let (due, pause) = known.due();
        assert!(due.is_empty() && pause == INTERVAL_MAX, "{due:?} {pause:?}");
        known.hurry(GROUP);
        assert!(known.due().1 <= SECOND + URGENT_INTERVAL);
        known.groups.lock().get_mut(&GROUP).expect("there").asked_at = None;
        assert_eq!(known.due().0, [GROUP]);
    }
}
