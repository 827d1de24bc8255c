//! The power fails under pushing clients, on one node and on all nodes at once: what was not synced is gone, and yet no
//! acknowledged push is lost or doubled.
//!
//! `EVERSHARD_TEST_POWER_CUTS` is the number of cuts (default 4; `make chaos` makes more).

mod support;

use std::collections::BTreeMap;

use support::power::{self, PowerDisk};
use support::pusher::{Load, Pusher, finish_all, wait_progress};
use support::trainer::Trainer;
use support::{Cluster, Options, setting};

const DIM: usize = 8;
const CLIENTS: u64 = 3;

/// The nodes of a cluster, each with a disk of its own.
struct Run {
    // First: its processes end before their disks are unmounted.
    cluster: Cluster,
    disks: BTreeMap<u64, PowerDisk>,
}

impl Run {
    async fn start() -> Self {
        // Frequent flushes, small segments: every kind of file is being written when the power goes.
        let options = Options { shards: 3, ..Options::default() }
            .arg("--durability", "fsync")
            .arg("--flush-interval-ms", 200)
            .arg("--log-segment-bytes", 1 << 20)
            .arg("--log-retain-bytes", 1 << 20);
        let mut cluster = Cluster::prepare(options).await;
        let disks = cluster.ids().into_iter().map(|id| (id, PowerDisk::create(cluster.node(id).data())));
        let disks = disks.collect();
        cluster.start_all();
        cluster.create().await;
        cluster.wait_ready().await;
        Run { cluster, disks }
    }

    /// The nodes lose their power, and get it back. Whether the disk or the process ends first makes a difference: a
    /// server that outlives its disk must acknowledge nothing more.
    fn cut(&mut self, nodes: &[u64], is_disk_first: bool) {
        for id in nodes.iter().filter(|_| is_disk_first) {
            self.disks[id].cut();
        }
        for id in nodes {
            self.cluster.kill(*id);
        }
        for id in nodes.iter().filter(|_| !is_disk_first) {
            self.disks[id].cut();
        }
        for id in nodes {
            self.disks.get_mut(id).unwrap().power_on();
            self.cluster.restart(*id);
        }
    }
}

/// Runs a test where the power can be cut, and says why not elsewhere.
fn with_power(test: impl Future<Output = ()>) {
    if let Some(missing) = power::what_is_missing() {
        eprintln!(
            "SKIPPED: cutting the power needs root, loop devices, xfs_io and mkfs.xfs or mkfs.ext4: {missing}"
        );
        return;
    }
    power::mounts_of_our_own();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(test);
}

async fn cuts(nodes_of: impl Fn(usize) -> Vec<u64>) {
    let mut run = Run::start().await;
    let trainer = Trainer::connect(&run.cluster.endpoints()).await;
    let table = trainer.integers("audit", DIM).await;
    let pushers: Vec<Pusher> = (0..CLIENTS)
        .map(|seed| {
            let load = Load { rows_a_push: 64, ..Load::small("audit", DIM) };
            Pusher::start(run.cluster.endpoints(), load, seed)
        })
        .collect();
    let rounds = setting("EVERSHARD_TEST_POWER_CUTS", 4);
    for round in 0..rounds {
        wait_progress(&pushers, 40).await;
        run.cut(&nodes_of(round), round % 2 == 1);
        run.cluster.wait_ready().await;
        run.cluster.wait_caught_up().await;
    }
    wait_progress(&pushers, 5).await;
    let ledger = finish_all(pushers).await;
    eprintln!("{rounds} power cuts, {} acknowledged pushes", ledger.pushes);
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
    run.cluster.assert_replicas_equal().await;

    // And what is on the disks alone says the same.
    run.cut(&run.cluster.ids(), false);
    run.cluster.wait_ready().await;
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
    run.cluster.assert_replicas_equal().await;
    for id in run.cluster.ids() {
        let node = run.cluster.node(id);
        assert!(!node.log_contains("quarantined"), "a torn tail is no damage:\n{}", node.log_tail());
    }
}

#[test]
fn a_power_cut_on_all_nodes_at_once_loses_nothing_acknowledged() {
    with_power(cuts(|_| vec![1, 2, 3]));
}

#[test]
fn power_cuts_on_one_node_after_another_lose_nothing_acknowledged() {
    with_power(cuts(|round| vec![round as u64 % 3 + 1]));
}
