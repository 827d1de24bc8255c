//! Every u64 is an id: no value is reserved, whatever the number of shards; duplicates are summed; initial values are a
//! pure function of the id.

mod support;

use std::collections::BTreeSet;

use bytes::Bytes;
use evershard_proto::key::key_of;
use evershard_proto::v1::parameter_service_client::ParameterServiceClient;
use evershard_proto::v1::{Consistency, PullRequest};
use support::trainer::{Table, Trainer};
use support::{Cluster, Options};

const DIM: usize = 4;
const EDGES: [u64; 5] = [0, 1, u64::MAX, u64::MAX - 1, i64::MIN.cast_unsigned()];

/// One node is enough for what ids mean.
async fn single(shards: u32) -> (Cluster, Trainer, Table) {
    let cluster = Cluster::start(Options { nodes: 1, replicas: 1, shards, ..Options::default() }).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("rows", DIM).await;
    (cluster, trainer, table)
}

fn assert_rows(rows: &[f32], expected: &[f32]) {
    let got: Vec<f32> = rows.chunks_exact(DIM).map(|row| row[0]).collect();
    assert_eq!(got, expected);
    assert!(rows.chunks_exact(DIM).all(|row| row.iter().all(|value| *value == row[0])));
}

async fn edge_ids_are_ordinary(shards: u32) {
    let (cluster, _trainer, table) = single(shards).await;
    let gradients: Vec<f32> = (1..=EDGES.len()).flat_map(|n| [n as f32; DIM]).collect();
    table.push(&EDGES, &gradients).await.unwrap();
    table.push(&EDGES, &gradients).await.unwrap();
    assert_rows(&table.pull(&EDGES).await.unwrap(), &[-2.0, -4.0, -6.0, -8.0, -10.0]);
    // Their neighbours were not touched.
    let neighbours = [2, u64::MAX - 2, i64::MIN.cast_unsigned() + 1, i64::MAX.cast_unsigned()];
    assert_rows(&table.pull(&neighbours).await.unwrap(), &[0.0; 4]);
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn edge_ids_with_one_shard() {
    edge_ids_are_ordinary(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn edge_ids_with_two_shards() {
    edge_ids_are_ordinary(2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn edge_ids_with_three_shards() {
    edge_ids_are_ordinary(3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn edge_ids_with_seven_shards() {
    edge_ids_are_ordinary(7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn edge_ids_survive_a_flush_and_a_restart() {
    let options = Options { nodes: 1, replicas: 1, shards: 3, ..Options::default() };
    let mut cluster = Cluster::start(options.arg("--flush-interval-ms", 100)).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("rows", DIM).await;
    table.push(&EDGES, &[1.0; EDGES.len() * DIM]).await.unwrap();
    for shard in cluster.shards() {
        support::eventually(&format!("shard {shard} flushed"), || async {
            let replica = cluster.replica(1, shard).await.ok_or("no answer")?;
            if replica.flushed >= replica.applied { Ok(()) } else { Err(format!("{replica:?}")) }
        })
        .await;
    }
    cluster.kill(1);
    cluster.restart(1);
    cluster.wait_ready().await;
    assert_rows(&table.pull(&EDGES).await.unwrap(), &[-1.0; 5]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn duplicates_are_summed_in_a_push_and_repeated_in_a_pull() {
    let (_cluster, _trainer, table) = single(3).await;
    let ids = [7, u64::MAX, 7, 7, u64::MAX, 3];
    let gradients: Vec<f32> = [1.0, 10.0, 2.0, 4.0, 20.0, 100.0].iter().flat_map(|g| [*g; DIM]).collect();
    table.push(&ids, &gradients).await.unwrap();
    assert_rows(&table.pull(&ids).await.unwrap(), &[-7.0, -30.0, -7.0, -7.0, -30.0, -100.0]);
}

/// SGD cannot tell a sum from two steps; Adagrad can.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_optimizer_runs_once_for_duplicates() {
    let (_cluster, trainer, _) = single(2).await;
    let table = trainer.adagrad("adagrad", DIM).await;
    table.push(&[1, 1, 2], &[&[1.0; DIM][..], &[3.0; DIM], &[4.0; DIM]].concat()).await.unwrap();
    let rows = table.pull(&[1, 2]).await.unwrap();
    assert_eq!(rows[..DIM], rows[DIM..], "1 + 3 in one push is a gradient of 4");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_with_equal_low_bits_are_told_apart() {
    let (_cluster, _trainer, table) = single(3).await;
    let ids: Vec<u64> = (0..200u64).map(|high| (high << 32) | 0xdead_beef).collect();
    let gradients: Vec<f32> = (0..200u32).flat_map(|n| [n as f32; DIM]).collect();
    table.push(&ids, &gradients).await.unwrap();
    let expected: Vec<f32> = (0..200u32).map(|n| -(n as f32)).collect();
    assert_rows(&table.pull(&ids).await.unwrap(), &expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unseen_id_has_the_same_row_everywhere_and_looking_creates_nothing() {
    let cluster = Cluster::with_shards(3).await;
    let first = Trainer::connect(&cluster.endpoints()).await;
    let table = first.normal("random", DIM).await;
    let ids: Vec<u64> = EDGES.into_iter().chain(1000..1020).collect();
    let rows = table.pull(&ids).await.unwrap();
    assert_eq!(table.pull(&ids).await.unwrap(), rows);
    let second = Trainer::connect(&cluster.endpoints()).await;
    assert_eq!(second.table("random").await.pull(&ids).await.unwrap(), rows);
    assert!(rows.iter().any(|value| *value != 0.0), "a normal distribution is not all zeros");

    // Each replica by itself, past the client.
    cluster.wait_caught_up().await;
    for node in cluster.ids() {
        let routing = cluster.routing(node).await.unwrap();
        let number =
            routing.tables.iter().find(|t| t.definition.as_ref().unwrap().name == "random").unwrap().number;
        for (id, row) in ids.iter().zip(rows.chunks_exact(DIM)) {
            let key = key_of(number, *id);
            let shard = routing.shards.iter().find(|s| (s.range_start..=s.range_end).contains(&key)).unwrap();
            let request = PullRequest {
                group: shard.group,
                table: number,
                consistency: Consistency::Any.into(),
                keys: Bytes::copy_from_slice(&key.to_le_bytes()),
                want_exists: true,
                newer_than: 0,
            };
            let reply =
                ParameterServiceClient::new(cluster.channel(node)).pull(request).await.unwrap().into_inner();
            let bytes: Vec<u8> = row.iter().flat_map(|value| value.to_le_bytes()).collect();
            assert_eq!(reply.rows, bytes, "id {id} on node {node}");
            assert_eq!(reply.exists[..], [0], "looking at id {id} created it on node {node}");
        }
    }
    for node in cluster.ids() {
        for replica in cluster.status(node).await.unwrap().replicas {
            assert!(replica.tables.iter().all(|table| table.rows == 0), "node {node}: {replica:?}");
        }
    }
}

/// Sequential ids, and ids equal modulo a power of two, spread over the shards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_spread_over_the_shards() {
    let (cluster, _trainer, _table) = single(7).await;
    let routing = cluster.routing(1).await.unwrap();
    let spread = |ids: &mut dyn Iterator<Item = u64>| {
        let mut counts = vec![0usize; routing.shards.len()];
        for id in ids {
            let key = key_of(routing.tables[0].number, id);
            counts[routing
                .shards
                .iter()
                .position(|s| (s.range_start..=s.range_end).contains(&key))
                .unwrap()] += 1;
        }
        let mean = counts.iter().sum::<usize>() as f64 / counts.len() as f64;
        counts.into_iter().max().unwrap() as f64 / mean
    };
    assert!(spread(&mut (0..1_000_000)) < 1.1);
    assert!(spread(&mut (0..1_000_000).map(|id| id << 20)) < 1.1);
    let groups: BTreeSet<u64> = routing.shards.iter().map(|shard| shard.group).collect();
    assert_eq!(groups.len(), 7, "every shard is a group of its own");
}
