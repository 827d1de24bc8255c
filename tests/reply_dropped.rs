//! The reply of a push is lost after it was applied; the client sends it again, to the same leader or to a new one: it is
//! applied once.

mod support;

use std::time::Duration;

use support::ledger::Ledger;
use support::proxy::Mode;
use support::trainer::{Table, Trainer};
use support::{Cluster, Options, eventually};
use tokio::task::JoinHandle;

const DIM: usize = 4;
const ROUNDS: u64 = 5;

async fn proxied() -> (Cluster, Trainer, Table) {
    let cluster = Cluster::start(Options { shards: 1, proxied: true, ..Options::default() }).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("audit", DIM).await;
    table.push(&[0], &[0.0; DIM]).await.unwrap();
    (cluster, trainer, table)
}

/// Sends one push whose reply is swallowed; returns once it was applied, with the push still waiting.
async fn push_without_reply(cluster: &Cluster, leader: u64, table: &Table, ids: Vec<u64>) -> JoinHandle<()> {
    let before = cluster.replica(leader, 0).await.unwrap().applied;
    let swallowed = cluster.proxy(leader).swallowed();
    cluster.proxy(leader).set(Mode::SwallowReplies);
    let table = table.clone();
    let waiting = tokio::spawn(async move {
        let ones = vec![1.0; ids.len() * DIM];
        table.push(&ids, &ones).await.unwrap();
    });
    eventually("the push is applied and its reply swallowed", || async {
        let applied = cluster.replica(leader, 0).await.ok_or("no answer")?.applied;
        let lost = cluster.proxy(leader).swallowed() - swallowed;
        if applied > before && lost > 0 {
            Ok(())
        } else {
            Err(format!("applied {applied}, {lost} bytes swallowed"))
        }
    })
    .await;
    assert!(!waiting.is_finished(), "the client believes in a reply that it cannot have got");
    waiting
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_sent_again_to_the_same_leader_is_applied_once() {
    let (cluster, _trainer, table) = proxied().await;
    let mut ledger = Ledger::default();
    let mut same = 0;
    for round in 0..ROUNDS {
        let leader = cluster.leader_of(0).await;
        let ids: Vec<u64> = (0..=round).collect();
        let waiting = push_without_reply(&cluster, leader, &table, ids.clone()).await;
        cluster.proxy(leader).set(Mode::Cut);
        tokio::time::sleep(Duration::from_millis(50)).await;
        cluster.proxy(leader).set(Mode::Pass);
        waiting.await.unwrap();
        ledger.acknowledge(&ids, &vec![1; ids.len()]);
        same += u32::from(cluster.leader_of(0).await == leader);
    }
    assert!(same > 0, "an election came between in every round");
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
    cluster.assert_replicas_equal().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_sent_again_to_a_new_leader_is_applied_once() {
    let (mut cluster, _trainer, table) = proxied().await;
    let mut ledger = Ledger::default();
    for round in 0..ROUNDS {
        let leader = cluster.leader_of(0).await;
        let ids: Vec<u64> = (0..=round).collect();
        let waiting = push_without_reply(&cluster, leader, &table, ids.clone()).await;
        cluster.kill(leader);
        cluster.proxy(leader).set(Mode::Pass);
        waiting.await.unwrap();
        ledger.acknowledge(&ids, &vec![1; ids.len()]);
        assert_ne!(cluster.leader_of(0).await, leader);
        cluster.restart(leader);
        cluster.wait_ready().await;
        cluster.wait_caught_up().await;
    }
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
    cluster.assert_replicas_equal().await;
}

/// All connections are slow and then end, over and over: order and counts hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_end_in_mid_air_lose_nothing() {
    let (cluster, _trainer, table) = proxied().await;
    let mut ledger = Ledger::default();
    let cutting = async {
        for round in 0..20u64 {
            let node = 1 + round % 3;
            cluster.proxy(node).set(Mode::Delay(Duration::from_millis(2)));
            tokio::time::sleep(Duration::from_millis(60)).await;
            cluster.proxy(node).set(Mode::Cut);
            tokio::time::sleep(Duration::from_millis(10)).await;
            cluster.proxy(node).set(Mode::Pass);
        }
    };
    let pushing = async {
        for round in 0..200u64 {
            let ids: Vec<u64> = (0..8).map(|i| (round * 3 + i) % 32).collect();
            table.push(&ids, &vec![1.0; ids.len() * DIM]).await.unwrap();
            ledger.acknowledge(&ids, &vec![1; ids.len()]);
        }
    };
    tokio::join!(cutting, pushing);
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
    cluster.assert_replicas_equal().await;
}
