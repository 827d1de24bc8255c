//! Values that are not finite: what each policy does to rows, in pushes, assigns, additions and steps, and what is counted of it.

use bytes::Bytes;
use evershard_proto::key::key_of;
use evershard_proto::push_body::{Encoding, Operation, PushBodyBuilder};
use evershard_proto::shard_command::ShardCommand;
use evershard_proto::v1;

use super::harness::{Replica, apply, command, flush, pull};
use crate::model::{Action, CommandOutcome, KeyRange, PushOutcome, RefusalKind, Source};
use crate::shard::ShardMachine;

const REJECT: u32 = 1;
const SKIP: u32 = 2;
const CLIP: u32 = 3;
const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;
const MAX: f32 = f32::MAX;

/// SGD with lr = 1, zeros, dim 2, under each policy; the next index is 4.
fn with_tables() -> Replica {
    let replica = Replica::new(1, KeyRange::ALL);
    let policies = [v1::NonFinitePolicy::Reject, v1::NonFinitePolicy::SkipRow, v1::NonFinitePolicy::Clip];
    for (number, policy) in (1..).zip(policies) {
        let kind = Some(v1::optimizer::Kind::Sgd(v1::Sgd { lr: 1.0 }));
        let definition = v1::TableDefinition {
            name: format!("table-{number}"),
            dim: 2,
            optimizer: Some(v1::Optimizer { kind, ..Default::default() }),
            non_finite: policy.into(),
            ..Default::default()
        };
        let table = v1::TableDescription { number, definition: Some(definition), definition_version: 0 };
        let schema = ShardCommand::Schema { table, dropped: false }.encode();
        apply(replica.machine(), command(number.into(), schema));
    }
    replica
}

fn body(session: u64, seq: u64, table: u32, operation: Operation, rows: &[(u64, [f32; 2])]) -> Bytes {
    let keys: Vec<u64> = rows.iter().map(|row| key_of(table, row.0)).collect();
    let payload: Vec<u8> = rows.iter().flat_map(|row| row.1).flat_map(f32::to_le_bytes).collect();
    let mut builder = PushBodyBuilder::new(0);
    builder.section(table, operation, Encoding::F32, 2, None, &keys).copy_from_slice(&payload);
    builder.finish(session, seq, 0)
}

fn push(machine: &ShardMachine, index: u64, body: Bytes) -> PushOutcome {
    PushOutcome::decode(&apply(machine, command(index, body))).expect("an outcome")
}

fn row(machine: &ShardMachine, table: u32, id: u64) -> [f32; 2] {
    pull(machine, table, id).0.try_into().expect("two")
}

/// What apply counted of a table: rejected, skipped, clipped.
fn counted(machine: &ShardMachine, table: u32) -> [u64; 3] {
    let total = machine.offences().of(table).logged.total;
    Action::ALL.map(|action| total.of(action))
}

/// The last offence: source, action, count, id, column, of a sum.
fn last(machine: &ShardMachine, table: u32) -> (Source, Action, u64, u64, u32, bool) {
    let known = machine.offences().of(table).logged.last;
    let offence = known.back().expect("one");
    let first = offence.rows.first;
    assert!(!first.value.is_finite());
    (offence.source, offence.action, offence.rows.count, first.id, first.column, first.of_sum)
}

#[test]
fn a_push_goes_by_its_tables_policy_and_is_counted_once() {
    let replica = with_tables();
    let machine = replica.machine();
    let rows = [(7, [1.0, NAN]), (8, [-1.0, 2.0]), (9, [-INF, INF]), (8, [-1.0, INF])];
    let refused = push(machine, 4, body(5, 1, REJECT, Operation::Gradient, &rows));
    assert!(matches!(refused, PushOutcome::Refused(refusal) if refusal.kind == RefusalKind::NonFinite));
    assert_eq!(
        push(machine, 5, body(5, 2, SKIP, Operation::Gradient, &rows)),
        PushOutcome::Applied { index: 5 }
    );
    assert_eq!(
        push(machine, 6, body(6, 1, CLIP, Operation::Gradient, &rows)),
        PushOutcome::Applied { index: 6 }
    );
    // Again, as after a lost answer.
    for (index, again) in
        [(7, body(5, 2, SKIP, Operation::Gradient, &rows)), (8, body(6, 1, CLIP, Operation::Gradient, &rows))]
    {
        assert_eq!(push(machine, index, again), PushOutcome::Applied { index: 0 });
    }
    assert_eq!(pull(machine, REJECT, 8), (vec![0.0; 2], false));
    assert_eq!(pull(machine, SKIP, 7), (vec![0.0; 2], false), "a row that is left out is not made");
    assert!(!pull(machine, SKIP, 9).1);
    assert_eq!(row(machine, SKIP, 8), [1.0, -2.0], "a bad row does not take the good one of its id with it");
    assert_eq!(row(machine, CLIP, 7), [-1.0, 0.0]);
    assert_eq!(row(machine, CLIP, 8), [2.0, -MAX]);
    assert_eq!(row(machine, CLIP, 9), [MAX, -MAX]);
    assert_eq!(counted(machine, SKIP), [0, 3, 0]);
    assert_eq!(counted(machine, CLIP), [0, 0, 3]);
    assert_eq!(last(machine, SKIP), (Source::Session(5), Action::Skipped, 3, 7, 1, false));
    assert_eq!(last(machine, CLIP), (Source::Session(6), Action::Clipped, 3, 7, 1, false));
    // Finite rows are not counted.
    push(machine, 9, body(5, 3, SKIP, Operation::Gradient, &[(7, [1.0, 1.0])]));
    assert_eq!(counted(machine, SKIP), [0, 3, 0]);
}

#[test]
fn assigns_and_additions_go_by_the_policy_too() {
    let replica = with_tables();
    let machine = replica.machine();
    let bad = [(7, [NAN, 3.0]), (8, [-INF, 4.0]), (9, [5.0, 6.0])];
    let mut index = 3;
    for (seq, operation) in (0..).zip([Operation::Set, Operation::Add]) {
        for table in [REJECT, SKIP, CLIP] {
            index += 1;
            let seq = seq * 3 + u64::from(table);
            let outcome = push(machine, index, body(5, seq, table, operation, &bad));
            assert_eq!(matches!(outcome, PushOutcome::Refused(_)), table == REJECT, "{outcome:?}");
        }
    }
    assert_eq!(pull(machine, REJECT, 9), (vec![0.0; 2], false));
    assert_eq!(pull(machine, SKIP, 7), (vec![0.0; 2], false));
    assert_eq!(row(machine, SKIP, 9), [10.0, 12.0]);
    assert_eq!(row(machine, CLIP, 7), [0.0, 6.0]);
    // -MAX set, and -MAX added to it: what a row becomes is not the policy's.
    assert_eq!(row(machine, CLIP, 8), [-INF, 8.0]);
    assert_eq!((counted(machine, SKIP), counted(machine, CLIP)), ([0, 4, 0], [0, 0, 4]));
}

#[test]
fn a_sum_that_is_not_finite_goes_by_the_policy_and_is_told_apart() {
    let replica = with_tables();
    let machine = replica.machine();
    let rows = [(7, [MAX, 1.0]), (8, [1.0, 1.0]), (7, [MAX, 1.0])];
    push(machine, 4, body(5, 1, SKIP, Operation::Gradient, &rows));
    push(machine, 5, body(5, 2, CLIP, Operation::Gradient, &rows));
    assert_eq!(pull(machine, SKIP, 7), (vec![0.0; 2], false));
    assert_eq!(row(machine, SKIP, 8), [-1.0; 2]);
    assert_eq!(row(machine, CLIP, 7), [-MAX, -2.0]);
    assert_eq!(last(machine, SKIP), (Source::Session(5), Action::Skipped, 1, 7, 0, true));
    assert_eq!(last(machine, CLIP), (Source::Session(5), Action::Clipped, 1, 7, 0, true));
}

#[test]
fn the_sums_of_a_step_go_by_the_policy_and_a_table_that_rejects_skips() {
    let replica = with_tables();
    let machine = replica.machine();
    let rows = [(7, [INF, 1.0]), (8, [1.0, 1.0])];
    for (step, table) in [REJECT, SKIP, CLIP].into_iter().enumerate() {
        let step = step as u64;
        let body = body(0, 1, table, Operation::Gradient, &rows);
        let entry = ShardCommand::Step { job: 3, step, part: 0, of: 1, body }.encode();
        for index in [4 + 2 * step, 5 + 2 * step] {
            // The second time it is applied already.
            let answer = apply(machine, command(index, entry.clone()));
            assert_eq!(CommandOutcome::decode(&answer), Ok(CommandOutcome::Done));
        }
        assert_eq!(row(machine, table, 8), [-1.0; 2]);
    }
    assert_eq!(pull(machine, REJECT, 7), (vec![0.0; 2], false));
    assert_eq!(pull(machine, SKIP, 7), (vec![0.0; 2], false));
    assert_eq!(row(machine, CLIP, 7), [-MAX, -1.0]);
    let source = Source::Step { job: 3 };
    assert_eq!(last(machine, REJECT), (source, Action::Skipped, 1, 7, 0, true));
    assert_eq!(last(machine, SKIP), (source, Action::Skipped, 1, 7, 0, true));
    assert_eq!(last(machine, CLIP), (source, Action::Clipped, 1, 7, 0, true));
    assert_eq!((counted(machine, REJECT), counted(machine, CLIP)), ([0, 1, 0], [0, 0, 1]));
}

#[test]
fn counts_begin_with_the_replica_and_say_again_what_is_replayed() {
    let mut replica = with_tables();
    let bad = |seq| body(5, seq, SKIP, Operation::Gradient, &[(seq, [NAN, 1.0])]);
    push(replica.machine(), 4, bad(1));
    flush(replica.machine());
    push(replica.machine(), 5, bad(2));
    assert_eq!(counted(replica.machine(), SKIP), [0, 2, 0]);
    replica.crash();
    assert_eq!(counted(replica.machine(), SKIP), [0; 3]);
    push(replica.machine(), 5, bad(2));
    assert_eq!(counted(replica.machine(), SKIP), [0, 1, 0]);
    // A dropped table is forgotten.
    let table = v1::TableDescription { number: SKIP, ..Default::default() };
    apply(replica.machine(), command(6, ShardCommand::Schema { table, dropped: true }.encode()));
    assert!(replica.machine().offences().totals().is_empty());
}

/// What is finite is no policy's affair: large values, denormals and both zeros have the bits that f32 arithmetic gives them, and
/// nothing is counted.
#[test]
fn large_and_tiny_values_and_negative_zero_are_finite_under_every_policy() {
    let tiny = f32::from_bits(1);
    let replica = with_tables();
    let machine = replica.machine();
    let mut index = 3;
    let mut push_next = |table, operation, rows: &[(u64, [f32; 2])]| {
        index += 1;
        let outcome = push(machine, index, body(5, index - 3, table, operation, rows));
        assert_eq!(outcome, PushOutcome::Applied { index });
    };
    for table in [REJECT, SKIP, CLIP] {
        let gradients = [
            (1, [1e38, -1e38]),
            (2, [tiny, -1e-40]),
            (3, [-0.0, 0.0]),
            // An id of two rows: they are summed first.
            (4, [1e38, tiny]),
            (4, [1e38, tiny]),
            (5, [-0.0, tiny]),
            (5, [-0.0, -tiny]),
            (6, [MAX, -MAX]),
        ];
        push_next(table, Operation::Gradient, &gradients);
        let bits = |id| row(machine, table, id).map(f32::to_bits);
        let expect = |values: [f32; 2]| values.map(f32::to_bits);
        assert_eq!(bits(1), expect([-1e38, 1e38]));
        assert_eq!(bits(2), expect([-tiny, 1e-40]), "denormals are not flushed");
        assert_eq!(bits(3), expect([0.0, 0.0]), "0 - (-0) is 0");
        assert!(pull(machine, table, 3).1, "a row of zeros is pushed as any other");
        assert_eq!(bits(4), expect([-1e38 - 1e38, -f32::from_bits(2)]));
        assert_eq!(bits(5), expect([0.0, 0.0]));
        assert_eq!(bits(6), expect([-MAX, MAX]));

        let values = [(7, [-0.0, 1e38]), (8, [-tiny, 1e-40])];
        push_next(table, Operation::Set, &values);
        assert_eq!(bits(7), expect([-0.0, 1e38]), "an assigned zero keeps its sign");
        assert_eq!(bits(8), expect([-tiny, 1e-40]));
        push_next(table, Operation::Add, &[(7, [-0.0, 1e38]), (8, [tiny, tiny])]);
        assert_eq!(bits(7), expect([-0.0, 1e38 + 1e38]));
        assert_eq!(bits(8), expect([0.0, 1e-40 + tiny]));
        assert_eq!(counted(machine, table), [0; 3]);
    }
    // Four times 1e38 is more than f32 holds.
    let four = [(1, [1e38, 1.0]), (1, [1e38, 1.0]), (1, [1e38, 1.0]), (1, [1e38, 1.0])];
    let outcome = push(machine, 13, body(5, 10, REJECT, Operation::Gradient, &four));
    assert!(matches!(outcome, PushOutcome::Refused(refusal) if refusal.kind == RefusalKind::NonFinite));
    push(machine, 14, body(5, 11, SKIP, Operation::Gradient, &four));
    assert_eq!(row(machine, SKIP, 1), [-1e38, 1e38]);
    assert_eq!(last(machine, SKIP), (Source::Session(5), Action::Skipped, 1, 1, 0, true));
    push(machine, 15, body(5, 12, CLIP, Operation::Set, &[(1, [0.0; 2])]));
    push(machine, 16, body(5, 13, CLIP, Operation::Gradient, &four));
    assert_eq!(row(machine, CLIP, 1), [-MAX, -4.0]);
    assert_eq!(last(machine, CLIP), (Source::Session(5), Action::Clipped, 1, 1, 0, true));
}
