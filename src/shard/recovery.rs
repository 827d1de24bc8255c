//! A replica's state from its store: after a restart, and after a snapshot was installed. Rows stay where they are, on disk: they
//! come to memory on use (`cold`) and by the warm-up (`scan_run`). So this takes no longer for a larger table.
//!
//! Invariants:
//! - what is found is exact as of `replay_from`, but for rows that hold later entries already (versions up to
//!   `complete_at`): replay skips those;
//! - rows of a table without a schema are the remains of a dropped one, or newer than `replay_from`: a crash came between a run
//!   and its record, and replay will meet the entry that creates the table.

use std::collections::{BTreeMap, BTreeSet};

use evershard_raft::state_machine::LogPosition;
use evershard_storage::rocks::{FlushedState, Position, ReplicaIdentity};
use evershard_storage::table::Table;

use super::error::ShardError;
use super::small_state::{AppliedState, SmallState};

/// What a store holds.
#[derive(Debug)]
pub(crate) struct Recovered {
    pub(crate) applied: AppliedState,
    pub(crate) tables: BTreeMap<u32, Table>,
    pub(crate) complete_at: u64,
    pub(crate) debts: Debts,
}

/// What memory and store still hold although the state does not: the next flush cycles clear it.
#[derive(Debug, Default)]
pub(crate) struct Debts {
    /// Tombstones in memory, flushed since this replica was opened: (table, key) -> version. They leave memory once
    /// `replay_from` has passed the version; the store forgets its own when it compacts.
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
        small.dropped.keys().all(|number| self.settled.contains(number))
    }

    /// The rows of these tables are gone from disk.
    pub(crate) fn settle(&mut self, tables: &[u32]) {
        self.settled.extend(tables);
        self.tombstones.retain(|(table, _), _| !tables.contains(table));
    }
}

/// Reads everything but the rows.
pub(crate) fn recover(identity: &ReplicaIdentity, state: &FlushedState) -> Result<Recovered, ShardError> {
    let (shard, group) = (identity.shard, identity.group);
    let small = SmallState::decode(&state.small_state).map_err(|source| ShardError::SmallState {
        shard,
        group,
        source,
    })?;
    let nothing_flushed = *state == FlushedState::default();
    let table = |shape| if nothing_flushed { Table::new(shape) } else { Table::on_disk(shape) };
    let tables = small.schemas.iter().map(|(number, schema)| (*number, table(schema.shape()))).collect();
    let position = state.replay_from.map(log_position);
    let applied = AppliedState { position, membership: state.membership.clone(), small };
    Ok(Recovered { applied, tables, complete_at: state.complete_at, debts: Debts::default() })
}

pub(crate) fn log_position(position: Position) -> LogPosition {
    LogPosition { term: position.term, leader: position.leader, index: position.index }
}

pub(crate) fn store_position(position: LogPosition) -> Position {
    Position { term: position.term, leader: position.leader, index: position.index }
}
