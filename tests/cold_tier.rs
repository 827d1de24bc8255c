//! A table ten times the memory budget: exact sums under uniform and skewed load, through kill -9 and restarts; memory stays
//! within the budget; rows that were never pushed stay absent.

mod support;

use std::collections::HashMap;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use support::ledger::Ledger;
use support::metrics::metric;
use support::trainer::{Table, Trainer};
use support::{Cluster, Options, eventually, setting};

const DIM: usize = 128;
const BATCH: usize = 4096;
/// The smallest there is.
const BUDGET: u64 = 16 << 20;
/// A row's floats and what is beside them.
const ROW_BYTES: u64 = DIM as u64 * 4 + 32;

/// Pushes once; the ledger hears of it.
async fn push(table: &Table, ledger: &mut Ledger, ids: &[u64], random: &mut StdRng) {
    let gradients: Vec<i64> = ids.iter().map(|_| random.random_range(1..=3)).collect();
    let floats: Vec<f32> = gradients.iter().flat_map(|g| std::iter::repeat_n(*g as f32, DIM)).collect();
    table.push(ids, &floats).await.expect("a push within its deadline");
    ledger.acknowledge(ids, &gradients);
}

/// Ids as a recommender's: few of them most of the time (Zipf with exponent 1).
fn skewed(count: usize, ids: u64, random: &mut StdRng) -> Vec<u64> {
    (0..count).map(|_| ((ids as f64).powf(random.random::<f64>()) as u64).min(ids) - 1).collect()
}

async fn check(table: &Table, ledger: &Ledger) {
    let ids = ledger.ids();
    let mut rows = Vec::with_capacity(ids.len() * DIM);
    for ids in ids.chunks(BATCH) {
        rows.extend(table.pull(ids).await.expect("a pull within its deadline"));
    }
    ledger.assert_matches(&rows, DIM);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_of_ten_times_the_budget_is_exact() {
    let ids = 10 * BUDGET / ROW_BYTES;
    let pushes = setting("EVERSHARD_COLD_PUSHES", 60);
    let options = Options { shards: 2, ..Options::default() };
    let options = options.arg("--memory-budget", BUDGET).arg("--flush-interval-ms", 200);
    let mut cluster = Cluster::start(options).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("large", DIM).await;
    let mut random = StdRng::seed_from_u64(3);
    let mut ledger = Ledger::default();

    // Every other id, so that there are absent ones between them.
    let all: Vec<u64> = (0..ids).map(|id| id * 2).collect();
    for batch in all.chunks(BATCH) {
        push(&table, &mut ledger, batch, &mut random).await;
    }
    for number in 0..pushes {
        let batch = if number % 2 == 0 {
            skewed(BATCH / 4, ids, &mut random)
        } else {
            (0..BATCH / 4).map(|_| random.random_range(0..ids)).collect()
        };
        let batch: Vec<u64> = batch.into_iter().map(|id| id * 2).collect();
        // As training does: pull, then push.
        table.pull(&batch).await.expect("a pull");
        push(&table, &mut ledger, &batch, &mut random).await;
        if number == pushes / 2 {
            let victim = cluster.leader_of(0).await;
            cluster.kill(victim);
            push(&table, &mut ledger, &batch, &mut random).await;
            cluster.restart(victim);
        }
    }
    cluster.wait_ready().await;
    cluster.wait_caught_up().await;
    let absent: Vec<u64> = (0..BATCH as u64).map(|id| id * 2 + 1).collect();
    assert!(table.pull(&absent).await.expect("a pull").iter().all(|value| *value == 0.0));
    check(&table, &ledger).await;
    cluster.assert_replicas_equal().await;

    for id in cluster.ids() {
        let used = metric(&cluster, id, "evershard_memory_used_bytes").await;
        let cold = metric(&cluster, id, "evershard_pull_cold_rows_total").await;
        eprintln!("node {id}: {used} bytes of {BUDGET}, {cold} rows of pulls from disk");
        assert!(used > 0.5 * BUDGET as f64, "node {id} keeps next to nothing in memory");
        // A message's rows may come on top, which counts with a budget as small as this.
        assert!(used <= 1.2 * BUDGET as f64, "node {id} is over its budget");
    }
    let counts = rows_by_node(&cluster).await;
    assert!(counts.values().all(|rows| *rows == ids), "{counts:?} of {ids}");

    // Everything from disk.
    cluster.kill_all();
    cluster.start_all();
    cluster.wait_ready().await;
    check(&table, &ledger).await;
    cluster.assert_replicas_equal().await;
    eventually("all rows counted again", || async {
        let counts = rows_by_node(&cluster).await;
        if counts.values().all(|rows| *rows == ids) { Ok(()) } else { Err(format!("{counts:?} of {ids}")) }
    })
    .await;
}

/// What is replayed is dirty, and may not leave memory before it is flushed: the flush does not wait for the end of the replay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_with_more_rows_than_memory_has_room_for_is_replayed() {
    let ids = 3 * BUDGET / ROW_BYTES;
    // An hour: nothing is flushed because it is time.
    let options = Options { nodes: 1, replicas: 1, shards: 1, ..Options::default() }
        .arg("--flush-interval-ms", 3_600_000);
    let mut cluster = Cluster::start(options).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("large", DIM).await;
    let (mut random, mut ledger) = (StdRng::seed_from_u64(4), Ledger::default());
    let all: Vec<u64> = (0..ids).collect();
    for batch in all.chunks(BATCH) {
        push(&table, &mut ledger, batch, &mut random).await;
    }
    let replica = cluster.replica(1, 0).await.expect("it answers");
    assert!(replica.committed - replica.flushed > 100, "all of it is to be replayed: {replica:?}");
    cluster.kill(1);
    let args = &mut cluster.node_mut(1).settings.server_args;
    args.extend(["--memory-budget".to_owned(), BUDGET.to_string()]);
    cluster.restart(1);
    cluster.wait_ready().await;
    check(&table, &ledger).await;
    let used = metric(&cluster, 1, "evershard_memory_used_bytes").await;
    assert!(used <= 1.2 * BUDGET as f64, "{used} bytes of {BUDGET}");
}

/// Live rows that each node counts.
async fn rows_by_node(cluster: &Cluster) -> HashMap<u64, u64> {
    let mut counts = HashMap::new();
    for id in cluster.ids() {
        let status = cluster.status(id).await.expect("it answers");
        let rows = status.replicas.iter().flat_map(|replica| &replica.tables).map(|table| table.rows).sum();
        counts.insert(id, rows);
    }
    counts
}
