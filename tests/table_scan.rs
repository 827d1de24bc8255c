//! A table read whole and counted: every row once, from leaders and followers, through failover, while it changes; and by a
//! client that never pushes.

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use evershard::{Absent, Consistency, PullOptions, ScanOptions, definition};
use evershard_proto::v1::OpenSessionRequest;
use support::trainer::{Table, Trainer};
use support::{Cluster, Options, eventually};

const DIM: usize = 4;
const ROWS: u64 = 30_000;

/// A row's value says its id.
fn value(id: u64) -> f32 {
    (id % 100_000) as f32
}

async fn fill(table: &Table, ids: &[u64]) {
    for ids in ids.chunks(8192) {
        let values: Vec<f32> = ids.iter().flat_map(|id| [value(*id); DIM]).collect();
        table.set(ids, &values).await.unwrap();
    }
}

/// All rows by id; each comes once, whole and right, and no piece goes back in time.
async fn scan(table: &Table, options: ScanOptions) -> BTreeMap<u64, f32> {
    let mut scan = table.table.scan(options);
    let (mut rows, mut indexes) = (BTreeMap::new(), BTreeMap::new());
    while let Some(piece) = scan.next_piece().await.unwrap() {
        assert_eq!(piece.values.len(), piece.ids.len() * DIM);
        assert!(options.rows_max == 0 || piece.ids.len() <= options.rows_max as usize);
        let before = indexes.insert(piece.group, piece.index).unwrap_or(0);
        assert!(piece.index >= before, "group {} at {} after {before}", piece.group, piece.index);
        for (id, row) in piece.ids.iter().zip(piece.values.chunks_exact(DIM)) {
            assert!(row.iter().all(|of| *of == row[0]), "half a row: {row:?}");
            assert_eq!(rows.insert(*id, row[0]), None, "id {id} came twice");
        }
    }
    rows
}

fn all_of(consistency: Consistency) -> ScanOptions {
    let max_staleness_ms = if consistency == Consistency::Bounded { 2_000 } else { 0 };
    ScanOptions { consistency, max_staleness_ms, ..ScanOptions::default() }
}

fn edge_ids() -> impl Iterator<Item = u64> {
    [u64::MAX, u64::MAX - 1, 1 << 63].into_iter()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_row_comes_once_from_leaders_and_followers_through_failover() {
    // Failover is a part of it: the default timers.
    let options =
        Options { shards: 3, server_args: Vec::new(), ..Options::default() }.arg("--flush-interval-ms", 200);
    let mut cluster = Cluster::start(options).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("items", DIM).await;
    assert_eq!(table.table.size(ScanOptions::default()).await.unwrap(), 0);
    assert!(scan(&table, ScanOptions::default()).await.is_empty());
    let ids: Vec<u64> = (0..ROWS).chain(edge_ids()).collect();
    fill(&table, &ids).await;
    let removed: Vec<u64> = (0..ROWS).step_by(3).collect();
    table.table.remove(&removed).await.unwrap();
    let expected: BTreeMap<u64, f32> =
        ids.iter().filter(|id| **id % 3 != 0 || **id >= ROWS).map(|id| (*id, value(*id))).collect();
    let count = expected.len() as u64;

    for consistency in [Consistency::Leader, Consistency::Linearizable, Consistency::Bounded] {
        assert_eq!(scan(&table, all_of(consistency)).await, expected, "{consistency:?}");
        assert_eq!(table.table.size(all_of(consistency)).await.unwrap(), count, "{consistency:?}");
    }
    cluster.wait_caught_up().await;
    assert_eq!(scan(&table, all_of(Consistency::Any)).await, expected);
    let node = ScanOptions { node: Some(2), ..all_of(Consistency::Any) };
    assert_eq!(scan(&table, node).await, expected);
    assert_eq!(table.table.size(node).await.unwrap(), count);

    // The leader of the shard that is read dies in the middle of it.
    let mut pieces = table.table.scan(ScanOptions { rows_max: 1000, ..ScanOptions::default() });
    let (mut found, mut killed) = (BTreeMap::new(), None);
    while let Some(piece) = pieces.next_piece().await.unwrap() {
        for (id, row) in piece.ids.iter().zip(piece.values.chunks_exact(DIM)) {
            assert_eq!(found.insert(*id, row[0]), None, "id {id} came twice");
        }
        if killed.is_none() && found.len() > 2000 {
            let shard = cluster.routing(1).await.unwrap();
            let shard = shard.shards.iter().find(|shard| shard.group == piece.group).unwrap().shard;
            let victim = cluster.leader_of(shard).await;
            cluster.kill(victim);
            killed = Some(victim);
        }
    }
    assert_eq!(found, expected);
    assert_eq!(table.table.size(ScanOptions::default()).await.unwrap(), count);
    cluster.restart(killed.expect("somebody led"));
    cluster.wait_ready().await;

    // From disk, and counted anew.
    cluster.kill_all();
    cluster.start_all();
    cluster.wait_ready().await;
    assert_eq!(scan(&table, ScanOptions::default()).await, expected);
    assert_eq!(table.table.size(ScanOptions::default()).await.unwrap(), count);
    table.table.clear().await.unwrap();
    assert!(scan(&table, ScanOptions::default()).await.is_empty());
    assert_eq!(table.table.size(ScanOptions::default()).await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_stay_come_once_while_others_come_and_go() {
    let options = Options { shards: 2, ..Options::default() }.arg("--flush-interval-ms", 100);
    let cluster = Cluster::start(options).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("items", DIM).await;
    let stay: Vec<u64> = (0..6000).collect();
    fill(&table, &stay).await;
    let stop = Arc::new(AtomicBool::new(false));
    let churn = tokio::spawn({
        let (table, stop) = (table.clone(), stop.clone());
        async move {
            for round in 0_u64.. {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                let come_and_go: Vec<u64> = (0..200).map(|id| 1_000_000 + round % 7 * 200 + id).collect();
                fill(&table, &come_and_go).await;
                // Those that stay change as well.
                let begin = (round % 29 * 200) as usize;
                fill(&table, &stay[begin..begin + 200]).await;
                table.table.remove(&come_and_go[..150]).await.unwrap();
            }
        }
    });
    for rows_max in [0, 50, 700] {
        for consistency in [Consistency::Leader, Consistency::Bounded, Consistency::Any] {
            let rows = scan(&table, ScanOptions { rows_max, ..all_of(consistency) }).await;
            let stayed = rows.range(..1_000_000).count();
            // Of `any` nothing is promised but that what it reads is right.
            assert!(stayed == 6000 || consistency == Consistency::Any, "{stayed} rows, {consistency:?}");
            assert!(rows.iter().all(|(id, found)| *found == value(*id)));
        }
    }
    stop.store(true, Ordering::SeqCst);
    churn.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_only_reads_needs_no_session_and_no_optimizer() {
    let cluster = Cluster::with_shards(2).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let plain = definition::sparse("plain", u32::try_from(DIM).unwrap(), None);
    let initializer = definition::normal(0.0, 1.0, 7);
    let plain = trainer.create(evershard::TableDefinition { initializer, ..plain }).await;
    plain.set(&[1, 2], &[2.0; 2 * DIM]).await.unwrap();
    let open = || async {
        let nonce = bytes::Bytes::copy_from_slice(&rand::random::<[u8; 16]>());
        let request = OpenSessionRequest { nonce, worker: None };
        eventually("a session", || async {
            let reply = cluster.admin(1).open_session(request.clone()).await;
            reply.map(|reply| reply.into_inner().session).map_err(|status| status.to_string())
        })
        .await
    };
    let before = open().await;
    cluster.wait_caught_up().await;
    let reader = Trainer::connect(&cluster.endpoints()).await.table("plain").await;
    for consistency in
        [Consistency::Leader, Consistency::Linearizable, Consistency::Bounded, Consistency::Any]
    {
        let options = PullOptions {
            consistency,
            max_staleness_ms: if consistency == Consistency::Bounded { 1000 } else { 0 },
            want_exists: true,
            absent: Absent::Zeros,
            node: None,
        };
        let mut rows = [f32::NAN; 4 * DIM];
        let info = reader.table.pull_with(&[1, 8, 2, 8], options, &mut rows).await.unwrap();
        assert_eq!(info.exists, [1, 0, 1, 0], "{consistency:?}");
        assert_eq!(rows, *[[2.0; DIM], [0.0; DIM], [2.0; DIM], [0.0; DIM]].concat(), "{consistency:?}");
        assert_eq!(reader.table.size(all_of(consistency)).await.unwrap(), 2);
        assert_eq!(scan_values(&reader, all_of(consistency)).await, [2.0; 2]);
    }
    // Without being told otherwise absent rows are what their first push would begin with.
    let initial = reader.pull(&[8]).await.unwrap();
    assert!(initial.iter().all(|value| *value != 0.0), "{initial:?}");
    assert_eq!(open().await, before + 1, "the reader opened a session");
    assert!(plain.push(&[1], &[1.0; DIM]).await.is_err(), "no optimizer, no gradients");
    plain.table.remove(&[1]).await.unwrap();
    assert_eq!(reader.table.size(ScanOptions::default()).await.unwrap(), 1);
}

async fn scan_values(table: &Table, options: ScanOptions) -> Vec<f32> {
    let mut scan = table.table.scan(options);
    let mut values = Vec::new();
    while let Some(piece) = scan.next_piece().await.unwrap() {
        values.extend(piece.values.chunks_exact(DIM).map(|row| row[0]));
    }
    values
}
