//! Loading a replica's state from its store: after a restart, and after a snapshot was installed.
//!
//! Invariants:
//! - what is loaded is exact as of `replay_from`, but for rows that hold later entries already (versions up to
//!   `complete_at`): replay skips those;
//! - rows of a table without a schema are the remains of a dropped one, or all newer than `replay_from`: a crash came
//!   between a run and its record, and replay will meet the entry that creates the table. Anything else is corruption.

use std::collections::{BTreeMap, BTreeSet};

use evershard_raft::state_machine::LogPosition;
use evershard_storage::rocks::{FlushedState, Position, ReplicaStore};
use evershard_storage::table::{RowHeader, Table};

use super::error::ShardError;
use super::rows::{Orphans, RowSet};
use super::small_state::{AppliedState, SmallState};

/// What a store holds.
#[derive(Debug)]
pub(crate) struct Recovered {
    pub(crate) applied: AppliedState,
    pub(crate) rows: RowSet,
    pub(crate) complete_at: u64,
    pub(crate) debts: Debts,
}

/// What the store still holds although the state does not: the next flush cycles clear it.
#[derive(Debug, Default)]
pub(crate) struct Debts {
    /// Tombstones on disk: (table, key) -> version. They go once `replay_from` has passed the version.
    pub(crate) tombstones: BTreeMap<(u32, u64), u64>,
    /// Dropped tables that certainly have no rows on disk; any other dropped table may have.
    pub(crate) settled: BTreeSet<u32>,
}

impl Debts {
    /// The dropped tables whose rows may still be on disk.
    pub(crate) fn unsettled(&self, small: &SmallState) -> Vec<u32> {
        small.dropped.keys().filter(|number| !self.settled.contains(number)).copied().collect()
    }

    /// True when there is nothing to clear.
    pub(crate) fn is_empty(&self, small: &SmallState) -> bool {
        self.tombstones.is_empty() && small.dropped.keys().all(|number| self.settled.contains(number))
    }

    /// The rows of these tables are gone from disk.
    pub(crate) fn settle(&mut self, tables: &[u32]) {
        self.settled.extend(tables);
        self.tombstones.retain(|(table, _), _| !tables.contains(table));
    }
}

/// Loads everything.
pub(crate) fn load(store: &ReplicaStore, state: &FlushedState) -> Result<Recovered, ShardError> {
    let identity = store.identity();
    let (shard, group) = (identity.shard, identity.group);
    let small = SmallState::decode(&state.small_state).map_err(|source| ShardError::SmallState {
        shard,
        group,
        source,
    })?;
    let tables = small.schemas.iter().map(|(number, schema)| (*number, Table::new(schema.shape()))).collect();
    let settled = small.dropped.keys().copied().collect();
    let mut loader = Loader {
        small: &small,
        replay_from: state.replay_from.map_or(0, |position| position.index),
        tables,
        orphans: Orphans::default(),
        debts: Debts { tombstones: BTreeMap::new(), settled },
        misfit: None,
    };
    store
        .load_rows(|table, key, header, floats| loader.row(table, key, header, floats))
        .map_err(|source| ShardError::Store { shard, group, source })?;
    if let Some((table, key, found)) = loader.misfit {
        let expected = loader.tables.get(&table).map_or(0, |table| table.shape().floats());
        return Err(ShardError::RowShape { shard, group, table, key, found, expected });
    }
    let (rows, debts) = (RowSet::new(loader.tables, loader.orphans), loader.debts);
    let position = state.replay_from.map(log_position);
    let applied = AppliedState { position, membership: state.membership.clone(), small };
    Ok(Recovered { applied, rows, complete_at: state.complete_at, debts })
}

/// Sorts the rows of a store into tables.
struct Loader<'a> {
    small: &'a SmallState,
    replay_from: u64,
    tables: BTreeMap<u32, Table>,
    orphans: Orphans,
    debts: Debts,
    /// The first row that fits nowhere: table, key, floats.
    misfit: Option<(u32, u64, usize)>,
}

impl Loader<'_> {
    fn row(&mut self, number: u32, key: u64, header: RowHeader, floats: &[f32]) {
        if self.small.dropped.contains_key(&number) {
            self.debts.settled.remove(&number);
            return;
        }
        if header.is_tombstone() {
            self.debts.tombstones.insert((number, key), header.version);
        }
        let fits = match self.tables.get_mut(&number) {
            Some(table) => {
                let fits = header.is_tombstone() || floats.len() == table.shape().floats();
                if fits {
                    table.load(key, header, floats);
                }
                fits
            }
            None => {
                let newer = header.version > self.replay_from;
                if newer {
                    self.orphans.entry(number).or_default().push((key, header, floats.to_vec()));
                }
                newer
            }
        };
        if !fits && self.misfit.is_none() {
            self.misfit = Some((number, key, floats.len()));
        }
    }
}

pub(crate) fn log_position(position: Position) -> LogPosition {
    LogPosition { term: position.term, leader: position.leader, index: position.index }
}

pub(crate) fn store_position(position: LogPosition) -> Position {
    Position { term: position.term, leader: position.leader, index: position.index }
}
