//! A follower that is stopped, with its connections open, costs the leader no more memory than its bounds, however much is
//! pushed meanwhile: whether the leader has in its log what the follower lacks, or only a snapshot. It catches up by itself.

mod support;

use std::time::Duration;

use support::metrics::metric;
use support::pusher::{Load, Pusher, finish_all, wait_progress};
use support::trainer::Trainer;
use support::{Cluster, Options, eventually};

const DIM: usize = 64;
const LEADER: u64 = 1;
const FOLLOWER: u64 = 3;
const MIB: u64 = 1 << 20;
/// What the leader may take for it: appends under way and not answered (8 MiB a shard), what the transport took of them, what is
/// read of the log for the next try, and what an allocator keeps of all that. Nothing of it grows with what is pushed.
const GROWTH_MAX: u64 = 48 * MIB;
const PUSHED_BYTES: u64 = 6 * GROWTH_MAX;
/// Pushed before anything is measured, so that caches and buffers are as large as they get.
const WARM_BYTES: u64 = 96 * MIB;
const GROUP_BYTES: u64 = 8 * MIB;
const IN_FLIGHT: &str = "evershard_replica_in_flight_bytes";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_follower_that_only_lacks_log_costs_the_leader_no_memory() {
    stop_a_follower(2 * PUSHED_BYTES).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_follower_that_needs_a_snapshot_costs_the_leader_no_memory() {
    stop_a_follower(MIB).await;
}

async fn stop_a_follower(log_retain_bytes: u64) {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("node.toml");
    std::fs::write(
        &config,
        format!("group_in_flight_bytes = {GROUP_BYTES}\nlog_cache_bytes = {}\n", 8 * MIB),
    )
    .unwrap();
    let options = Options { shards: 1, ..Options::default() }
        .arg("--config", config.display())
        .arg("--log-segment-bytes", 8 * MIB)
        .arg("--log-retain-bytes", log_retain_bytes)
        .arg("--flush-interval-ms", 200);
    let cluster = Cluster::start(options).await;
    cluster.transfer(0, LEADER).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("audit", DIM).await;
    // A message each, of nearly the largest there is.
    let load = Load { ids: 8192, rows_a_push: 960, pause: Duration::ZERO, ..Load::small("audit", DIM) };
    let pushers: Vec<Pusher> =
        (0..3).map(|seed| Pusher::start(cluster.endpoints(), load.clone(), seed)).collect();
    let before = peak_until_pushed(&cluster, &pushers, WARM_BYTES).await;

    cluster.node(FOLLOWER).freeze();
    let stopped_at = cluster.replica(LEADER, 0).await.unwrap().applied;
    let peak = peak_until_pushed(&cluster, &pushers, PUSHED_BYTES).await;
    eprintln!("{PUSHED_BYTES} bytes pushed: {before} bytes resident before, {peak} at the most");
    assert!(peak <= before + GROWTH_MAX, "{before} bytes, then {peak}");
    let replica = cluster.replica(LEADER, 0).await.unwrap();
    assert_eq!(replica.role, "leader", "{replica:?}");
    let has_log = log_retain_bytes > PUSHED_BYTES;
    assert_eq!(replica.purged <= stopped_at, has_log, "stopped at {stopped_at}: {replica:?}");

    cluster.node(FOLLOWER).thaw();
    wait_progress(&pushers, 10).await;
    let ledger = finish_all(pushers).await;
    eventually("it catches up", || async {
        let target = cluster.replica(LEADER, 0).await.ok_or("no answer")?.committed;
        match cluster.replica(FOLLOWER, 0).await {
            Some(replica) if replica.applied >= target => Ok(()),
            other => Err(format!("{other:?}, the leader is at {target}")),
        }
    })
    .await;
    let after = cluster.node(LEADER).resident_bytes();
    assert!(after <= before + GROWTH_MAX, "{before} bytes, {after} when the follower had caught up");
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
    cluster.assert_replicas_equal().await;
    // What it was sent is its own.
    cluster.transfer(0, FOLLOWER).await;
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
}

/// The most that the leader has in memory until so much more was pushed to it; it never has more in flight than it may.
async fn peak_until_pushed(cluster: &Cluster, pushers: &[Pusher], bytes: u64) -> u64 {
    let pushed = || metric(cluster, LEADER, "evershard_push_bytes_total");
    let target = pushed().await + bytes as f64;
    let mut peak = 0;
    while pushed().await < target {
        wait_progress(pushers, 5).await;
        peak = peak.max(cluster.node(LEADER).resident_bytes());
        let in_flight = metric(cluster, LEADER, IN_FLIGHT).await;
        assert!(in_flight <= GROUP_BYTES as f64, "{in_flight} bytes in flight");
    }
    let metrics = cluster.node(LEADER).http("/metrics").await;
    assert!(metrics.contains(IN_FLIGHT), "{metrics}");
    peak
}
