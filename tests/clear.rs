//! Clearing a table on a cluster: all rows go, on every replica, through failover, restart and snapshot; in order with the own
//! pushes; other tables stay.

mod support;

use evershard::{ErrorKind, PullOptions, definition};
use support::trainer::{Table, Trainer};
use support::{Cluster, Options, eventually};

const DIM: usize = 4;
const IDS: u64 = 500;

fn ids() -> Vec<u64> {
    (0..IDS).collect()
}

async fn fill(table: &Table, value: f32) {
    table.set(&ids(), &vec![value; IDS as usize * DIM]).await.unwrap();
}

/// The value that all rows have, and how many exist.
async fn all(table: &Table) -> (f32, usize) {
    let mut rows = vec![f32::NAN; IDS as usize * DIM];
    let options = PullOptions { want_exists: true, ..PullOptions::default() };
    let info = table.table.pull_with(&ids(), options, &mut rows).await.unwrap();
    assert!(rows.iter().all(|value| *value == rows[0]), "{rows:?}");
    (rows[0], info.exists.iter().filter(|exists| **exists == 1).count())
}

/// Rows that each living node counts of all tables.
async fn counts(cluster: &Cluster) -> Vec<u64> {
    let mut counts = Vec::new();
    for id in cluster.ids() {
        let status = cluster.status(id).await.expect("it answers");
        counts.push(status.replicas.iter().flat_map(|replica| &replica.tables).map(|table| table.rows).sum());
    }
    counts
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cleared_table_stays_clear_through_failover_restart_and_flush() {
    // Failover is a part of it: the default timers. Flushes in between, and rows on disk only.
    let options =
        Options { shards: 2, server_args: Vec::new(), ..Options::default() }.arg("--flush-interval-ms", 100);
    let mut cluster = Cluster::start(options).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("items", DIM).await;
    let other = trainer.integers("other", DIM).await;
    fill(&other, 7.0).await;
    for round in 0..4_u64 {
        fill(&table, 5.0).await;
        if round % 2 == 1 {
            // From disk.
            cluster.kill_all();
            cluster.start_all();
            cluster.wait_ready().await;
        }
        let receipt = table.table.clear().await.unwrap();
        assert_eq!((receipt.messages, receipt.rows), (2, 0));
        assert_eq!(all(&table).await, (0.0, 0), "round {round}");
        assert_eq!(all(&other).await, (7.0, IDS as usize));
        let victim = cluster.leader_of(u32::try_from(round % 2).unwrap()).await;
        cluster.kill(victim);
        assert_eq!(all(&table).await, (0.0, 0), "round {round}, after a failover");
        cluster.restart(victim);
        cluster.wait_ready().await;
        cluster.wait_caught_up().await;
        cluster.assert_replicas_equal().await;
    }
    eventually("rows counted", || async {
        let counts = counts(&cluster).await;
        if counts == [IDS; 3] { Ok(()) } else { Err(format!("{counts:?}")) }
    })
    .await;
    table.push(&[1], &[-3.0; DIM]).await.unwrap();
    cluster.kill_all();
    cluster.start_all();
    cluster.wait_ready().await;
    assert_eq!(table.pull(&[1, 2]).await.unwrap(), [[3.0; DIM], [0.0; DIM]].concat());
    cluster.assert_replicas_equal().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clear_keeps_its_place_among_the_own_pushes_and_counts_once() {
    const ROUNDS: u64 = 12;
    let options = Options { shards: 2, server_args: Vec::new(), ..Options::default() };
    let mut cluster = Cluster::start(options).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("items", DIM).await;
    for round in 0..ROUNDS {
        let victim = (round % 3 == 0).then_some(cluster.leader_of(u32::try_from(round % 2).unwrap()).await);
        // All begun before any is acknowledged: the clear is tried again by itself when a leader dies.
        let rows = vec![-1.0; IDS as usize * DIM];
        let mut begun = Vec::new();
        for _ in 0..3 {
            begun.push(table.table.push_begin(&ids(), &rows, Default::default()).await.unwrap());
        }
        let cleared = tokio::spawn({
            let table = table.table.clone();
            async move { table.clear().await }
        });
        if let Some(victim) = victim {
            cluster.kill(victim);
        }
        cleared.await.unwrap().unwrap();
        for handle in begun {
            handle.wait().await.unwrap();
        }
        table.push(&ids(), &rows).await.unwrap();
        assert_eq!(all(&table).await, (1.0, IDS as usize), "round {round}");
        if let Some(victim) = victim {
            cluster.restart(victim);
            cluster.wait_ready().await;
        }
    }
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_is_gone_cannot_be_cleared_and_one_without_an_optimizer_can() {
    let cluster = Cluster::with_shards(2).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let definition = definition::sparse("plain", u32::try_from(DIM).unwrap(), None);
    let plain = trainer.create(definition).await;
    fill(&plain, 3.0).await;
    plain.table.clear().await.unwrap();
    assert_eq!(all(&plain).await, (0.0, 0));
    plain.table.clear().await.unwrap();
    trainer.client.drop_table("plain").await.unwrap();
    let refused = plain.table.clear().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::UnknownTable, "{refused}");
    // The session goes on: the refused numbers are used up.
    let table = trainer.integers("items", DIM).await;
    fill(&table, 1.0).await;
    assert_eq!(all(&table).await, (1.0, IDS as usize));
}
