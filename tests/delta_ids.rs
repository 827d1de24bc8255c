//! Pushes that name rows by ids in the place of keys, on real clusters: the sums are exact, through kills and the replay of their
//! entries; and a cluster whose version is below theirs gets none.
//!
//! Gradients are whole numbers that every encoding holds, under SGD with lr = 1 from zero: a weight is the negated sum.

mod support;

use std::collections::BTreeMap;

use bytes::Bytes;
use evershard::{Encoding, ErrorKind, PushOptions};
use evershard_proto::key::mix64;
use evershard_proto::push_body::{HEADER_BYTES, KEY_BYTES, Operation, PushBodyBuilder, SECTION_BYTES};
// The highest that this build knows.
use evershard_proto::shard_command::CLUSTER_VERSION_CUTS as CLUSTER_VERSION_MAX;
use evershard_proto::v1::RaiseVersionRequest;
use support::metrics::metric;
use support::raw::{self, RawSession};
use support::trainer::{Table, Trainer, in_step};
use support::{Cluster, Options, eventually};

const DIM: usize = 4;
const PUSHED: &str = "evershard_push_bytes_total";
const CONTRIBUTED: &str = "evershard_step_bytes_total";

/// What a table must hold: sums by id.
type Sums = BTreeMap<u64, [f32; DIM]>;

/// A row of gradients: its largest value is 127, so that int8 has it exactly; twice it is still exact in bf16.
fn gradient(id: u64, round: u64) -> [f32; DIM] {
    [127.0, (id % 9) as f32 - 4.0, (round % 5) as f32, 0.0]
}

/// Ids near each other, in no order, some of them twice, and the ends of the range.
fn near(round: u64) -> Vec<u64> {
    let mut ids: Vec<u64> = (0..90).map(|at| (at * 37 + round) % 97 + at % 2 * 1000).collect();
    ids.extend([u64::MAX, 0, ids[7], ids[20], u64::MAX - 1]);
    ids
}

/// Ids that are as long by themselves as their keys, some of them twice.
fn far(round: u64) -> Vec<u64> {
    let mut ids: Vec<u64> = (0..40).map(|at| mix64(at + round % 3 + 1)).collect();
    ids.extend([ids[0], ids[5]]);
    ids
}

fn gradients(ids: &[u64], round: u64) -> Vec<f32> {
    ids.iter().flat_map(|id| gradient(*id, round)).collect()
}

fn add(sums: &mut Sums, ids: &[u64], round: u64) {
    for id in ids {
        let sum = sums.entry(*id).or_default();
        sum.iter_mut().zip(gradient(*id, round)).for_each(|(sum, value)| *sum += value);
    }
}

async fn assert_holds(table: &Table, sums: &Sums) {
    let ids: Vec<u64> = sums.keys().copied().collect();
    let expected: Vec<f32> = sums.values().flatten().map(|sum| -sum).collect();
    assert_eq!(table.pull(&ids).await.unwrap(), expected, "table {}", table.table.name());
}

async fn total(cluster: &Cluster, name: &str) -> f64 {
    let mut sum = 0.0;
    for id in cluster.ids() {
        sum += metric(cluster, id, name).await;
    }
    sum
}

async fn raise(cluster: &Cluster, version: Option<u32>) -> Result<u32, tonic::Status> {
    let reply = cluster.admin(2).raise_version(RaiseVersionRequest { version }).await?;
    Ok(reply.into_inner().version)
}

/// Waits until every node tells its clients of the version.
async fn wait_version(cluster: &Cluster, version: u32) {
    for id in cluster.ids() {
        eventually("every node knows the cluster version", || async {
            match cluster.routing(id).await {
                Some(routing) if routing.cluster_version == version => Ok(()),
                other => Err(format!("node {id}: {:?}", other.map(|routing| routing.cluster_version))),
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sums_are_exact_in_every_encoding_through_kills_and_replay() {
    // Nothing is flushed: what a node has after it was killed, it has from its log.
    let options = Options { shards: 3, ..Options::default() }.arg("--flush-interval-ms", 3_600_000);
    let mut cluster = Cluster::start(options).await;
    wait_version(&cluster, CLUSTER_VERSION_MAX).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let mut tables = Vec::new();
    for encoding in Encoding::ALL {
        for kind in ["near", "far"] {
            let table = trainer.integers(&format!("{kind}-{}", encoding.name()), DIM).await;
            tables.push((Table { table: table.table.with_encoding(encoding) }, kind, Sums::new()));
        }
    }
    for round in 0..12 {
        // Both kinds of sections in each message.
        let pushes: Vec<(Vec<u64>, Vec<f32>)> = tables
            .iter()
            .map(|(_, kind, _)| if *kind == "near" { near(round) } else { far(round) })
            .map(|ids| (ids.clone(), gradients(&ids, round)))
            .collect();
        let parts: Vec<_> = tables
            .iter()
            .zip(&pushes)
            .map(|((table, ..), (ids, gradients))| (&table.table, &ids[..], &gradients[..]))
            .collect();
        trainer.client.push_many(&parts).await.unwrap();
        for ((_, _, sums), (ids, _)) in tables.iter_mut().zip(&pushes) {
            add(sums, ids, round);
        }
        if round == 5 {
            let leader = cluster.leader_of(1).await;
            cluster.kill(leader);
            cluster.restart(leader);
        }
    }
    for (table, _, sums) in &tables {
        assert_holds(table, sums).await;
    }
    // What is set, added and removed is named by ids as well; of an id that is set twice the last value counts.
    let (table, _, sums) = &mut tables[0];
    let set = [7u64, 3, 7];
    table.set(&set, &[[1.0; DIM], [2.0; DIM], [3.0; DIM]].concat()).await.unwrap();
    table.table.add(&[4, 3, 4], &[1.0; 3 * DIM]).await.unwrap();
    table.table.remove(&[9, 8]).await.unwrap();
    sums.insert(7, [-3.0; DIM]);
    sums.insert(3, [-3.0; DIM]);
    sums.entry(4).or_default().iter_mut().for_each(|sum| *sum -= 2.0);
    sums.extend([(8, [-0.0; DIM]), (9, [-0.0; DIM])]);
    cluster.wait_ready().await;
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
    cluster.kill_all();
    cluster.start_all();
    cluster.wait_ready().await;
    for (table, _, sums) in &tables {
        assert_holds(table, sums).await;
    }
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
}

/// Bytes of the bodies of one push of `ids` with keys: a message a shard.
fn plain_bytes(ids: &[u64], shards: usize) -> f64 {
    let distinct: std::collections::BTreeSet<&u64> = ids.iter().collect();
    (shards * (HEADER_BYTES + SECTION_BYTES) + distinct.len() * (KEY_BYTES + DIM * 4)) as f64
}

/// A push of one id, named by itself, as no client makes it for this cluster.
fn by_id(session: u64, seq: u64, table: u32, id: u64) -> Bytes {
    let mut builder = PushBodyBuilder::new(0);
    let kind = (Operation::Gradient, Encoding::F32);
    builder
        .id_section(table, kind, (DIM as u32, None), &[id], &[])
        .copy_from_slice(&gradient(id, 0).iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>());
    builder.finish(session, seq, 0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_gets_no_ids_before_it_is_of_their_version() {
    const SHARDS: usize = 2;
    let options = Options { shards: 2, cluster_version: Some(1), ..Options::default() };
    let cluster = Cluster::start(options).await;
    wait_version(&cluster, 1).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("items", DIM).await;
    let (ids, mut sums) = (near(0), Sums::new());
    let push = async |table: &Table, sums: &mut Sums| {
        let before = total(&cluster, PUSHED).await;
        let options = PushOptions { encoding: Some(Encoding::F32), ..PushOptions::default() };
        table.table.push_with(&ids, &gradients(&ids, 0), options).await.unwrap();
        add(sums, &ids, 0);
        total(&cluster, PUSHED).await - before
    };
    assert_eq!(push(&table, &mut sums).await, plain_bytes(&ids, SHARDS), "keys, to the byte");
    // Whatever a client sends, the log has none.
    let number = table.table.number();
    let shard = raw::shard_of(&cluster, number, 5).await;
    let mut session = RawSession::open(&cluster).await;
    let seq = session.next(shard.group);
    let leader = cluster.leader_of(shard.shard).await;
    let body = by_id(session.number, seq, number, 5);
    let refused = raw::push(&cluster, leader, shard.group, body.clone()).await.unwrap_err();
    assert_eq!(raw::kind(&refused), ErrorKind::Unavailable);
    assert!(refused.message().contains("cluster version 2"), "{refused}");
    assert_holds(&table, &sums).await;

    // A build that does not know a version keeps the cluster from it.
    let beyond = raise(&cluster, Some(CLUSTER_VERSION_MAX + 1)).await.unwrap_err();
    assert_eq!(raw::kind(&beyond), ErrorKind::Invalid);
    assert!(beyond.message().contains("of node "), "{beyond}");
    assert_eq!(raise(&cluster, None).await.unwrap(), CLUSTER_VERSION_MAX);
    assert_eq!(raise(&cluster, Some(1)).await.unwrap(), CLUSTER_VERSION_MAX, "it does not go down");
    wait_version(&cluster, CLUSTER_VERSION_MAX).await;

    // The same body under the same number: the door said that it may pass, and it has.
    raw::push(&cluster, leader, shard.group, body).await.unwrap();
    add(&mut sums, &[5], 0);
    // A client that has not heard of it goes on as before; one that has saves what its ids do not need.
    assert_eq!(push(&table, &mut sums).await, plain_bytes(&ids, SHARDS));
    let newer = Trainer::connect(&cluster.endpoints()).await;
    let saved = plain_bytes(&ids, SHARDS) - push(&newer.table("items").await, &mut sums).await;
    let distinct = ids.iter().collect::<std::collections::BTreeSet<_>>().len();
    assert!(saved > (distinct * 6) as f64, "{saved} bytes saved of {distinct} rows");
    assert_holds(&table, &sums).await;
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
}

/// Workers' parts have ids; the sums that their leader lays out have keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_of_a_job_are_summed_from_ids_through_kills() {
    let options = Options { shards: 2, ..Options::default() }.arg("--flush-interval-ms", 3_600_000);
    let mut cluster = Cluster::start(options).await;
    wait_version(&cluster, CLUSTER_VERSION_MAX).await;
    let options = in_step(2);
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let other = Trainer::connect(&cluster.endpoints()).await;
    let mut tables = Vec::new();
    for encoding in Encoding::ALL {
        let table = trainer.integers(encoding.name(), DIM).await;
        tables.push((Table { table: table.table.with_encoding(encoding) }, Sums::new()));
    }
    let (job, other_job) =
        (trainer.client.job("ml", options).await.unwrap(), other.client.job("ml", options).await.unwrap());
    let (mut first, mut second) = (job.worker(0).await.unwrap(), other_job.worker(1).await.unwrap());
    for round in 0..6 {
        for (table, sums) in &mut tables {
            let (one, two) = (near(round), [near(round + 1), far(round)].concat());
            let before = total(&cluster, CONTRIBUTED).await;
            first.push(&table.table, &one, &gradients(&one, round)).await.unwrap();
            if round == 0 && table.table.encoding() == Encoding::F32 {
                let saved = plain_bytes(&one, 2) - (total(&cluster, CONTRIBUTED).await - before);
                assert!(saved > 500.0, "{saved} bytes saved of {} rows", one.len());
            }
            second.push(&table.table, &two, &gradients(&two, round)).await.unwrap();
            add(sums, &one, round);
            add(sums, &two, round);
        }
        if round == 3 {
            // With parts in its memory.
            let leader = cluster.leader_of(0).await;
            cluster.kill(leader);
            cluster.restart(leader);
        }
        let (one, two) = tokio::join!(first.tick(b""), second.tick(b""));
        one.unwrap();
        two.unwrap();
    }
    cluster.wait_ready().await;
    cluster.wait_caught_up().await;
    for (table, sums) in &tables {
        assert_holds(table, sums).await;
    }
    cluster.assert_replicas_equal().await;
    cluster.kill_all();
    cluster.start_all();
    cluster.wait_ready().await;
    for (table, sums) in &tables {
        assert_holds(table, sums).await;
    }
}
