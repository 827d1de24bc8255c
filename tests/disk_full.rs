//! A full disk (bytes or inodes) costs no acknowledged push and no process: pushes are refused where there is no room and
//! go on where there is, pulls go on everywhere, and everything resumes by itself when space is back.

mod support;

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use evershard_proto::v1::{DiskStatus, ErrorDetail, ErrorKind};
use prost::Message;
use support::pusher::{Load, Pusher, finish_all, wait_progress};
use support::small_disk::SmallDisk;
use support::trainer::{Table, Trainer};
use support::{Cluster, Options, eventually, raw};

const DIM: usize = 64;
const VICTIM: u64 = 1;
const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 128 * MIB;
const INODES: u64 = 2000;

fn options() -> Options {
    Options { shards: 2, ..Options::default() }
        .arg("--log-segment-bytes", MIB)
        .arg("--log-retain-bytes", 256 * 1024)
        .arg("--flush-interval-ms", 200)
}

type Mount = fn(&Path, u64, u64) -> Option<SmallDisk>;

fn load() -> Load {
    Load { ids: 1024, rows_a_push: 64, ..Load::small("audit", DIM) }
}

/// A cluster of which some nodes have small disks, under load.
struct Run {
    cluster: Cluster,
    table: Table,
    pushers: Vec<Pusher>,
    // Last: the servers end before their disks go.
    disks: Vec<SmallDisk>,
}

impl Run {
    /// `None` where no disk can be mounted.
    async fn start(small: &[u64]) -> Option<Self> {
        Self::under(load(), small).await
    }

    async fn under(load: Load, small: &[u64]) -> Option<Self> {
        Self::on(SmallDisk::mount, load, small).await
    }

    async fn on(mount: Mount, load: Load, small: &[u64]) -> Option<Self> {
        let mut cluster = Cluster::prepare(options()).await;
        let mut disks = Vec::new();
        for id in small {
            disks.push(mount(&cluster.node(*id).data(), DISK_BYTES, INODES)?);
        }
        cluster.start_all();
        cluster.create().await;
        cluster.wait_ready().await;
        let trainer = Trainer::connect(&cluster.endpoints()).await;
        let table = trainer.integers("audit", DIM).await;
        let pushers: Vec<Pusher> =
            (0..2).map(|seed| Pusher::start(cluster.endpoints(), load.clone(), seed)).collect();
        wait_progress(&pushers, 10).await;
        Some(Run { cluster, table, pushers, disks })
    }

    async fn disk(&self, id: u64) -> Result<DiskStatus, String> {
        let status = self.cluster.status(id).await.ok_or("no answer")?;
        status.disk.ok_or_else(|| "no disk".to_owned())
    }

    async fn wait_low(&self, id: u64, low: bool) {
        eventually(&format!("node {id} notices"), || async {
            let disk = self.disk(id).await?;
            if disk.low == low { Ok(()) } else { Err(format!("{disk:?}")) }
        })
        .await;
    }

    /// The victim leads nothing any more, the meta group neither.
    async fn wait_led_by_others(&self) {
        eventually("leadership moves to nodes with room", || async {
            let status = self.cluster.status(VICTIM).await.ok_or("no answer")?;
            match status.replicas.iter().find(|r| r.role == "leader") {
                Some(leader) => Err(format!("{leader:?}")),
                None => Ok(()),
            }
        })
        .await;
        for shard in self.cluster.shards() {
            assert_ne!(self.cluster.leader_of(shard).await, VICTIM);
        }
    }

    /// Space is back: all go on, and nothing is missing or doubled.
    async fn finish(mut self) {
        self.cluster.wait_ready().await;
        wait_progress(&self.pushers, 10).await;
        self.cluster.wait_caught_up().await;
        let ledger = finish_all(self.pushers.drain(..)).await;
        ledger.assert_matches(&self.table.pull(&ledger.ids()).await.unwrap(), DIM);
        self.cluster.assert_replicas_equal().await;
        // The disk is written again by everybody.
        for id in self.cluster.ids() {
            eventually(&format!("node {id} flushes"), || async {
                let status = self.cluster.status(id).await.ok_or("no answer")?;
                match status.replicas.iter().find(|r| r.group != 0 && r.flushed < r.applied) {
                    Some(behind) => Err(format!("{behind:?}")),
                    None => Ok(()),
                }
            })
            .await;
        }
        self.cluster.transfer(0, VICTIM).await;
        ledger.assert_matches(&self.table.pull(&ledger.ids()).await.unwrap(), DIM);
    }

    fn assert_running(&mut self) {
        for id in self.cluster.ids() {
            let node = self.cluster.node_mut(id);
            assert!(!node.has_ended(), "node {id} ended; its log:\n{}", node.log_tail());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_loses_its_leaderships_and_pushes_go_on() {
    let Some(mut run) = Run::start(&[VICTIM]).await else { return };
    run.cluster.transfer(0, VICTIM).await;
    run.cluster.transfer(1, VICTIM).await;
    run.disks[0].fill(4 * MIB);
    run.wait_low(VICTIM, true).await;
    run.wait_led_by_others().await;
    wait_progress(&run.pushers, 50).await;
    let metrics = run.cluster.node(VICTIM).http("/metrics").await;
    assert!(metrics.contains("evershard_disk_low 1"), "{metrics}");
    assert!(metrics.contains("evershard_disk_free_bytes"), "{metrics}");

    // To the last byte: the follower's log has nothing but what it reserved.
    run.disks[0].fill(0);
    eventually("the reserve is used up", || async {
        wait_progress(&run.pushers, 20).await;
        let answer = run.cluster.node(VICTIM).http("/readyz").await;
        if answer.contains("503") && answer.contains("reserve") { Ok(()) } else { Err(answer) }
    })
    .await;
    wait_progress(&run.pushers, 50).await;
    run.assert_running();
    let status = run.cluster.status(VICTIM).await.unwrap();
    assert!(status.replicas.iter().all(|r| r.role == "follower"), "it follows: {status:?}");
    // And it votes, because what it has left was kept from pushes: with the leader gone, only its vote makes another.
    for shard in run.cluster.shards() {
        run.cluster.transfer(shard, 2).await;
    }
    run.cluster.kill(2);
    for shard in run.cluster.shards() {
        assert_eq!(run.cluster.leader_of(shard).await, 3);
    }
    run.cluster.restart(2);
    wait_progress(&run.pushers, 20).await;
    run.assert_running();

    run.disks[0].empty();
    run.wait_low(VICTIM, false).await;
    run.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_every_disk_full_pulls_go_on_and_pushes_wait() {
    let Some(run) = Run::start(&[1, 2, 3]).await else { return };
    for disk in &run.disks {
        disk.fill(4 * MIB);
    }
    pulls_go_on_and_pushes_wait(run, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_every_disk_out_of_inodes_pulls_go_on_and_pushes_wait() {
    let Some(run) = Run::on(SmallDisk::mount_ext4, load(), &[1, 2, 3]).await else { return };
    for disk in &run.disks {
        disk.fill_inodes(0);
    }
    for id in run.cluster.ids() {
        run.wait_low(id, true).await;
        let disk = run.disk(id).await.unwrap();
        assert!(
            disk.free_bytes >= disk.low_water_bytes && disk.free_inodes < disk.low_water_inodes,
            "{disk:?}"
        );
    }
    pulls_go_on_and_pushes_wait(run, false).await;
}

/// `restarts`: whether what is left of the disks is enough to open a replica.
async fn pulls_go_on_and_pushes_wait(mut run: Run, restarts: bool) {
    for id in run.cluster.ids() {
        run.wait_low(id, true).await;
    }
    // Told to whoever asks, with the disk's name and when to come back.
    let session = raw::RawSession::open(&run.cluster).await;
    let (id, taken) = (1_000_000, AtomicU64::new(0));
    let number = run.table.table.number();
    let shard = raw::shard_of(&run.cluster, number, id).await;
    let refused = eventually("a push is refused", || async {
        let leader = run.cluster.leader_of(shard.shard).await;
        let seq = taken.load(Ordering::SeqCst) + 1;
        let body = raw::body(session.number, seq, number, DIM as u32, &[id], &[1.0; DIM]);
        match raw::push(&run.cluster, leader, shard.group, body).await {
            // It is a moment from noticing to refusing.
            Ok(_) => {
                taken.store(seq, Ordering::SeqCst);
                Err("taken".to_owned())
            }
            Err(status) if raw::kind(&status) == ErrorKind::Exhausted => Ok(status),
            Err(status) => Err(status.to_string()),
        }
    })
    .await;
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
    assert!(refused.message().contains("low-water mark") && refused.message().contains("data"), "{refused}");
    let detail = ErrorDetail::decode(refused.details()).unwrap();
    assert!(detail.retry_after_ms > 0, "{detail:?}");
    // Nobody gets further; everybody waits, and reads.
    let acknowledged: Vec<u64> = run.pushers.iter().map(Pusher::acknowledged).collect();
    let ids: Vec<u64> = (0..1024).collect();
    for _ in 0..20 {
        run.table.pull(&ids).await.unwrap();
    }
    let now: Vec<u64> = run.pushers.iter().map(Pusher::acknowledged).collect();
    assert!(
        now.iter().zip(&acknowledged).all(|(now, before)| *now <= before + 1),
        "{acknowledged:?}, {now:?}"
    );
    // A leader can be elected, and tables be made, from what was reserved.
    if restarts {
        run.cluster.kill(VICTIM);
        run.cluster.restart(VICTIM);
        run.cluster.wait_ready().await;
        run.table.pull(&ids).await.unwrap();
    }
    run.assert_running();

    for disk in &run.disks {
        disk.empty();
    }
    // The number that was refused was not used up.
    let seq = taken.load(Ordering::SeqCst) + 1;
    let body = raw::body(session.number, seq, number, DIM as u32, &[id], &[1.0; DIM]);
    eventually("the refused number is taken", || async {
        let leader = run.cluster.leader_of(shard.shard).await;
        raw::push(&run.cluster, leader, shard.group, body.clone()).await.map_err(|status| status.to_string())
    })
    .await;
    let row = run.table.pull(&[id]).await.unwrap();
    assert_eq!(row, vec![-(seq as f32); DIM]);
    run.finish().await;
}

/// A node below its mark votes, but where another could lead it does not even try: leaders die again and again, and it never
/// has a leadership to give away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_stands_for_no_election() {
    // Slowly: what is left of the disk must hold the log for as long as this takes, or the node could not keep up any more.
    let load = Load { pause: Duration::from_millis(50), ..Load::small("audit", DIM) };
    let Some(mut run) = Run::under(load, &[VICTIM]).await else { return };
    run.disks[0].fill(8 * MIB);
    run.wait_low(VICTIM, true).await;
    run.wait_led_by_others().await;
    run.cluster.wait_caught_up().await;
    let handed_over = |run: &Run| {
        let log = std::fs::read_to_string(run.cluster.node(VICTIM).log()).unwrap();
        log.matches("the disk is full: leadership is handed over").count()
    };
    let before = handed_over(&run);
    for turn in 0..6 {
        let (dies, lives) = if turn % 2 == 0 { (2, 3) } else { (3, 2) };
        for shard in run.cluster.shards() {
            run.cluster.transfer(shard, dies).await;
        }
        run.cluster.kill(dies);
        for shard in run.cluster.shards() {
            assert_eq!(run.cluster.leader_of(shard).await, lives, "shard {shard}");
        }
        wait_progress(&run.pushers, 5).await;
        run.cluster.restart(dies);
        run.cluster.wait_ready().await;
        run.cluster.wait_caught_up().await;
    }
    assert_eq!(handed_over(&run), before, "it led: {}", run.cluster.node(VICTIM).log_tail());
    run.disks[0].empty();
    run.wait_low(VICTIM, false).await;
    run.finish().await;
}

/// Two followers below their marks would be needed for the quorum: what they have left is not for pushes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_with_room_takes_no_push_that_only_full_disks_could_keep() {
    let Some(run) = Run::start(&[1, 2]).await else { return };
    for disk in &run.disks {
        disk.fill(4 * MIB);
    }
    eventually("node 3 leads, and refuses", || async {
        for shard in run.cluster.shards() {
            let leader = run.cluster.leader_of(shard).await;
            if leader != 3 {
                return Err(format!("node {leader} leads shard {shard}"));
            }
        }
        let before: Vec<u64> = run.pushers.iter().map(Pusher::acknowledged).collect();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let now: Vec<u64> = run.pushers.iter().map(Pusher::acknowledged).collect();
        if now == before { Ok(()) } else { Err(format!("{before:?}, {now:?}")) }
    })
    .await;
    let number = run.table.table.number();
    let session = raw::RawSession::open(&run.cluster).await;
    let shard = raw::shard_of(&run.cluster, number, 7).await;
    let body = raw::body(session.number, 1, number, DIM as u32, &[7], &[1.0; DIM]);
    let refused = raw::push(&run.cluster, 3, shard.group, body).await.unwrap_err();
    assert_eq!(raw::kind(&refused), ErrorKind::Exhausted, "{refused}");
    assert!(
        refused.message().contains("node 1 has") && refused.message().contains("node 2 has"),
        "{refused}"
    );
    run.table.pull(&[7]).await.unwrap();
    // One of them is enough.
    run.disks[0].empty();
    wait_progress(&run.pushers, 20).await;
    run.disks[1].empty();
    run.wait_low(2, false).await;
    run.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_without_inodes_is_full_too() {
    let Some(mut run) = Run::start(&[VICTIM]).await else { return };
    run.cluster.transfer(0, VICTIM).await;
    run.disks[0].fill_inodes(20);
    run.wait_low(VICTIM, true).await;
    run.wait_led_by_others().await;
    run.disks[0].fill_inodes(0);
    wait_progress(&run.pushers, 200).await;
    run.assert_running();
    run.disks[0].empty();
    run.wait_low(VICTIM, false).await;
    run.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_starts_on_a_full_disk() {
    let Some(run) = Run::start(&[VICTIM]).await else { return };
    starts_on(run, |disk| disk.fill(0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_starts_on_a_disk_without_inodes() {
    let Some(run) = Run::on(SmallDisk::mount_ext4, load(), &[VICTIM]).await else { return };
    starts_on(run, |disk| disk.fill_inodes(0)).await;
}

async fn starts_on(mut run: Run, fill: fn(&SmallDisk)) {
    run.cluster.kill(VICTIM);
    fill(&run.disks[0]);
    wait_progress(&run.pushers, 10).await;
    run.cluster.restart(VICTIM);
    run.wait_low(VICTIM, true).await;
    wait_progress(&run.pushers, 30).await;
    // Nothing piles up, nothing is lost, and it is killed once more.
    run.assert_running();
    run.cluster.kill(VICTIM);
    run.cluster.restart(VICTIM);
    run.wait_low(VICTIM, true).await;
    run.disks[0].empty();
    run.wait_low(VICTIM, false).await;
    run.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_node_on_a_full_disk_says_so() {
    let cluster = Cluster::prepare(options()).await;
    let node = cluster.node(VICTIM);
    let Some(disk) = SmallDisk::mount(&node.data(), MIB, 100) else { return };
    disk.fill(0);
    let ended = node.command(None).output().unwrap();
    assert!(!ended.status.success());
    assert!(node.log_contains("is full (0 bytes and"), "{}", node.log_tail());
    assert!(node.log_contains(&node.data().display().to_string()), "{}", node.log_tail());
}
