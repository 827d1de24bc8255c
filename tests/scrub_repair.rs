//! A replica that differs from its peers with all checksums right: a scrub finds it, and `evershardctl scrub --repair` (here
//! its request) has it rebuilt; without a majority of equal replicas nothing is touched.

mod support;

use std::collections::BTreeMap;

use evershard_proto::v1::{ScrubReply, ScrubRequest};
use support::falsify::falsify;
use support::ledger::Ledger;
use support::pusher::{Load, Pusher, wait_progress};
use support::trainer::{Table, Trainer};
use support::{Cluster, Options, eventually};

const DIM: usize = 8;

struct Run {
    cluster: Cluster,
    table: Table,
    ledger: Ledger,
}

impl Run {
    /// A shard with rows that all replicas have flushed.
    async fn start() -> Self {
        let options = Options { shards: 1, ..Options::default() }.arg("--flush-interval-ms", 100);
        let cluster = Cluster::start(options).await;
        let trainer = Trainer::connect(&cluster.endpoints()).await;
        let table = trainer.integers("audit", DIM).await;
        let pusher = Pusher::start(cluster.endpoints(), Load::small("audit", DIM), 1);
        wait_progress(std::slice::from_ref(&pusher), 40).await;
        let ledger = pusher.finish().await;
        cluster.wait_caught_up().await;
        for id in cluster.ids() {
            eventually("all is flushed", || async {
                let replica = cluster.replica(id, 0).await.ok_or("no replica")?;
                if replica.flushed >= replica.committed { Ok(()) } else { Err(format!("{replica:?}")) }
            })
            .await;
        }
        Run { cluster, table, ledger }
    }

    async fn replicas(&self) -> BTreeMap<u64, u64> {
        let mut found = BTreeMap::new();
        for id in self.cluster.ids() {
            if let Some(replica) = self.cluster.replica(id, 0).await {
                found.insert(id, replica.replica);
            }
        }
        found
    }

    async fn scrub(&self, repair: bool) -> ScrubReply {
        eventually("a digest of every replica", || async {
            let request = ScrubRequest { shards: Vec::new(), repair };
            let reply = self.cluster.admin(1).scrub(request).await.map_err(|s| s.to_string())?.into_inner();
            if reply.shards.iter().all(|s| s.problem.is_empty()) {
                Ok(reply)
            } else {
                Err(format!("{reply:?}"))
            }
        })
        .await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_differs_is_rebuilt_when_asked() {
    let mut run = Run::start().await;
    run.cluster.transfer(0, 1).await;
    falsify(&mut run.cluster, 3, 1.0).await;
    let before = run.replicas().await;

    let found = run.scrub(false).await;
    assert!(!found.shards[0].equal, "{found:?}");
    assert!(found.shards[0].quarantined.is_empty(), "nobody asked for it: {found:?}");
    assert_eq!(run.replicas().await, before);

    let found = run.scrub(true).await;
    assert_eq!(found.shards[0].quarantined, [3], "{found:?}");
    eventually("node 3 has a new replica that votes", || async {
        let replica = run.cluster.replica(3, 0).await.ok_or("none")?;
        let is_new = replica.replica != before[&3] && replica.role == "follower";
        if is_new { Ok(()) } else { Err(format!("{replica:?}")) }
    })
    .await;
    assert!(run.cluster.node(3).log_contains("replica quarantined"), "{}", run.cluster.node(3).log_tail());
    run.cluster.assert_replicas_equal().await;
    assert!(run.scrub(true).await.shards[0].quarantined.is_empty());
    // As the rebuilt replica gives them.
    run.cluster.transfer(0, 3).await;
    run.ledger.assert_matches(&run.table.pull(&run.ledger.ids()).await.unwrap(), DIM);
}

/// Also when the one that differs leads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_differs_is_rebuilt_too() {
    let mut run = Run::start().await;
    falsify(&mut run.cluster, 2, 1.0).await;
    run.cluster.transfer(0, 2).await;
    let before = run.replicas().await;
    let found = run.scrub(true).await;
    assert_eq!(found.shards[0].quarantined, [2], "{found:?}");
    eventually("node 2 has a new replica that votes", || async {
        let replica = run.cluster.replica(2, 0).await.ok_or("none")?;
        let is_new = replica.replica != before[&2] && matches!(&*replica.role, "follower" | "leader");
        if is_new { Ok(()) } else { Err(format!("{replica:?}")) }
    })
    .await;
    run.cluster.assert_replicas_equal().await;
    run.ledger.assert_matches(&run.table.pull(&run.ledger.ids()).await.unwrap(), DIM);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_nothing_is_touched() {
    let mut run = Run::start().await;
    falsify(&mut run.cluster, 2, 1.0).await;
    falsify(&mut run.cluster, 3, 2.0).await;
    let before = run.replicas().await;
    let found = run.scrub(true).await;
    assert!(!found.shards[0].equal && found.shards[0].quarantined.is_empty(), "{found:?}");
    assert_eq!(run.replicas().await, before);
}
