//! Tables that do not make a row for every id: by how often it came, and by its hash; through kills, restarts and raft snapshots.
//!
//! Gradients are whole numbers under SGD from zero, so a weight says exactly which pushes trained its row.

mod support;

use evershard::{Admission, ErrorKind, PullOptions, TableDefinition};
use support::laggard::{applied, leave_behind};
use support::pusher::{Load, Pusher, wait_progress};
use support::trainer::{Table, Trainer, in_step, integers};
use support::{Cluster, Options, eventually};

fn filtered(name: &str, filter_freq: u32) -> TableDefinition {
    TableDefinition { admission: Some(Admission { filter_freq, ..Default::default() }), ..integers(name, 1) }
}

/// One push of gradients of -1, a row each.
async fn push(table: &Table, ids: &[u64]) {
    table.push(ids, &vec![-1.0; ids.len()]).await.unwrap();
}

/// The weights of the rows that exist.
async fn rows(table: &Table, ids: &[u64]) -> Vec<Option<f32>> {
    let mut weights = vec![0.0; ids.len()];
    let options = PullOptions { want_exists: true, ..PullOptions::default() };
    let exists = table.table.pull_with(ids, options, &mut weights).await.unwrap().exists;
    weights.iter().zip(exists).map(|(weight, exists)| (exists == 1).then_some(*weight)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repetitions_within_a_push_count() {
    let cluster = Cluster::with_shards(2).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.create(filtered("items", 3)).await;
    push(&table, &[5, 5, 5, 6]).await;
    // 5 came three times: its row is made and trained by the whole push. 6 came once.
    assert_eq!(rows(&table, &[5, 6]).await, [Some(3.0), None]);
    push(&table, &[6]).await;
    assert_eq!(rows(&table, &[6]).await, [None], "6 came twice");
    push(&table, &[6, 5]).await;
    assert_eq!(rows(&table, &[5, 6]).await, [Some(4.0), Some(1.0)]);
    // Of another table, plain, nothing changes.
    let plain = trainer.integers("plain", 1).await;
    push(&plain, &[6]).await;
    assert_eq!(rows(&plain, &[6]).await, [Some(1.0)]);
    let conflict = trainer.client.create_table(filtered("items", 4)).await.unwrap_err();
    assert_eq!(conflict.kind(), ErrorKind::Conflict);
    assert!(conflict.to_string().contains("filter_freq=3"), "{conflict}");
    cluster.assert_replicas_equal().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_threshold_of_3_is_reached_across_kills_and_restarts() {
    let mut cluster = Cluster::with_shards(2).await;
    let ids: Vec<u64> = (0..500).collect();
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.create(filtered("items", 3)).await;
    push(&table, &ids).await;
    let leader = cluster.leader_of(0).await;
    cluster.kill(leader);
    push(&table, &ids).await;
    cluster.restart(leader);
    cluster.wait_ready().await;
    assert_eq!(rows(&table, &ids).await, vec![None; ids.len()]);
    cluster.kill_all();
    cluster.start_all();
    cluster.wait_ready().await;
    // Another client: counts are the table's.
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.table("items").await;
    assert_eq!(rows(&table, &ids).await, vec![None; ids.len()]);
    push(&table, &ids).await;
    assert_eq!(rows(&table, &ids).await, vec![Some(1.0); ids.len()], "trained by the third push alone");
    cluster.assert_replicas_equal().await;
}

/// A replica that gets counts in files only goes on with them as a leader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counts_are_in_a_raft_snapshot() {
    let options = Options { shards: 1, ..Options::default() }
        .arg("--log-retain-bytes", 256 * 1024)
        .arg("--log-segment-bytes", 1 << 20)
        .arg("--flush-interval-ms", 200);
    let mut cluster = Cluster::start(options).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.create(filtered("items", 3)).await;
    let load = Load { ids: 4096, rows_a_push: 64, ..Load::small("audit", 64) };
    trainer.integers("audit", 64).await;
    let ids: Vec<u64> = (0..500).collect();
    if cluster.leader_of(0).await == 3 {
        cluster.transfer(0, 1).await;
    }
    let then = applied(&cluster, 3).await;
    cluster.kill(3);
    push(&table, &ids).await;
    push(&table, &ids[..100]).await;
    let pushers = [Pusher::start(cluster.endpoints(), load, 1)];
    leave_behind(&cluster, &then).await;
    cluster.restart(3);
    cluster.wait_ready().await;
    cluster.wait_caught_up().await;
    wait_progress(&pushers, 3).await;
    let [pusher] = pushers;
    pusher.finish().await;
    cluster.transfer(0, 3).await;
    push(&table, &ids).await;
    let expected: Vec<_> = ids.iter().map(|id| (*id < 100).then_some(1.0)).collect();
    assert_eq!(rows(&table, &ids).await, expected);
    push(&table, &ids).await;
    let expected: Vec<_> = ids.iter().map(|id| Some(if *id < 100 { 2.0 } else { 1.0 })).collect();
    assert_eq!(rows(&table, &ids).await, expected);
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_share_of_the_ids_is_admitted_and_the_same_by_everybody() {
    let mut cluster = Cluster::with_shards(2).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let ids: Vec<u64> = (0..2000).collect();
    let sampled = |name: &str, seed| TableDefinition {
        admission: Some(Admission { admit_probability: 0.25, filter_freq: 2, seed }),
        ..integers(name, 1)
    };
    let (table, other) =
        (trainer.create(sampled("items", 1)).await, trainer.create(sampled("users", 2)).await);
    push(&table, &ids).await;
    push(&other, &ids).await;
    assert_eq!(rows(&table, &ids).await, vec![None; ids.len()], "both rules must admit an id");
    let leader = cluster.leader_of(0).await;
    cluster.kill(leader);
    push(&table, &ids).await;
    push(&other, &ids).await;
    let found = rows(&table, &ids).await;
    let admitted = found.iter().flatten().count();
    assert!((400..600).contains(&admitted), "{admitted} of 2000");
    assert!(found.iter().flatten().all(|weight| *weight == 1.0), "by the second push");
    assert_ne!(found, rows(&other, &ids).await, "another seed chooses other ids");
    push(&table, &ids).await;
    let again = rows(&table, &ids).await;
    assert!(found.iter().zip(&again).all(|(was, is)| was.map(|weight| weight + 1.0) == *is));
    cluster.restart(leader);
    cluster.wait_ready().await;
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
}

/// Workers' gradients are summed before they are logged; how often their ids came is, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn occurrences_are_added_up_over_the_workers_of_a_step() {
    let cluster = Cluster::with_shards(2).await;
    let options = in_step(2);
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.create(filtered("items", 4)).await;
    let job = trainer.client.job("ml", options).await.unwrap();
    let other = Trainer::connect(&cluster.endpoints()).await;
    let other_job = other.client.job("ml", options).await.unwrap();
    let (mut first, mut second) = (job.worker(0).await.unwrap(), other_job.worker(1).await.unwrap());
    for _ in 0..2 {
        // 5: 3 + 1 in a step; 6: 1 + 1; 7: 0 + 1.
        first.push(&table.table, &[5, 5, 6, 5], &[-1.0; 4]).await.unwrap();
        second.push(&table.table, &[7, 6, 5], &[-1.0; 3]).await.unwrap();
        let (one, two) = tokio::join!(first.tick(b""), second.tick(b""));
        one.unwrap();
        two.unwrap();
    }
    eventually("both steps are applied", || async {
        match rows(&table, &[5, 6, 7]).await[..] {
            [Some(8.0), Some(2.0), None] => Ok(()),
            ref other => Err(format!("{other:?}")),
        }
    })
    .await;
    cluster.assert_replicas_equal().await;
}
