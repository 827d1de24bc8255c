//! A disk that hangs, fails a sync, or gives back other bytes than it was given, while its node runs: the cluster goes on
//! with exact sums, and the node does what is right by itself.

#![cfg(feature = "failpoints")]

mod support;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;

use support::frozen_disk::FrozenDisk;
use support::laggard::{applied, leave_behind};
use support::ledger::Ledger;
use support::pusher::{Load, Pusher, finish_all, wait_progress};
use support::trainer::{Table, Trainer};
use support::{Cluster, Options, eventually};

const DIM: usize = 64;
const VICTIM: u64 = 3;
const MIB: u64 = 1 << 20;

/// A cluster under load whose victim leads everything.
struct Run {
    cluster: Cluster,
    table: Table,
    pushers: Vec<Pusher>,
    /// What was acknowledged to pushers that have ended.
    ledger: Ledger,
}

impl Run {
    async fn start(options: Options, failpoints: Option<&str>) -> Self {
        let mut cluster = Cluster::start(Options { shards: 2, ..options }).await;
        if failpoints.is_some() {
            cluster.kill(VICTIM);
            cluster.node_mut(VICTIM).start(failpoints);
            cluster.wait_ready().await;
        }
        Self::over(cluster).await
    }

    async fn over(cluster: Cluster) -> Self {
        let trainer = Trainer::connect(&cluster.endpoints()).await;
        let table = trainer.integers("audit", DIM).await;
        let mut run = Run { cluster, table, pushers: Vec::new(), ledger: Ledger::default() };
        run.push().await;
        run
    }

    /// The victim's disk is a file system that can really be frozen. `None`, and says why, where that cannot be.
    async fn on_freezable_disk() -> Option<(Self, FrozenDisk)> {
        if support::setting("EVERSHARD_TEST_FREEZE", 0) == 0 {
            eprintln!("skipped: EVERSHARD_TEST_FREEZE is not set");
            return None;
        }
        let options = Options { shards: 2, ..Options::default() }.arg("--disk-stall-ms", 1000);
        let mut cluster = Cluster::prepare(options).await;
        let disk = FrozenDisk::mount(&cluster.node(VICTIM).data())?;
        cluster.start_all();
        cluster.create().await;
        cluster.wait_ready().await;
        Some((Self::over(cluster).await, disk))
    }

    /// From now on there are pushes.
    async fn push(&mut self) {
        let load = Load { ids: 1024, rows_a_push: 64, ..Load::small("audit", DIM) };
        let pushers = (0..2).map(|seed| Pusher::start(self.cluster.endpoints(), load.clone(), seed));
        self.pushers = pushers.collect();
        wait_progress(&self.pushers, 10).await;
    }

    /// From now on there are none.
    async fn rest(&mut self) {
        let ledger = finish_all(self.pushers.drain(..)).await;
        self.ledger.merge(&ledger);
        self.cluster.wait_caught_up().await;
    }

    async fn assert_exact(&self) {
        self.ledger.assert_matches(&self.table.pull(&self.ledger.ids()).await.unwrap(), DIM);
    }

    /// The victim says that it is not ready because its disk does not answer, and leads nothing any more.
    async fn wait_gives_way(&self) {
        eventually("it says so", || async {
            let ready = self.cluster.node(VICTIM).http("/readyz").await;
            let said = ready.contains("503") && ready.contains("has waited for its disk");
            if said { Ok(()) } else { Err(ready) }
        })
        .await;
        for shard in self.cluster.shards() {
            eventually("another leads", || async {
                let now = self.cluster.leader_now(shard).await.filter(|id| *id != VICTIM);
                now.ok_or_else(|| "not yet".to_owned())
            })
            .await;
        }
    }

    async fn lead_all(&self) {
        for shard in self.cluster.shards() {
            self.cluster.transfer(shard, VICTIM).await;
        }
    }

    /// The term of each shard's leader.
    async fn terms(&self) -> Vec<u64> {
        let mut terms = Vec::new();
        for shard in self.cluster.shards() {
            let leader = self.cluster.leader_of(shard).await;
            let replica = self.cluster.replica(leader, shard).await.expect("it answers");
            terms.push(replica.term);
        }
        terms
    }

    async fn finish(mut self) {
        self.cluster.wait_ready().await;
        wait_progress(&self.pushers, 10).await;
        self.rest().await;
        self.assert_exact().await;
        self.cluster.assert_replicas_equal().await;
        self.cluster.transfer(0, VICTIM).await;
        self.assert_exact().await;
    }
}

/// A new cluster of which every shard's first election came off: with timers as slow as these there is no second one within the
/// patience of a test. A first election is lost when the others have not made their replicas yet.
async fn with_leaders(options: Options, victims_failpoints: &str) -> Cluster {
    for _ in 0..10 {
        // Not restarted: nodes would neither vote nor stand for as long.
        let mut cluster = Cluster::prepare(options.clone()).await;
        for id in cluster.ids() {
            cluster.node_mut(id).start((id == VICTIM).then_some(victims_failpoints));
        }
        cluster.create().await;
        if tokio::time::timeout(support::PATIENCE / 6, cluster.wait_ready()).await.is_ok() {
            return cluster;
        }
    }
    panic!("no cluster has a leader of every shard at once");
}

/// Heartbeats go on while the disk of their sender hangs: nobody else would notice. Here nobody else could take over either:
/// no follower stands for election within the patience of a test, so leadership moves by being handed over, or not at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_on_a_hung_disk_hands_over() {
    let elsewhere = tempfile::tempdir().unwrap();
    let hang = elsewhere.path().join("hang");
    let held =
        ["append::before_sync", "save_vote::before_sync"].map(|p| format!("{p}=hang@{}", hang.display()));
    let patience_ms = u64::try_from(support::PATIENCE.as_millis()).unwrap();
    let options = Options { shards: 2, ..Options::default() }
        .arg("--disk-stall-ms", 500)
        .arg("--election-min-ms", 2 * patience_ms)
        .arg("--election-max-ms", 3 * patience_ms);
    let run = Run::over(with_leaders(options, &held.join(";")).await).await;
    for round in 1..=2 {
        run.lead_all().await;
        wait_progress(&run.pushers, 10).await;
        let terms = run.terms().await;
        std::fs::write(&hang, "").unwrap();
        // Exact sums at the end say that this was right; here only that it went on.
        wait_progress(&run.pushers, 50).await;
        for shard in run.cluster.shards() {
            eventually("another leads", || async {
                let now = run.cluster.leader_now(shard).await.filter(|id| *id != VICTIM);
                now.ok_or_else(|| "not yet".to_owned())
            })
            .await;
        }
        let victim = run.cluster.node(VICTIM);
        let ready = victim.http("/readyz").await;
        assert!(ready.contains("503") && ready.contains("has waited for its disk"), "{ready}");
        let metrics = victim.http("/metrics").await;
        assert!(metrics.contains("evershard_log_stalled 1"), "{metrics}");
        let said = handed_over(victim);
        assert!(said >= round * run.cluster.shards().len(), "{said} times; {}", victim.log_tail());
        let now = run.terms().await;
        assert!(terms.iter().zip(&now).all(|(before, now)| *now == before + 1), "{terms:?}, {now:?}");
        std::fs::remove_file(&hang).unwrap();
        run.cluster.wait_ready().await;
        run.cluster.wait_caught_up().await;
        let ready = run.cluster.node(VICTIM).http("/readyz").await;
        assert!(ready.contains("200"), "{ready}");
    }
    run.finish().await;
}

/// How often a node has said that it hands a shard over because its disk hangs. How that ended it cannot know before its disk
/// goes on: a new leader's vote is for the disk too.
fn handed_over(node: &support::node::Node) -> usize {
    let log = std::fs::read_to_string(node.log()).unwrap();
    log.matches("the disk is hung: leadership is handed over").count()
}

/// Nobody pushes, so nobody waits for the disk, and the log least of all: the probe does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_whose_disk_hangs_hands_over_though_nobody_pushes() {
    let elsewhere = tempfile::tempdir().unwrap();
    let hang = elsewhere.path().join("hang");
    let held = format!("disk_probe::before_asking=hang@{}", hang.display());
    let patience_ms = u64::try_from(support::PATIENCE.as_millis()).unwrap();
    let options = Options { shards: 2, ..Options::default() }
        .arg("--disk-stall-ms", 500)
        .arg("--election-min-ms", 2 * patience_ms)
        .arg("--election-max-ms", 3 * patience_ms);
    let mut run = Run::over(with_leaders(options, &held).await).await;
    run.rest().await;
    run.lead_all().await;
    std::fs::write(&hang, "").unwrap();
    run.wait_gives_way().await;
    let metrics = run.cluster.node(VICTIM).http("/metrics").await;
    assert!(metrics.contains("evershard_disk_stalled 1"), "{metrics}");
    assert!(metrics.contains("evershard_log_stalled 0"), "{metrics}");
    assert!(handed_over(run.cluster.node(VICTIM)) >= run.cluster.shards().len());
    run.assert_exact().await;
    std::fs::remove_file(&hang).unwrap();
    run.cluster.wait_ready().await;
    let ready = run.cluster.node(VICTIM).http("/readyz").await;
    assert!(ready.contains("200"), "{ready}");
    run.push().await;
    run.finish().await;
}

/// The same with a file system that really hangs: for `make chaos`, as root.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_on_a_frozen_file_system_gives_way_though_nobody_pushes() {
    let Some((mut run, disk)) = Run::on_freezable_disk().await else { return };
    for _ in 0..2 {
        run.rest().await;
        run.lead_all().await;
        disk.freeze();
        run.wait_gives_way().await;
        // By those that lead now, while it still hangs.
        run.assert_exact().await;
        disk.thaw();
        run.cluster.wait_ready().await;
        run.push().await;
        run.cluster.wait_caught_up().await;
    }
    run.finish().await;
}

/// The same under load, with a file system that really hangs: for `make chaos`, as root. What writes to it cannot even be killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_on_a_frozen_file_system_gives_way() {
    let Some((run, disk)) = Run::on_freezable_disk().await else { return };
    for _ in 0..3 {
        run.lead_all().await;
        wait_progress(&run.pushers, 10).await;
        disk.freeze();
        wait_progress(&run.pushers, 50).await;
        // Followers commit without it: what goes on says nothing yet.
        run.wait_gives_way().await;
        wait_progress(&run.pushers, 20).await;
        disk.thaw();
        run.cluster.wait_ready().await;
        run.cluster.wait_caught_up().await;
    }
    run.finish().await;
}

/// Nothing is acknowledged after a failed sync, which would lie if it were asked again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_sync_ends_the_node_at_once() {
    let mut run = Run::start(Options::default(), Some("log::sync_error=fail-after@400")).await;
    run.lead_all().await;
    let ended = loop {
        if let Some(ended) = run.cluster.node_mut(VICTIM).poll_end() {
            break ended;
        }
        wait_progress(&run.pushers, 1).await;
    };
    assert_eq!(ended.code(), Some(74), "{ended}");
    let node = run.cluster.node(VICTIM);
    let said = "fatal: cannot write or sync";
    assert!(node.log_contains(said) && node.log_contains("os error 5"), "{}", node.log_tail());
    assert!(node.log_contains(&node.data().join("log").display().to_string()), "{}", node.log_tail());
    wait_progress(&run.pushers, 30).await;
    run.cluster.restart(VICTIM);
    run.finish().await;
}

/// Not only the log: whatever the node must be able to rely on after a crash.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_sync_of_anything_else_ends_the_node_too() {
    let options = Options::default()
        .arg("--log-retain-bytes", 256 * 1024)
        .arg("--log-segment-bytes", MIB)
        .arg("--flush-interval-ms", 100);
    let mut run = Run::start(options, None).await;
    for shard in run.cluster.shards() {
        run.cluster.transfer(shard, 1).await;
    }
    // A file that is received, and the state of the meta group.
    for part in ["incoming", "meta-state"] {
        let then = applied(&run.cluster, VICTIM).await;
        run.cluster.kill(VICTIM);
        if part == "incoming" {
            leave_behind(&run.cluster, &then).await;
        }
        run.cluster.node_mut(VICTIM).start(Some(&format!("disk::sync_error=fail-in@{part}")));
        let trainer = Trainer::connect(&run.cluster.endpoints()).await;
        let ended = loop {
            if let Some(ended) = run.cluster.node_mut(VICTIM).poll_end() {
                break ended;
            }
            // The meta group has something to write down.
            trainer.integers(&format!("{part}-{}", rand::random::<u32>()), 1).await;
            wait_progress(&run.pushers, 1).await;
        };
        assert_eq!(ended.code(), Some(74), "{part}: {ended}");
        let node = run.cluster.node(VICTIM);
        let said = node.log_tail();
        let is_it = |line: &str| {
            line.contains("fatal: cannot write or sync") && line.contains(part) && line.contains("os error 5")
        };
        assert!(said.lines().any(is_it), "{part}: {said}");
        run.cluster.restart(VICTIM);
        run.cluster.wait_ready().await;
        run.cluster.wait_caught_up().await;
    }
    run.finish().await;
}

/// What a flush finds while the log is still replayed counts too: nothing that is damaged begins to serve.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_is_found_damaged_while_it_opens_is_lost() {
    let elsewhere = tempfile::tempdir().unwrap();
    let hang = elsewhere.path().join("hang");
    let mut run = Run::start(Options::default().arg("--flush-interval-ms", 100), None).await;
    let before = replicas(&run.cluster).await;
    run.cluster.kill(VICTIM);
    wait_progress(&run.pushers, 10).await;
    std::fs::write(&hang, "").unwrap();
    let failpoints =
        format!("store::lost_runs=fail@1;replica_start::before_it_counts=hang@{}", hang.display());
    run.cluster.node_mut(VICTIM).start(Some(&failpoints));
    eventually("its flush finds the damage", || async {
        let node = run.cluster.node(VICTIM);
        if node.log_contains("cannot be flushed any more") { Ok(()) } else { Err(node.log_tail()) }
    })
    .await;
    std::fs::remove_file(&hang).unwrap();
    let lost = wait_lost(&run.cluster, &before).await;
    assert_eq!(lost.len(), 1, "{lost:?} of {before:?}");
    wait_replaced(&run.cluster, &lost).await;
    let node = run.cluster.node(VICTIM);
    assert!(node.log_contains("a failpoint says that runs are lost"), "{}", node.log_tail());
    run.finish().await;
}

/// The leader of a follower that slept reads what it sends from its disk: and finds other bytes there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_that_a_leader_meets_while_it_runs_costs_its_replicas_only() {
    let elsewhere = tempfile::tempdir().unwrap();
    let config = elsewhere.path().join("node.toml");
    // So that nothing is read from memory.
    std::fs::write(&config, "log_cache_bytes = 4096\n").unwrap();
    let options =
        Options::default().arg("--log-segment-bytes", MIB).arg("--config", config.display().to_string());
    let mut run = Run::start(options, None).await;
    run.lead_all().await;
    let before = replicas(&run.cluster).await;
    run.cluster.kill(1);
    let first = run.cluster.node(VICTIM).log_segments().len();
    eventually("two segments more", || async {
        wait_progress(&run.pushers, 10).await;
        let now = run.cluster.node(VICTIM).log_segments().len();
        if now > first + 2 { Ok(()) } else { Err(format!("{first}, {now}")) }
    })
    .await;
    run.lead_all().await;
    let all = run.cluster.node(VICTIM).log_segments();
    // Written while the other slept, and not the one being written.
    let path = &all[all.len() - 3];
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    for offset in (64 * 1024..file.metadata().unwrap().len()).step_by(16 * 1024) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 0x40], offset).unwrap();
    }
    let pid = run.cluster.node(VICTIM).pid();
    run.cluster.restart(1);
    let lost = wait_lost(&run.cluster, &before).await;
    wait_replaced(&run.cluster, &lost).await;
    assert!(!run.cluster.node_mut(VICTIM).has_ended());
    let node = run.cluster.node(VICTIM);
    assert_eq!(node.pid(), pid, "the node went on");
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    assert!(node.log_contains("replica quarantined") && node.log_contains(&name), "{}", node.log_tail());
    run.finish().await;
}

/// Waits until the victim has other replicas than before, and tells which are gone.
async fn wait_lost(cluster: &Cluster, before: &BTreeMap<u64, u64>) -> BTreeMap<u64, u64> {
    eventually("a damaged replica is replaced", || async {
        let after = replicas(cluster).await;
        let lost = before.iter().filter(|(group, id)| after.get(group).is_some_and(|now| now != *id));
        let lost: BTreeMap<u64, u64> = lost.map(|(group, id)| (*group, *id)).collect();
        if lost.is_empty() { Err(format!("{before:?}, {after:?}")) } else { Ok(lost) }
    })
    .await
}

/// Waits until the successors of what was lost vote, and nothing of it is left.
async fn wait_replaced(cluster: &Cluster, lost: &BTreeMap<u64, u64>) {
    eventually("its successor votes, and nothing is left of it", || async {
        let status = cluster.status(VICTIM).await.ok_or("no answer")?;
        for (group, old) in lost {
            let of_group = || status.replicas.iter().filter(|r| r.group == *group);
            if of_group().any(|r| r.replica == *old)
                || !of_group().any(|r| ["leader", "follower"].contains(&r.role.as_str()))
            {
                return Err(format!("group {group} was {old}: {status:?}"));
            }
        }
        if status.ready { Ok(()) } else { Err(format!("{status:?}")) }
    })
    .await;
}

/// The replica ids on the victim, by group.
async fn replicas(cluster: &Cluster) -> BTreeMap<u64, u64> {
    let status = eventually("the victim answers", || async {
        cluster.status(VICTIM).await.ok_or_else(|| "no answer".to_owned())
    })
    .await;
    status.replicas.into_iter().filter(|r| r.role != "quarantined").map(|r| (r.group, r.replica)).collect()
}
