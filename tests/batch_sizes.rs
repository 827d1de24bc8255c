//! Batches of any size: none, one, around powers of two, beyond one message, and a pull of 64 MiB.

mod support;

use support::trainer::Trainer;
use support::{Cluster, Options};

const DIM: usize = 64;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_of_every_size_are_whole() {
    let cluster = Cluster::start(Options { shards: 3, ..Options::default() }).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("rows", DIM).await;
    let mut pushed = 0u32;
    for size in [0u64, 1, 255, 256, 257, 65_536] {
        let ids: Vec<u64> = (0..size).map(|id| id.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        let gradients: Vec<f32> =
            (0..size).flat_map(|n| std::iter::repeat_n((n % 1000) as f32 + 1.0, DIM)).collect();
        let before = table.pull(&ids).await.unwrap();
        table.push(&ids, &gradients).await.unwrap();
        pushed += 1;
        let after = table.pull(&ids).await.unwrap();
        assert_eq!(after.len(), ids.len() * DIM);
        let wrong = before
            .iter()
            .zip(&after)
            .zip(&gradients)
            .filter(|((before, after), g)| **after != **before - **g);
        assert_eq!(wrong.count(), 0, "batch of {size}, push {pushed}");
    }
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pull_of_64_mib_comes_whole() {
    let cluster = Cluster::start(Options { shards: 3, ..Options::default() }).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.normal("random", DIM).await;
    let ids: Vec<u64> = (0..(64 << 20) / (4 * DIM as u64)).collect();
    let rows = table.pull(&ids).await.unwrap();
    assert_eq!(rows.len() * 4, 64 << 20);
    // Its parts are the same pulled alone.
    for start in [0, 1, 70_000, ids.len() - 100] {
        let part = table.pull(&ids[start..start + 100]).await.unwrap();
        assert_eq!(part, rows[start * DIM..(start + 100) * DIM]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_wider_than_a_message_travel_alone() {
    let cluster = Cluster::start(Options { shards: 2, ..Options::default() }).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    // 256 KiB of floats a row: the widest there may be.
    let dim = 65_536;
    let table = trainer.integers("wide", dim).await;
    let ids = [1, 2, 3];
    let gradients: Vec<f32> = ids.iter().flat_map(|id| std::iter::repeat_n(*id as f32, dim)).collect();
    table.push(&ids, &gradients).await.unwrap();
    let rows = table.pull(&ids).await.unwrap();
    assert!(rows.iter().zip(&gradients).all(|(row, gradient)| *row == -*gradient));
}
