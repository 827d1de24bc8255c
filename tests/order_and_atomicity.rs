//! Pushes of one client to one shard apply in the order sent, pipelined or not; a pull never sees half a row.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use support::trainer::Trainer;
use support::{Cluster, Options};

const DIM: usize = 64;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_of_pipelined_assignments_wins() {
    let cluster = Cluster::with_shards(3).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("rows", DIM).await;
    let ids: Vec<u64> = (0..32).collect();
    for round in 0..20u32 {
        // Sent one after the other, none waiting for the one before.
        let values: Vec<f32> = (1..=10).map(|step| (round * 10 + step) as f32).collect();
        let contents: Vec<Vec<f32>> = values.iter().map(|value| vec![*value; ids.len() * DIM]).collect();
        let mut begun = Vec::new();
        for content in &contents {
            begun.push(table.begin_set(&ids, content).await);
        }
        for write in begun {
            write.wait().await.unwrap();
        }
        let rows = table.pull(&ids).await.unwrap();
        let last = values[values.len() - 1];
        assert!(rows.iter().all(|value| *value == last), "round {round}: {:?} instead of {last}", &rows[..4]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_holds_across_a_change_of_leader() {
    let mut cluster =
        Cluster::start(Options { shards: 1, server_args: Vec::new(), ..Options::default() }).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("rows", DIM).await;
    for round in 0..4u32 {
        let values: Vec<f32> = (1..=40).map(|step| (round * 40 + step) as f32).collect();
        let contents: Vec<Vec<f32>> = values.iter().map(|value| vec![*value; DIM]).collect();
        let victim = cluster.leader_of(0).await;
        let mut begun = Vec::new();
        for (number, content) in contents.iter().enumerate() {
            begun.push(table.begin_set(&[7], content).await);
            if number == contents.len() / 2 {
                cluster.kill(victim);
            }
        }
        for write in begun {
            write.wait().await.unwrap();
        }
        let row = table.pull(&[7]).await.unwrap();
        assert_eq!(row[0], values[values.len() - 1], "round {round}");
        cluster.restart(victim);
        cluster.wait_ready().await;
        cluster.wait_caught_up().await;
    }
    cluster.assert_replicas_equal().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_pull_never_sees_half_a_row() {
    let cluster = Cluster::with_shards(2).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("rows", DIM).await;
    let ids: Vec<u64> = (0..64).collect();
    table.set(&ids, &vec![0.0; ids.len() * DIM]).await.unwrap();

    let stop = Arc::new(AtomicBool::new(false));
    let mut readers = Vec::new();
    for _ in 0..2 {
        let (endpoints, ids, stop) = (cluster.endpoints(), ids.clone(), stop.clone());
        readers.push(tokio::spawn(async move {
            let trainer = Trainer::connect(&endpoints).await;
            let table = trainer.table("rows").await;
            let mut pulls = 0u64;
            while !stop.load(Ordering::SeqCst) {
                let rows = table.pull(&ids).await.unwrap();
                for (id, row) in ids.iter().zip(rows.chunks_exact(DIM)) {
                    assert!(row.iter().all(|value| *value == row[0]), "half a row of id {id}: {row:?}");
                }
                pulls += 1;
            }
            pulls
        }));
    }
    // By values and by gradients, which are the same in every column of a row.
    for step in 1..=300u32 {
        let content = vec![step as f32; ids.len() * DIM];
        match step % 2 {
            0 => table.set(&ids, &content).await.unwrap(),
            _ => table.push(&ids, &content).await.unwrap(),
        }
    }
    stop.store(true, Ordering::SeqCst);
    for reader in readers {
        assert!(reader.await.unwrap() > 0, "nobody read while rows changed");
    }
}
