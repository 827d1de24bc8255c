//! A follower that slept through more than the retained log is sent a snapshot, while pushes go on; a transfer goes on after both
//! its ends were killed.

mod support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use support::laggard::{applied, leave_behind};
use support::metrics::metric;
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

/// Sender and receiver are killed at once in the middle of a transfer. What had arrived is not sent again, although neither
/// process remembers anything of it, and pushes that were acknowledged before, between and after are all there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_goes_on_after_both_its_ends_were_killed() {
    const SENDER: u64 = 1;
    const OTHER: u64 = 2;
    const RECEIVER: u64 = 3;
    const ARRIVED: &str = "evershard_snapshot_bytes_total{kind=\"received\"}";
    const SKIPPED: &str = "evershard_snapshot_bytes_total{kind=\"skipped\"}";
    // The least that a node may be told: it takes the ballast ten seconds.
    const RATE: u64 = 1 << 20;
    // Flushed is what is much, and that is the ballast: parts of a file that a compaction replaces are of no use to anybody.
    let options = Options { shards: 1, ..options() }
        .arg("--snapshot-bytes-per-second", RATE)
        .arg("--flush-interval-ms", 600_000)
        .arg("--flush-dirty-bytes", 2 << 20);
    let mut cluster = Cluster::start(options).await;
    cluster.transfer(0, SENDER).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("audit", DIM).await;
    let ballast = trainer.normal("ballast", DIM).await;
    let pushers = [Pusher::start(cluster.endpoints(), Load { ids: 256, ..load() }, 4)];
    wait_progress(&pushers, 10).await;
    let then = applied(&cluster, RECEIVER).await[0];
    cluster.kill(RECEIVER);
    // Floats that no compression shortens.
    let ids: Vec<u64> = (0..40_000).collect();
    for ids in ids.chunks(4000) {
        ballast.push(ids, &vec![0.0; ids.len() * DIM]).await.unwrap();
    }
    // Whichever of them leads when the receiver is back has nothing but a snapshot for it.
    for node in [SENDER, OTHER] {
        wait_purged(&cluster, node, then).await;
        wait_settled(&cluster.node(node).data().join("replicas")).await;
    }
    // Its links are of the first flushes, which it made for a receiver that did not answer. Now it makes others.
    cluster.kill(SENDER);
    cluster.restart(SENDER);
    cluster.leader_of(0).await;
    cluster.transfer(0, SENDER).await;
    cluster.restart(RECEIVER);
    eventually("a part of the snapshot arrives", || async {
        let bytes = metric(&cluster, RECEIVER, ARRIVED).await;
        if bytes >= 3.0 * RATE as f64 { Ok(()) } else { Err(format!("{bytes} bytes")) }
    })
    .await;
    cluster.kill(SENDER);
    cluster.kill(RECEIVER);
    assert!(!cluster.node(RECEIVER).log_contains("installing a snapshot"), "it was only on its way");

    cluster.restart(SENDER);
    // What was acknowledged meanwhile, by the two of them, must be there too.
    wait_progress(&pushers, 20).await;
    cluster.transfer(0, SENDER).await;
    assert_eq!(metric(&cluster, SENDER, SKIPPED).await, 0.0, "a new process");
    cluster.restart(RECEIVER);
    cluster.wait_ready().await;
    cluster.wait_caught_up().await;
    let skipped = metric(&cluster, SENDER, SKIPPED).await;
    assert!(skipped >= RATE as f64, "{skipped} bytes skipped; {}", cluster.node(SENDER).log_tail());
    assert!(metric(&cluster, SENDER, "evershard_snapshots_resumed_total").await >= 1.0);
    assert!(cluster.node(RECEIVER).log_contains("installing a snapshot"));

    wait_progress(&pushers, 10).await;
    let [pusher] = pushers;
    let ledger = pusher.finish().await;
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
    let before = ballast.pull(&ids).await.unwrap();
    // It leads with what it was sent.
    cluster.transfer(0, RECEIVER).await;
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
    assert!(ballast.pull(&ids).await.unwrap() == before, "the same rows from the receiver");
}

/// Waits until a node has nothing in its log of what follows `index`.
async fn wait_purged(cluster: &Cluster, node: u64, index: u64) {
    eventually(&format!("node {node} leaves {index} behind"), || async {
        let replica = cluster.replica(node, 0).await.ok_or("no answer")?;
        if replica.purged > index + 8 { Ok(()) } else { Err(format!("{replica:?}")) }
    })
    .await;
}

/// Waits until no run is added below a folder any more, and none is compacted.
async fn wait_settled(folder: &Path) {
    const LOOKS: u32 = 40;
    let (mut last, mut same) = (BTreeSet::new(), 0);
    eventually("no flush and no compaction is under way", || {
        let now = runs(folder);
        same = if now == last { same + 1 } else { 0 };
        last = now;
        let outcome = if same >= LOOKS { Ok(()) } else { Err(format!("{last:?}")) };
        async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            outcome
        }
    })
    .await;
}

/// The sorted runs below a folder that others change meanwhile.
fn runs(folder: &Path) -> BTreeSet<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return BTreeSet::new() };
    let found = entries.flatten().flat_map(|entry| {
        let path = entry.path();
        if path.is_dir() {
            return runs(&path);
        }
        let is_run = path.extension().is_some_and(|extension| extension == "sst");
        is_run.then_some(path).into_iter().collect()
    });
    found.collect()
}
