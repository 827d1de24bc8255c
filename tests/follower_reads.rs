//! Reads from followers: a bound is honoured by a follower that is cut off, frozen, or told late; nobody misses his own push;
//! what followers do not answer, others do.
//!
//! What was acknowledged to the test more than the bound before it asks must be in the answer, or there is none. Nodes are
//! asked past their proxies, so that the follower that is cut off from its leader can still be asked.

mod support;

use std::time::{Duration, Instant};

use evershard::{Consistency, ErrorKind, PullOptions};
use evershard_proto::v1::{PullReply, PullRequest};
use support::metrics::metric;
use support::proxy::Mode;
use support::trainer::{Table, Trainer};
use support::{Cluster, Options, PATIENCE, eventually, raw};
use tonic::Status;

const DIM: usize = 4;
const ID: u64 = 7;

/// One shard, led by node 1; nodes 2 and 3 follow.
struct Followed {
    cluster: Cluster,
    trainer: Trainer,
    table: Table,
    number: u32,
    group: u64,
}

impl Followed {
    async fn start(proxied: bool) -> Self {
        let cluster = Cluster::start(Options { shards: 1, proxied, ..Options::default() }).await;
        cluster.transfer(0, 1).await;
        let trainer = Trainer::connect(&cluster.endpoints()).await;
        let table = trainer.integers("items", DIM).await;
        let number = table.table.number();
        let group = raw::shard_of(&cluster, number, ID).await.group;
        cluster.wait_caught_up().await;
        Followed { cluster, trainer, table, number, group }
    }

    async fn set(&self, value: f32) {
        self.table.set(&[ID], &[value; DIM]).await.unwrap();
    }

    async fn read(&self, node: u64, consistency: Consistency, bound: Duration) -> Result<PullReply, Status> {
        let request = PullRequest {
            group: self.group,
            consistency: consistency.into(),
            max_staleness_ms: u32::try_from(bound.as_millis()).unwrap(),
            ..PullRequest::default()
        };
        raw::pull_as(&self.cluster, node, self.number, &[ID], request).await
    }

    /// The value of a bounded read from one node.
    async fn value(&self, node: u64, bound: Duration) -> Result<f32, ErrorKind> {
        let reply =
            self.read(node, Consistency::Bounded, bound).await.map_err(|status| raw::kind(&status))?;
        let row = raw::floats(&reply);
        assert!(row.iter().all(|value| *value == row[0]), "half a row: {row:?}");
        Ok(row[0])
    }

    /// Waits until a node answers a bounded read with this value.
    async fn wait_value(&self, node: u64, bound: Duration, expected: f32) {
        eventually(&format!("node {node} has {expected}"), || async {
            match self.value(node, bound).await {
                Ok(value) if value == expected => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
    }
}

fn bounded(bound: Duration) -> PullOptions {
    let max_staleness_ms = u32::try_from(bound.as_millis()).unwrap();
    PullOptions { consistency: Consistency::Bounded, max_staleness_ms, ..PullOptions::default() }
}

async fn pull(table: &Table, options: PullOptions) -> f32 {
    let mut row = [f32::NAN; DIM];
    table.table.pull_with(&[ID], options, &mut row).await.unwrap();
    row[0]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_answer_and_nobody_misses_his_own_push() {
    const PUSHES: u64 = 300;
    let followed = Followed::start(false).await;
    let (cluster, table) = (&followed.cluster, &followed.table);
    let mut before = Vec::new();
    for node in cluster.ids() {
        before.push(metric(cluster, node, "evershard_pull_rows_total").await);
    }
    for number in 1..=PUSHES {
        table.push(&[ID], &[-1.0; DIM]).await.unwrap();
        // The bound alone would let a follower leave it out.
        let mut row = [f32::NAN; DIM];
        let info = table.table.pull_with(&[ID], bounded(PATIENCE), &mut row).await.unwrap();
        assert_eq!(row[0], number as f32);
        assert!(info.indexes[&followed.group] >= number, "{info:?}");
    }
    let mut pulled = Vec::new();
    for (node, before) in cluster.ids().into_iter().zip(before) {
        pulled.push(metric(cluster, node, "evershard_pull_rows_total").await - before);
    }
    eprintln!("pulls by node: {pulled:?}");
    let share = PUSHES as f64 / 4.0;
    assert!(pulled[0] < share && pulled[1] > share && pulled[2] > share, "{pulled:?}");

    // Another client has pushed nothing: its reads may be older, within the bound.
    let reader = Trainer::connect(&cluster.endpoints()).await.table("items").await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(pull(&reader, bounded(Duration::from_millis(300))).await, PUSHES as f32);
    let nodes = [2, 3].map(|node| PullOptions { node: Some(node), ..bounded(Duration::from_millis(300)) });
    for options in nodes {
        assert_eq!(pull(&reader, options).await, PUSHES as f32);
    }
    for consistency in [Consistency::Any, Consistency::Linearizable, Consistency::Leader] {
        followed.cluster.wait_caught_up().await;
        assert_eq!(pull(&reader, PullOptions { consistency, ..Default::default() }).await, PUSHES as f32);
    }
    let unbounded = PullOptions { consistency: Consistency::Bounded, ..Default::default() };
    let refused = reader.table.pull_with(&[ID], unbounded, &mut [0.0; DIM]).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    let refused = followed.value(2, Duration::ZERO).await.unwrap_err();
    assert_eq!(refused, ErrorKind::Invalid);
}

/// Reads from node 2, cut off from its leader, and whatever it says is held against what was acknowledged. With late
/// answers of the leader, which say nothing of the time when they come.
async fn cut_off(delay: Duration) {
    const BOUND: Duration = Duration::from_millis(1000);
    const ROUNDS: u32 = 6;
    let followed = Followed::start(true).await;
    let cluster = &followed.cluster;
    let mut session = raw::RawSession::open(cluster).await;
    let (mut answers, mut refusals, mut late) = (0, 0, 0);
    for round in 0..ROUNDS {
        let (old, new) = (round as f32, (round + 1) as f32);
        followed.wait_value(2, BOUND, old).await;
        if delay > Duration::ZERO {
            cluster.proxy(1).set(Mode::Delay(delay));
            // At another moment of the follower's questions each time.
            let until = Instant::now() + delay * 4 + delay * 3 * round / ROUNDS;
            while Instant::now() < until {
                let _ = followed.value(2, BOUND).await;
            }
        }
        // Nobody reaches it; it reaches its leader still, and hears how far it is behind.
        cluster.proxy(2).set(Mode::Cut);
        // Past the proxy: acknowledged as soon as it is committed.
        let seq = session.next(followed.group);
        let body = raw::body(session.number, seq, followed.number, DIM as u32, &[ID], &[-1.0; DIM]);
        raw::push(cluster, 1, followed.group, body).await.unwrap();
        let acknowledged = Instant::now();
        while acknowledged.elapsed() < BOUND * 3 {
            let asked = acknowledged.elapsed();
            match followed.value(2, BOUND).await {
                Ok(value) => {
                    answers += 1;
                    assert!(
                        value == new || asked <= BOUND,
                        "node 2 answered {value} when {new} had been acknowledged for {asked:?}, bound {BOUND:?}"
                    );
                }
                Err(ErrorKind::TooStale) => refusals += 1,
                Err(kind) => panic!("{kind:?}"),
            }
            late += u32::from(asked > BOUND);
        }
        // Clients find somebody who may answer.
        assert_eq!(pull(&followed.table, bounded(BOUND)).await, new);
        cluster.proxy(1).set(Mode::Pass);
        cluster.proxy(2).set(Mode::Pass);
        followed.wait_value(2, BOUND, new).await;
    }
    eprintln!(
        "{answers} answers, {refusals} refusals, {late} of both when it was too late for the old value"
    );
    assert!(refusals > 0 && late > 0);
    assert!(answers > 0 || delay > Duration::ZERO, "within the bound the old value is as good");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_that_is_cut_off_answers_within_the_bound_or_not_at_all() {
    cut_off(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_leader_said_late_makes_nothing_fresher() {
    // Head and body of an answer are late one after the other, and all of it is waited for a second.
    cut_off(Duration::from_millis(250)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_that_was_frozen_does_not_take_itself_for_fresh() {
    const BOUND: Duration = Duration::from_millis(400);
    let followed = Followed::start(false).await;
    let cluster = &followed.cluster;
    followed.set(1.0).await;
    for round in 1..4_u32 {
        let (old, new) = (round as f32, (round + 1) as f32);
        followed.wait_value(2, BOUND, old).await;
        cluster.node(2).freeze();
        followed.set(new).await;
        // The time that the guarantee is about.
        tokio::time::sleep(BOUND).await;
        let thawed = async {
            // The question is there before the answers of its peers are.
            tokio::time::sleep(Duration::from_millis(100)).await;
            cluster.node(2).thaw();
        };
        let (answer, ()) = tokio::join!(followed.value(2, BOUND), thawed);
        assert!(
            matches!(answer, Ok(value) if value == new) || answer == Err(ErrorKind::TooStale),
            "{answer:?}"
        );
        followed.wait_value(2, BOUND, new).await;
    }
    // Clients do not wait for it.
    cluster.node(2).freeze();
    followed.set(9.0).await;
    for _ in 0..10 {
        assert_eq!(pull(&followed.table, bounded(BOUND)).await, 9.0);
    }
    cluster.node(2).thaw();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_answer_while_the_leader_is_gone_as_long_as_the_bound_allows() {
    let mut followed = Followed::start(false).await;
    followed.set(5.0).await;
    for node in [2, 3] {
        followed.wait_value(node, PATIENCE, 5.0).await;
    }
    let reader = Trainer::connect(&followed.cluster.endpoints()).await.table("items").await;
    followed.cluster.kill(1);
    // No election in between: followers know what they need to know.
    assert_eq!(pull(&reader, bounded(PATIENCE)).await, 5.0);
    assert_eq!(pull(&reader, PullOptions { consistency: Consistency::Any, ..Default::default() }).await, 5.0);
    // With a bound that they cannot keep somebody has to lead first.
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(pull(&reader, bounded(Duration::from_millis(50))).await, 5.0);
    followed.set(6.0).await;
    assert_eq!(pull(&followed.table, bounded(PATIENCE)).await, 6.0, "its own push, to the next leader");
    drop(followed.trainer);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_linearizable_read_needs_a_quorum_now() {
    let followed = Followed::start(true).await;
    let cluster = &followed.cluster;
    followed.set(3.0).await;
    let read = || followed.read(1, Consistency::Linearizable, Duration::ZERO);
    assert_eq!(raw::floats(&read().await.unwrap()), [3.0; DIM]);
    let not_leader = followed.read(2, Consistency::Linearizable, Duration::ZERO).await.unwrap_err();
    assert_eq!(raw::kind(&not_leader), ErrorKind::NotLeader);
    for node in [2, 3] {
        cluster.proxy(node).set(Mode::Cut);
    }
    // Its lease may hold still: that is not asked.
    let refused = read().await.unwrap_err();
    assert!(matches!(raw::kind(&refused), ErrorKind::Unavailable | ErrorKind::NotLeader), "{refused}");
    for node in [2, 3] {
        cluster.proxy(node).set(Mode::Pass);
    }
    assert_eq!(
        pull(&followed.table, PullOptions { consistency: Consistency::Linearizable, ..Default::default() })
            .await,
        3.0
    );
}
