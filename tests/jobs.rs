//! Workers of a job: nobody gets further ahead than the staleness through failovers of every leader, who is fenced changes
//! nothing any more, the dead are left behind or waited for or the end, replacements go on where the rank was.

mod support;

use std::sync::Arc;
use std::time::Duration;

use evershard::{DeadWorkerPolicy, Error, ErrorKind, Job, JobOptions, Worker, WorkerState};
use support::trainer::{Table, Trainer};
use support::{Cluster, PATIENCE};
use tokio::task::JoinSet;
use tokio::time::timeout;

const DIM: usize = 4;
/// Short, and long enough that a busy machine does not end it.
const LEASE: Duration = Duration::from_secs(2);

fn options(workers: u32, staleness: Option<u32>) -> JobOptions {
    JobOptions { workers, staleness, lease: Duration::from_secs(60), ..JobOptions::default() }
}

/// A client, a job, a table: what a worker's process has.
async fn connect(cluster: &Cluster, options: JobOptions) -> (Trainer, Job, Table) {
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let job = trainer.client.job("ml", options).await.unwrap();
    let table = trainer.integers("audit", DIM).await;
    (trainer, job, table)
}

/// Adds one to a row.
async fn add_one(worker: &Worker, table: &Table, id: u64) -> Result<(), Error> {
    worker.push(&table.table, &[id], &[-1.0; DIM]).await.map(|_| ())
}

async fn value(table: &Table, id: u64) -> f32 {
    table.pull(&[id]).await.unwrap()[0]
}

/// Each worker counts its steps in a row of its own, and looks at everybody's: what it sees is never older than the
/// staleness allows, and nobody is further ahead than that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_gets_further_ahead_than_the_staleness_through_failovers() {
    const WORKERS: u64 = 3;
    const STEPS: u64 = 60;
    for staleness in [0, 2] {
        let mut cluster = Cluster::with_shards(2).await;
        let mut running = JoinSet::new();
        let all: Arc<Vec<u64>> = Arc::new((0..WORKERS).collect());
        for rank in 0..WORKERS {
            let (trainer, job, table) = connect(&cluster, options(3, Some(staleness))).await;
            let all = all.clone();
            running.spawn(async move {
                let mut worker = job.worker(u32::try_from(rank).unwrap()).await.unwrap();
                let mut rows = vec![0.0; all.len() * DIM];
                let mut widest = 0;
                for step in 0..STEPS {
                    worker.pull(&table.table, &all, &mut rows).await.unwrap();
                    for other in 0..WORKERS {
                        // Exact: counts of steps.
                        let seen = rows[usize::try_from(other).unwrap() * DIM] as u64;
                        assert!(
                            seen + u64::from(staleness) >= step,
                            "rank {rank} begins step {step} and sees {seen} steps of rank {other}"
                        );
                        // Another may have pushed for the step that it is in.
                        assert!(
                            seen <= step + u64::from(staleness) + 1,
                            "rank {rank} is in step {step}, and rank {other} has done {seen}"
                        );
                        widest = widest.max(seen.abs_diff(step));
                    }
                    add_one(&worker, &table, rank).await.unwrap();
                    worker.tick(&step.to_le_bytes()).await.unwrap();
                }
                worker.leave().await.unwrap();
                drop(trainer);
                widest
            });
        }
        // Whoever leads, the meta group too.
        for victim in [1, 2, 3, 1] {
            tokio::time::sleep(Duration::from_millis(700)).await;
            if running.is_empty() {
                break;
            }
            cluster.kill(victim);
            tokio::time::sleep(Duration::from_millis(1500)).await;
            cluster.restart(victim);
            cluster.wait_ready().await;
            cluster.wait_caught_up().await;
        }
        let mut widest = 0;
        while let Some(done) = timeout(PATIENCE, running.join_next()).await.expect("the workers end") {
            widest = widest.max(done.unwrap());
        }
        eprintln!("staleness {staleness}: at most {widest} steps apart");
        let (_, _, table) = connect(&cluster, options(3, Some(staleness))).await;
        for id in 0..WORKERS {
            assert_eq!(value(&table, id).await, STEPS as f32);
        }
        cluster.assert_replicas_equal().await;
    }
}

/// Whose rank is taken pushes into the void, and hears it; the one who has the rank goes on where it was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_earlier_incarnation_is_fenced_before_the_next_one_begins() {
    let cluster = Cluster::with_shards(2).await;
    let (_old_process, job, table) = connect(&cluster, options(1, None)).await;
    let mut old = job.worker(0).await.unwrap();
    add_one(&old, &table, 7).await.unwrap();
    old.tick(b"after one").await.unwrap();

    let (_new_process, job, _) = connect(&cluster, options(1, None)).await;
    let mut new = job.worker(0).await.unwrap();
    assert!(new.epoch() > old.epoch());
    assert_eq!((new.clock(), new.cursor()), (1, b"after one".as_slice()));
    // Neither under its old session nor under another.
    for _ in 0..3 {
        let refused = add_one(&old, &table, 7).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Fenced, "{refused}");
        assert!(refused.to_string().contains("epoch"), "{refused}");
    }
    assert_eq!(old.tick(b"again").await.unwrap_err().kind(), ErrorKind::Fenced);
    assert_eq!(value(&table, 7).await, 1.0);
    add_one(&new, &table, 7).await.unwrap();
    new.tick(b"after two").await.unwrap();
    assert_eq!(value(&table, 7).await, 2.0);
    new.leave().await.unwrap();
}

/// The lease of a worker that is stopped for longer than it ends: what it pushes when it wakes up is refused, although nobody
/// took its rank.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_was_silent_for_its_lease_is_fenced() {
    let cluster = Cluster::with_shards(2).await;
    let given = JobOptions { lease: LEASE, ..options(1, None) };
    let endpoints = cluster.endpoints();
    let worker = tokio::task::spawn_blocking(move || {
        // A process of its own, as it were: while its only thread does something else, nothing of it is heard.
        let process = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (_trainer, worker, table) = process.block_on(async {
            let trainer = Trainer::connect(&endpoints).await;
            let table = trainer.integers("audit", DIM).await;
            let job = trainer.client.job("ml", given).await.unwrap();
            let worker = job.worker(0).await.unwrap();
            add_one(&worker, &table, 7).await.unwrap();
            (trainer, worker, table)
        });
        std::thread::sleep(LEASE * 3);
        process.block_on(async {
            let refused = add_one(&worker, &table, 7).await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Fenced, "{refused}");
            assert_eq!(value(&table, 7).await, 1.0);
        });
    });
    worker.await.unwrap();
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let described = &trainer.client.jobs(Some("ml")).await.unwrap()[0];
    assert_eq!(described.workers[0].state(), WorkerState::Dead);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_dead_are_left_behind_or_waited_for_or_the_end() {
    let cluster = Cluster::with_shards(1).await;
    for policy in [DeadWorkerPolicy::Continue, DeadWorkerPolicy::Wait, DeadWorkerPolicy::Abort] {
        let given = JobOptions { dead_worker: policy, lease: LEASE, ..options(2, Some(0)) };
        let (trainer, job, table) = connect(&cluster, given).await;
        let (_other_process, other_job, _) = connect(&cluster, given).await;
        let mut dying = job.worker(0).await.unwrap();
        let mut other = other_job.worker(1).await.unwrap();
        let (first, second) = tokio::join!(dying.tick(b"d1"), other.tick(b"o1"));
        first.unwrap();
        second.unwrap();
        // It is gone, and says nothing.
        drop(dying);
        let ticked = timeout(LEASE * 5, other.tick(b"o2")).await;
        match policy {
            DeadWorkerPolicy::Continue => {
                ticked.expect("it goes on without the dead one").unwrap();
                let described = &trainer.client.jobs(Some("ml")).await.unwrap()[0];
                assert_eq!(described.workers[0].state(), WorkerState::Dead);
                // A replacement is waited for again.
                let mut replacement = job.worker(0).await.unwrap();
                // The others' step 2 is over; its own data goes on where it was.
                assert_eq!((replacement.clock(), replacement.cursor()), (2, b"d1".as_slice()));
                add_one(&replacement, &table, 1).await.unwrap();
                let (theirs, ours) = tokio::join!(replacement.tick(b"d2"), other.tick(b"o3"));
                theirs.unwrap();
                ours.unwrap();
            }
            DeadWorkerPolicy::Wait => {
                assert!(ticked.is_err(), "it waits: {ticked:?}");
                let mut replacement = job.worker(0).await.unwrap();
                assert_eq!((replacement.clock(), replacement.cursor()), (1, b"d1".as_slice()));
                let (theirs, ours) = tokio::join!(replacement.tick(b"d2"), other.tick(b"o2"));
                theirs.unwrap();
                ours.unwrap();
            }
            DeadWorkerPolicy::Abort => {
                let refused = ticked.expect("nobody waits in a job that is over").unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::JobAborted, "{refused}");
                assert_eq!(job.worker(0).await.unwrap_err().kind(), ErrorKind::JobAborted);
            }
        }
        trainer.client.remove_job("ml").await.unwrap();
        assert_eq!(trainer.client.remove_job("ml").await.unwrap_err().kind(), ErrorKind::UnknownJob);
    }
}

/// A step does not end with a push of it that failed, and no push of it is forgotten for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_that_fails_is_told_before_its_step_ends() {
    let cluster = Cluster::with_shards(2).await;
    let (trainer, job, table) = connect(&cluster, options(1, Some(0))).await;
    let gone = trainer.integers("gone", DIM).await;
    let mut worker = job.worker(0).await.unwrap();
    trainer.client.drop_table("gone").await.unwrap();
    for into in [&table, &gone, &table, &gone] {
        worker.push_begin(&into.table, &[7], &[-1.0; DIM]).await.unwrap();
    }
    for _ in 0..2 {
        assert_eq!(worker.tick(b"one").await.unwrap_err().kind(), ErrorKind::UnknownTable);
        assert_eq!((worker.clock(), worker.cursor()), (0, b"".as_slice()));
    }
    worker.tick(b"one").await.unwrap();
    assert_eq!((worker.clock(), value(&table, 7).await), (1, 2.0));
}

/// Two workers add one a hundred times each: two hundred, whatever the order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_add_up_exactly_and_one_may_come_later() {
    const ADDS: usize = 100;
    let cluster = Cluster::with_shards(2).await;
    let (trainer, job, table) = connect(&cluster, options(2, None)).await;
    let mut running = JoinSet::new();
    for rank in 0..4 {
        // Ranks 2 and 3 are not of the job's beginning.
        let worker = job.worker(rank).await.unwrap();
        let table = table.clone();
        running.spawn(async move {
            let mut worker = worker;
            for _ in 0..ADDS {
                worker.push_begin(&table.table, &[5], &[-1.0; DIM]).await.unwrap();
                worker.tick(b"").await.unwrap();
            }
            worker.barrier().await.unwrap();
            let seen = value(&table, 5).await;
            assert_eq!(seen, 4.0 * ADDS as f32, "rank {rank}, behind the barrier");
        });
    }
    while let Some(done) = timeout(PATIENCE, running.join_next()).await.expect("the workers end") {
        done.unwrap();
    }
    let described = &trainer.client.jobs(None).await.unwrap()[0];
    assert_eq!(described.workers.len(), 4);
    assert!(described.workers.iter().all(|worker| worker.clock == ADDS as u64));
    assert!(job.worker(9).await.unwrap_err().to_string().contains("next that may be added is 4"));
}
