//! A node kills itself in the middle of a write, wherever that hurts most, and comes back: nothing acknowledged is lost,
//! nothing is doubled, replicas are equal.

#![cfg(feature = "failpoints")]

mod support;

use std::time::Duration;

use support::laggard::{applied, is_left_behind, leave_behind};
use support::node::was_killed;
use support::pusher::{Load, Pusher, finish_all, wait_progress};
use support::trainer::Trainer;
use support::{Cluster, Options, PATIENCE};
use tokio::time::{Instant, sleep};

const DIM: usize = 64;
const VICTIM: u64 = 3;
/// Sent a snapshot by the victim, where that is the point.
const SLEEPER: u64 = 1;

fn options() -> Options {
    Options { shards: 2, ..Options::default() }
        .arg("--log-retain-bytes", 128 * 1024)
        .arg("--log-segment-bytes", 1 << 20)
        .arg("--flush-interval-ms", 200)
}

fn load() -> Load {
    Load { ids: 1024, rows_a_push: 64, ..Load::small("audit", DIM) }
}

/// What must happen for the victim to come to the point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// It follows while others push.
    Follow,
    /// It leads while others push.
    Lead,
    /// It votes.
    Vote,
    /// It slept through more than the retained log, and is sent a snapshot.
    CatchUp,
    /// It leads, and sends a snapshot to one that slept.
    SendSnapshot,
}

/// Kills the victim at the `pass`-th pass of `point`, starts it again, and looks at what is left.
async fn crash_at(point: &str, pass: u64, way: Way) {
    let mut cluster = Cluster::start(options()).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("audit", DIM).await;
    let pushers: Vec<Pusher> = (0..2).map(|seed| Pusher::start(cluster.endpoints(), load(), seed)).collect();
    wait_progress(&pushers, 10).await;
    let failpoints = format!("{point}=kill@{pass}");

    if way == Way::CatchUp {
        let then = applied(&cluster, VICTIM).await;
        cluster.kill(VICTIM);
        leave_behind(&cluster, &then).await;
        cluster.node_mut(VICTIM).start(Some(&failpoints));
    } else {
        cluster.kill(VICTIM);
        cluster.node_mut(VICTIM).start(Some(&failpoints));
        provoke(&mut cluster, way).await;
    }
    wait_for_crash(&mut cluster, point, way).await;
    // The victim may have crashed before or after the sleeper was woken.
    if !cluster.node(SLEEPER).is_running() {
        cluster.restart(SLEEPER);
    }
    cluster.restart(VICTIM);
    cluster.wait_ready().await;
    cluster.wait_caught_up().await;
    wait_progress(&pushers, 5).await;

    let ledger = finish_all(pushers).await;
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
    cluster.assert_replicas_equal().await;
    // It can lead with what it has now.
    cluster.transfer(0, VICTIM).await;
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
}

/// Brings the victim into the role in which it comes to the point. It may crash at any moment.
async fn provoke(cluster: &mut Cluster, way: Way) {
    if way != Way::SendSnapshot {
        return;
    }
    lead_everything(cluster).await;
    let then = applied(cluster, SLEEPER).await;
    cluster.kill(SLEEPER);
    // It begins to send as soon as the sleeper lacks more than is retained: then it crashes, and without a quorum nobody
    // gets any further.
    let deadline = Instant::now() + PATIENCE;
    while let Err(missing) = is_left_behind(cluster, &then).await {
        if cluster.node_mut(VICTIM).has_ended() {
            return;
        }
        assert!(Instant::now() < deadline, "the sleeper could still be served from the log: {missing}");
        sleep(Duration::from_millis(10)).await;
    }
    // A snapshot is sent by a leader: the victim still is one, or nobody comes to the point.
    lead_everything(cluster).await;
    cluster.node_mut(SLEEPER).start(None);
}

/// Makes the victim lead all shards, unless it has crashed.
async fn lead_everything(cluster: &mut Cluster) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if cluster.node_mut(VICTIM).has_ended() {
            return;
        }
        let mut missing = 0;
        for shard in cluster.shards() {
            if cluster.leader_now(shard).await != Some(VICTIM) {
                missing += 1;
                ask_to_lead(cluster, shard, VICTIM).await;
            }
        }
        if missing == 0 {
            return;
        }
        assert!(Instant::now() < deadline, "node {VICTIM} does not become the leader");
        sleep(Duration::from_millis(200)).await;
    }
}

async fn ask_to_lead(cluster: &Cluster, shard: u32, to_node: u64) {
    let request = evershard_proto::v1::TransferLeaderRequest { shard, to_node };
    // A refusal is as good as a crash: it is asked again.
    let _ = cluster.admin(1).transfer_leader(request).await;
}

/// Waits for the victim to kill itself, moving leaderships about when the point needs that.
async fn wait_for_crash(cluster: &mut Cluster, point: &str, way: Way) {
    let deadline = Instant::now() + PATIENCE;
    let mut turn = 0u64;
    while Instant::now() < deadline {
        if let Some(status) = cluster.node_mut(VICTIM).poll_end() {
            assert!(
                was_killed(status),
                "ended with {status} instead; log:\n{}",
                cluster.node(VICTIM).log_tail()
            );
            assert!(
                cluster.node(VICTIM).log_contains(&format!("failpoint {point}")),
                "killed, but not at {point}; log:\n{}",
                cluster.node(VICTIM).log_tail()
            );
            return;
        }
        match way {
            Way::Vote => {
                turn += 1;
                for shard in cluster.shards() {
                    ask_to_lead(cluster, shard, 1 + turn % 2).await;
                }
            }
            Way::Lead => {
                for shard in cluster.shards() {
                    if cluster.leader_now(shard).await != Some(VICTIM) {
                        ask_to_lead(cluster, shard, VICTIM).await;
                    }
                }
            }
            Way::Follow | Way::CatchUp | Way::SendSnapshot => {}
        }
        sleep(Duration::from_millis(100)).await;
    }
    panic!("node {VICTIM} never came to {point}; its log:\n{}", cluster.node(VICTIM).log_tail());
}

macro_rules! crash_points {
    ($($name:ident: $point:literal, $pass:literal, $way:ident;)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                crash_at($point, $pass, Way::$way).await;
            }
        )*
    };
}

crash_points! {
    append_before_write_as_follower: "append::before_write", 40, Follow;
    append_before_write_as_leader: "append::before_write", 60, Lead;
    append_before_sync_as_follower: "append::before_sync", 40, Follow;
    append_before_sync_as_leader: "append::before_sync", 60, Lead;
    append_after_sync_as_leader: "append::after_sync", 60, Lead;
    save_vote_before_sync: "save_vote::before_sync", 2, Vote;
    roll_before_switch: "roll::before_switch", 2, Follow;
    purge_before_sync: "purge::before_sync", 2, Follow;
    flush_before_complete_at: "flush::before_complete_at", 3, Follow;
    flush_before_ingest: "flush::before_ingest", 3, Follow;
    flush_before_meta: "flush::before_meta", 3, Follow;
    flush_after_meta: "flush::after_meta", 3, Follow;
    flush_before_meta_as_leader: "flush::before_meta", 4, Lead;
    durable_file_before_rename: "durable_file::before_rename", 20, Follow;
    durable_file_before_sync_folder: "durable_file::before_sync_folder", 20, Follow;
    snapshot_before_install: "snapshot::before_install", 1, CatchUp;
    snapshot_after_install: "snapshot::after_install", 1, CatchUp;
    install_before_move: "install::before_move", 1, CatchUp;
    install_before_swap: "install::before_swap", 1, CatchUp;
    install_after_swap: "install::after_swap", 1, CatchUp;
    snapshot_after_link: "snapshot::after_link", 1, SendSnapshot;
    snapshot_mid_stream: "snapshot::mid_stream", 1, SendSnapshot;
}
