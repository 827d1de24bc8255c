//! Jobs that sum the gradients of a step before they are applied (BSP): bits that do not depend on who died when, steps applied
//! once, contributions whole or not at all.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use evershard::{Aggregation, ClientOptions, ErrorKind, Job, JobOptions, Worker, definition};
use support::trainer::{Table, Trainer, in_step};
use support::{Cluster, Options, PATIENCE, setting};
use tokio::task::JoinSet;
use tokio::time::timeout;

const DIM: usize = 4;
const WORKERS: u32 = 4;
const IDS: u64 = 60;

async fn connect(cluster: &Cluster, options: JobOptions) -> (Trainer, Job, Table) {
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let job = trainer.client.job("ml", options).await.unwrap();
    let table = trainer.integers("integers", DIM).await;
    (trainer, job, table)
}

/// Two tables whose weights depend on the order of every addition.
async fn tables(trainer: &Trainer) -> [evershard::Table; 2] {
    let create = async |name: &str, optimizer| {
        let definition = definition::sparse(name, u32::try_from(DIM).unwrap(), optimizer);
        trainer.client.create_table(definition).await.unwrap()
    };
    [create("users", definition::adagrad(0.1)).await, create("items", definition::sgd(0.05)).await]
}

/// Of a worker's batch at a step; some are empty.
fn batch(rank: u32, step: u64) -> Vec<u64> {
    let rank = u64::from(rank);
    if (rank + step).is_multiple_of(5) {
        return Vec::new();
    }
    (0..12).map(|at| (rank * 7 + step * 13 + at * at) % IDS).collect()
}

/// What would be learned of rows: any function of them, whose values are of very different magnitudes.
fn gradients(rows: &[f32], rank: u32, step: u64) -> Vec<f32> {
    let noise = |at: usize| {
        let seed = (u64::from(rank) << 40) ^ (step << 20) ^ at as u64;
        let bits = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((bits >> 40) as f32 / 8_388_608.0 - 1.0) * 10f32.powi(i32::try_from(bits % 5).unwrap() - 2)
    };
    rows.iter().enumerate().map(|(at, row)| 0.3 * row + noise(at)).collect()
}

async fn train(worker: &mut Worker, tables: &[evershard::Table; 2], steps: std::ops::Range<u64>) {
    let rank = worker.rank();
    for step in steps {
        assert_eq!(worker.clock(), step);
        let ids = batch(rank, step);
        for table in tables {
            let mut rows = vec![0.0; ids.len() * DIM];
            worker.pull(table, &ids, &mut rows).await.unwrap();
            let gradients = gradients(&rows, rank, step);
            // In two pushes, one after the other: their order counts, too.
            let half = ids.len() / 2;
            worker.push_begin(table, &ids[..half], &gradients[..half * DIM]).await.unwrap();
            worker.push(table, &ids[half..], &gradients[half * DIM..]).await.unwrap();
        }
        worker.tick(&(step + 1).to_le_bytes()).await.unwrap();
    }
}

/// Trains, kills the leader of a shard or of the meta group `kills` times on the way, and gives the bits of every weight.
async fn run(steps: u64, kills: usize) -> Vec<u32> {
    let mut cluster = Cluster::with_shards(3).await;
    let (trainer, _, _) = connect(&cluster, in_step(WORKERS)).await;
    let all = tables(&trainer).await;
    let progress = Arc::new(AtomicU64::new(0));
    let mut running = JoinSet::new();
    for rank in 0..WORKERS {
        let (process, job, _) = connect(&cluster, in_step(WORKERS)).await;
        let (tables, progress) = (tables(&process).await, progress.clone());
        running.spawn(async move {
            let mut worker = job.worker(rank).await.unwrap();
            for step in 0..steps {
                train(&mut worker, &tables, step..step + 1).await;
                progress.fetch_max(step + 1, Ordering::Relaxed);
            }
            worker.leave().await.unwrap();
            drop(process);
        });
    }
    for kill in 0..kills {
        let before = progress.load(Ordering::Relaxed);
        let moved = async {
            while progress.load(Ordering::Relaxed) < (before + 3).min(steps) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(PATIENCE, moved).await.expect("steps are made");
        let victim = cluster.leader_of(u32::try_from(kill % 3).unwrap()).await;
        cluster.kill(victim);
        tokio::time::sleep(Duration::from_millis(600)).await;
        cluster.restart(victim);
        cluster.wait_ready().await;
        cluster.wait_caught_up().await;
    }
    while let Some(done) = timeout(PATIENCE, running.join_next()).await.expect("the workers end") {
        done.unwrap();
    }
    let ids: Vec<u64> = (0..IDS).collect();
    let mut bits = Vec::new();
    for table in &all {
        bits.extend(table.pull_vec(&ids).await.unwrap().iter().map(|weight| weight.to_bits()));
    }
    cluster.assert_replicas_equal().await;
    bits
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_with_killed_leaders_ends_with_the_bits_of_an_undisturbed_one() {
    let steps = setting("EVERSHARD_TEST_STEPS", 40) as u64;
    let undisturbed = run(steps, 0).await;
    assert!(undisturbed.iter().filter(|bits| **bits != 0).count() > undisturbed.len() / 2, "it learned");
    let disturbed = run(steps, setting("EVERSHARD_KILLS", 3)).await;
    assert_eq!(undisturbed, disturbed);
}

async fn value(table: &Table, id: u64) -> f32 {
    table.pull(&[id]).await.unwrap()[0]
}

async fn add(worker: &Worker, table: &Table, ids: &[u64], value: f32) {
    worker.push(&table.table, ids, &vec![-value; ids.len() * DIM]).await.unwrap();
}

/// Sums and means, empty contributions, nothing before the step's end, workers that are added.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_is_applied_at_its_end_with_what_all_workers_contributed() {
    let cluster = Cluster::with_shards(2).await;
    for aggregation in [Aggregation::Sum, Aggregation::Mean] {
        let (trainer, job, table) =
            connect(&cluster, JobOptions { aggregation: Some(aggregation), ..in_step(2) }).await;
        let id = aggregation as u64;
        let (mut first, mut second) = (job.worker(0).await.unwrap(), job.worker(1).await.unwrap());
        add(&first, &table, &[id], 3.0).await;
        add(&first, &table, &[id], 5.0).await;
        assert_eq!(value(&table, id).await, 0.0, "nothing is applied before the step's end");
        let (one, other) = tokio::join!(first.tick(b"a1"), second.tick(b"b1"));
        one.unwrap();
        other.unwrap();
        // The second worker's batch was empty, and counts.
        let expected = if aggregation == Aggregation::Sum { 8.0 } else { 4.0 };
        assert_eq!(value(&table, id).await, expected);
        assert_eq!((second.clock(), second.cursor()), (1, b"b1".as_slice()));

        let mut third = job.worker(2).await.unwrap();
        assert_eq!(third.clock(), 1);
        add(&third, &table, &[id], 9.0).await;
        let all = tokio::join!(first.tick(b"a2"), second.tick(b"b2"), third.tick(b"c1"));
        all.0.and(all.1).and(all.2).unwrap();
        let more = if aggregation == Aggregation::Sum { 9.0 } else { 3.0 };
        assert_eq!(value(&table, id).await, expected + more);
        // What is pushed to a step that its worker does not end is in none, and that is said.
        add(&third, &table, &[id], 1000.0).await;
        let refused = third.leave().await.unwrap_err();
        assert!(refused.to_string().contains("since its last tick"), "{refused}");
        let both = tokio::join!(first.tick(b"a3"), second.tick(b"b3"));
        both.0.and(both.1).unwrap();
        assert_eq!(value(&table, id).await, expected + more);
        let described = &trainer.client.jobs(Some("ml")).await.unwrap()[0];
        assert!(described.workers.iter().all(|worker| worker.clock >= 2));
        trainer.client.remove_job("ml").await.unwrap();
    }
}

/// A step of more than a message and more than an entry: every row once, also when its leader dies on the way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_step_goes_through_in_parts_and_once() {
    const ROWS: u64 = 60_000;
    let mut cluster = Cluster::with_shards(1).await;
    let (_trainer, job, table) = connect(&cluster, in_step(1)).await;
    let ids: Vec<u64> = (0..ROWS).collect();
    let mut worker = job.worker(0).await.unwrap();
    for step in 0..6u64 {
        add(&worker, &table, &ids, 1.0).await;
        if step % 2 == 1 {
            let leader = cluster.leader_of(0).await;
            let ticking = worker.tick(b"");
            // Somewhere in the middle of it.
            let kill = async {
                tokio::time::sleep(Duration::from_millis(15 * step)).await;
                cluster.kill(leader);
            };
            let (ticked, ()) = tokio::join!(ticking, kill);
            ticked.unwrap();
            cluster.restart(leader);
            cluster.wait_ready().await;
        } else {
            worker.tick(b"").await.unwrap();
        }
        let rows = table.pull(&ids).await.unwrap();
        assert!(rows.iter().all(|value| *value == (step + 1) as f32), "after step {step}");
    }
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
}

/// What an incarnation contributed before it was replaced does not count beside what its replacement contributes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replacement_contributes_instead_of_whoever_had_the_rank() {
    let cluster = Cluster::with_shards(2).await;
    let (_one, job, table) = connect(&cluster, in_step(2)).await;
    let (mut first, old) = (job.worker(0).await.unwrap(), job.worker(1).await.unwrap());
    add(&first, &table, &[1, 2, 3, 4], 1.0).await;
    add(&old, &table, &[1, 2, 3, 4], 100.0).await;
    let (_other, job, _) = connect(&cluster, in_step(2)).await;
    let mut new = job.worker(1).await.unwrap();
    add(&new, &table, &[1, 2], 10.0).await;
    let refused = old.push(&table.table, &[3], &[-100.0; DIM]).await;
    if let Err(refused) = &refused {
        assert_eq!(refused.kind(), ErrorKind::Fenced, "{refused}");
    }
    let (one, other) = tokio::join!(first.tick(b""), new.tick(b""));
    one.unwrap();
    other.unwrap();
    let mut old = old;
    assert_eq!(old.tick(b"").await.unwrap_err().kind(), ErrorKind::Fenced);
    for (id, expected) in [(1, 11.0), (2, 11.0), (3, 1.0), (4, 1.0)] {
        assert_eq!(value(&table, id).await, expected, "row {id}");
    }
}

/// Calls that nobody waits for any more: a push that is made again counts once, and nothing is pushed to a step that is ending.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_are_given_up_and_made_again_count_once() {
    let cluster = Cluster::with_shards(2).await;
    let (_trainer, job, table) = connect(&cluster, in_step(2)).await;
    let (mut first, mut second) = (job.worker(0).await.unwrap(), job.worker(1).await.unwrap());
    let ids: Vec<u64> = (0..2000).collect();
    let mut acknowledged = 0.0;
    for attempt in 0..30 {
        // Given up at any point of its way.
        let patience = Duration::from_micros(300 * attempt);
        if timeout(patience, add(&first, &table, &ids, 100.0)).await.is_ok() {
            acknowledged += 100.0;
        }
    }
    let before = table.pull(&ids).await.unwrap();
    assert!(before.iter().all(|value| *value == 0.0));
    add(&first, &table, &[1, 2], 1.0).await;
    assert!(
        timeout(Duration::from_millis(400), first.tick(b"one")).await.is_err(),
        "the other is still at it"
    );
    let refused = first.push(&table.table, &[1], &[-1000.0; DIM]).await.unwrap_err();
    assert!(refused.to_string().contains("tick again"), "{refused}");
    second.push_begin(&table.table, &[2], &[-10.0; DIM]).await.unwrap();
    let (one, other) = tokio::join!(first.tick(b"another"), second.tick(b""));
    one.unwrap();
    other.unwrap();
    assert_eq!(first.cursor(), b"one", "where the step ended");
    let after = table.pull(&ids).await.unwrap();
    for (row, id) in after.chunks(DIM).zip(&ids) {
        let more = [0.0, 1.0, 11.0][usize::try_from(*id.min(&3)).unwrap() % 3];
        assert_eq!(row[0], acknowledged + more, "row {id}: what was acknowledged, and nothing else");
    }
}

/// What leaders keep for steps is bounded: a push beyond that is in no step, and takes no room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_beyond_the_bound_is_in_no_step_and_takes_no_room() {
    const WIDE: usize = 256;
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("node.toml");
    std::fs::write(&config, "step_buffer_bytes = 16777216\n").unwrap();
    let options_of_nodes = Options { shards: 1, ..Options::default() }.arg("--config", config.display());
    let cluster = Cluster::start(options_of_nodes).await;
    let impatient = ClientOptions { deadline: Duration::from_secs(4), ..ClientOptions::default() };
    let trainer = Trainer::with(&cluster.endpoints(), impatient).await;
    let table = trainer.integers("wide", WIDE).await;
    let mut worker = trainer.client.job("ml", in_step(1)).await.unwrap().worker(0).await.unwrap();
    // A little more than 1 KiB a row.
    let ids: Vec<u64> = (0..20_000).collect();
    let gradients = vec![-1.0; ids.len() * WIDE];
    for _ in 0..2 {
        let refused = worker.push(&table.table, &ids, &gradients).await.unwrap_err();
        assert!(refused.to_string().contains("step_buffer_bytes"), "{refused}");
    }
    let fits = 14_000;
    worker.push(&table.table, &ids[..fits], &gradients[..fits * WIDE]).await.unwrap();
    let too_long = worker.tick(&vec![0; 17 << 10]).await.unwrap_err();
    assert!(too_long.to_string().contains("16384"), "{too_long}");
    worker.tick(b"one").await.unwrap();
    let seen = [0, 13_999, 14_000, 19_999].map(|id| ids[id]);
    let rows = table.pull(&seen).await.unwrap();
    assert_eq!([0, 1, 2, 3].map(|row| rows[row * WIDE]), [1.0, 1.0, 0.0, 0.0]);
}
