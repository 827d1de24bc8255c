//! Two of three disks wiped: the survivor lets nobody overwrite it and takes nothing for a majority; by an operator's
//! explicit decision it goes on alone, with all that it held, and its wiped peers become replicas again. Peers that come
//! back with their old disks, against all advice, do not split the cluster.

mod support;

use std::collections::BTreeMap;
use std::time::Duration;

use evershard::ClientOptions;
use evershard_proto::v1::{InitClusterRequest, NodeAddress, ShardDescription, UnsafeRecoverRequest};
use support::ledger::Ledger;
use support::pusher::{Load, Pusher, wait_progress};
use support::trainer::{Table, Trainer};
use support::{Cluster, Options, eventually};

const DIM: usize = 8;
const SURVIVOR: u64 = 1;
const LOST: [u64; 2] = [2, 3];

struct Run {
    cluster: Cluster,
    ledger: Ledger,
}

impl Run {
    /// A cluster with rows, all on every node; then two nodes are dead and their disks empty.
    async fn start() -> Self {
        let run = Self::start_with_old_disks().await;
        for id in LOST {
            std::fs::remove_dir_all(run.cluster.node(id).data()).unwrap();
        }
        run
    }

    /// The same, and the disks of the dead are as they were.
    async fn start_with_old_disks() -> Self {
        let options = Options { shards: 2, ..Options::default() }.arg("--flush-interval-ms", 200);
        let mut cluster = Cluster::start(options).await;
        let trainer = Trainer::connect(&cluster.endpoints()).await;
        let _table = trainer.integers("audit", DIM).await;
        let pusher = Pusher::start(cluster.endpoints(), Load::small("audit", DIM), 1);
        wait_progress(std::slice::from_ref(&pusher), 50).await;
        let ledger = pusher.finish().await;
        cluster.wait_caught_up().await;
        for id in LOST {
            cluster.kill(id);
        }
        Run { cluster, ledger }
    }

    async fn held(&self) -> BTreeMap<u64, u64> {
        let status = eventually("the survivor answers", || async {
            self.cluster.status(SURVIVOR).await.ok_or_else(|| "no answer".to_owned())
        })
        .await;
        status.replicas.into_iter().map(|r| (r.group, r.replica)).collect()
    }

    async fn cluster_id(&self) -> String {
        self.cluster.routing(SURVIVOR).await.unwrap().cluster_id
    }

    async fn recover(&self, cluster_id: &str, lost_nodes: &[u64]) -> Result<Vec<u64>, tonic::Status> {
        let request =
            UnsafeRecoverRequest { cluster_id: cluster_id.to_owned(), lost_nodes: lost_nodes.to_vec() };
        let reply = self.cluster.admin(SURVIVOR).unsafe_recover(request).await?;
        Ok(reply.into_inner().groups.into_iter().map(|group| group.group).collect())
    }

    /// Waits until every group votes with a replica on each node, none of them one of `given_up`.
    async fn wait_three_voters(&self, given_up: &[u64]) {
        eventually("every group has three voters", || async {
            for id in LOST {
                let status = self.cluster.status(id).await.ok_or("no answer")?;
                let votes = |role: &str| matches!(role, "leader" | "follower");
                if !status.ready
                    || status.replicas.len() != 3
                    || !status.replicas.iter().all(|r| votes(&r.role) && !given_up.contains(&r.replica))
                {
                    return Err(format!("{status:?}"));
                }
            }
            Ok(())
        })
        .await;
    }

    async fn table(&self) -> Table {
        Trainer::connect(&self.cluster.endpoints()).await.table("audit").await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_survivor_refuses_to_be_overwritten_or_to_be_a_majority() {
    let mut run = Run::start().await;
    let before = run.held().await;
    let nodes = run.cluster.routing(SURVIVOR).await.unwrap().nodes;
    for id in LOST {
        run.cluster.restart(id);
    }
    // Nobody makes a new cluster of the empty ones beside it, nor of it.
    let request = InitClusterRequest {
        nodes: nodes.into_iter().map(|n| NodeAddress { id: n.id, address: n.address }).collect(),
        shards: 2,
        replicas: 3,
        cluster_version: None,
    };
    for id in [1, 2, 3] {
        let refused = eventually("init is refused", || async {
            match run.cluster.admin(id).init_cluster(request.clone()).await {
                Ok(reply) => panic!("node {id}: a second beginning: {reply:?}"),
                Err(status) if status.code() == tonic::Code::Unavailable => Err(status.to_string()),
                Err(status) => Ok(status),
            }
        })
        .await;
        eprintln!("node {id}: {refused}");
    }
    // Some elections later.
    tokio::time::sleep(Duration::from_secs(4)).await;
    let routing = run.cluster.routing(SURVIVOR).await.unwrap();
    let leads = |shard: &ShardDescription| shard.leader_node == SURVIVOR;
    assert!(!routing.shards.iter().any(leads), "it serves nothing without a majority: {routing:?}");
    assert_eq!(run.held().await, before, "it holds what it held");
    for id in LOST {
        let status = run.cluster.status(id).await.unwrap();
        assert!(status.replicas.is_empty(), "nothing was made on node {id}: {status:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_survivor_goes_on_alone_when_told_and_its_peers_come_back() {
    let mut run = Run::start().await;
    let before = run.held().await;
    let cluster_id = run.cluster_id().await;
    // Not meant for it, or not true: nothing happens.
    assert!(run.recover("another", &LOST).await.is_err());
    assert!(run.recover(&cluster_id, &[]).await.is_err());
    assert!(run.recover(&cluster_id, &[SURVIVOR, 2]).await.is_err());
    assert_eq!(
        run.recover(&cluster_id, &[3]).await.unwrap_or_default(),
        Vec::<u64>::new(),
        "2 of 3 would do"
    );

    let recovered = run.recover(&cluster_id, &LOST).await.unwrap();
    assert_eq!(recovered, [0, 1, 2]);
    let node = run.cluster.node(SURVIVOR);
    assert!(node.log_contains("UNSAFE RECOVERY"), "{}", node.log_tail());
    for shard in run.cluster.shards() {
        assert_eq!(run.cluster.leader_of(shard).await, SURVIVOR);
    }
    assert_eq!(run.held().await, before, "under its old ids");
    // All was on the survivor, so nothing is lost; and it takes more.
    let table = run.table().await;
    run.ledger.assert_matches(&table.pull(&run.ledger.ids()).await.unwrap(), DIM);
    let pusher = Pusher::start(run.cluster.endpoints(), Load::small("audit", DIM), 2);
    wait_progress(std::slice::from_ref(&pusher), 20).await;
    assert_eq!(run.recover(&cluster_id, &LOST).await.unwrap(), Vec::<u64>::new(), "done before");

    // The empty ones come back and carry their weight.
    for id in LOST {
        run.cluster.restart(id);
    }
    run.wait_three_voters(&[]).await;
    run.cluster.wait_caught_up().await;
    run.cluster.kill(SURVIVOR);
    wait_progress(std::slice::from_ref(&pusher), 10).await;
    run.cluster.restart(SURVIVOR);
    run.cluster.wait_ready().await;
    run.ledger.merge(&pusher.finish().await);
    run.ledger.assert_matches(&table.pull(&run.ledger.ids()).await.unwrap(), DIM);
    run.cluster.assert_replicas_equal().await;
}

/// Against all advice the lost nodes come back with their old disks: they hear of it before they start a replica.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_disks_that_come_back_are_given_up() {
    let mut run = Run::start_with_old_disks().await;
    let cluster_id = run.cluster_id().await;
    assert_eq!(run.recover(&cluster_id, &LOST).await.unwrap(), [0, 1, 2]);
    let given_up = run.cluster.status(SURVIVOR).await.unwrap().given_up;
    assert_eq!(given_up.len(), 6, "two of each of three groups: {given_up:?}");
    assert_eq!(run.cluster.routing(SURVIVOR).await.unwrap().recovery_epoch, 6);
    let pusher = Pusher::start(run.cluster.endpoints(), Load::small("audit", DIM), 2);
    wait_progress(std::slice::from_ref(&pusher), 20).await;
    for id in LOST {
        run.cluster.restart(id);
    }
    run.wait_three_voters(&given_up).await;
    for id in LOST {
        let node = run.cluster.node(id);
        assert!(node.log_contains("given up by an unsafe recovery"), "{}", node.log_tail());
        assert_eq!(run.cluster.status(id).await.unwrap().given_up, given_up);
    }
    wait_progress(std::slice::from_ref(&pusher), 10).await;
    run.ledger.merge(&pusher.finish().await);
    run.cluster.wait_caught_up().await;
    run.ledger.assert_matches(&run.table().await.pull(&run.ledger.ids()).await.unwrap(), DIM);
    run.cluster.assert_replicas_equal().await;
    // It is on their disks: they start once more, as what they are now.
    run.cluster.kill_all();
    run.cluster.start_all();
    run.cluster.wait_ready().await;
    assert_eq!(run.cluster.routing(SURVIVOR).await.unwrap().recovery_epoch, 6);
    run.ledger.assert_matches(&run.table().await.pull(&run.ledger.ids()).await.unwrap(), DIM);
}

/// The old nodes start while the survivor cannot be heard: they are a majority of the old groups, and lead them. Nobody who
/// has seen the recovery gets a push acknowledged or a row read by them, and they end when they hear of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_old_majority_takes_nothing_from_who_has_seen_the_recovery() {
    let mut run = Run::start_with_old_disks().await;
    let cluster_id = run.cluster_id().await;
    // One that worked before, and learns of it by its first push.
    let options = || ClientOptions { deadline: Duration::from_secs(8), ..ClientOptions::default() };
    let trainer = Trainer::with(&run.cluster.endpoints(), options()).await;
    let table = trainer.table("audit").await;
    run.recover(&cluster_id, &LOST).await.unwrap();
    let given_up = run.cluster.status(SURVIVOR).await.unwrap().given_up;
    let ids: Vec<u64> = (0..512).collect();
    let ones = vec![1.0; ids.len() * DIM];
    table.push(&ids, &ones).await.unwrap();
    let before = table.pull(&ids).await.unwrap();

    run.cluster.node(SURVIVOR).freeze();
    for id in LOST {
        run.cluster.restart(id);
    }
    let is_split = eventually("the old nodes lead the old groups", || async {
        let mut led = Vec::new();
        for id in LOST {
            let status = run.cluster.status(id).await.ok_or("no answer")?;
            led.extend(status.replicas.into_iter().filter(|r| r.role == "leader").map(|r| r.replica));
        }
        if led.len() == 3 { Ok(led) } else { Err(format!("{led:?}")) }
    })
    .await;
    assert!(is_split.iter().all(|replica| given_up.contains(replica)), "{is_split:?}");
    let pushed = table.push(&ids, &ones).await;
    assert!(pushed.is_err(), "pushed to a history that was given up");
    let pulled = table.pull(&ids).await;
    assert!(pulled.is_err(), "read from a history that was given up");
    let made = trainer.client.create_table(support::trainer::integers("late", DIM)).await;
    assert!(made.is_err(), "made in a history that was given up");

    run.cluster.node(SURVIVOR).thaw();
    run.wait_three_voters(&given_up).await;
    run.cluster.wait_caught_up().await;
    run.cluster.assert_replicas_equal().await;
    // The push that failed may have been applied since, by the survivor; once, and as a whole for each shard.
    let after = table.pull(&ids).await.unwrap();
    for (at, (before, after)) in before.iter().zip(&after).enumerate() {
        assert!(*after == *before || *after == before - 1.0, "row {}: {after} after {before}", at / DIM);
    }
}

/// A node that is only slow, or cut off from its operator, is not lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_answers_with_its_replicas_is_not_lost() {
    let cluster = Cluster::with_shards(1).await;
    let cluster_id = cluster.routing(1).await.unwrap().cluster_id;
    let request = UnsafeRecoverRequest { cluster_id, lost_nodes: vec![2, 3] };
    let refused = cluster.admin(1).unsafe_recover(request).await.unwrap_err();
    assert!(refused.message().contains("is not lost"), "{refused}");
    cluster.wait_ready().await;
    cluster.assert_replicas_equal().await;
}
