//! What a shard should hold: a few lines that read the same log entries as the replicas, without versions, flushes,
//! optimizers or replay.
//!
//! Whoever applies an entry first tells the model; everyone else, and everyone who replays, must have got the same answer
//! and hold the same rows at the same index.
//!
//! Not here: what the clients know (`client`), which is the other witness.

use std::collections::BTreeMap;

use bytes::Bytes;
use evershard_proto::limits::PUSHES_IN_FLIGHT_MAX;
use evershard_proto::push_body::{KIND_PUSH, Operation, PushBody, Section};
use evershard_proto::shard_command::ShardCommand;
use evershard_proto::v1::optimizer::Kind;
use evershard_proto::v1::{Optimizer, Sgd, TableDefinition, TableDescription};
use evershard_raft::{CommittedEntry, EntryContent};
use evershard_server::model::{CommandOutcome, PushOutcome};

/// Integer gradients; every session pushes to every row.
pub const SUMS: u32 = 1;
pub const SUM_DIM: usize = 2;
/// More than one batch of a flush, so that an entry can come between two of them.
pub const SUM_IDS: u64 = 400;
/// Assigned and removed rows; each belongs to one session.
pub const CELLS: u32 = 2;
pub const CELL_DIM: usize = 1;
pub const CELLS_PER_SESSION: u64 = 8;
pub const SESSIONS: u64 = 4;
pub const CELL_IDS: u64 = CELLS_PER_SESSION * (SESSIONS + 1);

/// The entries that create the tables.
pub fn schemas() -> [ShardCommand; 2] {
    let sgd = Optimizer { kind: Some(Kind::Sgd(Sgd { lr: 1.0 })), weight_decay: 0.0, ..Default::default() };
    let table = |number, name: &str, dim: usize, optimizer| ShardCommand::Schema {
        table: TableDescription {
            number,
            definition: Some(TableDefinition {
                name: name.into(),
                dim: dim as u32,
                optimizer,
                ..Default::default()
            }),
            definition_version: 0,
        },
        dropped: false,
    };
    [table(SUMS, "sums", SUM_DIM, Some(sgd)), table(CELLS, "cells", CELL_DIM, None)]
}

/// The rows of one table, by key; absent rows read as zeros.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rows(BTreeMap<u64, Vec<f32>>);

impl Rows {
    pub fn get(&self, key: u64) -> Option<&[f32]> {
        self.0.get(&key).map(Vec::as_slice)
    }

    /// Subtracts a gradient.
    pub fn descend(&mut self, key: u64, gradient: &[f32]) {
        let row = self.0.entry(key).or_insert_with(|| vec![0.0; gradient.len()]);
        for (weight, value) in row.iter_mut().zip(gradient) {
            *weight -= value;
        }
    }

    pub fn set(&mut self, key: u64, values: &[f32]) {
        self.0.insert(key, values.to_vec());
    }

    pub fn remove(&mut self, key: u64) {
        self.0.remove(&key);
    }

    fn change(&mut self, section: &Section<'_>) {
        for (number, key) in section.keys().enumerate() {
            if section.operation == Operation::Remove {
                self.remove(key);
                continue;
            }
            let values: Vec<f32> = section
                .row(number)
                .chunks_exact(4)
                .map(|raw| f32::from_le_bytes(raw.try_into().expect("4 bytes")))
                .collect();
            match section.operation {
                Operation::Gradient => self.descend(key, &values),
                Operation::Set => self.set(key, &values),
                other => panic!("nobody pushes {other:?}"),
            }
        }
    }

    /// What a pull of `keys` answers: weights, then whether each exists.
    pub fn pulled(&self, keys: &[u64], dim: usize) -> Vec<u8> {
        let zeros = vec![0.0; dim];
        let weights = keys.iter().flat_map(|key| self.get(*key).unwrap_or(&zeros)).copied();
        let mut bytes: Vec<u8> = weights.flat_map(f32::to_le_bytes).collect();
        bytes.extend(keys.iter().map(|key| u8::from(self.get(*key).is_some())));
        bytes
    }
}

/// An entry that was applied somewhere.
#[derive(Debug, Clone, PartialEq)]
struct Known {
    term: u64,
    crc: u32,
    answer: Bytes,
}

/// See the module.
#[derive(Debug)]
pub struct Model {
    entries: BTreeMap<u64, Known>,
    /// Sequence number applied last, by session.
    sessions: BTreeMap<u64, u64>,
    rows: BTreeMap<u32, Rows>,
    keys: BTreeMap<u32, (Vec<u64>, usize)>,
    /// Crc of all rows after each entry, by table and index.
    pictures: BTreeMap<(u32, u64), u32>,
    /// Digests that replicas took, by index.
    /// By index, those of scrubs apart: they cover sessions and schemas too.
    digests: BTreeMap<(u64, bool), u128>,
    /// Sequence numbers that came again after they were applied.
    pub repeated: u64,
    /// Digests that were compared with one that another replica, or this one before a restart, took at the same index.
    pub digests_compared: u64,
}

impl Model {
    pub fn new(keys: BTreeMap<u32, (Vec<u64>, usize)>) -> Self {
        let rows = keys.keys().map(|table| (*table, Rows::default())).collect();
        Self {
            entries: BTreeMap::new(),
            sessions: BTreeMap::new(),
            rows,
            keys,
            pictures: BTreeMap::new(),
            digests: BTreeMap::new(),
            repeated: 0,
            digests_compared: 0,
        }
    }

    /// A replica applied `entry` and answered `answer`. The error says what is wrong with that.
    pub fn applied(&mut self, entry: &CommittedEntry, answer: &Bytes) -> Result<(), String> {
        let index = entry.position.index;
        let crc = match &entry.content {
            EntryContent::Blank => 0,
            EntryContent::Membership(bytes) => crc32fast::hash(bytes),
            EntryContent::Command { command, .. } => crc32fast::hash(command),
        };
        if !self.entries.contains_key(&index) {
            let last = self.entries.keys().next_back().copied();
            if last.is_some_and(|last| last + 1 != index) {
                return Err(format!("entry {index} is applied, nobody has applied any after {last:?}"));
            }
            let answer = self.advance(entry);
            self.entries.insert(index, Known { term: entry.position.term, crc, answer });
        }
        let known = &self.entries[&index];
        let found = Known { term: entry.position.term, crc, answer: answer.clone() };
        if *known != found {
            return Err(format!("entry {index}: expected {known:?}, a replica had {found:?}"));
        }
        Ok(())
    }

    fn advance(&mut self, entry: &CommittedEntry) -> Bytes {
        let index = entry.position.index;
        let answer = match &entry.content {
            EntryContent::Blank | EntryContent::Membership(_) => Bytes::new(),
            EntryContent::Command { command, .. } if command.first() == Some(&KIND_PUSH) => {
                self.push(&PushBody::parse(command).expect("a push of ours"), index).encode()
            }
            EntryContent::Command { .. } => CommandOutcome::Done.encode(),
        };
        for (table, (keys, dim)) in &self.keys {
            let picture = crc32fast::hash(&self.rows[table].pulled(keys, *dim));
            self.pictures.insert((*table, index), picture);
        }
        answer
    }

    fn push(&mut self, body: &PushBody<'_>, index: u64) -> PushOutcome {
        let last = self.sessions.entry(body.session).or_default();
        if body.seq > *last + 1 {
            return PushOutcome::OutOfOrder { expected: *last + 1 };
        }
        if body.seq <= *last {
            self.repeated += 1;
            let kept = *last - body.seq < PUSHES_IN_FLIGHT_MAX as u64;
            return if kept {
                PushOutcome::Applied { index: 0 }
            } else {
                PushOutcome::Forgotten { last: *last }
            };
        }
        *last = body.seq;
        for section in body.sections() {
            self.rows.get_mut(&section.table).expect("a table of ours").change(&section);
        }
        PushOutcome::Applied { index }
    }

    /// The crc of [`Rows::pulled`] for a table's keys as of `index`.
    pub fn picture(&self, table: u32, index: u64) -> Option<u32> {
        self.pictures.get(&(table, index)).copied()
    }

    /// The keys of a table, and its dim.
    pub fn keys(&self, table: u32) -> &(Vec<u64>, usize) {
        &self.keys[&table]
    }

    /// A replica took a digest as of `index`.
    pub fn digest(&mut self, index: u64, is_scrub: bool, digest: u128) -> Result<(), String> {
        match self.digests.insert((index, is_scrub), digest) {
            Some(known) if known != digest => {
                Err(format!("digests as of {index} differ: {known:032x} and {digest:032x}"))
            }
            Some(_) => {
                self.digests_compared += 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}
