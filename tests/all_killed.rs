//! All nodes killed at once, and started again: every acknowledged push is there, and clients go on where they were.

mod support;

use support::pusher::{Load, Pusher, finish_all, wait_progress};
use support::trainer::Trainer;
use support::{Cluster, Options};

const DIM: usize = 8;
const ROUNDS: usize = 3;

async fn all_nodes_killed_at_once(durability: &str) {
    let options = Options::default().arg("--durability", durability).arg("--flush-interval-ms", 300);
    let mut cluster = Cluster::start(options).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("audit", DIM).await;
    let pushers: Vec<Pusher> =
        (0..2).map(|seed| Pusher::start(cluster.endpoints(), Load::small("audit", DIM), seed)).collect();
    for _ in 0..ROUNDS {
        wait_progress(&pushers, 50).await;
        cluster.kill_all();
        cluster.start_all();
        cluster.wait_ready().await;
    }
    wait_progress(&pushers, 5).await;
    let ledger = finish_all(pushers).await;
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
    cluster.assert_replicas_equal().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_acknowledged_is_lost_with_fsync() {
    all_nodes_killed_at_once("fsync").await;
}

/// `memory` means the page cache of a quorum: a killed process loses nothing of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_acknowledged_is_lost_with_memory() {
    all_nodes_killed_at_once("memory").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clean_stop_of_all_nodes_loses_nothing_either() {
    let mut cluster = Cluster::with_shards(2).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("audit", DIM).await;
    let pusher = Pusher::start(cluster.endpoints(), Load::small("audit", DIM), 1);
    wait_progress(std::slice::from_ref(&pusher), 50).await;
    let ledger = pusher.finish().await;
    for id in cluster.ids() {
        let status = cluster.node_mut(id).stop();
        assert!(status.success(), "node {id} ended with {status} after SIGTERM");
    }
    cluster.start_all();
    cluster.wait_ready().await;
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
    cluster.assert_replicas_equal().await;
}
