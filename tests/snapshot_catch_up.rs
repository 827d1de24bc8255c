//! A follower that slept through more than the retained log is sent a snapshot, while pushes go on.

mod support;

use support::pusher::{Load, Pusher, wait_progress};
use support::trainer::Trainer;
use support::{Cluster, Options, eventually};

const DIM: usize = 64;
/// Log kept for laggards: soon less than what is pushed.
const RETAIN_BYTES: u64 = 256 * 1024;

fn options() -> Options {
    Options { shards: 2, ..Options::default() }
        .arg("--log-retain-bytes", RETAIN_BYTES)
        .arg("--log-segment-bytes", 1 << 20)
        .arg("--flush-interval-ms", 200)
}

fn load() -> Load {
    // 64 rows of 64 floats: 17 KiB a push.
    Load { ids: 4096, rows_a_push: 64, ..Load::small("audit", DIM) }
}

/// Waits until the leader of every shard has flushed (and so may purge) far beyond where `follower` is.
async fn leave_behind(cluster: &Cluster, follower_applied: &[u64]) {
    for shard in cluster.shards() {
        let then = follower_applied[shard as usize];
        eventually(&format!("shard {shard} runs away"), || async {
            let leader = cluster.leader_now(shard).await.ok_or("no leader")?;
            let replica = cluster.replica(leader, shard).await.ok_or("no answer")?;
            // Each entry is at least 8 KiB here: three times what is retained.
            if replica.flushed > then + 3 * RETAIN_BYTES / 8192 {
                Ok(())
            } else {
                Err(format!("{replica:?}"))
            }
        })
        .await;
    }
}

async fn applied(cluster: &Cluster, node: u64) -> Vec<u64> {
    let mut indexes = Vec::new();
    for shard in cluster.shards() {
        indexes.push(cluster.replica(node, shard).await.map_or(0, |replica| replica.applied));
    }
    indexes
}

/// A node that leads nothing.
async fn follower(cluster: &Cluster) -> u64 {
    for shard in cluster.shards() {
        if cluster.leader_of(shard).await == 3 {
            cluster.transfer(shard, 1).await;
        }
    }
    3
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_follower_catches_up_by_snapshot_while_pushes_go_on() {
    let mut cluster = Cluster::start(options()).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("audit", DIM).await;
    let pushers = [Pusher::start(cluster.endpoints(), load(), 1)];
    wait_progress(&pushers, 10).await;
    let follower = follower(&cluster).await;
    let then = applied(&cluster, follower).await;
    cluster.kill(follower);
    leave_behind(&cluster, &then).await;
    cluster.restart(follower);
    cluster.wait_ready().await;
    cluster.wait_caught_up().await;
    wait_progress(&pushers, 10).await;

    let [pusher] = pushers;
    let ledger = pusher.finish().await;
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
    // What it was sent is its own now: it survives a restart, and it can lead.
    cluster.kill(follower);
    cluster.restart(follower);
    cluster.wait_ready().await;
    cluster.transfer(0, follower).await;
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
    cluster.assert_replicas_equal().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_follower_catches_up_by_snapshot_while_pushes_go_on() {
    let cluster = Cluster::start(options()).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("audit", DIM).await;
    let pushers = [Pusher::start(cluster.endpoints(), load(), 2)];
    wait_progress(&pushers, 10).await;
    let follower = follower(&cluster).await;
    let then = applied(&cluster, follower).await;
    cluster.node(follower).freeze();
    leave_behind(&cluster, &then).await;
    cluster.node(follower).thaw();
    cluster.wait_caught_up().await;
    wait_progress(&pushers, 10).await;

    let [pusher] = pushers;
    let ledger = pusher.finish().await;
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
    cluster.assert_replicas_equal().await;
}

/// An install that fails for a reason that passes costs neither the replica nor a restart of its node: here of one that was
/// never restarted, so that it knows the replica's log from making it.
#[cfg(feature = "failpoints")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_whose_install_failed_opens_its_replica_again() {
    let mut cluster = Cluster::prepare(options()).await;
    for id in [1, 2] {
        cluster.node_mut(id).start(None);
    }
    cluster.node_mut(3).start(Some("snapshot::install_error=fail@1"));
    cluster.create().await;
    cluster.wait_ready().await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("audit", DIM).await;
    let pushers = [Pusher::start(cluster.endpoints(), load(), 3)];
    wait_progress(&pushers, 10).await;
    let follower = follower(&cluster).await;
    let then = applied(&cluster, follower).await;
    let before = replica_ids(&cluster, follower).await;
    cluster.node(follower).freeze();
    leave_behind(&cluster, &then).await;
    cluster.node(follower).thaw();
    eventually("the install fails", || async {
        let log = std::fs::read_to_string(cluster.node(follower).log()).unwrap();
        if log.contains("replica stopped") { Ok(()) } else { Err(log) }
    })
    .await;
    wait_progress(&pushers, 10).await;

    let [pusher] = pushers;
    let ledger = pusher.finish().await;
    cluster.wait_ready().await;
    cluster.wait_caught_up().await;
    assert_eq!(replica_ids(&cluster, follower).await, before, "the same replicas went on");
    cluster.assert_replicas_equal().await;
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
}

#[cfg(feature = "failpoints")]
async fn replica_ids(cluster: &Cluster, node: u64) -> Vec<u64> {
    let status = cluster.status(node).await.unwrap();
    status.replicas.iter().map(|replica| replica.replica).collect()
}
