//! Rows that go by themselves, on clusters whose leaders are killed meanwhile. What stays is exact: gradients are whole numbers
//! under SGD from zero, so a weight is the number of pushes that trained its row since it was made.

mod support;

use std::collections::BTreeSet;

use evershard::{Error, Eviction, PullOptions, PushOptions, TableDefinition};
use support::laggard::{applied, leave_behind};
use support::pusher::{Load, Pusher, wait_progress};
use support::trainer::{Table, Trainer, integers};
use support::{Cluster, Options, eventually};

fn options(shards: u32) -> Options {
    Options { shards, ..Options::default() }.arg("--eviction-interval-ms", 100)
}

fn evicting(name: &str, eviction: Eviction) -> TableDefinition {
    TableDefinition { eviction: Some(eviction), ..integers(name, 1) }
}

/// One push of gradients of -1 at a clock.
async fn push_at(table: &Table, clock: u64, ids: &[u64]) -> Result<(), Error> {
    let options = PushOptions { clock, ..PushOptions::default() };
    table.table.push_with(ids, &vec![-1.0; ids.len()], options).await.map(|_| ())
}

async fn rows(table: &Table, ids: &[u64]) -> Vec<Option<f32>> {
    let mut weights = vec![0.0; ids.len()];
    let options = PullOptions { want_exists: true, ..PullOptions::default() };
    let exists = table.table.pull_with(ids, options, &mut weights).await.unwrap().exists;
    weights.iter().zip(exists).map(|(weight, exists)| (exists == 1).then_some(*weight)).collect()
}

/// Waits until exactly these are there, with these weights.
async fn wait_for_rows(table: &Table, ids: &[u64], expected: impl Fn(u64) -> Option<f32>) {
    let expected: Vec<_> = ids.iter().map(|id| expected(*id)).collect();
    eventually("the rows that are to go are gone, and no other", || async {
        let found = rows(table, ids).await;
        let missing = found.iter().zip(&expected).any(|(is, should)| is.is_none() && should.is_some());
        assert!(!missing, "a row went that had to stay");
        if found == expected { Ok(()) } else { Err(format!("{} rows", found.iter().flatten().count())) }
    })
    .await;
}

const HOT: std::ops::Range<u64> = 0..200;
const STEPS_TO_LIVE: u64 = 3;

/// Of a step: rows that are in every batch, and 40 that never come again, in between.
fn batch(clock: u64) -> Vec<u64> {
    let once = |at: u64| 1000 + clock * 40 + at / 5;
    HOT.flat_map(|id| if id % 5 == 0 { vec![once(id), id] } else { vec![id] }).collect()
}

/// Rows of the same batches go while others are trained on, and leaders die: every weight is exact.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_in_the_batches_of_evicted_ones_keep_exact_sums() {
    const STEPS: u64 = 60;
    let mut cluster = Cluster::start(options(2)).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer
        .create(evicting("items", Eviction { steps_to_live: STEPS_TO_LIVE, ..Default::default() }))
        .await;
    let mut gone = BTreeSet::new();
    for clock in 1..=STEPS {
        push_at(&table, clock, &batch(clock)).await.unwrap();
        if clock % 20 == 10 {
            // Rows of early steps go while later ones come.
            let first: Vec<u64> =
                batch(clock - STEPS_TO_LIVE - 1).into_iter().filter(|id| *id >= 1000).collect();
            wait_for_rows(&table, &first, |_| None).await;
            gone.extend(first);
            let leader = cluster.leader_of(u32::try_from(clock / 20 % 2).unwrap()).await;
            cluster.kill(leader);
            cluster.restart(leader);
        }
    }
    cluster.wait_ready().await;
    assert!(!gone.is_empty());
    let hot: Vec<u64> = HOT.collect();
    assert_eq!(rows(&table, &hot).await, vec![Some(STEPS as f32); hot.len()]);
    let once: Vec<u64> = (1..=STEPS).flat_map(batch).filter(|id| *id >= 1000).collect();
    let stays = |id: u64| (id - 1000) / 40 + STEPS_TO_LIVE >= STEPS;
    wait_for_rows(&table, &once, |id| stays(id).then_some(1.0)).await;
    assert_eq!(rows(&table, &hot).await, vec![Some(STEPS as f32); hot.len()]);
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
    // And after everything was read back from disk.
    cluster.kill_all();
    cluster.start_all();
    cluster.wait_ready().await;
    assert_eq!(rows(&table, &hot).await, vec![Some(STEPS as f32); hot.len()]);
    wait_for_rows(&table, &once, |id| stays(id).then_some(1.0)).await;
    cluster.assert_replicas_equal().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_expire_also_where_nobody_pushes_and_come_back_anew() {
    let mut cluster = Cluster::start(options(2)).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.create(evicting("items", Eviction { expire_seconds: 1, ..Default::default() })).await;
    let patient =
        trainer.create(evicting("patient", Eviction { expire_seconds: 86_000, ..Default::default() })).await;
    let ids: Vec<u64> = (0..10_000).collect();
    push_at(&table, 0, &ids).await.unwrap();
    push_at(&patient, 0, &ids).await.unwrap();
    let leader = cluster.leader_of(0).await;
    cluster.kill(leader);
    // More of them than an entry takes.
    wait_for_gone(&table, &ids).await;
    push_at(&patient, 0, &ids).await.unwrap();
    assert_eq!(rows(&patient, &ids).await, vec![Some(2.0); ids.len()]);
    cluster.restart(leader);
    cluster.wait_ready().await;
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
    // What went starts anew: it may be gone again by the time that it is looked at, but it is never 2.
    push_at(&table, 0, &ids).await.unwrap();
    assert!(rows(&table, &ids).await.iter().flatten().all(|weight| *weight == 1.0));
}

async fn wait_for_gone(table: &Table, ids: &[u64]) {
    eventually("every row expires", || async {
        match rows(table, ids).await.iter().flatten().count() {
            0 => Ok(()),
            left => Err(format!("{left} are left")),
        }
    })
    .await;
}

/// A replica that gets rows, notes and tombstones in files only judges them as the others do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_are_evicted_by_a_leader_that_came_by_a_raft_snapshot() {
    let options = options(1)
        .arg("--log-retain-bytes", 256 * 1024)
        .arg("--log-segment-bytes", 1 << 20)
        .arg("--flush-interval-ms", 200);
    let mut cluster = Cluster::start(options).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer
        .create(evicting("items", Eviction { steps_to_live: STEPS_TO_LIVE, ..Default::default() }))
        .await;
    let load = Load { ids: 4096, rows_a_push: 64, ..Load::small("audit", 64) };
    trainer.integers("audit", 64).await;
    if cluster.leader_of(0).await == 3 {
        cluster.transfer(0, 1).await;
    }
    let then = applied(&cluster, 3).await;
    cluster.kill(3);
    let (old, new): (Vec<u64>, Vec<u64>) = ((0..300).collect(), (300..600).collect());
    push_at(&table, 1, &old).await.unwrap();
    push_at(&table, 3, &new).await.unwrap();
    let pushers = [Pusher::start(cluster.endpoints(), load, 1)];
    leave_behind(&cluster, &then).await;
    cluster.restart(3);
    cluster.wait_ready().await;
    cluster.wait_caught_up().await;
    wait_progress(&pushers, 3).await;
    let [pusher] = pushers;
    pusher.finish().await;
    cluster.transfer(0, 3).await;
    let all = [&old[..], &new].concat();
    assert_eq!(rows(&table, &all).await, vec![Some(1.0); all.len()]);
    push_at(&table, 5, &[9999]).await.unwrap();
    wait_for_rows(&table, &all, |id| (id >= 300).then_some(1.0)).await;
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_rows_and_too_many_rows_go_and_the_frequent_ones_stay() {
    let cluster = Cluster::start(options(1)).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let capped = trainer.create(evicting("capped", Eviction { max_rows: 100, ..Default::default() })).await;
    let small = trainer.create(evicting("small", Eviction { min_l2: 2.5, ..Default::default() })).await;
    let ids: Vec<u64> = (0..300).collect();
    // In one push, so that nobody looks in between: the first hundred come three times, the others once.
    let repeated: Vec<u64> = ids.iter().flat_map(|id| vec![*id; if *id < 100 { 3 } else { 1 }]).collect();
    push_at(&small, 0, &repeated).await.unwrap();
    wait_for_rows(&small, &ids, |id| (id < 100).then_some(3.0)).await;
    push_at(&capped, 0, &repeated).await.unwrap();
    wait_for_rows(&capped, &ids, |id| (id < 100).then_some(3.0)).await;
    // The cap holds however many come.
    let more: Vec<u64> = (1000..2000).collect();
    push_at(&capped, 0, &more).await.unwrap();
    wait_for_rows(&capped, &[&ids[..], &more].concat(), |id| (id < 100).then_some(3.0)).await;
    cluster.assert_replicas_equal().await;
}

/// Design 14.11: a clock that is set one day ahead evicts nothing, also of a node that leads from its start on.
#[cfg(feature = "failpoints")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_a_day_ahead_evicts_nothing() {
    let mut cluster = Cluster::start(options(1)).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table =
        trainer.create(evicting("items", Eviction { expire_seconds: 3600, ..Default::default() })).await;
    let marker = trainer.create(evicting("marker", Eviction { min_l2: 1.5, ..Default::default() })).await;
    let ids: Vec<u64> = (0..300).collect();
    push_at(&table, 0, &ids).await.unwrap();
    cluster.kill_all();
    for id in cluster.ids() {
        cluster.node_mut(id).start(Some("clock::day_ahead=fail@1000000000"));
    }
    cluster.wait_ready().await;
    // Several rounds of looks are over when each of these is gone: the tables are looked at in order of their numbers.
    for round in 0..5 {
        push_at(&marker, 0, &[round]).await.unwrap();
        wait_for_rows(&marker, &[round], |_| None).await;
    }
    assert_eq!(rows(&table, &ids).await, vec![Some(1.0); ids.len()]);
    cluster.assert_replicas_equal().await;
}
