//! The machine against the reference, entry by entry; and single rules by example.

use evershard_proto::push_body::{Encoding, Operation, PushBodyBuilder};
use evershard_proto::shard_command::ShardCommand;
use evershard_proto::v1::{self, ErrorKind};
use evershard_raft::state_machine::StateMachine;
use proptest::prelude::*;

use super::harness::{Replica, apply, cases, command, fingerprint, pull};
use super::reference::Reference;
use super::script::{IDS, log, one, schema};
use crate::model::{CommandOutcome, KeyRange, PushOutcome, Refusal, RefusalKind};

const LOWER_HALF: KeyRange = KeyRange { start: 0, end: u64::MAX / 2 };

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn a_machine_does_what_the_reference_does(entries in log(120), half in prop::bool::weighted(0.2)) {
        let range = if half { LOWER_HALF } else { KeyRange::ALL };
        let replica = Replica::new(1, range);
        let machine = replica.machine();
        let mut reference = Reference::new(range);
        for entry in &entries {
            let answer = apply(machine, entry.clone());
            if let Some(expected) = reference.apply(entry) {
                prop_assert_eq!(PushOutcome::decode(&answer), Ok(expected), "entry {}", entry.position.index);
            }
        }
        machine.run_scans();
        prop_assert_eq!(machine.digest().map(|(_, digest)| digest), Some(reference.digest()));
        for table in reference.tables() {
            for id in IDS {
                let key = evershard_proto::key::key_of(table, id);
                if range.contains(key) {
                    let (weights, exists) = pull(machine, table, id);
                    let (expected, expected_exists) = reference.pull(table, id).expect("a table");
                    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                    prop_assert_eq!(bits(&weights), bits(&expected));
                    prop_assert_eq!(exists, expected_exists);
                }
            }
        }
        let status = machine.status();
        prop_assert_eq!(status.tables.iter().map(|t| t.table).collect::<Vec<_>>(), reference.tables());
        for table in status.tables {
            prop_assert_eq!(table.rows, reference.rows(table.table));
        }
    }

    #[test]
    fn the_same_log_gives_the_same_bits_however_it_is_cut(entries in log(80), cut in 1usize..20) {
        let (one_by_one, in_batches) = (Replica::new(1, KeyRange::ALL), Replica::new(2, KeyRange::ALL));
        let mut answers = Vec::new();
        for entry in &entries {
            answers.push(apply(one_by_one.machine(), entry.clone()));
        }
        let mut others = Vec::new();
        for batch in entries.chunks(cut) {
            others.extend(in_batches.machine().apply(batch).expect("applied"));
        }
        prop_assert_eq!(answers, others);
        prop_assert_eq!(fingerprint(one_by_one.machine()), fingerprint(in_batches.machine()));
    }
}

/// A machine with the tables of the script; the next index is 5.
fn with_tables(range: KeyRange) -> Replica {
    let replica = Replica::new(1, range);
    for (index, table) in (1..=4).zip(super::script::TABLES) {
        let answer = apply(replica.machine(), command(index, schema(table, false)));
        assert_eq!(CommandOutcome::decode(&answer), Ok(CommandOutcome::Done));
    }
    replica
}

fn outcome(replica: &Replica, index: u64, body: bytes::Bytes) -> PushOutcome {
    PushOutcome::decode(&apply(replica.machine(), command(index, body))).expect("an outcome")
}

#[test]
fn integer_gradients_are_exact_and_applied_once() {
    let replica = with_tables(KeyRange::ALL);
    let body = one(1, 1, 2, Operation::Gradient, &[(0, &[-1.0]), (u64::MAX, &[-2.0]), (0, &[-4.0])]);
    assert_eq!(outcome(&replica, 5, body.clone()), PushOutcome::Applied { index: 5 });
    assert_eq!(outcome(&replica, 6, body), PushOutcome::Applied { index: 0 });
    assert_eq!(pull(replica.machine(), 2, 0), (vec![5.0], true));
    assert_eq!(pull(replica.machine(), 2, u64::MAX), (vec![2.0], true));
    assert_eq!(pull(replica.machine(), 2, 1), (vec![0.0], false));
}

#[test]
fn a_schedule_follows_the_clock_of_the_push() {
    let replica = Replica::new(1, KeyRange::ALL);
    let kind = v1::optimizer::Kind::Sgd(v1::Sgd { lr: 1.0 });
    let schedule = Some(v1::Schedule { warmup_steps: 4, decay: None });
    let optimizer = Some(v1::Optimizer { kind: Some(kind), schedule, ..Default::default() });
    let definition = v1::TableDefinition { name: "warm".into(), dim: 1, optimizer, ..Default::default() };
    let table = v1::TableDescription { number: 2, definition: Some(definition), definition_version: 0 };
    let schema = ShardCommand::Schema { table, dropped: false }.encode();
    apply(replica.machine(), command(1, schema));
    let rates = [(0, None), (1, None), (3, None), (1000, None), (0, Some(3.0))];
    let mut weight = 0.0;
    for ((clock, lr), (seq, change)) in rates.into_iter().zip((1..).zip([0.25, 0.5, 1.0, 1.0, 3.0])) {
        let mut builder = PushBodyBuilder::new(0);
        let keys = [evershard_proto::key::key_of(2, 7)];
        let payload = builder.section(2, Operation::Gradient, Encoding::F32, 1, lr, &keys);
        payload.copy_from_slice(&1.0f32.to_le_bytes());
        outcome(&replica, seq + 1, builder.finish(1, seq, clock));
        weight -= change;
        assert_eq!(pull(replica.machine(), 2, 7), (vec![weight], true), "clock {clock}");
    }
}

#[test]
fn an_empty_push_uses_up_its_number_and_is_remembered_as_such() {
    let replica = with_tables(KeyRange::ALL);
    let withdrawn = PushOutcome::Refused(Refusal { kind: RefusalKind::Withdrawn, table: 0 });
    assert_eq!(outcome(&replica, 5, PushBodyBuilder::new(0).finish(1, 1, 0)), withdrawn);
    assert_eq!(replica.machine().last_seq(1), 1);
    let ahead = one(1, 3, 2, Operation::Gradient, &[(0, &[-1.0])]);
    assert_eq!(outcome(&replica, 6, ahead), PushOutcome::OutOfOrder { expected: 2 });
    assert_eq!(replica.machine().last_seq(1), 1);
    assert_eq!(replica.machine().recorded_outcome(1, 1), Some(withdrawn));
    assert_eq!(replica.machine().recorded_outcome(1, 2), None);
    // The content that comes late is answered as withdrawn, and not applied; an emptied message whose content was applied
    // is answered as applied.
    assert_eq!(outcome(&replica, 7, one(1, 1, 2, Operation::Gradient, &[(0, &[-1.0])])), withdrawn);
    let applied = outcome(&replica, 8, one(1, 2, 2, Operation::Gradient, &[(0, &[-1.0])]));
    assert_eq!(applied, PushOutcome::Applied { index: 8 });
    let emptied = outcome(&replica, 9, PushBodyBuilder::new(0).finish(1, 2, 0));
    assert_eq!(emptied, PushOutcome::Applied { index: 0 });
}

#[test]
fn a_refused_push_changes_nothing_in_any_table() {
    let replica = with_tables(KeyRange::ALL);
    let before = fingerprint(replica.machine()).digest;
    let mut builder = PushBodyBuilder::new(0);
    let good = evershard_proto::key::key_of(2, 1);
    builder
        .section(2, Operation::Gradient, evershard_proto::push_body::Encoding::F32, 1, None, &[good])
        .copy_from_slice(&1.0f32.to_le_bytes());
    builder.section(9, Operation::Remove, evershard_proto::push_body::Encoding::F32, 1, None, &[good]);
    let refused = outcome(&replica, 5, builder.finish(1, 1, 0));
    let refusal = Refusal { kind: RefusalKind::UnknownTable, table: 9 };
    assert_eq!(refused, PushOutcome::Refused(refusal));
    assert_eq!(fingerprint(replica.machine()).digest, before);
    assert_eq!(replica.machine().recorded_outcome(1, 1), Some(PushOutcome::Refused(refusal)));
}

/// Builds from before the encodings recorded a refusal for such an entry of version 1, and halt at version 2: so must, for
/// ever, whoever applies the same log.
#[test]
fn an_encoded_section_counts_from_version_2_on_and_never_for_set() {
    use evershard_proto::push_body::Encoding;
    let replica = with_tables(KeyRange::ALL);
    let key = evershard_proto::key::key_of(2, 1);
    let encoded = |seq, operation, encoding: Encoding, payload: &[u8]| {
        let mut builder = PushBodyBuilder::new(0);
        builder.section(2, operation, encoding, 1, None, &[key]).copy_from_slice(payload);
        builder.finish(1, seq, 0)
    };
    let refused = PushOutcome::Refused(Refusal { kind: RefusalKind::Encoding, table: 2 });
    let before = fingerprint(replica.machine()).digest;
    let mut old = encoded(1, Operation::Gradient, Encoding::Bf16, &[0x80, 0x3f]).to_vec();
    assert_eq!(old[1], 2);
    old[1] = 1;
    assert_eq!(outcome(&replica, 5, old.into()), refused);
    assert_eq!(outcome(&replica, 6, encoded(2, Operation::Set, Encoding::F16, &[0x00, 0x3c])), refused);
    assert_eq!(fingerprint(replica.machine()).digest, before);
    let int8 = encoded(3, Operation::Gradient, Encoding::Int8, &[0, 0, 0, 0x3f, 2]);
    assert_eq!(outcome(&replica, 7, int8), PushOutcome::Applied { index: 7 });
    assert_ne!(fingerprint(replica.machine()).digest, before);
    // Half of it would not be f32: nobody knows version 3.
    let mut later = encoded(4, Operation::Gradient, Encoding::Bf16, &[0x80, 0x3f]).to_vec();
    later[1] = 3;
    assert!(evershard_proto::push_body::PushBody::parse(&later).is_err());
}

#[test]
fn the_door_says_what_is_wrong() {
    let replica = with_tables(LOWER_HALF);
    let machine = replica.machine();
    let check = |body: bytes::Bytes| {
        let body = evershard_proto::push_body::PushBody::parse(&body).expect("parses");
        let refusal = machine.check_push(&body).expect_err("refused");
        (refusal.kind(), refusal.to_string())
    };
    let inside = |table| {
        IDS.into_iter().find(|id| LOWER_HALF.contains(evershard_proto::key::key_of(table, *id))).expect("one")
    };
    let outside =
        IDS.into_iter().find(|id| !LOWER_HALF.contains(evershard_proto::key::key_of(1, *id))).expect("one");
    let (kind, message) = check(one(1, 1, 1, Operation::Gradient, &[(inside(1), &[1.0, 2.0])]));
    assert_eq!(kind, ErrorKind::WrongDim);
    assert!(
        message.contains("dim 3") && message.contains("has 2") && message.contains("table-1"),
        "{message}"
    );
    let (kind, message) = check(one(1, 1, 1, Operation::Gradient, &[(inside(1), &[1.0, 2.0, f32::NAN])]));
    assert_eq!(kind, ErrorKind::NonFinite);
    assert!(message.contains("column 2") && message.contains(&inside(1).to_string()), "{message}");
    let (kind, message) = check(one(1, 1, 1, Operation::Gradient, &[(outside, &[0.0; 3])]));
    assert_eq!(kind, ErrorKind::WrongRange);
    assert!(message.contains(&outside.to_string()), "{message}");
    let huge = [f32::MAX, 0.0, 0.0];
    let (kind, message) = check(one(1, 1, 1, Operation::Gradient, &[(inside(1), &huge), (inside(1), &huge)]));
    assert_eq!(kind, ErrorKind::NonFinite);
    assert!(message.contains("summed"), "{message}");
    assert_eq!(check(one(1, 1, 4, Operation::Gradient, &[(inside(4), &[0.0; 2])])).0, ErrorKind::NoOptimizer);
    assert_eq!(check(one(1, 1, 8, Operation::Gradient, &[(0, &[0.0; 2])])).0, ErrorKind::UnknownTable);
}

#[test]
fn unknown_kinds_and_versions_halt_and_change_nothing() {
    let replica = with_tables(KeyRange::ALL);
    let machine = replica.machine();
    let mut newer = one(1, 1, 2, Operation::Gradient, &[(0, &[-1.0])]).to_vec();
    newer[1] = 6;
    for bad in [newer, vec![77, 1, 0, 0], vec![2, 9, 0, 0], vec![]] {
        let halt = machine.apply(&[command(5, bad.into())]).expect_err("halts");
        assert_eq!(halt.index, 5);
        assert_eq!(machine.applied().expect("some").index, 4);
    }
    // A known kind that does not decode is an answer, and the log goes on.
    let mut damaged = ShardCommand::Scrub { scrub_id: 1 }.encode().to_vec();
    damaged[9] ^= 1;
    let answer = apply(machine, command(5, damaged.into()));
    assert_eq!(CommandOutcome::decode(&answer), Ok(CommandOutcome::Malformed));
    assert!(machine.apply(&[command(7, schema(1, false))]).is_err(), "a gap");
}

#[test]
fn a_dropped_number_never_comes_back() {
    let replica = with_tables(KeyRange::ALL);
    let machine = replica.machine();
    apply(machine, command(5, one(1, 1, 2, Operation::Gradient, &[(0, &[-1.0])])));
    apply(machine, command(6, schema(2, true)));
    let again = apply(machine, command(7, schema(2, false)));
    assert_eq!(CommandOutcome::decode(&again), Ok(CommandOutcome::Dropped { table: 2 }));
    let conflict = {
        let mut definition = super::script::definition(1);
        definition.dim = 9;
        let table = evershard_proto::v1::TableDescription {
            number: 1,
            definition: Some(definition),
            definition_version: 0,
        };
        ShardCommand::Schema { table, dropped: false }.encode()
    };
    let answer = apply(machine, command(8, conflict));
    assert_eq!(CommandOutcome::decode(&answer), Ok(CommandOutcome::Conflict { table: 1 }));
    assert_eq!(machine.status().tables.len(), 3);
}

/// The SGD table of the script with another learning rate, at a version.
fn tuned(lr: f32, version: u64) -> bytes::Bytes {
    let mut definition = super::script::definition(2);
    let kind = v1::optimizer::Kind::Sgd(v1::Sgd { lr });
    definition.optimizer = Some(v1::Optimizer { kind: Some(kind), ..Default::default() });
    let table = v1::TableDescription { number: 2, definition: Some(definition), definition_version: version };
    ShardCommand::Schema { table, dropped: false }.encode()
}

#[test]
fn an_older_definition_never_replaces_a_newer_one() {
    let replica = with_tables(KeyRange::ALL);
    let machine = replica.machine();
    apply(machine, command(5, one(1, 1, 2, Operation::Gradient, &[(7, &[1.0])])));
    let mut weight = -1.0;
    // Version by version: what is said of it, and the learning rate in force afterwards.
    let done = CommandOutcome::Done;
    let conflict = CommandOutcome::Conflict { table: 2 };
    for (turn, (lr, version, expected, now)) in [
        (2.0, 1, done, 2.0),
        (2.0, 1, done, 2.0),
        // Two shards must not differ because one saw version 2 late, or never.
        (2.0, 3, done, 2.0),
        (4.0, 2, done, 2.0),
        (1.0, 0, done, 2.0),
        (4.0, 3, conflict, 2.0),
        (4.0, 4, done, 4.0),
        (2.0, 3, done, 4.0),
        (8.0, u64::MAX, done, 8.0),
    ]
    .into_iter()
    .enumerate()
    {
        let index = 6 + 2 * turn as u64;
        let answer = apply(machine, command(index, tuned(lr, version)));
        assert_eq!(CommandOutcome::decode(&answer), Ok(expected), "lr {lr}, version {version}");
        assert_eq!(pull(machine, 2, 7), (vec![weight], true), "no row is touched");
        apply(machine, command(index + 1, one(1, 2 + turn as u64, 2, Operation::Gradient, &[(7, &[1.0])])));
        weight -= now;
        assert_eq!(pull(machine, 2, 7), (vec![weight], true), "lr {lr}, version {version}");
    }
}

#[test]
fn a_version_changes_numbers_of_the_optimizer_and_nothing_else() {
    let replica = with_tables(KeyRange::ALL);
    let machine = replica.machine();
    let before = fingerprint(machine);
    let changes: [fn(&mut v1::TableDefinition); 6] = [
        |d| d.dim = 2,
        |d| d.name = "other".into(),
        |d| d.optimizer = None,
        |d| d.optimizer = super::script::definition(3).optimizer,
        |d| d.non_finite = 0,
        |d| d.initializer = super::script::definition(1).initializer,
    ];
    for (index, change) in (5..).zip(changes) {
        let mut definition = super::script::definition(2);
        change(&mut definition);
        let table = v1::TableDescription { number: 2, definition: Some(definition), definition_version: 9 };
        let answer = apply(machine, command(index, ShardCommand::Schema { table, dropped: false }.encode()));
        assert_eq!(
            CommandOutcome::decode(&answer),
            Ok(CommandOutcome::Conflict { table: 2 }),
            "entry {index}"
        );
    }
    assert_eq!(fingerprint(machine).digest, before.digest);
    // The table may be told to a shard in any version first.
    let mut definition = super::script::definition(2);
    definition.name = "late".into();
    let table = v1::TableDescription { number: 8, definition: Some(definition), definition_version: 3 };
    let answer =
        apply(machine, command(11, ShardCommand::Schema { table: table.clone(), dropped: false }.encode()));
    assert_eq!(CommandOutcome::decode(&answer), Ok(CommandOutcome::Done));
    let created = v1::TableDescription { definition_version: 0, ..table };
    let answer =
        apply(machine, command(12, ShardCommand::Schema { table: created, dropped: false }.encode()));
    assert_eq!(CommandOutcome::decode(&answer), Ok(CommandOutcome::Done));
}

#[test]
fn expired_sessions_are_told_so() {
    let replica = with_tables(KeyRange::ALL);
    let machine = replica.machine();
    apply(machine, command(5, one(1, 1, 2, Operation::Gradient, &[(0, &[-1.0])])));
    apply(machine, command(6, ShardCommand::Sessions { floor: 3, live: vec![2] }.encode()));
    assert_eq!(
        outcome(&replica, 7, one(1, 2, 2, Operation::Gradient, &[(0, &[-1.0])])),
        PushOutcome::SessionExpired
    );
    assert_eq!(machine.recorded_outcome(1, 1), Some(PushOutcome::SessionExpired));
    assert_eq!(
        outcome(&replica, 8, one(2, 1, 2, Operation::Gradient, &[(0, &[-1.0])])),
        PushOutcome::Applied { index: 8 }
    );
    assert_eq!(pull(machine, 2, 0), (vec![2.0], true));
}

#[test]
fn a_removed_row_starts_anew() {
    let replica = with_tables(KeyRange::ALL);
    let machine = replica.machine();
    let initial = pull(machine, 1, 7);
    apply(machine, command(5, one(1, 1, 1, Operation::Gradient, &[(7, &[1.0; 3])])));
    let trained = pull(machine, 1, 7);
    assert_ne!(trained.0, initial.0);
    apply(machine, command(6, one(1, 2, 1, Operation::Remove, &[(7, &[0.0; 3])])));
    assert_eq!(pull(machine, 1, 7), initial);
    assert_eq!(machine.status().tables[0].tombstones, 1);
    apply(machine, command(7, one(1, 3, 1, Operation::Gradient, &[(7, &[1.0; 3])])));
    assert_eq!(pull(machine, 1, 7), trained);
}

#[test]
fn the_clock_is_the_highest_time_seen() {
    let replica = with_tables(KeyRange::ALL);
    let seen: Vec<u64> = (1..=4).map(|index| 1_000 + (index * 37) % 101 * 100).collect();
    assert_eq!(replica.machine().clock_ms(), *seen.iter().max().expect("some"));
}
