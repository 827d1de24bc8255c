//! What a pushed byte costs the disks, as the metrics tell it: in the log, by flushes, by compaction. Checked against what must be
//! so, by counting what was pushed.

mod support;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use support::metrics::metric;
use support::trainer::{Table, Trainer};
use support::{Cluster, Options, eventually};

const DIM: usize = 64;
const ROWS: u64 = 4096;
/// Of one round: every row once, its floats and nothing else.
const PAYLOAD: f64 = (ROWS * DIM as u64 * 4) as f64;
/// A key, a version, a number of steps, what tells the layout: less than this beside the floats of a row.
const BESIDE_MAX: f64 = 64.0;

/// What a node has written so far.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Written {
    log: f64,
    flush: f64,
    compaction: f64,
}

impl Written {
    async fn by(cluster: &Cluster, node: u64) -> Self {
        let part = async |part: &str| {
            metric(cluster, node, &format!("evershard_disk_written_bytes_total{{part=\"{part}\"}}")).await
        };
        Written { log: part("log").await, flush: part("flush").await, compaction: part("compaction").await }
    }

    fn is_at_least(&self, before: &Written) -> bool {
        self.log >= before.log && self.flush >= before.flush && self.compaction >= before.compaction
    }
}

struct Run {
    cluster: Cluster,
    table: Table,
    random: StdRng,
    last: Vec<Written>,
}

impl Run {
    async fn start() -> Self {
        let options = Options { shards: 1, ..Options::default() }.arg("--flush-interval-ms", 100);
        let cluster = Cluster::start(options).await;
        let table = Trainer::connect(&cluster.endpoints()).await.integers("audit", DIM).await;
        let mut run = Run { cluster, table, random: StdRng::seed_from_u64(5), last: Vec::new() };
        run.settle().await;
        run
    }

    /// Every row once, by numbers that no compression makes much smaller.
    async fn push(&mut self) {
        let ids: Vec<u64> = (0..ROWS).collect();
        for ids in ids.chunks(512) {
            let gradients: Vec<f32> = (0..ids.len() * DIM).map(|_| self.random.random::<f32>()).collect();
            self.table.push(ids, &gradients).await.unwrap();
        }
    }

    /// Waits until all is flushed everywhere, and looks. Nothing that is counted has become less.
    async fn settle(&mut self) -> Vec<Written> {
        self.cluster.wait_caught_up().await;
        for id in self.cluster.ids() {
            eventually("all is flushed", || async {
                let replica = self.cluster.replica(id, 0).await.ok_or("no replica")?;
                if replica.flushed >= replica.committed { Ok(()) } else { Err(format!("{replica:?}")) }
            })
            .await;
        }
        let now = self.written().await;
        for (now, before) in now.iter().zip(&self.last) {
            assert!(now.is_at_least(before), "{before:?}, then {now:?}");
        }
        self.last.clone_from(&now);
        now
    }

    async fn written(&self) -> Vec<Written> {
        let mut written = Vec::new();
        for id in self.cluster.ids() {
            written.push(Written::by(&self.cluster, id).await);
        }
        written
    }

    /// What arrived, over all nodes.
    async fn pushed(&self) -> f64 {
        let mut sum = 0.0;
        for id in self.cluster.ids() {
            sum += metric(&self.cluster, id, "evershard_push_bytes_total").await;
        }
        sum
    }

    /// Waits until a number of each node is as it must be: they are told once a second.
    async fn wait(&self, what: &str, is_so: impl Fn(usize, Written) -> bool) {
        eventually(what, || async {
            let written = self.written().await;
            let all = written.iter().enumerate().all(|(place, now)| is_so(place, *now));
            if all { Ok(()) } else { Err(format!("{written:?}")) }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_part_counts_what_it_must() {
    let mut run = Run::start().await;
    let idle = run.last.clone();
    assert_eq!(run.pushed().await, 0.0);
    for node in &idle {
        assert_eq!((node.flush, node.compaction), (0.0, 0.0), "there are no rows: {node:?}");
    }

    // One round: every row is dirty once, and so flushed once, by every replica.
    run.push().await;
    run.settle().await;
    assert!(run.pushed().await >= PAYLOAD);
    run.wait("what was pushed is in each log", |place, now| now.log - idle[place].log >= PAYLOAD).await;
    run.wait("and each flush", |_, now| now.flush >= PAYLOAD).await;
    let round = run.settle().await;
    let flushed = round[0].flush;
    assert!(round.iter().all(|node| node.flush == flushed), "the same rows at every node: {round:?}");
    assert_eq!(flushed % ROWS as f64, 0.0, "whole rows, each as large as the others: {flushed}");
    assert!(flushed <= PAYLOAD + ROWS as f64 * BESIDE_MAX, "each row once: {flushed}");

    // More of the same rows, each round flushed before the next: runs that overlap, which are compacted.
    let mut rounds = 1.0;
    while run.last.iter().any(|node| node.compaction < PAYLOAD / 2.0) {
        assert!(rounds < 100.0, "a hundred runs of the same rows, and nothing is compacted: {:?}", run.last);
        run.push().await;
        run.settle().await;
        rounds += 1.0;
    }
    assert!(run.pushed().await >= rounds * PAYLOAD);
    run.wait("each log has every round", |place, now| now.log - idle[place].log >= rounds * PAYLOAD).await;
    run.wait("and is flushed", |_, now| now.flush >= rounds * flushed).await;
    for node in run.settle().await {
        assert_eq!(node.flush, rounds * flushed, "every row once a round, {rounds} rounds: {node:?}");
    }
}

/// As counters do, they begin again with the process; what was flushed before is not counted again, and what comes is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_restart_only_what_is_new_counts() {
    let mut run = Run::start().await;
    run.push().await;
    run.settle().await;
    run.wait("flushed", |_, now| now.flush >= PAYLOAD).await;
    let flushed = run.settle().await[0].flush;
    // Also what was appended before a leader changed.
    run.cluster.transfer(0, 1).await;
    run.settle().await;
    let last = run.last[2].log;
    run.cluster.kill(3);
    run.cluster.restart(3);
    run.cluster.wait_ready().await;
    run.last.clear();
    let restarted = run.settle().await[2];
    assert_eq!(restarted.flush, 0.0, "all was flushed, and nothing is again");
    assert!(restarted.log < last, "no record is written again: {restarted:?}, {last} before");
    run.push().await;
    run.settle().await;
    run.wait("what is new is in the log", |place, now| place != 2 || now.log - restarted.log >= PAYLOAD)
        .await;
    run.wait("and flushed", |place, now| place != 2 || now.flush >= flushed).await;
    assert_eq!(run.settle().await[2].flush, flushed, "every row once");
}
