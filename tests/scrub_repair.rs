//! A replica that differs from its peers with all checksums right: a scrub finds it, and `evershardctl scrub --repair` (here
//! its request) has it rebuilt; without a majority of equal replicas nothing is touched.

mod support;

use std::collections::BTreeMap;

use evershard_proto::v1::{ScrubReply, ScrubRequest};
use support::falsify::falsify;
use support::flushed::FlushedShard;
use support::{Options, eventually};

const DIM: usize = 8;

struct Run(FlushedShard);

impl Run {
    async fn start() -> Self {
        Self(FlushedShard::start(Options::default(), DIM).await)
    }

    async fn replicas(&self) -> BTreeMap<u64, u64> {
        let mut found = BTreeMap::new();
        for id in self.0.cluster.ids() {
            if let Some(replica) = self.0.cluster.replica(id, 0).await {
                found.insert(id, replica.replica);
            }
        }
        found
    }

    async fn scrub(&self, repair: bool) -> ScrubReply {
        eventually("a digest of every replica", || async {
            let request = ScrubRequest { shards: Vec::new(), repair };
            let reply = self.0.cluster.admin(1).scrub(request).await.map_err(|s| s.to_string())?.into_inner();
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
    falsify(&mut run.0.cluster, 3, 1.0).await;
    let before = run.replicas().await;

    let found = run.scrub(false).await;
    assert!(!found.shards[0].equal, "{found:?}");
    assert!(found.shards[0].quarantined.is_empty(), "nobody asked for it: {found:?}");
    assert_eq!(run.replicas().await, before);

    let found = run.scrub(true).await;
    assert_eq!(found.shards[0].quarantined, [3], "{found:?}");
    eventually("node 3 has a new replica that votes", || async {
        let replica = run.0.cluster.replica(3, 0).await.ok_or("none")?;
        let is_new = replica.replica != before[&3] && replica.role == "follower";
        if is_new { Ok(()) } else { Err(format!("{replica:?}")) }
    })
    .await;
    assert!(
        run.0.cluster.node(3).log_contains("replica quarantined"),
        "{}",
        run.0.cluster.node(3).log_tail()
    );
    run.0.cluster.assert_replicas_equal().await;
    assert!(run.scrub(true).await.shards[0].quarantined.is_empty());
    run.0.assert_exact_on(3).await;
}

/// Also when the one that differs leads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_differs_is_rebuilt_too() {
    let mut run = Run::start().await;
    falsify(&mut run.0.cluster, 2, 1.0).await;
    run.0.cluster.transfer(0, 2).await;
    let before = run.replicas().await;
    let found = run.scrub(true).await;
    assert_eq!(found.shards[0].quarantined, [2], "{found:?}");
    eventually("node 2 has a new replica that votes", || async {
        let replica = run.0.cluster.replica(2, 0).await.ok_or("none")?;
        let is_new = replica.replica != before[&2] && matches!(&*replica.role, "follower" | "leader");
        if is_new { Ok(()) } else { Err(format!("{replica:?}")) }
    })
    .await;
    run.0.cluster.assert_replicas_equal().await;
    run.0.assert_exact_on(2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_nothing_is_touched() {
    let mut run = Run::start().await;
    falsify(&mut run.0.cluster, 2, 1.0).await;
    falsify(&mut run.0.cluster, 3, 2.0).await;
    let before = run.replicas().await;
    let found = run.scrub(true).await;
    assert!(!found.shards[0].equal && found.shards[0].quarantined.is_empty(), "{found:?}");
    assert_eq!(run.replicas().await, before);
}
