//! Admission and eviction, by example. The random logs of `script` have them too.

use bytes::Bytes;
use evershard_proto::key::key_of;
use evershard_proto::push_body::{Encoding, Operation, PushBodyBuilder};
use evershard_proto::shard_command::{EvictedRow, ShardCommand};
use evershard_proto::v1::{self, Admission, Eviction};
use evershard_raft::state_machine::{EntryContent, StateMachine};

use super::harness::{Replica, apply, command, entry, fingerprint, flush, pull};
use super::script::one;
use crate::eviction::{CutOff, look};
use crate::model::{CommandOutcome, KeyRange, PushOutcome, TableSchema};

const TABLE: u32 = 1;

/// SGD with lr = 1 from zero: weights are the negated sums of gradients.
fn definition(admission: Option<Admission>, eviction: Option<Eviction>) -> v1::TableDefinition {
    let sgd = v1::optimizer::Kind::Sgd(v1::Sgd { lr: 1.0 });
    let optimizer = Some(v1::Optimizer { kind: Some(sgd), ..Default::default() });
    v1::TableDefinition { name: "t".into(), dim: 1, optimizer, admission, eviction, ..Default::default() }
}

/// A replica with the table; the next index is 2.
fn replica(admission: Option<Admission>, eviction: Option<Eviction>) -> Replica {
    let replica = Replica::new(1, KeyRange::ALL);
    let definition = Some(definition(admission, eviction));
    let table = v1::TableDescription { number: TABLE, definition, definition_version: 0 };
    let created =
        apply(replica.machine(), command(1, ShardCommand::Schema { table, dropped: false }.encode()));
    assert_eq!(CommandOutcome::decode(&created), Ok(CommandOutcome::Done));
    replica
}

fn filter(filter_freq: u32) -> Option<Admission> {
    Some(Admission { filter_freq, ..Default::default() })
}

/// Gradients of -1, as entry `index`.
fn push(replica: &Replica, index: u64, ids: &[u64]) {
    let rows: Vec<(u64, &[f32])> = ids.iter().map(|id| (*id, &[-1.0][..])).collect();
    let body = one(1, replica.machine().last_seq(1) + 1, TABLE, Operation::Gradient, &rows);
    applied(replica, index, body);
}

fn applied(replica: &Replica, index: u64, body: Bytes) {
    let outcome = PushOutcome::decode(&apply(replica.machine(), command(index, body)));
    assert_eq!(outcome, Ok(PushOutcome::Applied { index }));
}

/// How often an id came, while that is all there is of it.
fn counted(replica: &Replica, id: u64) -> Option<u32> {
    let set = replica.machine().rows().read();
    let header = set.table(TABLE).expect("there").find(key_of(TABLE, id)).map(|row| row.header());
    header.filter(|header| header.is_counting()).map(|header| header.steps)
}

fn weight(replica: &Replica, id: u64) -> Option<f32> {
    let (weights, exists) = pull(replica.machine(), TABLE, id);
    exists.then_some(weights[0])
}

fn version(replica: &Replica, id: u64) -> u64 {
    let set = replica.machine().rows().read();
    set.table(TABLE).expect("there").find(key_of(TABLE, id)).expect("a record").header().version
}

fn evict(replica: &Replica, index: u64, rows: &[(u64, u64)]) {
    let listed = rows.iter().map(|(id, version)| EvictedRow { key: key_of(TABLE, *id), version: *version });
    let evict = ShardCommand::Evict { table: TABLE, clock_ms: 0, step: 0, rows: listed.collect() };
    let answer = apply(replica.machine(), command(index, evict.encode()));
    assert_eq!(CommandOutcome::decode(&answer), Ok(CommandOutcome::Done));
}

#[test]
fn an_id_came_as_often_as_its_rows_did_before_they_were_summed() {
    let replica = replica(filter(4), None);
    push(&replica, 2, &[5, 5, 5, 6]);
    assert_eq!((counted(&replica, 5), counted(&replica, 6)), (Some(3), Some(1)));
    assert_eq!((weight(&replica, 5), weight(&replica, 6)), (None, None), "they read as absent");
    let status = replica.machine().status();
    assert_eq!((status.tables[0].rows, status.tables[0].resident), (0, 2));
    // A client that summed them says so, and it is the same.
    let mut builder = PushBodyBuilder::new(0);
    let keys = [7, 8].map(|id| key_of(TABLE, id));
    builder.counted_section(TABLE, Encoding::F32, 1, None, &keys, &[3, 1]).copy_from_slice(&[0; 8]);
    applied(&replica, 3, builder.finish(1, 2, 0));
    assert_eq!((counted(&replica, 7), counted(&replica, 8)), (Some(3), Some(1)));
}

#[test]
fn the_push_that_reaches_the_threshold_trains_the_row() {
    let replica = replica(filter(3), None);
    push(&replica, 2, &[5, 6]);
    push(&replica, 3, &[5]);
    assert_eq!(weight(&replica, 5), None);
    push(&replica, 4, &[5, 6]);
    assert_eq!(weight(&replica, 5), Some(1.0));
    assert_eq!(counted(&replica, 6), Some(2));
    // The push is summed: all of it trains the row.
    push(&replica, 5, &[6, 6, 6]);
    assert_eq!(weight(&replica, 6), Some(3.0));
    push(&replica, 6, &[5]);
    assert_eq!(weight(&replica, 5), Some(2.0), "a row is trained from then on");
}

#[test]
fn a_threshold_is_reached_across_restarts() {
    let mut replica = replica(filter(3), None);
    push(&replica, 2, &[5, 6]);
    flush(replica.machine());
    replica.crash();
    let before = fingerprint(replica.machine());
    assert!(replica.machine().digest().is_some());
    push(&replica, 3, &[5]);
    assert_ne!(fingerprint(replica.machine()).digest, before.digest, "a count is a part of the state");
    // Not flushed: replayed.
    replica.crash();
    push(&replica, 3, &[5]);
    push(&replica, 4, &[5]);
    assert_eq!(weight(&replica, 5), Some(1.0));
    assert_eq!(counted(&replica, 6), None, "on disk only");
    push(&replica, 5, &[6]);
    assert_eq!(counted(&replica, 6), Some(2));
}

#[test]
fn what_is_set_or_added_makes_a_row_and_what_is_removed_counts_anew() {
    let replica = replica(filter(3), None);
    push(&replica, 2, &[5, 6, 7]);
    applied(&replica, 3, one(1, 2, TABLE, Operation::Set, &[(5, &[9.0])]));
    applied(&replica, 4, one(1, 3, TABLE, Operation::Add, &[(6, &[2.0])]));
    assert_eq!((weight(&replica, 5), weight(&replica, 6)), (Some(9.0), Some(2.0)));
    push(&replica, 5, &[5]);
    assert_eq!(weight(&replica, 5), Some(10.0), "a row that is there is trained");
    applied(&replica, 6, one(1, 5, TABLE, Operation::Remove, &[(5, &[0.0]), (7, &[0.0])]));
    assert_eq!(
        replica.machine().status().tables[0].tombstones,
        2,
        "also of a count: replay must not go on with it"
    );
    push(&replica, 7, &[5, 5, 7, 7]);
    assert_eq!((counted(&replica, 5), counted(&replica, 7)), (Some(2), Some(2)));
}

#[test]
fn an_id_whose_hash_is_not_admitted_leaves_no_trace() {
    let admission = Admission { admit_probability: 0.5, filter_freq: 2, seed: 3 };
    let definition = definition(Some(admission), None);
    let schema = TableSchema::new(TABLE, &definition).expect("valid");
    let replica = replica(Some(admission), None);
    let ids: Vec<u64> = (0..200).collect();
    push(&replica, 2, &ids);
    push(&replica, 3, &ids);
    for id in &ids {
        let expected = schema.rules().admits_id(*id).then_some(1.0);
        assert_eq!(weight(&replica, *id), expected, "id {id}");
    }
    let admitted = ids.iter().filter(|id| schema.rules().admits_id(**id)).count() as u64;
    assert!((60..140).contains(&admitted), "{admitted} of 200");
    assert_eq!(replica.machine().status().tables[0].resident, admitted);
    // Nor does it take part in what is refused or out of step: a row made by hand is trained.
    let other = ids.iter().find(|id| !schema.rules().admits_id(**id)).expect("half of them");
    applied(&replica, 4, one(1, 3, TABLE, Operation::Set, &[(*other, &[4.0])]));
    push(&replica, 5, &[*other]);
    assert_eq!(weight(&replica, *other), Some(5.0));
}

#[test]
fn a_row_goes_only_as_it_was_when_its_leader_looked() {
    let replica = replica(None, Some(Eviction { expire_seconds: 1, ..Default::default() }));
    push(&replica, 2, &[5, 6, 7]);
    push(&replica, 3, &[6]);
    // 6 changed since, 8 never was; 7 is not listed.
    evict(&replica, 4, &[(5, 2), (6, 2), (8, 2)]);
    assert_eq!([5, 6, 7].map(|id| weight(&replica, id)), [None, Some(2.0), Some(1.0)]);
    assert_eq!(version(&replica, 5), 4, "a tombstone");
    // Twice in one entry, and a version that the entry itself gives.
    evict(&replica, 5, &[(6, 3), (6, 5), (5, 4)]);
    assert_eq!(weight(&replica, 6), None);
    assert_eq!((version(&replica, 6), version(&replica, 5)), (5, 4), "what is gone stays as it is");
}

/// Gradients go by their ids: whatever went before them, in whichever place of the message.
#[test]
fn an_evicted_row_shifts_no_gradient_of_a_batch_that_was_under_way() {
    let replica = replica(None, Some(Eviction { expire_seconds: 1, ..Default::default() }));
    let ids: Vec<u64> = (0..300).collect();
    let gradients: Vec<[f32; 1]> = ids.iter().map(|id| [-(*id as f32)]).collect();
    let rows: Vec<(u64, &[f32])> = ids.iter().zip(&gradients).map(|(id, g)| (*id, &g[..])).collect();
    applied(&replica, 2, one(1, 1, TABLE, Operation::Gradient, &rows));
    let gone: Vec<(u64, u64)> = ids.iter().filter(|id| *id % 7 == 3).map(|id| (*id, 2)).collect();
    evict(&replica, 3, &gone);
    applied(&replica, 4, one(1, 2, TABLE, Operation::Gradient, &rows));
    for id in ids {
        let times = if id % 7 == 3 { 1.0 } else { 2.0 };
        assert_eq!(weight(&replica, id), Some(times * id as f32), "id {id}");
    }
}

/// Hot and cold rows are found alike; what apply reads to evict them it reads from disk.
#[test]
fn a_look_finds_what_is_in_memory_and_what_is_on_disk_only() {
    let mut replica = replica(filter(2), Some(Eviction { expire_seconds: 5, ..Default::default() }));
    let at = |index, seconds: u64, body| {
        entry(index, EntryContent::Command { time_ms: seconds * 1000, command: body })
    };
    let gradients = |replica: &Replica, ids: &[u64]| {
        let rows: Vec<(u64, &[f32])> = ids.iter().map(|id| (*id, &[-1.0][..])).collect();
        one(1, replica.machine().last_seq(1) + 1, TABLE, Operation::Gradient, &rows)
    };
    // Rows 1..=4, and counts of 5..=8.
    let body = gradients(&replica, &[1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8]);
    apply(replica.machine(), at(2, 100, body));
    flush(replica.machine());
    replica.crash();
    // Of them 1, 2, 5 are in memory again: 1 and 5 because they changed.
    let body = gradients(&replica, &[1, 5]);
    apply(replica.machine(), at(3, 104, body));
    assert_eq!(weight(&replica, 2), Some(2.0));
    let looked = |replica: &Replica, clock_ms| {
        let machine = replica.machine();
        let schema = machine.rows().schemas()[&TABLE].clone();
        let found = look(machine.rows(), &schema, CutOff { clock_ms, step: 0 }, &mut || true);
        found.expect("read").expect("looked to the end").rows
    };
    assert!(looked(&replica, 105_000).is_empty());
    let mut expected: Vec<u64> = [2, 3, 4, 6, 7, 8].map(|id| key_of(TABLE, id)).to_vec();
    expected.sort_unstable();
    let found = looked(&replica, 106_000);
    assert_eq!(found.iter().map(|row| row.key).collect::<Vec<_>>(), expected);
    assert!(found.iter().all(|row| row.version == 2));
    let evict = ShardCommand::Evict { table: TABLE, clock_ms: 106_000, step: 0, rows: found };
    apply(replica.machine(), at(4, 106, evict.encode()));
    assert_eq!([1, 2, 3, 4, 5].map(|id| weight(&replica, id)), [Some(3.0), None, None, None, Some(1.0)]);
    assert!(looked(&replica, 106_000).is_empty(), "what went is not found again");
    // Nor after the tombstones were flushed and forgotten.
    flush(replica.machine());
    replica.crash();
    assert!(looked(&replica, 109_000).is_empty());
    assert_eq!(looked(&replica, 110_000).len(), 2);
    let body = gradients(&replica, &[8]);
    apply(replica.machine(), at(5, 106, body));
    assert_eq!(counted(&replica, 8), Some(1), "counted anew");
}

#[test]
fn the_step_of_a_table_is_the_highest_clock_of_its_pushes() {
    let mut replica = replica(None, Some(Eviction { steps_to_live: 3, ..Default::default() }));
    let at = |clock| {
        let mut builder = PushBodyBuilder::new(0);
        let payload =
            builder.section(TABLE, Operation::Gradient, Encoding::F32, 1, None, &[key_of(TABLE, clock)]);
        payload.copy_from_slice(&(-1f32).to_le_bytes());
        builder.finish(1, clock, clock)
    };
    for clock in 1..=9 {
        applied(&replica, clock + 1, at(clock));
    }
    flush(replica.machine());
    replica.crash();
    assert_eq!(replica.machine().table_step(TABLE), 9);
    let schema = replica.machine().rows().schemas()[&TABLE].clone();
    let cut_off = CutOff { clock_ms: 0, step: 9 };
    let found = look(replica.machine().rows(), &schema, cut_off, &mut || true).expect("read").expect("whole");
    assert_eq!(found.rows.len(), 5, "those of clocks 1 to 5");
    assert!(found.rows.iter().all(|row| row.version <= 6));
}

#[test]
fn a_look_that_is_told_to_stop_finds_nothing() {
    let replica = replica(None, Some(Eviction { min_l2: 5.0, ..Default::default() }));
    push(&replica, 2, &(0..100).collect::<Vec<_>>());
    let schema = replica.machine().rows().schemas()[&TABLE].clone();
    let cut_off = CutOff { clock_ms: 0, step: 0 };
    assert_eq!(look(replica.machine().rows(), &schema, cut_off, &mut || false).expect("read"), None);
    let found = look(replica.machine().rows(), &schema, cut_off, &mut || true).expect("read").expect("whole");
    assert_eq!(found.rows.len(), 100);
}

/// An entry of this kind in the log of a build that does not know it halts the replica (design 14.13): so does one of a version
/// that this build does not know.
#[test]
fn an_eviction_of_another_version_halts_the_replica() {
    let replica = replica(None, None);
    let mut bytes =
        ShardCommand::Evict { table: TABLE, clock_ms: 0, step: 0, rows: vec![] }.encode().to_vec();
    bytes[1] += 1;
    let halted = replica.machine().apply(&[command(2, bytes.into())]).expect_err("halted");
    assert_eq!(halted.index, 2);
    assert_eq!(replica.machine().applied().expect("some").index, 1);
}
