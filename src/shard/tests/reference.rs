//! A shard written once more, slowly and plainly: hash maps, one element at a time, no batches, and versions only because
//! evictions name them. It applies
//! the entries of a log once each, in order; the machine must agree with it whatever it went through.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use evershard_proto::key::{id_of, key_of};
use evershard_proto::limits::PUSHES_IN_FLIGHT_MAX;
use evershard_proto::push_body::{Encoding, Operation, PushBody, Section};
use evershard_proto::shard_command::ShardCommand;
use evershard_proto::v1;
use evershard_raft::state_machine::{CommittedEntry, EntryContent};

use crate::model::{KeyRange, PushOutcome, Refusal, RefusalKind, TableSchema};
use crate::optimizer::Rule;
use crate::read::Digest;

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    weights: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
    steps: u32,
    /// Of an id that is not admitted yet: how often it came.
    counting: Option<u32>,
    frequency: u32,
    seconds: u32,
    clock: u64,
    version: u64,
}

/// What a section comes with.
#[derive(Clone, Copy)]
struct Occasion {
    index: u64,
    clock: u64,
}

#[derive(Debug)]
pub(super) struct Reference {
    range: KeyRange,
    tables: BTreeMap<u32, v1::TableDefinition>,
    /// Of the definitions.
    versions: HashMap<u32, u64>,
    dropped: BTreeSet<u32>,
    rows: HashMap<(u32, u64), Row>,
    sessions: HashMap<u64, Vec<Option<Refusal>>>,
    expired: BTreeSet<u64>,
    floor: u64,
    /// By job: steps that are whole, parts of the next one, of how many.
    steps: HashMap<u64, (u64, u32, u32)>,
    clock_ms: u64,
}

impl Reference {
    pub(super) fn new(range: KeyRange) -> Self {
        Reference {
            range,
            tables: BTreeMap::new(),
            versions: HashMap::new(),
            dropped: BTreeSet::new(),
            rows: HashMap::new(),
            sessions: HashMap::new(),
            expired: BTreeSet::new(),
            floor: 0,
            steps: HashMap::new(),
            clock_ms: 0,
        }
    }

    /// Applies an entry; for a push, what must be answered.
    pub(super) fn apply(&mut self, entry: &CommittedEntry) -> Option<PushOutcome> {
        let EntryContent::Command { command, time_ms } = &entry.content else { return None };
        self.clock_ms = self.clock_ms.max(*time_ms);
        let index = entry.position.index;
        if command[0] == evershard_proto::push_body::KIND_PUSH {
            return Some(self.push(entry.position.index, command));
        }
        match ShardCommand::decode(command).expect("the test's own") {
            ShardCommand::Schema { table, dropped: true } => {
                self.dropped.insert(table.number);
                self.tables.remove(&table.number);
                self.rows.retain(|(number, _), _| *number != table.number);
            }
            ShardCommand::Schema { table, dropped: false } => {
                let (number, version) = (table.number, table.definition_version);
                let is_newer = self.versions.get(&number).is_none_or(|known| version > *known);
                if !self.dropped.contains(&number) && is_newer {
                    self.versions.insert(number, version);
                    self.tables.insert(number, table.definition.expect("there"));
                }
            }
            ShardCommand::Scrub { .. } | ShardCommand::Cut { .. } => {}
            ShardCommand::Sessions { floor, live } => {
                self.expired.extend((0..floor).filter(|number| !live.contains(number)));
                self.floor = self.floor.max(floor);
            }
            ShardCommand::Step { job, step, part, of, body } => {
                self.step(index, (job, step), (part, of), &body);
            }
            ShardCommand::Evict { table, rows, .. } => {
                for row in rows {
                    if self.version(table, row.key) == Some(row.version) {
                        self.rows.remove(&(table, row.key));
                    }
                }
            }
        }
        None
    }

    fn push(&mut self, index: u64, bytes: &[u8]) -> PushOutcome {
        if bytes.len() < 40 {
            return PushOutcome::Refused(Refusal { kind: RefusalKind::Malformed, table: 0 });
        }
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight"));
        let (session, seq) = (word(8), word(16));
        if seq == 0 {
            return PushOutcome::Refused(Refusal { kind: RefusalKind::SeqZero, table: 0 });
        }
        if self.expired.contains(&session) {
            return PushOutcome::SessionExpired;
        }
        let results = self.sessions.entry(session).or_default();
        let last = results.len() as u64;
        if seq > last + 1 {
            return PushOutcome::OutOfOrder { expected: last + 1 };
        }
        if seq <= last {
            if last - seq >= PUSHES_IN_FLIGHT_MAX as u64 {
                return PushOutcome::Forgotten { last };
            }
            return match results[seq as usize - 1] {
                None => PushOutcome::Applied { index: 0 },
                Some(refusal) => PushOutcome::Refused(refusal),
            };
        }
        let refusal = match PushBody::parse_without_checksum(bytes) {
            Ok(body) => self.refusal(&body),
            Err(_) => Some(Refusal { kind: RefusalKind::Malformed, table: 0 }),
        };
        self.sessions.get_mut(&session).expect("there").push(refusal);
        if let Some(refusal) = refusal {
            return PushOutcome::Refused(refusal);
        }
        let body = PushBody::parse_without_checksum(bytes).expect("checked");
        for section in body.sections() {
            if section.operation == Operation::Clear {
                self.rows.retain(|(number, _), _| *number != section.table);
                continue;
            }
            self.section(&section, self.policy(section.table), Occasion { index, clock: body.clock });
        }
        PushOutcome::Applied { index }
    }

    fn policy(&self, table: u32) -> v1::NonFinitePolicy {
        v1::NonFinitePolicy::try_from(self.tables[&table].non_finite).expect("known")
    }

    fn step(&mut self, index: u64, (job, step): (u64, u64), (part, of): (u32, u32), body: &[u8]) {
        let known = self.steps.get(&job).copied();
        let (steps, parts, cut) = known.unwrap_or((step, 0, 0));
        let is_next = step == steps && part == parts && (cut == 0 || cut == of);
        let goes_on = step > steps && part == 0;
        if !is_next && !goes_on {
            return;
        }
        for section in PushBody::parse_step(body).expect("the test's own").sections() {
            let Some(definition) = self.tables.get(&section.table) else { continue };
            let is_good = section.operation == Operation::Gradient
                && section.dim == definition.dim
                && definition.optimizer.is_some()
                && !(section.is_counted() && section.table < 5)
                && section.lr.is_none_or(|lr| lr.is_finite() && lr >= 0.0)
                && section.keys().all(|key| key >= self.range.start && key <= self.range.end);
            if is_good {
                let policy = match self.policy(section.table) {
                    v1::NonFinitePolicy::Reject => v1::NonFinitePolicy::SkipRow,
                    policy => policy,
                };
                self.section(&section, policy, Occasion { index, clock: step });
            }
        }
        let next = if part + 1 == of { (step + 1, 0, 0) } else { (step, part + 1, of) };
        self.steps.insert(job, next);
    }

    fn refusal(&self, body: &PushBody<'_>) -> Option<Refusal> {
        let mut seen = BTreeSet::new();
        if body.sections().next().is_none() {
            return Some(Refusal { kind: RefusalKind::Withdrawn, table: 0 });
        }
        for section in body.sections() {
            let table = section.table;
            let refusal = |kind| Some(Refusal { kind, table });
            if !seen.insert(table) {
                return refusal(RefusalKind::RepeatedTable);
            }
            let Some(definition) = self.tables.get(&table) else { return refusal(RefusalKind::UnknownTable) };
            let removes = matches!(section.operation, Operation::Remove | Operation::Clear);
            if !removes && section.dim != definition.dim {
                return refusal(RefusalKind::WrongDim);
            }
            let encoded = body.version >= 2 && section.operation != Operation::Set;
            if !removes && section.encoding != Encoding::F32 && !encoded {
                return refusal(RefusalKind::Encoding);
            }
            if section.is_counted() && table < 5 {
                return refusal(RefusalKind::Encoding);
            }
            if section.operation == Operation::Gradient {
                if definition.optimizer.is_none() {
                    return refusal(RefusalKind::NoOptimizer);
                }
                if section.lr.is_some_and(|lr| !lr.is_finite() || lr < 0.0) {
                    return refusal(RefusalKind::LearningRate);
                }
            }
            if section.keys().any(|key| key < self.range.start || key > self.range.end) {
                return refusal(RefusalKind::WrongRange);
            }
            if definition.non_finite == v1::NonFinitePolicy::Reject as i32 && !removes {
                let values = all_values(&section);
                let bad = values.iter().flatten().any(|v| !v.is_finite());
                let sums = section.operation != Operation::Set
                    && summed(&section, &values).iter().any(|(_, v)| v.iter().any(|v| !v.is_finite()));
                if bad || sums {
                    return refusal(RefusalKind::NonFinite);
                }
            }
        }
        None
    }

    fn section(&mut self, section: &Section<'_>, policy: v1::NonFinitePolicy, occasion: Occasion) {
        let definition = self.tables[&section.table].clone();
        let schema = TableSchema::new(section.table, &definition).expect("valid");
        if section.operation == Operation::Remove {
            for key in section.keys() {
                self.rows.remove(&(section.table, key));
            }
            return;
        }
        let mut values = all_values(section);
        let mut keys: Vec<u64> = section.keys().collect();
        let mut came: Vec<u32> = (0..keys.len()).map(|row| section.occurrences(row)).collect();
        match policy {
            v1::NonFinitePolicy::Reject => {}
            v1::NonFinitePolicy::SkipRow => {
                let keep: Vec<bool> = values.iter().map(|v| v.iter().all(|v| v.is_finite())).collect();
                let mut kept = keep.iter();
                values.retain(|_| *kept.next().expect("one each"));
                let mut kept = keep.iter();
                keys.retain(|_| *kept.next().expect("one each"));
                let mut kept = keep.iter();
                came.retain(|_| *kept.next().expect("one each"));
            }
            v1::NonFinitePolicy::Clip => values.iter_mut().flatten().for_each(clip),
        }
        let mut grouped = group(section.operation, &keys, &values);
        match policy {
            v1::NonFinitePolicy::Reject => {}
            v1::NonFinitePolicy::SkipRow => grouped.retain(|(_, v)| v.iter().all(|v| v.is_finite())),
            v1::NonFinitePolicy::Clip => grouped.iter_mut().flat_map(|(_, v)| v).for_each(clip),
        }
        for (key, values) in grouped {
            let of_key = keys.iter().zip(&came).filter(|(other, _)| **other == key);
            let came = of_key.fold(0u32, |sum, (_, came)| sum.saturating_add(*came));
            let Some(row) = self.admitted(&schema, key, came, section.operation, occasion) else { continue };
            match section.operation {
                Operation::Set => row.weights = values,
                Operation::Add => row.weights.iter_mut().zip(values).for_each(|(w, v)| *w += v),
                Operation::Gradient => train(&schema, row, &values, section.lr),
                Operation::Remove | Operation::Clear => unreachable!("handled above"),
            }
        }
    }

    /// The row to change, noted as changed; `None` when its id is not admitted.
    fn admitted(
        &mut self,
        schema: &TableSchema,
        key: u64,
        came: u32,
        operation: Operation,
        occasion: Occasion,
    ) -> Option<&mut Row> {
        let place = (schema.number(), key);
        let definition = schema.definition();
        let (admission, eviction) = (definition.admission, definition.eviction.unwrap_or_default());
        let before = self.rows.get(&place).and_then(|row| row.counting).unwrap_or(0);
        let all = before.saturating_add(came);
        let is_live = self.rows.get(&place).is_some_and(|row| row.counting.is_none());
        let is_filtered = operation == Operation::Gradient && !is_live;
        if is_filtered && !schema.rules().admits_id(id_of(schema.number(), key)) {
            return None;
        }
        let is_rare = is_filtered && admission.is_some_and(|admission| all < admission.filter_freq);
        let row = self.rows.entry(place).or_insert_with(|| fresh(schema, key));
        row.version = occasion.index;
        row.counting = is_rare.then_some(all);
        if eviction.expire_seconds > 0 {
            row.seconds = (self.clock_ms / 1000) as u32;
        }
        if eviction.steps_to_live > 0 {
            // A row that is admitted forgets what it knew while it was counting.
            row.clock = if is_live || is_rare { row.clock.max(occasion.clock) } else { occasion.clock };
        }
        if eviction.max_rows > 0 && !is_rare {
            let more = if is_filtered { all } else { came };
            row.frequency = row.frequency.saturating_add(more);
        }
        (!is_rare).then_some(row)
    }

    pub(super) fn version(&self, table: u32, key: u64) -> Option<u64> {
        self.rows.get(&(table, key)).map(|row| row.version)
    }

    fn notes(&self, table: u32, row: &Row) -> Vec<f32> {
        let Some(eviction) = self.tables[&table].eviction else { return vec![] };
        assert!(eviction.max_rows > 0 && eviction.expire_seconds > 0 && eviction.steps_to_live > 0);
        let words = [row.frequency, row.seconds, row.clock as u32, (row.clock >> 32) as u32];
        words.map(f32::from_bits).to_vec()
    }

    pub(super) fn digest(&self) -> Digest {
        let mut digest = Digest::default();
        for ((table, key), row) in &self.rows {
            let notes = self.notes(*table, row);
            if let Some(came) = row.counting {
                digest.add(*table, *key, came, 0, (&[], &notes));
                continue;
            }
            let floats = [&row.weights[..], &row.first, &row.second].concat();
            digest.add(*table, *key, row.steps, row.weights.len(), (&floats, &notes));
        }
        digest
    }

    pub(super) fn pull(&self, table: u32, id: u64) -> Option<(Vec<f32>, bool)> {
        let definition = self.tables.get(&table)?;
        let schema = TableSchema::new(table, definition).expect("valid");
        let key = key_of(table, id);
        Some(match self.rows.get(&(table, key)) {
            Some(row) if row.counting.is_none() => (row.weights.clone(), true),
            _ => (fresh(&schema, key).weights, false),
        })
    }

    pub(super) fn rows(&self, table: u32) -> u64 {
        let live = self.rows.iter().filter(|((number, _), row)| *number == table && row.counting.is_none());
        live.count() as u64
    }

    pub(super) fn tables(&self) -> Vec<u32> {
        self.tables.keys().copied().collect()
    }
}

fn clip(value: &mut f32) {
    if value.is_nan() {
        *value = 0.0;
    } else if value.is_infinite() {
        *value = f32::MAX.copysign(*value);
    }
}

fn all_values(section: &Section<'_>) -> Vec<Vec<f32>> {
    (0..section.count())
        .map(|row| {
            let raw = section.row(row);
            let two = |raw: &[u8]| [raw[0], raw[1]];
            match section.encoding {
                Encoding::F32 => {
                    raw.chunks_exact(4).map(|raw| f32::from_le_bytes(raw.try_into().expect("four"))).collect()
                }
                Encoding::Bf16 => raw
                    .chunks_exact(2)
                    .map(|raw| half::bf16::from_le_bytes(two(raw)).to_f32_const())
                    .collect(),
                Encoding::F16 => {
                    raw.chunks_exact(2).map(|raw| half::f16::from_le_bytes(two(raw)).to_f32_const()).collect()
                }
                Encoding::Int8 => {
                    let scale = f32::from_le_bytes(raw[..4].try_into().expect("four"));
                    raw[4..].iter().map(|value| f32::from(*value as i8) * scale).collect()
                }
            }
        })
        .collect()
}

fn summed(section: &Section<'_>, values: &[Vec<f32>]) -> Vec<(u64, Vec<f32>)> {
    group(Operation::Add, &section.keys().collect::<Vec<_>>(), values)
}

fn group(operation: Operation, keys: &[u64], values: &[Vec<f32>]) -> Vec<(u64, Vec<f32>)> {
    let mut grouped: Vec<(u64, Vec<f32>)> = Vec::new();
    for (key, values) in keys.iter().zip(values) {
        match grouped.iter_mut().find(|(known, _)| known == key) {
            None => grouped.push((*key, values.clone())),
            Some((_, known)) if operation == Operation::Set => known.clone_from(values),
            Some((_, known)) => known.iter_mut().zip(values).for_each(|(sum, v)| *sum += v),
        }
    }
    grouped
}

fn fresh(schema: &TableSchema, key: u64) -> Row {
    let dim = schema.dim() as usize;
    let mut weights = vec![0.0; dim];
    schema.fill_new_weights(id_of(schema.number(), key), &mut weights);
    let (first, second) = match schema.optimizer().map(|optimizer| optimizer.rule) {
        None | Some(Rule::Sgd(_)) => (vec![], vec![]),
        Some(Rule::Adagrad(rule)) => (vec![rule.initial_accumulator; dim], vec![]),
        Some(Rule::Adam(_)) => (vec![0.0; dim], vec![0.0; dim]),
        Some(other) => unreachable!("no script has {other:?}"),
    };
    Row { weights, first, second, steps: 0, counting: None, frequency: 0, seconds: 0, clock: 0, version: 0 }
}

fn train(schema: &TableSchema, row: &mut Row, gradient: &[f32], lr: Option<f32>) {
    let optimizer = schema.optimizer().expect("checked");
    let lr = lr.unwrap_or(optimizer.learning_rate());
    row.steps += 1;
    for (i, gradient) in gradient.iter().enumerate() {
        let mut g = *gradient;
        if optimizer.weight_decay != 0.0 {
            g += optimizer.weight_decay * row.weights[i];
        }
        match optimizer.rule {
            Rule::Sgd(_) => row.weights[i] -= lr * g,
            Rule::Adagrad(rule) => {
                row.first[i] += g * g;
                row.weights[i] -= lr * g / (row.first[i].sqrt() + rule.eps);
            }
            Rule::Adam(rule) => {
                let (beta1, beta2) = (f64::from(rule.beta1), f64::from(rule.beta2));
                row.first[i] = row.first[i] * rule.beta1 + (1.0 - beta1) as f32 * g;
                row.second[i] = row.second[i] * rule.beta2 + (1.0 - beta2) as f32 * g * g;
                let size = (f64::from(lr) / (1.0 - squaring(beta1, row.steps))) as f32;
                let correction = (1.0 - squaring(beta2, row.steps)).sqrt() as f32;
                row.weights[i] -= size * row.first[i] / (row.second[i].sqrt() / correction + rule.eps);
            }
            other => unreachable!("no script has {other:?}"),
        }
    }
    // A step leaves one NaN only, whatever the processor made.
    for value in row.weights.iter_mut().chain(&mut row.first).chain(&mut row.second) {
        if value.is_nan() {
            *value = f32::from_bits(0x7fc0_0000);
        }
    }
}

fn squaring(base: f64, exponent: u32) -> f64 {
    let (mut result, mut square) = (1.0, base);
    for bit in 0..32 - exponent.leading_zeros() {
        if exponent >> bit & 1 == 1 {
            result *= square;
        }
        square *= square;
    }
    result
}
