//! Loading a replica's state from its store: after a restart, and after a snapshot was installed.
//!
//! Invariants:
//! - what is loaded is exact as of `replay_from`, but for rows that hold later entries already (versions up to
//!   `complete_at`): replay skips those;
//! - rows of a table without a schema are the remains of a dropped one, or corruption: a flush writes only tables that the
//!   small state beside it knows.

use std::collections::{BTreeMap, BTreeSet};

use evershard_raft::state_machine::LogPosition;
use evershard_storage::rocks::{FlushedState, Position, ReplicaStore};
use evershard_storage::table::{RowHeader, Table};

use super::error::ShardError;
use super::rows::RowSet;
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
    let mut tables: BTreeMap<u32, Table> =
        small.schemas.iter().map(|(number, schema)| (*number, Table::new(schema.shape()))).collect();
    let mut debts = Debts { settled: small.dropped.keys().copied().collect(), ..Debts::default() };
    let mut bad = None;
    store
        .load_rows(|number, key, header, floats| {
            if bad.is_none() {
                bad = load_row(&small, &mut tables, &mut debts, number, key, header, floats);
            }
        })
        .map_err(|source| ShardError::Store { shard, group, source })?;
    if let Some((table, key, found)) = bad {
        let expected = tables.get(&table).map_or(0, |table| table.shape().floats());
        return Err(ShardError::RowShape { shard, group, table, key, found, expected });
    }
    let applied = AppliedState {
        position: state.replay_from.map(log_position),
        membership: state.membership.clone(),
        small,
    };
    Ok(Recovered { applied, rows: RowSet::new(tables), complete_at: state.complete_at, debts })
}

/// Takes in one row; answers (table, key, floats) when it fits nowhere.
fn load_row(
    small: &SmallState,
    tables: &mut BTreeMap<u32, Table>,
    debts: &mut Debts,
    number: u32,
    key: u64,
    header: RowHeader,
    floats: &[f32],
) -> Option<(u32, u64, usize)> {
    let Some(table) = tables.get_mut(&number) else {
        if small.dropped.contains_key(&number) {
            debts.settled.remove(&number);
            return None;
        }
        return Some((number, key, floats.len()));
    };
    if header.is_tombstone() {
        debts.tombstones.insert((number, key), header.version);
    } else if floats.len() != table.shape().floats() {
        return Some((number, key, floats.len()));
    }
    table.load(key, header, floats);
    None
}

pub(crate) fn log_position(position: Position) -> LogPosition {
    LogPosition { term: position.term, leader: position.leader, index: position.index }
}

pub(crate) fn store_position(position: LogPosition) -> Position {
    Position { term: position.term, leader: position.leader, index: position.index }
}
