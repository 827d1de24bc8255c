//! Snapshots over real sockets: connections that are cut at every chunk, a receiver and a sender that restart, a log that is kept meanwhile.
//!
//! Not here: every frame in turn (the unit tests of `raft/src/snapshot/`), processes (the root package's tests).
//!
//! Needs `--features failpoints`.

#![cfg(feature = "failpoints")]

mod support;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use evershard_raft::SnapshotFigures;
use support::cluster::{Cluster, GROUP, eventually, padded, replica_id};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

const CHUNK: usize = 256 * 1024;
/// What an adder links: one large file and two small ones.
const FILE_BYTES: u64 = 3_000_000;
const CHUNKS: u64 = FILE_BYTES.div_ceil(CHUNK as u64);

/// Passes bytes to one node; all its connections break whenever the number changes.
struct Proxy {
    address: SocketAddr,
    cuts: watch::Sender<u64>,
}

impl Proxy {
    async fn start(node: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("address");
        let (cuts, seen) = watch::channel(0);
        tokio::spawn(async move {
            while let Ok((mut outside, _)) = listener.accept().await {
                let (node, mut cut) = (node.clone(), seen.clone());
                cut.mark_unchanged();
                tokio::spawn(async move {
                    let Ok(mut inside) = TcpStream::connect(&node).await else { return };
                    let _ = (outside.set_nodelay(true), inside.set_nodelay(true));
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut outside, &mut inside) => {}
                        _ = cut.changed() => {}
                    }
                });
            }
        });
        Self { address, cuts }
    }
}

/// Three nodes: the leader, and one that slept through more log than is kept.
async fn with_sleeper(tune: fn(&mut evershard_raft::RaftOptions)) -> (Cluster, u64, u64) {
    let (cluster, leader, sleepers) = with_sleepers(3, 1, tune).await;
    (cluster, leader, sleepers[0])
}

/// Some of the nodes slept through more log than is kept.
async fn with_sleepers(
    nodes: u64,
    sleepers: usize,
    tune: fn(&mut evershard_raft::RaftOptions),
) -> (Cluster, u64, Vec<u64>) {
    let mut cluster = Cluster::start(nodes, &[GROUP], tune).await;
    let leader = cluster.wait_leader(GROUP).await;
    cluster.add(GROUP, 1).await;
    let others = cluster.nodes.keys().copied().filter(|id| *id != leader);
    let sleepers: Vec<u64> = others.take(sleepers).collect();
    for sleeper in &sleepers {
        cluster.kill(*sleeper).await;
    }
    run_away(&cluster, leader).await;
    (cluster, leader, sleepers)
}

/// Pushes more than is kept, flushes and purges, on every running node.
async fn run_away(cluster: &Cluster, leader: u64) {
    let group = cluster.group(leader, GROUP);
    for _ in 0..20 {
        group.propose(padded(1, 64 * 1024)).expect("admitted").await.expect("applied");
    }
    flush_all(cluster, leader).await;
    let purged = group.status().last_index.expect("entries");
    for id in cluster.nodes.keys() {
        let handle = cluster.group(*id, GROUP);
        eventually("the log is purged", || handle.status().purged.filter(|at| at + 5 > purged)).await;
    }
}

async fn flush_all(cluster: &Cluster, leader: u64) {
    let applied = cluster.group(leader, GROUP).status().last_index;
    for id in cluster.nodes.keys() {
        let handle = cluster.group(*id, GROUP);
        eventually("applied and durable", || {
            let status = handle.status();
            (status.applied.map(|at| at.index) >= applied && status.durable_index >= applied).then_some(())
        })
        .await;
        cluster.flush(*id, GROUP).await;
    }
}

/// Little log is kept, and a snapshot takes three seconds.
fn slow(options: &mut evershard_raft::RaftOptions) {
    options.limits.retain_log_bytes = 32 * 1024;
    options.limits.snapshot_chunk_bytes = CHUNK;
    options.limits.snapshot_links_kept = Duration::from_secs(2);
    options.limits.snapshot_bytes_per_second = Some(1_000_000);
}

fn figures(cluster: &Cluster, id: u64) -> SnapshotFigures {
    cluster.nodes[&id].registry.snapshot_figures()
}

/// What a node has of snapshots on its disk: `outgoing` links, or `incoming` files.
fn snapshot_files(cluster: &Cluster, id: u64, kind: &str) -> usize {
    let folder = cluster.data(id).join(format!("{kind}/{GROUP}-{}", replica_id(GROUP, id)));
    std::fs::read_dir(&folder).map(|entries| entries.count()).unwrap_or(0)
}

async fn assert_nothing_left(cluster: &Cluster) {
    for id in cluster.nodes.keys() {
        for kind in ["outgoing", "incoming"] {
            eventually("snapshot folders are removed", || {
                (snapshot_files(cluster, *id, kind) == 0).then_some(())
            })
            .await;
        }
    }
}

/// After every chunk the connections break: what had arrived is never sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_cut_at_every_chunk_costs_no_chunk_that_arrived() {
    let (mut cluster, leader, sleeper) = with_sleeper(slow).await;
    let node = cluster.peers[&sleeper].address.trim_start_matches("http://").to_owned();
    let proxy = Proxy::start(node).await;
    let registry = Arc::clone(&cluster.nodes[&leader].registry);
    registry.learn_address(sleeper, &format!("http://{}", proxy.address));
    let passes = Arc::new(AtomicU64::new(0));
    let cuts = proxy.cuts.clone();
    let counted = Arc::clone(&passes);
    fail::cfg_callback("snapshot::mid_stream", move || {
        if counted.fetch_add(1, Ordering::SeqCst) < CHUNKS + 2 {
            let cuts = cuts.clone();
            // Between this chunk and the next, which the rate holds back for a quarter of a second.
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(120));
                cuts.send_modify(|number| *number += 1);
            });
        }
    })
    .expect("armed");
    cluster.restart(sleeper, &[GROUP]).await;
    assert_eq!(cluster.converge(GROUP).await, 21);
    fail::remove("snapshot::mid_stream");
    let figures = figures(&cluster, leader);
    assert_eq!(cluster.adder(sleeper, GROUP).installs(), 1, "{figures:?}");
    assert!(passes.load(Ordering::SeqCst) >= CHUNKS, "it was cut at every chunk");
    // What is under way when an attempt breaks off, four chunks at most, may be sent again. A cut between two chunks ends no
    // attempt: the next one goes out over a new connection.
    let again = figures.bytes_sent - FILE_BYTES;
    assert!(again <= figures.failed * 4 * CHUNK as u64 + CHUNK as u64, "{figures:?}");
    assert_nothing_left(&cluster).await;
}

/// The receiver ends in the middle, then the sender does; what had arrived by then is not sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transfer_goes_on_after_both_sides_restarted() {
    let (mut cluster, leader, sleeper) = with_sleeper(slow).await;
    cluster.restart(sleeper, &[GROUP]).await;
    eventually("a part was sent", || {
        (figures(&cluster, leader).bytes_sent >= 4 * CHUNK as u64).then_some(())
    })
    .await;
    assert_eq!(cluster.adder(sleeper, GROUP).installs(), 0);
    cluster.kill(sleeper).await;
    cluster.kill(leader).await;
    cluster.restart(leader, &[GROUP]).await;
    let now = cluster.wait_leader(GROUP).await;
    if now != leader {
        // Another sender would begin from nothing.
        let to = replica_id(GROUP, leader);
        cluster.group(now, GROUP).transfer_leader(to, Duration::from_secs(20)).await.expect("moves");
        cluster.wait_leader(GROUP).await;
    }
    cluster.restart(sleeper, &[GROUP]).await;
    assert_eq!(cluster.converge(GROUP).await, 21);
    assert_eq!(cluster.adder(sleeper, GROUP).installs(), 1);
    let figures = figures(&cluster, leader);
    assert!(figures.resumed >= 1 && figures.bytes_skipped >= CHUNK as u64, "{figures:?}");
    assert!(figures.bytes_sent < FILE_BYTES, "{figures:?}");
    assert_nothing_left(&cluster).await;
}

/// While a snapshot is sent, more is pushed and purged than is kept for followers: what follows the snapshot stays, so that
/// one is enough.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_behind_a_snapshot_is_kept_while_it_is_sent() {
    let (mut cluster, leader, sleeper) = with_sleeper(slow).await;
    cluster.restart(sleeper, &[GROUP]).await;
    eventually("it is being sent", || (figures(&cluster, leader).bytes_sent > 0).then_some(())).await;
    // Tries to reach it while it slept.
    let failed_before = figures(&cluster, leader).failed;
    let group = cluster.group(leader, GROUP);
    let mut pushed = 21;
    while figures(&cluster, leader).sent == 0 {
        for _ in 0..4 {
            group.propose(padded(1, 64 * 1024)).expect("admitted").await.expect("applied");
            pushed += 1;
        }
        let at = group.status();
        if at.durable_index == at.last_index
            && cluster.adder(leader, GROUP).flush(group.status().durable_index)
        {
            group.flushed();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(pushed > 40, "pushes went on: {pushed}");
    assert_eq!(cluster.converge(GROUP).await, pushed);
    assert_eq!(cluster.adder(sleeper, GROUP).installs(), 1);
    let figures = figures(&cluster, leader);
    // One whose log is purged meanwhile is never installed: another is sent in its place.
    assert_eq!((figures.sent, figures.failed), (1, failed_before), "one was enough: {figures:?}");
    // And it is let go afterwards.
    assert_nothing_left(&cluster).await;
    flush_all(&cluster, leader).await;
    let last = group.status().last_index.expect("entries");
    eventually("the log is purged again", || group.status().purged.filter(|at| at + 5 > last)).await;
}

/// Two followers need a snapshot of the same group at once. Both are sent one, of the same links, while one alone would not be
/// done; what breaks off one of the transfers is nothing to the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_receivers_at_once_both_get_through() {
    let (mut cluster, leader, sleepers) = with_sleepers(5, 2, slow).await;
    for sleeper in &sleepers {
        cluster.restart(*sleeper, &[GROUP]).await;
    }
    both_receive(&cluster, &sleepers).await;
    assert_eq!(snapshot_files(&cluster, leader, "outgoing"), 1, "one set of links for both");

    eventually("a part was sent", || {
        (figures(&cluster, leader).bytes_sent >= 6 * CHUNK as u64).then_some(())
    })
    .await;
    // One ends in the middle, and begins again; the other is sent the rest of its own.
    let (staying, leaving) = (sleepers[0], sleepers[1]);
    cluster.kill(leaving).await;
    cluster.restart(leaving, &[GROUP]).await;
    both_receive(&cluster, &sleepers).await;
    assert_eq!(cluster.converge(GROUP).await, 21);
    for sleeper in [staying, leaving] {
        assert_eq!(cluster.adder(sleeper, GROUP).installs(), 1, "node {sleeper}");
    }
    // The leader hears of an install after it.
    let figures =
        eventually("both were sent", || Some(figures(&cluster, leader)).filter(|figures| figures.sent == 2))
            .await;
    assert!(figures.bytes_sent + figures.bytes_skipped >= 2 * FILE_BYTES, "{figures:?}");
    assert_nothing_left(&cluster).await;
}

/// Waits until all of these have a part of a snapshot, and none has it whole.
async fn both_receive(cluster: &Cluster, receivers: &[u64]) {
    eventually("all receive at once", || {
        let mut states = receivers.iter().map(|id| {
            let is_whole = cluster.adder(*id, GROUP).installs() > 0;
            assert!(!is_whole, "node {id} was served before the others had begun");
            snapshot_files(cluster, *id, "incoming") > 0
        });
        states.all(|receives| receives).then_some(())
    })
    .await;
}
