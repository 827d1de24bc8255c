//! Rows in memory are served while the disk is not: neither the threads nor the room that pulls of cold rows take keep pulls and
//! pushes of hot ones waiting. When the disk answers, so do those.

#![cfg(feature = "failpoints")]

mod support;

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

use evershard::{ClientOptions, Error};
use support::metrics::metric;
use support::trainer::{Table, Trainer};
use support::{Cluster, Options, PATIENCE, eventually};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio::time::timeout;

const DIM: usize = 128;
const NODE: u64 = 1;
const THREADS: u64 = 2;
const MIB: u64 = 1 << 20;
/// The smallest there is.
const BUDGET: u64 = 16 * MIB;
/// A row's floats and what is beside them.
const ROW_BYTES: u64 = DIM as u64 * 4 + 32;
/// A quarter of them is in memory.
const IDS: u64 = 4 * BUDGET / ROW_BYTES;
/// A reply of 32 KiB is made where the request is read, one of 256 KiB by a thread for large pulls.
const HOT: [usize; 2] = [64, 512];
/// What a node may hold for its clients: the least that can be set.
const NODE_BYTES: u64 = 16 * MIB;

type Pulled = JoinHandle<(Result<Vec<f32>, Error>, Vec<u64>)>;

/// A node with a table larger than its memory, and a disk that can be held.
struct Run {
    cluster: Cluster,
    table: Table,
    hot: Vec<u64>,
    hang: PathBuf,
    _folder: TempDir,
}

impl Run {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (hang, config) = (folder.path().join("hang"), folder.path().join("node.toml"));
        let bounds = format!("stream_in_flight_bytes = {NODE_BYTES}\nnode_in_flight_bytes = {NODE_BYTES}\n");
        std::fs::write(&config, bounds).unwrap();
        let options = Options { nodes: 1, replicas: 1, shards: 1, ..Options::default() }
            .arg("--config", config.display())
            .arg("--memory-budget", BUDGET)
            .arg("--flush-interval-ms", 200)
            .arg("--read-threads", THREADS);
        let mut cluster = Cluster::prepare(options).await;
        cluster.node_mut(NODE).start(Some(&format!("fetch::before_read=hang@{}", hang.display())));
        cluster.create().await;
        cluster.wait_ready().await;
        let table = trainer(&cluster).await.integers("large", DIM).await;
        let all: Vec<u64> = (0..IDS).collect();
        for ids in all.chunks(4096) {
            table.push(ids, &rows(ids, -1.0)).await.expect("a push");
        }
        let hot = all[..HOT[1]].to_vec();
        Run { cluster, table, hot, hang, _folder: folder }
    }

    async fn cold_rows(&self) -> f64 {
        metric(&self.cluster, NODE, "evershard_pull_cold_rows_total").await
    }

    /// From here on the disk answers nobody, and the hot rows are in memory.
    async fn hold_disk(&self) {
        let looks_in_memory = Cell::new(0);
        eventually("the hot rows stay in memory", || async {
            let before = self.cold_rows().await;
            self.table.pull(&self.hot).await.expect("a pull");
            let read = self.cold_rows().await - before;
            looks_in_memory.set(if read == 0.0 { looks_in_memory.get() + 1 } else { 0 });
            if looks_in_memory.get() >= 40 { Ok(()) } else { Err(format!("{read} rows were read from disk")) }
        })
        .await;
        std::fs::write(&self.hang, "").unwrap();
    }

    /// Pulls ids all over the table, other ones each time.
    fn pull_cold(&self, table: &Table, pulls: u64, rows_each: u64) -> Vec<Pulled> {
        let step = (IDS - self.hot.len() as u64) / (pulls * rows_each);
        assert!(step > 0, "so many rows are not there");
        let pull = |pull| {
            let ids: Vec<u64> = (0..rows_each).map(|n| IDS - 1 - (n * pulls + pull) * step).collect();
            let table = table.clone();
            tokio::spawn(async move { (table.pull(&ids).await, ids) })
        };
        (0..pulls).map(pull).collect()
    }

    /// Waits until every thread has a pull in hand, and each waits for the disk.
    async fn wait_held(&self, rows_each: u64, before: f64) {
        eventually("every thread waits for the disk", || async {
            // So many cannot be of one pull.
            let looked_for = self.cold_rows().await - before;
            if looked_for > rows_each as f64 { Ok(()) } else { Err(format!("{looked_for} rows")) }
        })
        .await;
    }

    /// Pulls and pushes the hot rows, in small pulls and in large ones, through `table`.
    async fn use_hot(&self, table: &Table) {
        for turn in 0..20 {
            for count in HOT {
                let ids = &self.hot[..count];
                let pulled = timeout(PATIENCE / 2, table.pull(ids)).await;
                let pulled = pulled.unwrap_or_else(|_| panic!("turn {turn}: {count} rows in memory wait"));
                assert!(pulled.expect("a pull") == rows(ids, 1.0 + turn as f32), "turn {turn}: other rows");
            }
            let pushed = timeout(PATIENCE / 2, table.push(&self.hot, &rows(&self.hot, -1.0))).await;
            pushed.unwrap_or_else(|_| panic!("turn {turn}: a push to rows in memory waits")).expect("a push");
        }
    }

    /// The disk answers again.
    async fn release(&self, cold: Vec<Pulled>) {
        assert!(cold.iter().all(|pull| !pull.is_finished()), "the disk was to answer nobody");
        std::fs::remove_file(&self.hang).unwrap();
        for pull in cold {
            let (pulled, ids) = pull.await.unwrap();
            assert!(pulled.expect("a pull") == rows(&ids, 1.0), "other rows from the disk");
        }
    }
}

/// A client of its own, which asks once and waits.
async fn trainer(cluster: &Cluster) -> Trainer {
    let deadline = 2 * PATIENCE;
    let options = ClientOptions { attempt_timeout: deadline, deadline, ..ClientOptions::default() };
    Trainer::with(&cluster.endpoints(), options).await
}

/// A row of each id that is nothing but the id, times a factor.
fn rows(ids: &[u64], factor: f32) -> Vec<f32> {
    ids.iter().flat_map(|id| std::iter::repeat_n(*id as f32 * factor, DIM)).collect()
}

/// Also those of the client whose own cold pulls wait, on the same stream.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_in_memory_do_not_wait_for_the_threads_that_read_the_disk() {
    const COLD_ROWS: u64 = 96;
    let run = Run::start().await;
    run.hold_disk().await;
    let before = run.cold_rows().await;
    let cold = run.pull_cold(&run.table, 8 * THREADS, COLD_ROWS);
    run.wait_held(COLD_ROWS, before).await;
    run.use_hot(&run.table).await;
    run.release(cold).await;
}

/// Cold pulls whose replies would be twice what the node may hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_in_memory_do_not_wait_for_the_room_that_cold_pulls_take() {
    const CLIENTS: u64 = 4;
    /// Close to the largest reply that there is.
    const COLD_ROWS: u64 = 1900;
    const PULLS: u64 = 2 * NODE_BYTES / MIB / CLIENTS;
    let run = Run::start().await;
    run.hold_disk().await;
    let before = run.cold_rows().await;
    let mut cold = Vec::new();
    for _ in 0..CLIENTS {
        let table = trainer(&run.cluster).await.table("large").await;
        cold.extend(run.pull_cold(&table, PULLS, COLD_ROWS));
    }
    run.wait_held(COLD_ROWS, before).await;
    // Whatever else of them the node lets in.
    tokio::time::sleep(Duration::from_secs(1)).await;
    run.use_hot(&run.table).await;
    run.release(cold).await;
}
