//! Checkpoints of a real cluster: exact at the cut in every mode while workers train, base and deltas with exact expected values, whole
//! or not there at all.

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use evershard::{Job, JobOptions};
use evershard_checkpoint::manifest::{Content, LinkKind};
use evershard_checkpoint::reader::{Batch, Selection, TableRows};
use evershard_checkpoint::target::Target;
use evershard_checkpoint::verify::verify;
use evershard_proto::key::id_of;
use evershard_proto::v1::checkpoint_service_client::CheckpointServiceClient;
use evershard_proto::v1::create_checkpoint_event::Event;
use evershard_proto::v1::{CheckpointDone, CreateCheckpointRequest};
use support::trainer::{Table, Trainer, in_step};
use support::{Cluster, Options, PATIENCE};
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::timeout;

const DIM: usize = 2;

struct Place {
    _home: TempDir,
    url: String,
    target: Target,
}

impl Place {
    fn new() -> Self {
        let home = TempDir::new().unwrap();
        let url = format!("file://{}", home.path().join("ckpt").display());
        let target = Target::create(&url).unwrap();
        Place { _home: home, url, target }
    }

    fn request(&self, name: &str) -> CreateCheckpointRequest {
        CreateCheckpointRequest { url: self.url.clone(), name: name.into(), ..Default::default() }
    }

    async fn create(
        &self,
        cluster: &Cluster,
        node: u64,
        name: &str,
    ) -> Result<CheckpointDone, tonic::Status> {
        create(cluster, node, self.request(name)).await
    }

    async fn content(&self, name: &str) -> Content {
        let content = self.target.get_manifest(&name.parse().unwrap()).await.unwrap();
        let verified = verify(&self.target, &content, |_| ()).await;
        assert!(verified.is_whole(), "{:?}", verified.problems);
        content
    }

    /// Ids and the first weight of their rows.
    async fn rows(&self, name: &str, table: &str) -> BTreeMap<u64, f32> {
        let content = self.content(name).await;
        let number = content.tables.iter().find(|entry| entry.name == table).unwrap().number;
        let mut rows = TableRows::new(&self.target, &content, number, Selection::live());
        let (mut batch, mut found) = (Batch::default(), BTreeMap::new());
        while rows.next_batch(&mut batch).await.unwrap() {
            for row in batch.rows() {
                assert!(row.values[..DIM].iter().all(|value| *value == row.values[0]), "a torn row");
                found.insert(id_of(number, row.key), row.values[0]);
            }
        }
        found
    }
}

async fn create(
    cluster: &Cluster,
    node: u64,
    request: CreateCheckpointRequest,
) -> Result<CheckpointDone, tonic::Status> {
    let mut client = CheckpointServiceClient::new(cluster.channel(node));
    let created = async {
        let mut events = client.create_checkpoint(request).await?.into_inner();
        loop {
            match events.message().await?.expect("done, or an error").event.expect("of this build") {
                Event::Done(done) => return Ok(done),
                Event::Held(_) | Event::Cut(_) | Event::Progress(_) => {}
            }
        }
    };
    timeout(PATIENCE, created).await.expect("a hang")
}

async fn push(table: &Table, ids: &[u64]) {
    table.push(ids, &vec![-1.0; ids.len() * DIM]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chain_has_the_exact_rows_at_every_point() {
    let cluster = Cluster::start(Options { shards: 4, ..Options::default() }).await;
    let place = Place::new();
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let (table, other) = (trainer.integers("items", DIM).await, trainer.integers("others", DIM).await);
    push(&table, &(0..3000).collect::<Vec<_>>()).await;
    push(&other, &[7]).await;
    // Any node may be asked.
    let base = place.create(&cluster, 2, "base").await.unwrap();
    assert_eq!((base.bytes_added, base.parent.as_str()), (base.bytes_total, ""));
    assert_eq!(base.shards.len(), 4);
    let first: BTreeMap<u64, f32> = (0..3000).map(|id| (id, 1.0)).collect();
    assert_eq!(place.rows("base", "items").await, first);

    // Some rows change, some go, some come.
    push(&table, &(100..200).collect::<Vec<_>>()).await;
    table.table.remove(&(0..50).collect::<Vec<_>>()).await.unwrap();
    push(&table, &[u64::MAX]).await;
    let delta = place.create(&cluster, 1, "delta").await.unwrap();
    assert_eq!(delta.parent, "base");
    assert!(delta.bytes_added < base.bytes_total / 3, "{} of {}", delta.bytes_added, base.bytes_total);
    let mut second: BTreeMap<u64, f32> = first.clone().split_off(&50);
    second.extend((100..200).map(|id| (id, 2.0)));
    second.insert(u64::MAX, 1.0);
    assert_eq!(place.rows("delta", "items").await, second);

    // Cleared, and begun anew; the other table is dropped.
    table.table.clear().await.unwrap();
    push(&table, &[1, 2]).await;
    trainer.client.admin().drop_table("others").await.unwrap();
    place.create(&cluster, 3, "cleared").await.unwrap();
    assert_eq!(place.rows("cleared", "items").await, [(1, 1.0), (2, 1.0)].into());
    let content = place.content("cleared").await;
    assert_eq!(content.tables.len(), 1);
    assert!(
        content.shards.iter().all(|shard| shard.links.len() == 3 && shard.links[2].kind == LinkKind::Delta)
    );

    // All rows, though there is one to build upon; and the earlier ones are as they were.
    let request = CreateCheckpointRequest { base: true, ..place.request("again") };
    let again = create(&cluster, 1, request).await.unwrap();
    assert_eq!(again.parent, "");
    assert_eq!(place.rows("again", "items").await, [(1, 1.0), (2, 1.0)].into());
    assert_eq!(place.rows("base", "items").await, first);
    assert_eq!(place.rows("delta", "items").await, second);
    // A name is taken once, and is a name.
    for (name, words) in
        [("base", "already"), ("../x", "not a checkpoint's name"), ("", "not a checkpoint's name")]
    {
        let error = place.create(&cluster, 1, name).await.unwrap_err();
        assert!(error.message().contains(words), "{error}");
    }
    assert_eq!(place.target.list().await.unwrap().len(), 4);
}

/// Workers of a job that each add 1 to a row of every shard's each step, until told to stop.
fn train(workers: &mut JoinSet<u64>, job: &Job, table: &Table, ranks: u32, stop: &Arc<AtomicBool>) {
    for rank in 0..ranks {
        let (job, table, stop) = (job.clone(), table.table.clone(), Arc::clone(stop));
        workers.spawn(async move {
            let mut worker = job.worker(rank).await.unwrap();
            let (ids, mut steps) = ((0..64).collect::<Vec<u64>>(), 0_u64);
            while !stop.load(Ordering::Relaxed) {
                worker.push(&table, &ids, &vec![-1.0; ids.len() * DIM]).await.unwrap();
                steps += 1;
                let stopped = worker.tick(&steps.to_le_bytes()).await;
                stopped.unwrap();
            }
            worker.leave().await.unwrap();
            steps
        });
    }
}

async fn cuts_are_exact(options: JobOptions) {
    const WORKERS: u32 = 3;
    let cluster = Cluster::start(Options { shards: 4, ..Options::default() }).await;
    let place = Place::new();
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("items", DIM).await;
    let is_summed = options.staleness == Some(0);
    let job = trainer.client.job("ml", JobOptions { workers: WORKERS, ..options }).await.unwrap();
    let (mut workers, stop) = (JoinSet::new(), Arc::new(AtomicBool::new(false)));
    train(&mut workers, &job, &table, WORKERS, &stop);
    for name in ["a", "b", "c", "d", "e"] {
        tokio::time::sleep(Duration::from_millis(150)).await;
        place.create(&cluster, 1, name).await.unwrap();
    }
    if is_summed {
        // All at once, or a worker would wait for one that has left.
        stop.store(true, Ordering::Relaxed);
        workers.abort_all();
    } else {
        stop.store(true, Ordering::Relaxed);
    }
    while let Some(ended) = timeout(PATIENCE, workers.join_next()).await.unwrap() {
        assert!(ended.is_ok() || is_summed);
    }
    let mut last = 0;
    for name in ["a", "b", "c", "d", "e"] {
        let content = place.content(name).await;
        let [job] = &content.jobs[..] else { panic!("one job") };
        // What each worker says of itself is what all shards have, in every row.
        let said = |cursor: &[u8]| cursor.try_into().map_or(0, u64::from_le_bytes);
        for worker in &job.workers {
            assert_eq!(said(&worker.cursor), worker.clock, "cursor and clock of rank {}", worker.rank);
        }
        let pushed: u64 = job.workers.iter().map(|worker| worker.clock).sum();
        let rows = place.rows(name, "items").await;
        assert_eq!(rows.len(), if pushed == 0 { 0 } else { 64 });
        assert!(rows.values().all(|value| *value == pushed as f32), "{name}: {pushed} pushes, rows {rows:?}");
        assert!(pushed >= last, "{name}");
        last = pushed;
    }
    assert!(last > 0, "nothing was trained");
    cluster.assert_replicas_equal().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cut_is_exact_while_summed_steps_are_made() {
    cuts_are_exact(in_step(3)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cut_is_exact_while_workers_keep_within_a_staleness() {
    cuts_are_exact(JobOptions { staleness: Some(2), ..in_step(3) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cut_is_exact_while_nobody_waits_for_anybody() {
    cuts_are_exact(JobOptions { staleness: None, ..in_step(3) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_checkpoint_that_cannot_be_is_not_there_and_holds_nobody() {
    let mut cluster = Cluster::start(Options { shards: 2, ..Options::default() }).await;
    let place = Place::new();
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("items", DIM).await;
    push(&table, &[1, 2, 3]).await;
    // A worker that is in the middle of its step is waited for, for as long as was said.
    let job = trainer.client.job("slow", JobOptions { staleness: None, ..in_step(1) }).await.unwrap();
    let mut worker = job.worker(0).await.unwrap();
    let request = CreateCheckpointRequest { hold_within_ms: 300, ..place.request("held") };
    let error = create(&cluster, 1, request).await.unwrap_err();
    assert!(error.message().contains("worker 0 of job \"slow\""), "{error}");
    timeout(PATIENCE, worker.tick(&[])).await.expect("the hold is over").unwrap();
    // A target that cannot be.
    let request = CreateCheckpointRequest { url: "file:///proc/nothing".into(), ..place.request("nowhere") };
    let error = create(&cluster, 1, request).await.unwrap_err();
    assert!(error.message().contains("/proc/nothing"), "{error}");
    worker.leave().await.unwrap();
    // With one node down there is one, written by the others.
    cluster.kill(3);
    support::eventually("a checkpoint of two nodes", || async {
        let name = format!("two-{}", uuid::Uuid::new_v4());
        place.create(&cluster, 1, &name).await.map_err(|error| error.to_string())
    })
    .await;
    assert_eq!(place.target.list().await.unwrap().len(), 1);
}
