//! Scrubs that nobody asks for: once an interval the leader of the meta group scrubs every shard, one after the other.
//!
//! Every node has a clock, which first strikes at a random time within the first interval: clusters that were started together do
//! not scrub together. Whoever leads the meta group when its clock strikes does the work. Nothing is kept about when the last scrub
//! was, so a new leader goes on with its own clock: after a change of leadership the next scrub comes sooner or later than one
//! interval after the last, within two of them.
//!
//! Invariants:
//! - one shard at a time: what a scrub costs is one pass over one replica a node;
//! - nothing is repaired that a scrub that was asked for would not repair (`scrub_repair`), and nothing at all when the node is
//!   told not to;
//! - every wait ends: by its deadline, or when the node stops.
//!
//! Not here: scrubbing (`scrub`).

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use evershard_proto::v1::ShardDigests;
use tokio_util::sync::CancellationToken;

use super::node::Node;
use crate::meta::state::META_SHARD;
use crate::telemetry::metric_definitions as metric;

/// For one shard, both passes over it: a replica of many gigabytes is read from its disk beside everything else.
const SHARD_WITHIN: Duration = Duration::from_secs(3600);

/// Runs until `stop`.
pub async fn run_scrubs(node: Arc<Node>, stop: CancellationToken) {
    let interval = Duration::from_secs(node.config.scrub_interval_seconds.into());
    if interval.is_zero() {
        return;
    }
    let mut due = Instant::now() + part_of(interval);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep_until(due.into()) => {}
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = node.scrub_all() => {}
        }
        // What took longer than the interval is followed by a pause all the same.
        due = if due + interval > Instant::now() { due + interval } else { Instant::now() + interval };
    }
}

/// A random part of it.
fn part_of(interval: Duration) -> Duration {
    let (random, _) = uuid::Uuid::new_v4().as_u64_pair();
    // The highest 48 bits of a v4 are all random, and a double holds them.
    interval.mul_f64((random >> 16) as f64 / (1u64 << 48) as f64)
}

impl Node {
    async fn scrub_all(self: &Arc<Self>) {
        let state = self.meta_state();
        let shards: Vec<u32> = state.groups.iter().map(|g| g.shard).filter(|s| *s != META_SHARD).collect();
        let mut is_whole = !shards.is_empty();
        for shard in shards {
            if !self.leads_meta() {
                return;
            }
            let deadline = Instant::now() + SHARD_WITHIN;
            match self.scrub(&[shard], self.config.scrub_repair, deadline).await {
                Ok(reply) => {
                    for found in &reply.shards {
                        tell(found);
                        is_whole &= matches!(outcome(found), "equal" | "different" | "quarantined");
                    }
                }
                Err(error) => {
                    tracing::error!(shard, %error, "a shard was not scrubbed");
                    is_whole = false;
                }
            }
        }
        if is_whole && let Ok(now) = SystemTime::now().duration_since(UNIX_EPOCH) {
            metrics::gauge!(metric::SCRUBBED_TIMESTAMP_SECONDS).set(now.as_secs_f64());
        }
    }

    fn leads_meta(&self) -> bool {
        let leadership = self.replicas.meta().map(|m| m.raft.leadership()).unwrap_or_default();
        leadership.is_self && leadership.is_ready
    }
}

/// What became of a shard's scrub: a closed set, for the metric.
pub(super) fn outcome(shard: &ShardDigests) -> &'static str {
    let first = shard.digests.first().map(|of| &of.digest);
    if shard.equal {
        "equal"
    } else if !shard.quarantined.is_empty() {
        "quarantined"
    } else if shard.digests.iter().any(|of| Some(&of.digest) != first) {
        // Also when somebody is missing: those that are there disagree.
        "different"
    } else {
        "incomplete"
    }
}

fn tell(found: &ShardDigests) {
    let ShardDigests { shard, index, digests, problem, quarantined, .. } = found;
    match outcome(found) {
        "equal" => tracing::info!(shard, index, replicas = digests.len(), "scrubbed: all replicas are equal"),
        "incomplete" => {
            tracing::warn!(shard, index, ?digests, problem, "scrubbed: not every replica gave a digest");
        }
        _ => tracing::error!(shard, index, ?digests, problem, ?quarantined, "scrubbed: replicas differ"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evershard_proto::v1::ReplicaDigest;

    #[test]
    fn the_offset_is_within_the_interval_and_not_always_the_same() {
        let day = Duration::from_secs(86_400);
        let offsets: Vec<Duration> = (0..64).map(|_| part_of(day)).collect();
        assert!(offsets.iter().all(|offset| *offset < day), "{offsets:?}");
        let half = offsets.iter().filter(|offset| **offset < day / 2).count();
        assert!((1..64).contains(&half), "{offsets:?}");
    }

    #[test]
    fn replicas_that_disagree_are_not_called_incomplete() {
        let digest = |node, digest: &str| ReplicaDigest { node, digest: digest.into() };
        let problem = "node 3 gave no answer".to_owned();
        let mut shard =
            ShardDigests { digests: vec![digest(1, "a"), digest(2, "a")], problem, ..Default::default() };
        assert_eq!(outcome(&shard), "incomplete");
        shard.digests[1].digest = "b".into();
        assert_eq!(outcome(&shard), "different");
        shard.quarantined.push(2);
        assert_eq!(outcome(&shard), "quarantined");
        let equal = ShardDigests { equal: true, digests: vec![digest(1, "a")], ..Default::default() };
        assert_eq!(outcome(&equal), "equal");
    }
}
