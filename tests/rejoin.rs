//! A replica whose log or store is lost or damaged never takes part under its old id: it is replaced by a new one, which
//! learns everything from its peers and then votes. Nothing acknowledged is lost meanwhile.

mod support;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use evershard_proto::v1::{InitClusterRequest, NodeAddress};
use support::node::{Node, NodeSettings};
use support::pusher::{Load, Pusher, finish_all, wait_progress};
use support::trainer::{Table, Trainer};
use support::{Cluster, Options, eventually, ports};

const DIM: usize = 64;
const VICTIM: u64 = 3;

/// A cluster under load, and what has to be in it at the end.
struct Run {
    cluster: Cluster,
    table: Table,
    pushers: Vec<Pusher>,
}

impl Run {
    async fn start() -> Self {
        let options = Options { shards: 2, ..Options::default() }.arg("--flush-interval-ms", 200);
        let cluster = Cluster::start(options).await;
        let trainer = Trainer::connect(&cluster.endpoints()).await;
        let table = trainer.integers("audit", DIM).await;
        let load = Load { ids: 1024, rows_a_push: 64, ..Load::small("audit", DIM) };
        let pushers: Vec<Pusher> =
            (0..2).map(|seed| Pusher::start(cluster.endpoints(), load.clone(), seed)).collect();
        wait_progress(&pushers, 30).await;
        Run { cluster, table, pushers }
    }

    /// The replica ids on the victim, by group.
    async fn replicas(&self) -> BTreeMap<u64, u64> {
        let status = eventually("the victim answers", || async {
            self.cluster.status(VICTIM).await.ok_or_else(|| "no answer".to_owned())
        })
        .await;
        let held = status.replicas.into_iter().filter(|r| r.role != "quarantined");
        held.map(|r| (r.group, r.replica)).collect()
    }

    /// Waits until every group in `lost` has a replica on the victim that votes under another id, and nothing is left of
    /// the old one.
    async fn wait_replaced(&self, lost: &BTreeMap<u64, u64>) {
        eventually("every lost replica is replaced", || async {
            let status = self.cluster.status(VICTIM).await.ok_or("no answer")?;
            for (group, old) in lost {
                let of_group = || status.replicas.iter().filter(|r| r.group == *group);
                if of_group().any(|r| r.replica == *old) {
                    return Err(format!("group {group} still holds {old}: {status:?}"));
                }
                if !of_group().any(|r| ["leader", "follower"].contains(&r.role.as_str())) {
                    return Err(format!("group {group} does not vote yet: {status:?}"));
                }
            }
            if status.ready { Ok(()) } else { Err(format!("not ready: {status:?}")) }
        })
        .await;
    }

    /// The new replicas carry their weight: with another node dead, the group goes on, and all is there.
    async fn finish(mut self) {
        self.cluster.wait_caught_up().await;
        self.cluster.kill(1);
        wait_progress(&self.pushers, 10).await;
        self.cluster.restart(1);
        self.cluster.wait_ready().await;
        self.cluster.wait_caught_up().await;
        let ledger = finish_all(self.pushers).await;
        ledger.assert_matches(&self.table.pull(&ledger.ids()).await.unwrap(), DIM);
        self.cluster.assert_replicas_equal().await;
        // The new replica alone shows the same.
        self.cluster.transfer(0, VICTIM).await;
        ledger.assert_matches(&self.table.pull(&ledger.ids()).await.unwrap(), DIM);
    }
}

fn flip_byte(path: &Path, offset: u64) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x40], offset).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wiped_node_comes_back_under_new_ids() {
    let mut run = Run::start().await;
    let before = run.replicas().await;
    assert_eq!(before.len(), 3, "the meta group and two shards: {before:?}");
    run.cluster.kill(VICTIM);
    wait_progress(&run.pushers, 5).await;
    std::fs::remove_dir_all(run.cluster.node(VICTIM).data()).unwrap();
    run.cluster.restart(VICTIM);
    run.wait_replaced(&before).await;
    run.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_bit_in_the_log_is_noticed_and_repaired_from_peers() {
    let mut run = Run::start().await;
    let before = run.replicas().await;
    run.cluster.kill(VICTIM);
    let segment = run.cluster.node(VICTIM).log_segments().remove(0);
    // In the middle of what was acknowledged: 30 pushes are 500 KiB.
    flip_byte(&segment, 100_000);
    run.cluster.restart(VICTIM);
    // The record that holds the byte is one group's, or nobody knows whose: at least one replica is lost.
    let replaced = || async {
        let after = run.replicas().await;
        let lost = before.iter().filter(|(group, id)| after.get(group).is_some_and(|now| now != *id));
        let lost: BTreeMap<u64, u64> = lost.map(|(group, id)| (*group, *id)).collect();
        if lost.is_empty() { Err(format!("{after:?}")) } else { Ok(lost) }
    };
    let lost = eventually("a lost replica has a successor", replaced).await;
    run.wait_replaced(&lost).await;
    let node = run.cluster.node(VICTIM);
    assert!(
        node.log_contains("replica quarantined") && node.log_contains("is unreadable"),
        "{}",
        node.log_tail()
    );
    run.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_store_costs_its_own_replica_only() {
    let mut run = Run::start().await;
    let before = run.replicas().await;
    run.cluster.kill(VICTIM);
    let (group, replica) = before.iter().find(|(group, _)| **group != 0).unwrap();
    let directory = run.cluster.node(VICTIM).data().join("replicas").join(format!("{group}-{replica}"));
    let manifests = files_named(&directory, "MANIFEST");
    assert!(!manifests.is_empty(), "no MANIFEST under {}", directory.display());
    for manifest in manifests {
        flip_byte(&manifest, 20);
    }
    run.cluster.restart(VICTIM);
    run.wait_replaced(&BTreeMap::from([(*group, *replica)])).await;
    let after = run.replicas().await;
    for (other, id) in before.iter().filter(|(other, _)| *other != group) {
        assert_eq!(after.get(other), Some(id), "group {other} had nothing to do with it");
    }
    run.finish().await;
}

fn files_named(directory: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files_named(&path, prefix));
        } else if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)) {
            found.push(path);
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_log_is_gone_does_not_start_and_says_what_to_do() {
    let mut run = Run::start().await;
    let before = run.replicas().await;
    run.cluster.kill(VICTIM);
    let data = run.cluster.node(VICTIM).data();
    std::fs::remove_dir_all(data.join("log")).unwrap();
    run.cluster.restart(VICTIM);
    let status = run.cluster.node_mut(VICTIM).wait_end();
    assert_eq!(status.code(), Some(1));
    let node = run.cluster.node(VICTIM);
    assert!(node.log_contains("its log is gone") && node.log_contains("wipe"), "{}", node.log_tail());
    // Again, so that the first refusal did not make the log that it missed.
    run.cluster.restart(VICTIM);
    assert_eq!(run.cluster.node_mut(VICTIM).wait_end().code(), Some(1));
    // As told.
    std::fs::remove_dir_all(&data).unwrap();
    run.cluster.restart(VICTIM);
    run.wait_replaced(&before).await;
    run.finish().await;
}

/// Nothing is lost here: the node has all its data, and another address.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_moved_is_found_at_its_new_address() {
    let mut run = Run::start().await;
    let before = run.replicas().await;
    run.cluster.kill(VICTIM);
    let settings = &mut run.cluster.node_mut(VICTIM).settings;
    settings.grpc_port = ports::free(1)[0];
    settings.advertised = format!("http://127.0.0.1:{}", settings.grpc_port);
    let moved = settings.advertised.clone();
    run.cluster.restart(VICTIM);
    eventually("the others know its new address", || async {
        let routing = run.cluster.routing(1).await.ok_or("no answer")?;
        let found = routing.nodes.iter().find(|n| n.id == VICTIM).map(|n| n.address.clone());
        if found.as_ref() == Some(&moved) { Ok(()) } else { Err(format!("{found:?}")) }
    })
    .await;
    run.cluster.wait_ready().await;
    assert_eq!(run.replicas().await, before, "it kept its replicas");
    run.finish().await;
}

/// Whoever repeats `cluster init` at a node that lost its disk would make a voter that forgot its log and vote.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wiped_node_does_not_begin_the_cluster_anew() {
    let mut run = Run::start().await;
    let before = run.replicas().await;
    let nodes = run.cluster.routing(1).await.unwrap().nodes;
    run.cluster.kill(VICTIM);
    std::fs::remove_dir_all(run.cluster.node(VICTIM).data()).unwrap();
    let peers = run.cluster.node(VICTIM).settings.peers.clone();
    let settings = &mut run.cluster.node_mut(VICTIM).settings;
    // Nobody whom it could join.
    settings.peers = settings.advertised.clone();
    run.cluster.restart(VICTIM);
    let request = InitClusterRequest {
        nodes: nodes.into_iter().map(|n| NodeAddress { id: n.id, address: n.address }).collect(),
        shards: 2,
        replicas: 3,
        cluster_version: None,
    };
    let refused = eventually("init is refused", || async {
        match run.cluster.admin(VICTIM).init_cluster(request.clone()).await {
            Ok(reply) => panic!("a second beginning: {reply:?}"),
            Err(status) if status.code() == tonic::Code::Unavailable => Err(status.to_string()),
            Err(status) => Ok(status),
        }
    })
    .await;
    assert!(refused.message().contains("--peers"), "it says what to do: {refused}");
    let status = run.cluster.status(VICTIM).await.unwrap();
    assert!(status.replicas.is_empty(), "nothing was made: {status:?}");

    run.cluster.kill(VICTIM);
    run.cluster.node_mut(VICTIM).settings.peers = peers;
    run.cluster.restart(VICTIM);
    run.wait_replaced(&before).await;
    run.finish().await;
}

/// An empty server that is given the id of one that lives takes nothing from it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_server_with_the_id_of_another_is_not_let_in() {
    let run = Run::start().await;
    let before = run.replicas().await;
    // Who is up, and not only where, changes by itself: a node is not heard of the moment it starts.
    let addresses = || async {
        let nodes = run.cluster.routing(1).await.unwrap().nodes;
        nodes.into_iter().map(|node| (node.id, node.address)).collect::<Vec<_>>()
    };
    let addresses_before = addresses().await;
    let elsewhere = tempfile::tempdir().unwrap();
    let free = ports::free(2);
    let mut impostor = Node::new(
        NodeSettings {
            grpc_port: free[0],
            http_port: free[1],
            advertised: format!("http://127.0.0.1:{}", free[0]),
            ..run.cluster.node(VICTIM).settings.clone()
        },
        elsewhere.path(),
    );
    impostor.start(None);
    eventually("it is told", || async {
        let log = std::fs::read_to_string(impostor.log()).unwrap();
        if log.contains("an id of its own") { Ok(()) } else { Err(log) }
    })
    .await;
    impostor.kill();
    assert_eq!(addresses().await, addresses_before, "no address changed");
    assert_eq!(run.replicas().await, before, "no replica was replaced");
    run.finish().await;
}
