//! Random logs: pushes of every kind, good and bad, from sessions that repeat, skip and expire, and everything else that a
//! shard's log holds. The entries are made once, with their sequence numbers; machines and reference apply the same bytes.

use bytes::Bytes;
use evershard_proto::key::key_of;
use evershard_proto::push_body::{Encoding, Operation, PushBodyBuilder};
use evershard_proto::shard_command::{EvictedRow, ShardCommand};
use evershard_proto::v1;
use evershard_raft::state_machine::{CommittedEntry, EntryContent};
use proptest::prelude::*;

use super::harness::{command, entry};
use super::reference::Reference;
use crate::model::KeyRange;

/// Ids that tests use: edges, neighbours, equal low halves.
pub(super) const IDS: [u64; 12] =
    [0, 1, 2, 3, u64::MAX, u64::MAX - 1, i64::MIN as u64, 7, 7 | 1 << 32, 7 | 2 << 32, 100, 101];
/// Numbers of the tables that [`definition`] knows.
pub(super) const TABLES: [u32; 6] = [1, 2, 3, 4, 5, 6];

/// Tables, each of another kind. The last two have rules for their rows.
pub(super) fn definition(table: u32) -> v1::TableDefinition {
    use v1::{initializer, optimizer};
    let optimizer =
        |kind, weight_decay| Some(v1::Optimizer { kind: Some(kind), weight_decay, ..Default::default() });
    let initializer = |kind| Some(v1::Initializer { kind: Some(kind), seed: 42 });
    let base = v1::TableDefinition { name: format!("table-{table}"), dim: 3, ..Default::default() };
    match table {
        1 => v1::TableDefinition {
            optimizer: optimizer(
                optimizer::Kind::Adagrad(v1::Adagrad { lr: 0.1, eps: 1e-10, initial_accumulator: 0.5 }),
                0.0,
            ),
            initializer: initializer(initializer::Kind::Normal(v1::Normal { mean: 0.0, std: 1.0 })),
            ..base
        },
        2 => v1::TableDefinition {
            dim: 1,
            optimizer: optimizer(optimizer::Kind::Sgd(v1::Sgd { lr: 1.0 }), 0.0),
            non_finite: v1::NonFinitePolicy::SkipRow as i32,
            ..base
        },
        3 => v1::TableDefinition {
            dim: 5,
            optimizer: optimizer(
                optimizer::Kind::Adam(v1::Adam { lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-8 }),
                0.01,
            ),
            initializer: initializer(initializer::Kind::Uniform(v1::Uniform { low: -1.0, high: 1.0 })),
            non_finite: v1::NonFinitePolicy::Clip as i32,
            ..base
        },
        5 => v1::TableDefinition {
            dim: 2,
            optimizer: optimizer(optimizer::Kind::Sgd(v1::Sgd { lr: 0.5 }), 0.0),
            initializer: initializer(initializer::Kind::Uniform(v1::Uniform { low: -1.0, high: 1.0 })),
            admission: Some(v1::Admission { filter_freq: 3, admit_probability: 0.7, seed: 4 }),
            ..base
        },
        6 => v1::TableDefinition {
            dim: 1,
            optimizer: optimizer(
                optimizer::Kind::Adagrad(v1::Adagrad { lr: 0.1, eps: 1e-10, initial_accumulator: 0.5 }),
                0.0,
            ),
            non_finite: v1::NonFinitePolicy::SkipRow as i32,
            admission: Some(v1::Admission { filter_freq: 2, ..Default::default() }),
            eviction: Some(v1::Eviction { expire_seconds: 5, steps_to_live: 3, min_l2: 0.25, max_rows: 100 }),
            ..base
        },
        _ => v1::TableDefinition { dim: 2, ..base },
    }
}

#[derive(Debug, Clone)]
struct SectionSpec {
    table: u32,
    operation: Operation,
    encoding: Encoding,
    wrong_dim: bool,
    lr: Option<f32>,
    /// How often each key came, but for the position: of gradients.
    came: Option<u32>,
    /// Ids in the place of keys: of each id its first row, in their order.
    has_ids: bool,
    rows: Vec<(usize, f32, f32)>,
}

/// How a push's sequence number relates to its session's last one.
#[derive(Debug, Clone)]
enum Seq {
    Next,
    Back(u64),
    Ahead(u64),
    Zero,
}

#[derive(Debug, Clone)]
enum Step {
    Push {
        session: u64,
        seq: Seq,
        sections: Vec<SectionSpec>,
        cut: Option<prop::sample::Index>,
    },
    /// A part of a job's step: how far ahead of the job's next step, and of its next part; of how many.
    Sum {
        job: u64,
        ahead: u64,
        part_ahead: u32,
        of: u32,
        sections: Vec<SectionSpec>,
    },
    Clear {
        session: u64,
        table: u32,
    },
    Create(u32),
    Drop(u32),
    Tune {
        table: u32,
        version: u64,
    },
    Expire {
        floor: u64,
        live: Vec<u64>,
    },
    /// Rows of a table, each as it is, or as of so many entries before.
    Evict {
        table: u32,
        rows: Vec<(usize, u64)>,
    },
    Scrub(u64),
    Blank,
    Membership(u8),
}

fn values() -> impl Strategy<Value = f32> {
    prop_oneof![
        20 => (-8i32..8).prop_map(|v| v as f32),
        10 => -2.0f32..2.0,
        1 => Just(3e38f32),
        1 => Just(f32::NAN),
        1 => Just(f32::NEG_INFINITY),
    ]
}

fn section() -> impl Strategy<Value = SectionSpec> {
    let table = prop_oneof![
        30 => prop::sample::select(&TABLES[..3]), 3 => Just(4u32), 24 => prop::sample::select(&TABLES[4..]), 1 => Just(9u32)
    ];
    let operation = prop_oneof![
        8 => Just(Operation::Gradient),
        2 => Just(Operation::Set),
        2 => Just(Operation::Add),
        3 => Just(Operation::Remove)
    ];
    let encoding = prop_oneof![20 => Just(Encoding::F32), 3 => Just(Encoding::Bf16), 3 => Just(Encoding::F16), 3 => Just(Encoding::Int8)];
    let lr = prop_oneof![
        10 => Just(None), 3 => (0.0f32..1.0).prop_map(Some), 1 => Just(Some(-1.0)), 1 => Just(Some(f32::INFINITY))
    ];
    let rows = prop::collection::vec((0..IDS.len(), values(), values()), 0..8);
    let came = prop_oneof![4 => Just(None), 4 => (1u32..3).prop_map(Some), 1 => Just(Some(u32::MAX))];
    let has_ids = prop::bool::weighted(0.3);
    (
        table,
        operation,
        encoding,
        prop::bool::weighted(0.03),
        lr,
        (came, prop::bool::weighted(0.02), has_ids),
        rows,
    )
        .prop_map(|(table, operation, encoding, wrong_dim, lr, (came, anywhere, has_ids), rows)| {
            SectionSpec {
                table,
                operation: if table == 4 && operation == Operation::Gradient {
                    Operation::Add
                } else {
                    operation
                },
                encoding,
                wrong_dim,
                lr,
                came: came.filter(|_| (table > 4 && table < 9) || anywhere),
                has_ids,
                rows,
            }
        })
}

fn step() -> impl Strategy<Value = Step> {
    let seq = prop_oneof![
        20 => Just(Seq::Next), 3 => (0u64..70).prop_map(Seq::Back), 1 => (1u64..3).prop_map(Seq::Ahead), 1 => Just(Seq::Zero)
    ];
    let push = (
        1u64..6,
        seq,
        prop::collection::vec(section(), 0..3),
        prop::option::weighted(0.03, any::<prop::sample::Index>()),
    )
        .prop_map(|(session, seq, sections, cut)| Step::Push { session, seq, sections, cut });
    // 0 is the one before the next one, 1 the next one.
    let near = || prop_oneof![1 => Just(0u64), 12 => Just(1u64), 1 => Just(2u64)];
    let sum = (1u64..3, near(), near(), 1u32..4, prop::collection::vec(section(), 0..3)).prop_map(
        |(job, ahead, part_ahead, of, sections)| Step::Sum {
            job,
            ahead,
            part_ahead: part_ahead as u32,
            of,
            sections,
        },
    );
    prop_oneof![
        40 => push,
        15 => sum,
        4 => (1u64..6, prop::sample::select(&[1u32, 2, 3, 4, 9][..]))
            .prop_map(|(session, table)| Step::Clear { session, table }),
        2 => prop::sample::select(&TABLES[..]).prop_map(Step::Create),
        1 => prop::sample::select(&TABLES[2..]).prop_map(Step::Drop),
        2 => (prop::sample::select(&TABLES[..3]), 0u64..6).prop_map(|(table, version)| Step::Tune { table, version }),
        1 => (0u64..4, prop::collection::vec(1u64..5, 0..4)).prop_map(|(floor, live)| Step::Expire { floor, live }),
        6 => (prop::sample::select(&[1u32, 5, 6, 6][..]), prop::collection::vec((0..IDS.len(), prop_oneof![4 => Just(0u64), 1 => 0u64..5]), 0..6))
            .prop_map(|(table, rows)| Step::Evict { table, rows }),
        1 => (1u64..100).prop_map(Step::Scrub),
        1 => Just(Step::Blank),
        1 => any::<u8>().prop_map(Step::Membership),
    ]
}

/// A log of up to `len` entries behind those that create the tables; indexes from 1.
pub(super) fn log(len: usize) -> impl Strategy<Value = Vec<CommittedEntry>> {
    prop::collection::vec(step(), 0..len).prop_map(|steps| {
        let mut entries: Vec<CommittedEntry> =
            TABLES.into_iter().zip(1..).map(|(table, index)| command(index, schema(table, false))).collect();
        // Sequence numbers as a reference would give them: every next one is recorded, whatever its outcome.
        let mut last = std::collections::HashMap::<u64, u64>::new();
        let mut jobs = std::collections::HashMap::<u64, (u64, u32, u32)>::new();
        // Knows the versions that a leader would list.
        let mut reference = Reference::new(KeyRange::ALL);
        for entry in &entries {
            reference.apply(entry);
        }
        for step in steps {
            let index = entries.len() as u64 + 1;
            entries.push(match step {
                Step::Push { session, seq, sections, cut } => {
                    let last = last.entry(session).or_default();
                    let seq = match seq {
                        Seq::Next => *last + 1,
                        Seq::Back(back) => last.saturating_sub(back),
                        Seq::Ahead(ahead) => *last + 1 + ahead,
                        Seq::Zero => 0,
                    };
                    let body = push(session, seq, &sections);
                    let body = match cut {
                        Some(at) => body.slice(..at.index(body.len() - 2) + 2),
                        None => body,
                    };
                    if seq == *last + 1 && body.len() >= 40 {
                        *last = seq;
                    }
                    command(index, body)
                }
                Step::Sum { job, ahead, part_ahead, of, mut sections } => {
                    let (steps, parts, cut) = *jobs.entry(job).or_insert((1, 0, 0));
                    let step = (steps + ahead).saturating_sub(1);
                    // Mostly cut as it was begun.
                    let of = if cut != 0 && of != 3 { cut } else { of };
                    let part = (parts + part_ahead).saturating_sub(1).min(of - 1);
                    let is_next = (step, part) == (steps, parts) && (cut == 0 || cut == of);
                    if is_next || (step > steps && part == 0) {
                        let next = if part + 1 == of { (step + 1, 0, 0) } else { (step, part + 1, of) };
                        jobs.insert(job, next);
                    }
                    sections.sort_by_key(|section| section.table);
                    sections.dedup_by_key(|section| section.table);
                    // Servers lay steps out.
                    sections.iter_mut().for_each(|section| section.has_ids = false);
                    let body = push(0, 1, &sections);
                    command(index, ShardCommand::Step { job, step, part, of, body }.encode())
                }
                Step::Clear { session, table } => {
                    let last = last.entry(session).or_default();
                    *last += 1;
                    command(index, clear(session, *last, table))
                }
                Step::Create(table) => command(index, schema(table, false)),
                Step::Drop(table) => command(index, schema(table, true)),
                Step::Tune { table, version } => command(index, tuned(table, version)),
                Step::Expire { floor, live } => {
                    command(index, ShardCommand::Sessions { floor, live }.encode())
                }
                Step::Evict { table, rows } => command(index, evict(&reference, table, &rows)),
                Step::Scrub(scrub_id) => command(index, ShardCommand::Scrub { scrub_id }.encode()),
                Step::Blank => entry(index, EntryContent::Blank),
                Step::Membership(tag) => entry(index, EntryContent::Membership(Bytes::from(vec![tag; 3]))),
            });
            reference.apply(&entries[entries.len() - 1]);
        }
        entries
    })
}

/// A table as of a version of its definition: another learning rate for each, as the meta group hands them out.
fn tuned(table: u32, version: u64) -> Bytes {
    use v1::optimizer::Kind;
    let mut definition = definition(table);
    if let Some(optimizer) = &mut definition.optimizer {
        let lr = match &mut optimizer.kind {
            Some(Kind::Adagrad(rule)) => &mut rule.lr,
            Some(Kind::Sgd(rule)) => &mut rule.lr,
            Some(Kind::Adam(rule)) => &mut rule.lr,
            other => unreachable!("no script has {other:?}"),
        };
        *lr *= (version + 1) as f32;
    }
    let table =
        v1::TableDescription { number: table, definition: Some(definition), definition_version: version };
    ShardCommand::Schema { table, dropped: false }.encode()
}

pub(super) fn clear(session: u64, seq: u64, table: u32) -> Bytes {
    let mut builder = PushBodyBuilder::new(0);
    builder.clear(table);
    builder.finish(session, seq, 0)
}

pub(super) fn schema(table: u32, dropped: bool) -> Bytes {
    let table =
        v1::TableDescription { number: table, definition: Some(definition(table)), definition_version: 0 };
    ShardCommand::Schema { table, dropped }.encode()
}

fn push(session: u64, seq: u64, sections: &[SectionSpec]) -> Bytes {
    let mut builder = PushBodyBuilder::new(0);
    for spec in sections {
        let dim = definition(spec.table).dim + u32::from(spec.wrong_dim);
        let mut rows = spec.rows.clone();
        if spec.has_ids {
            rows.sort_by_key(|(id, ..)| IDS[*id]);
            rows.dedup_by_key(|(id, ..)| *id);
        }
        let ids: Vec<u64> = rows.iter().map(|(id, ..)| IDS[*id]).collect();
        let keys: Vec<u64> = ids.iter().map(|id| key_of(spec.table, *id)).collect();
        let came = spec.came.filter(|_| spec.operation == Operation::Gradient && !keys.is_empty());
        let came: Vec<u32> = came
            .map(|came| (0..keys.len() as u32).map(|at| came.saturating_add(at % 2)).collect())
            .unwrap_or_default();
        let payload = if spec.has_ids {
            let kind = (spec.operation, spec.encoding);
            builder.id_section(spec.table, kind, (dim, spec.lr), &ids, &came)
        } else if came.is_empty() {
            builder.section(spec.table, spec.operation, spec.encoding, dim, spec.lr, &keys)
        } else {
            builder.counted_section(spec.table, spec.encoding, dim, spec.lr, &keys, &came)
        };
        if !spec.operation.has_values() {
            continue;
        }
        for (row, (_, first, rest)) in
            payload.chunks_exact_mut(spec.encoding.row_bytes(dim as usize)).zip(&rows)
        {
            fill(spec.encoding, row, *first, *rest);
        }
    }
    builder.finish(session, seq, seq % 5)
}

fn evict(reference: &Reference, table: u32, rows: &[(usize, u64)]) -> Bytes {
    let rows = rows.iter().map(|(id, before)| {
        let key = key_of(table, IDS[*id]);
        EvictedRow { key, version: reference.version(table, key).unwrap_or(1).saturating_sub(*before) }
    });
    ShardCommand::Evict { table, clock_ms: 0, step: 0, rows: rows.collect() }.encode()
}

/// `first`, then `rest` as often as there is room; of int8, a scale and what it scales.
fn fill(encoding: Encoding, row: &mut [u8], first: f32, rest: f32) {
    let bytes = |value: f32| match encoding {
        Encoding::F32 => value.to_le_bytes().to_vec(),
        Encoding::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
        Encoding::F16 => half::f16::from_f32_const(value).to_le_bytes().to_vec(),
        Encoding::Int8 => vec![rest as i8 as u8],
    };
    let (head, tail) = match encoding {
        Encoding::Int8 => row.split_at_mut(4),
        _ => row.split_at_mut(bytes(first).len()),
    };
    head.copy_from_slice(&if encoding == Encoding::Int8 {
        first.to_le_bytes().to_vec()
    } else {
        bytes(first)
    });
    for place in tail.chunks_exact_mut(bytes(rest).len()) {
        place.copy_from_slice(&bytes(rest));
    }
}

/// A push of one section.
pub(super) fn one(session: u64, seq: u64, table: u32, operation: Operation, rows: &[(u64, &[f32])]) -> Bytes {
    let mut builder = PushBodyBuilder::new(0);
    let keys: Vec<u64> = rows.iter().map(|(id, _)| key_of(table, *id)).collect();
    let values: Vec<u8> = match operation {
        Operation::Remove | Operation::Clear => vec![],
        _ => rows.iter().flat_map(|(_, values)| *values).flat_map(|value| value.to_le_bytes()).collect(),
    };
    let dim = rows.first().map_or(definition(table).dim, |(_, values)| values.len() as u32);
    builder.section(table, operation, Encoding::F32, dim, None, &keys).copy_from_slice(&values);
    builder.finish(session, seq, 0)
}
