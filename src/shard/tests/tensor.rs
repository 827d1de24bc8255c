//! Dense tensors in the state machine: what apply refuses and records, padding, and which blocks changed.

use bytes::{Bytes, BytesMut};
use evershard_proto::key::key_of;
use evershard_proto::push_body::Operation;
use evershard_proto::shard_command::ShardCommand;
use evershard_proto::v1::{self, ErrorKind};

use super::harness::{Replica, apply, command, fingerprint, flush, pull};
use super::script::one;
use crate::model::{CommandOutcome, KeyRange, PushOutcome, Refusal, RefusalKind};
use crate::read::{Marks, ReadError};

const TABLE: u32 = 20;
const DIM: usize = 16_384;
/// Two blocks, of which the last has ten elements.
const ELEMENTS: u64 = DIM as u64 + 10;

fn schema(elements: u64) -> Bytes {
    let kind = v1::optimizer::Kind::Adam(v1::Adam { lr: 0.5, beta1: 0.5, beta2: 0.5, eps: 1e-3 });
    let constant = v1::initializer::Kind::Constant(v1::Constant { value: 3.0 });
    let definition = v1::TableDefinition {
        name: "net.weight".into(),
        kind: v1::TableKind::Dense.into(),
        dim: DIM as u32,
        optimizer: Some(v1::Optimizer { kind: Some(kind), weight_decay: 0.125, ..Default::default() }),
        initializer: Some(v1::Initializer { kind: Some(constant), seed: 1 }),
        tensor: Some(v1::TensorDefinition { shape: vec![elements], ..Default::default() }),
        ..Default::default()
    };
    let table = v1::TableDescription { number: TABLE, definition: Some(definition), definition_version: 0 };
    ShardCommand::Schema { table, dropped: false }.encode()
}

fn with_tensor() -> Replica {
    let replica = Replica::new(1, KeyRange::ALL);
    let answer = apply(replica.machine(), command(1, schema(ELEMENTS)));
    assert_eq!(CommandOutcome::decode(&answer), Ok(CommandOutcome::Done));
    replica
}

/// A block whose last element inside the tensor is `value`, and whose first beyond it is `beyond`.
fn block(value: f32, beyond: f32) -> Vec<f32> {
    let mut values = vec![0.0; DIM];
    (values[9], values[10]) = (value, beyond);
    values
}

fn outcome(replica: &Replica, index: u64, body: Bytes) -> PushOutcome {
    PushOutcome::decode(&apply(replica.machine(), command(index, body))).expect("an outcome")
}

#[test]
fn a_block_that_is_not_there_is_refused_and_that_is_recorded() {
    let mut replica = with_tensor();
    let before = fingerprint(replica.machine()).digest;
    let full = vec![1.0; DIM];
    let out_of_range = Refusal { kind: RefusalKind::OutOfRange, table: TABLE };
    let not_of_tensor = Refusal { kind: RefusalKind::NotOfTensor, table: TABLE };
    let bodies = [
        (one(1, 1, TABLE, Operation::Gradient, &[(0, &full), (2, &full)]), out_of_range),
        (one(1, 2, TABLE, Operation::Set, &[(u64::MAX, &full)]), out_of_range),
        (one(1, 3, TABLE, Operation::Remove, &[(0, &full)]), not_of_tensor),
        (one(1, 4, TABLE, Operation::Gradient, &[(1, &block(1.0, 1.0))]), not_of_tensor),
        (one(1, 5, TABLE, Operation::Add, &[(1, &full)]), not_of_tensor),
    ];
    for ((body, refusal), index) in bodies.iter().zip(2..) {
        let parsed = evershard_proto::push_body::PushBody::parse(body).expect("our own");
        let at_the_door = replica.machine().check_push(&parsed).expect_err("at the door too");
        assert_eq!(at_the_door.refusal(), *refusal);
        assert!(at_the_door.to_string().contains("net.weight"), "{at_the_door}");
        assert_eq!(outcome(&replica, index, body.clone()), PushOutcome::Refused(*refusal));
    }
    assert_eq!(fingerprint(replica.machine()).digest, before);
    assert_eq!(RefusalKind::OutOfRange.error_kind(), ErrorKind::OutOfRange);
    flush(replica.machine());
    replica.crash();
    for (seq, (_, refusal)) in (1..).zip(bodies) {
        assert_eq!(replica.machine().recorded_outcome(1, seq), Some(PushOutcome::Refused(refusal)));
    }
    let refused = replica.machine().pull(TABLE, &key_of(TABLE, 2).to_le_bytes(), None, &mut BytesMut::new());
    assert!(matches!(refused, Err(ReadError::OutOfRange { block: 2, blocks: 2, .. })), "{refused:?}");
}

#[test]
fn padding_stays_zero_through_everything() {
    let replica = with_tensor();
    let machine = replica.machine();
    assert_eq!(pull(machine, TABLE, 1).0[9..11], [3.0, 0.0], "not pushed yet");
    for (seq, operation) in [Operation::Gradient, Operation::Add, Operation::Gradient].into_iter().enumerate()
    {
        let index = seq as u64 + 2;
        let body = one(1, seq as u64 + 1, TABLE, operation, &[(1, &block(1.0, 0.0))]);
        assert_eq!(outcome(&replica, index, body), PushOutcome::Applied { index });
        let weights = pull(machine, TABLE, 1).0;
        assert_ne!(weights[9], 3.0);
        assert!(weights[10..].iter().all(|weight| weight.to_bits() == 0), "after {operation:?}");
    }
    assert!(pull(machine, TABLE, 0).0.iter().all(|weight| *weight == 3.0));
}

/// As a pull of what is newer sees it: also of blocks that are on disk only.
#[test]
fn marks_tell_which_blocks_changed() {
    let mut replica = with_tensor();
    let keys: Vec<u8> = (0..2).flat_map(|block| key_of(TABLE, block).to_le_bytes()).collect();
    let newer_than = |replica: &Replica, index: u64| {
        let (mut marks, mut rows) = (Marks::newer_than(index), BytesMut::new());
        replica.machine().reader().pull(TABLE, &keys, Some(&mut marks), &mut rows).expect("a pull");
        marks.bytes().to_vec()
    };
    assert_eq!(newer_than(&replica, 1), [0, 0], "as they began");
    outcome(&replica, 2, one(1, 1, TABLE, Operation::Gradient, &[(1, &block(1.0, 0.0))]));
    outcome(&replica, 3, one(1, 2, TABLE, Operation::Set, &[(0, &vec![1.0; DIM])]));
    let expected = [(0, [1, 1]), (1, [1, 1]), (2, [1, 0]), (3, [0, 0])];
    for (index, marks) in expected {
        assert_eq!(newer_than(&replica, index), marks, "since {index}");
    }
    flush(replica.machine());
    replica.crash();
    for (index, marks) in expected {
        assert_eq!(newer_than(&replica, index), marks, "from disk, since {index}");
    }
}

#[test]
fn another_shape_is_a_conflict_and_an_entry_of_an_old_build_is_a_sparse_table() {
    let replica = with_tensor();
    let answer = apply(replica.machine(), command(2, schema(ELEMENTS + 1)));
    assert_eq!(CommandOutcome::decode(&answer), Ok(CommandOutcome::Conflict { table: TABLE }));
    let other = Replica::new(2, KeyRange::ALL);
    let mut old = schema(ELEMENTS).to_vec();
    old[1] = 1;
    let answer = apply(other.machine(), command(1, old.into()));
    assert_eq!(CommandOutcome::decode(&answer), Ok(CommandOutcome::Done));
    let body = one(1, 1, TABLE, Operation::Gradient, &[(u64::MAX, &vec![1.0; DIM])]);
    assert_eq!(outcome(&other, 2, body), PushOutcome::Applied { index: 2 });
}
