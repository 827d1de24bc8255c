//! Every bad input gets a typed error that names what is wrong, and nothing is changed.
//!
//! Not here: nodes that cannot start (`bad_start.rs`), clients that reach nobody (`unreachable.rs`).

mod support;

use bytes::Bytes;
use evershard::{Error, ErrorKind, TableDefinition, definition};
use evershard_proto::limits::{DIM_MAX, MESSAGE_BYTES_MAX, PUSH_BODY_BYTES_HARD_MAX};
use evershard_proto::v1::ProposeRequest;
use evershard_proto::v1::node_service_client::NodeServiceClient;
use support::raw::{self, RawSession};
use support::trainer::{Table, Trainer, integers};
use support::{Cluster, eventually};
use tonic::Code;

const DIM: usize = 4;
const IDS: [u64; 6] = [1, 2, 3, 4, 5, u64::MAX];

/// A cluster whose table `audit` has rows, which no test of this file may change.
async fn prepared() -> (Cluster, Trainer, Table, Vec<f32>) {
    let cluster = Cluster::with_shards(3).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("audit", DIM).await;
    let gradients: Vec<f32> = (0..IDS.len() * DIM).map(|i| i as f32).collect();
    table.push(&IDS, &gradients).await.unwrap();
    let rows = table.pull(&IDS).await.unwrap();
    (cluster, trainer, table, rows)
}

fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> (ErrorKind, String) {
    match result {
        Err(Error::Refused(refusal)) => (refusal.kind, refusal.message),
        other => panic!("not refused: {other:?}"),
    }
}

fn assert_refused<T: std::fmt::Debug>(result: Result<T, Error>, kind: ErrorKind, names: &str) {
    let (actual, message) = refusal(result);
    assert_eq!(actual, kind, "{message}");
    assert!(message.contains(names), "{message:?} does not name {names:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_client_refuses_what_cannot_be_meant() {
    let (cluster, trainer, table, rows) = prepared().await;

    assert_refused(trainer.client.table("nothing").await, ErrorKind::UnknownTable, "nothing");
    let short = vec![1.0; IDS.len() * DIM - 1];
    assert_refused(table.push(&IDS, &short).await, ErrorKind::LengthMismatch, "audit");
    assert_refused(table.set(&IDS, &short).await, ErrorKind::LengthMismatch, "audit");
    let mut out = vec![0.0; IDS.len() * DIM + 1];
    assert_refused(table.table.pull(&IDS, &mut out).await, ErrorKind::LengthMismatch, "25");
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut gradients = vec![1.0; IDS.len() * DIM];
        gradients[3 * DIM + 2] = bad;
        // One bad value refuses the push whole, whatever shards its rows are on.
        assert_refused(table.push(&IDS, &gradients).await, ErrorKind::NonFinite, "column 2 of row 3 (id 4)");
        assert_refused(table.set(&IDS, &gradients).await, ErrorKind::NonFinite, "id 4");
    }
    let twice = [(&table.table, &IDS[..1], &rows[..DIM]), (&table.table, &IDS[..1], &rows[..DIM])];
    assert_refused(trainer.client.push_many(&twice).await, ErrorKind::Invalid, "audit");

    assert_eq!(table.pull(&IDS).await.unwrap(), rows);
    cluster.assert_replicas_equal().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_batches_are_valid_and_change_nothing() {
    let (cluster, trainer, table, rows) = prepared().await;
    let applied_before = applied(&cluster).await;
    table.push(&[], &[]).await.unwrap();
    table.set(&[], &[]).await.unwrap();
    table.table.remove(&[]).await.unwrap();
    assert!(table.pull(&[]).await.unwrap().is_empty());
    trainer.client.push_many(&[]).await.unwrap();
    trainer.client.push_many(&[(&table.table, &[], &[])]).await.unwrap();
    trainer.client.pull_many(&mut []).await.unwrap();
    assert_eq!(applied(&cluster).await, applied_before);
    assert_eq!(table.pull(&IDS).await.unwrap(), rows);
}

/// What the leaders have applied, by shard.
async fn applied(cluster: &Cluster) -> Vec<u64> {
    let mut indexes = Vec::new();
    for shard in cluster.shards() {
        let leader = cluster.leader_of(shard).await;
        indexes.push(cluster.replica(leader, shard).await.unwrap().applied);
    }
    indexes
}

/// The servers check again what a good client never sends. A refused message leaves its number free for the next one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_refuses_what_a_client_should_not_send() {
    let (cluster, trainer, table, rows) = prepared().await;
    let frozen = TableDefinition { optimizer: None, ..integers("frozen", DIM) };
    let frozen = trainer.create(frozen).await;
    let number = table.table.number();
    let shard = raw::shard_of(&cluster, number, IDS[0]).await;
    let group = shard.group;
    let ids = [IDS[0]];
    let mut session = RawSession::open(&cluster).await;
    let ones = [1.0; DIM];
    let dim = u32::try_from(DIM).unwrap();

    let mut torn = raw::body(session.number, 1, number, dim, &ids, &ones).to_vec();
    torn[20] ^= 1;
    let wide = raw::body(session.number, 1, number, dim + 1, &ids, &[1.0; DIM + 1]);
    let nan = raw::body(session.number, 1, number, dim, &ids, &[1.0, f32::NAN, 1.0, 1.0]);
    let sum = [f32::MAX; 2 * DIM];
    let overflow = raw::body(session.number, 1, number, dim, &[ids[0], ids[0]], &sum);
    let unknown = raw::body(session.number, 1, 4000, dim, &ids, &ones);
    let no_optimizer = raw::body(session.number, 1, frozen.table.number(), dim, &ids, &ones);
    let elsewhere = IDS.into_iter().find(|id| {
        let key = evershard_proto::key::key_of(number, *id);
        !(shard.range_start..=shard.range_end).contains(&key)
    });
    let wrong_range = raw::body(session.number, 1, number, dim, &[elsewhere.unwrap()], &ones);
    let rows_over = PUSH_BODY_BYTES_HARD_MAX / (DIM * 4) + 1;
    let many: Vec<u64> = vec![ids[0]; rows_over];
    let too_large = raw::body(session.number, 1, number, dim, &many, &vec![1.0; rows_over * DIM]);
    let skipping = raw::body(session.number, 2, number, dim, &ids, &ones);
    let zero = raw::body(session.number, 0, number, dim, &ids, &ones);
    let nobody = raw::body(u64::MAX - 7, 1, number, dim, &ids, &ones);

    let cases: [(&str, Bytes, &[ErrorKind]); 12] = [
        // Never given out: taken in, it would answer for the client that is given it one day.
        ("a session nobody opened", nobody.clone(), &[ErrorKind::Unavailable]),
        ("damaged on its way", torn.into(), &[ErrorKind::Corrupt]),
        ("wrong dim", wide, &[ErrorKind::WrongDim]),
        ("NaN", nan, &[ErrorKind::NonFinite]),
        ("a sum that overflows", overflow, &[ErrorKind::NonFinite]),
        ("unknown table", unknown, &[ErrorKind::UnknownTable]),
        ("no optimizer", no_optimizer, &[ErrorKind::NoOptimizer]),
        ("another shard's row", wrong_range, &[ErrorKind::WrongRange]),
        ("over the limit", too_large, &[ErrorKind::TooLarge]),
        ("a gap in the numbers", skipping, &[ErrorKind::OutOfOrder]),
        ("number 0", zero, &[ErrorKind::Invalid, ErrorKind::OutOfOrder]),
        ("nothing at all", Bytes::new(), &[ErrorKind::LengthMismatch, ErrorKind::Invalid]),
    ];
    for (what, body, kinds) in cases {
        let leader = cluster.leader_of(shard.shard).await;
        let status = raw::push(&cluster, leader, group, body).await.expect_err(what);
        assert!(kinds.contains(&raw::kind(&status)), "{what}: {status:?}");
        assert!(!status.message().is_empty(), "{what} without a word");
    }
    let leader = cluster.leader_of(shard.shard).await;
    let status = raw::push(&cluster, leader, 999, nobody.clone()).await.expect_err("an unknown group");
    assert_eq!(raw::kind(&status), ErrorKind::UnknownGroup, "{status:?}");

    assert_eq!(table.pull(&IDS).await.unwrap(), rows);
    // After all that, number 1 is still to come, and counts.
    let good = raw::body(session.number, session.next(group), number, dim, &ids, &ones);
    raw::push(&cluster, leader, group, good).await.unwrap();
    let row = table.pull(&ids).await.unwrap();
    assert_eq!(row, rows[..DIM].iter().map(|value| value - 1.0).collect::<Vec<f32>>());
    cluster.assert_replicas_equal().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_over_the_limit_of_the_wire_ends_nothing_but_itself() {
    let (cluster, _trainer, table, rows) = prepared().await;
    let number = table.table.number();
    let shard = raw::shard_of(&cluster, number, IDS[0]).await;
    let leader = cluster.leader_of(shard.shard).await;
    let huge = Bytes::from(vec![0; MESSAGE_BYTES_MAX + 1]);
    let status = raw::push(&cluster, leader, shard.group, huge).await.expect_err("over 8 MiB");
    assert_eq!(status.code(), tonic::Code::OutOfRange, "{status:?}");
    // A pull whose answer would be over the limit.
    let many: Vec<u64> = vec![IDS[0]; MESSAGE_BYTES_MAX / (DIM * 4) + 1];
    let status = raw::pull(&cluster, leader, shard.group, number, &many).await.expect_err("over 8 MiB");
    assert!(matches!(raw::kind(&status), ErrorKind::TooLarge), "{status:?}");
    assert_eq!(table.pull(&IDS).await.unwrap(), rows);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_is_what_it_was_created_as() {
    let (cluster, trainer, table, rows) = prepared().await;
    // The same definition is found, from three clients at once, whoever is first.
    let mut creating = Vec::new();
    for _ in 0..3 {
        let endpoints = cluster.endpoints();
        creating.push(tokio::spawn(async move {
            let trainer = Trainer::connect(&endpoints).await;
            let created = trainer.integers("shared", 8).await;
            created.push(&[1], &[1.0; 8]).await.unwrap();
            created.table.number()
        }));
    }
    let mut numbers = Vec::new();
    for creating in creating {
        numbers.push(creating.await.unwrap());
    }
    assert!(numbers.iter().all(|number| *number == numbers[0]), "{numbers:?}");
    let shared = trainer.table("shared").await;
    assert_eq!(shared.pull(&[1]).await.unwrap(), [-3.0; 8]);

    let conflicts = [
        integers("audit", DIM + 1),
        definition::sparse("audit", 4, definition::sgd(0.5)),
        definition::sparse("audit", 4, definition::adagrad(1.0)),
        TableDefinition { optimizer: None, ..integers("audit", DIM) },
        TableDefinition { initializer: definition::normal(0.0, 1.0, 7), ..integers("audit", DIM) },
    ];
    for conflict in conflicts {
        assert_refused(trainer.client.create_table(conflict).await, ErrorKind::Conflict, "audit");
    }
    let impossible = [
        (integers("", DIM), "name"),
        (integers(" padded", DIM), "name"),
        (integers("line\nfeed", DIM), "name"),
        (integers(&"n".repeat(129), DIM), "128"),
        (integers("flat", 0), "dim"),
        (TableDefinition { dim: DIM_MAX + 1, ..integers("wide", 1) }, "dim"),
        (definition::sparse("rate", 4, definition::sgd(f32::NAN)), "lr"),
        (definition::sparse("rate", 4, definition::sgd(-1.0)), "lr"),
        (TableDefinition { initializer: definition::normal(0.0, -1.0, 7), ..integers("std", 4) }, "std"),
    ];
    for (definition, names) in impossible {
        assert_refused(trainer.client.create_table(definition).await, ErrorKind::Invalid, names);
    }
    let known: Vec<String> = trainer
        .client
        .routing()
        .await
        .unwrap()
        .tables
        .into_iter()
        .map(|table| table.definition.unwrap_or_default().name)
        .collect();
    assert_eq!(known, ["audit", "shared"]);
    assert_eq!(table.pull(&IDS).await.unwrap(), rows);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_without_an_optimizer_takes_values_and_no_gradients() {
    let (cluster, trainer, _table, _rows) = prepared().await;
    let frozen = trainer.create(TableDefinition { optimizer: None, ..integers("frozen", DIM) }).await;
    let values: Vec<f32> = (0..IDS.len() * DIM).map(|i| i as f32).collect();
    frozen.set(&IDS, &values).await.unwrap();
    let (kind, message) = refusal(frozen.push(&IDS, &values).await);
    assert_eq!(kind, ErrorKind::NoOptimizer, "{message}");
    assert!(message.contains("frozen"), "{message}");
    assert_eq!(frozen.pull(&IDS).await.unwrap(), values);
    cluster.assert_replicas_equal().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_table_is_unknown_to_those_who_still_hold_it() {
    let (cluster, trainer, table, _rows) = prepared().await;
    let other = Trainer::connect(&cluster.endpoints()).await;
    other.client.drop_table("audit").await.unwrap();
    let gone = other.client.drop_table("audit").await;
    assert_refused(gone, ErrorKind::UnknownTable, "audit");
    let ones = vec![1.0; IDS.len() * DIM];
    let (kind, message) = refusal(table.push(&IDS, &ones).await);
    assert_eq!(kind, ErrorKind::UnknownTable, "{message}");
    let (kind, message) = refusal(table.pull(&IDS).await);
    assert_eq!(kind, ErrorKind::UnknownTable, "{message}");
    // A new table of the old name starts from nothing.
    let anew = trainer.integers("audit", DIM).await;
    assert_ne!(anew.table.number(), table.table.number());
    assert_eq!(anew.pull(&IDS).await.unwrap(), vec![0.0; IDS.len() * DIM]);
    eventually("rows of the old table are gone everywhere", || async {
        let scrub = cluster.scrub().await?;
        if scrub.shards.iter().all(|shard| shard.equal) { Ok(()) } else { Err(format!("{scrub:?}")) }
    })
    .await;
}

/// What other nodes may propose is looked at too: an entry that no replica can use would halt them all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_that_cannot_be_applied_gets_into_a_log() {
    let (cluster, _trainer, table, rows) = prepared().await;
    let routing = cluster.routing(1).await.unwrap();
    let groups: Vec<u64> = std::iter::once(0).chain(routing.shards.iter().map(|shard| shard.group)).collect();
    let garbage: [&[u8]; 5] = [b"", &[9, 9], &[2, 1, 255, 255], &[1, 1, 0, 0], &[255; 40]];
    for node in cluster.ids() {
        for &group in &groups {
            for command in garbage.iter().filter(|command| group != 0 || !command.is_empty()) {
                let mut client = NodeServiceClient::new(cluster.channel(node));
                let request = ProposeRequest {
                    cluster_id: routing.cluster_id.clone(),
                    group,
                    command: Bytes::copy_from_slice(command),
                };
                let refused = client.propose(request).await.expect_err("it was proposed");
                assert_eq!(refused.code(), Code::InvalidArgument, "group {group}, {command:?}: {refused}");
            }
        }
    }
    table.push(&IDS, &vec![0.0; IDS.len() * DIM]).await.unwrap();
    assert_eq!(table.pull(&IDS).await.unwrap(), rows);
    cluster.assert_replicas_equal().await;
}
