//! Raft snapshots of a replica: links to what the store holds, and installing what another replica linked.
//!
//! Invariants:
//! - a link is of a moment between two flush cycles: its rows and its record belong together;
//! - an install is durable before it is visible; until then the old state serves.
//!
//! Not here: files over the wire (the raft crate), how links and swaps are made (`evershard_storage::rocks`).

use std::path::Path;
use std::sync::Arc;

use evershard_raft::state_machine::{SnapshotError, SnapshotMark};
use evershard_storage::rocks::{FlushedState, StoreError};

use super::machine::ShardMachine;
use super::recovery::{self, log_position};

impl ShardMachine {
    /// See `StateMachine::link_snapshot`.
    pub(super) fn link(&self, directory: &Path) -> Result<SnapshotMark, SnapshotError> {
        let _one_at_a_time = self.lock_debts();
        let state = self.store.link_to(directory).map_err(|error| snapshot_error(directory, error))?;
        Ok(mark_of(&state))
    }

    /// See `StateMachine::install_snapshot`.
    pub(super) fn install(&self, mark: &SnapshotMark, directory: &Path) -> Result<(), SnapshotError> {
        let mut debts = self.lock_debts();
        let state = self.store.replace_with(directory).map_err(|error| snapshot_error(directory, error))?;
        // From here on the disk holds the new state: if it cannot be loaded, there is no way back to the old one.
        let loaded = match recovery::recover(self.identity(), &state) {
            Ok(loaded) if mark_of(&state).position == mark.position => loaded,
            Ok(_) => {
                self.break_down();
                return Err(SnapshotError::Invalid(format!(
                    "its record ends at {:?}, the sender said {:?}",
                    state.replay_from, mark.position
                )));
            }
            Err(error) => {
                self.break_down();
                return Err(SnapshotError::Invalid(error.to_string()));
            }
        };
        *debts = loaded.debts;
        let _between_entries = self.lock_applier();
        let mut small = self.lock_small();
        let schemas = Arc::clone(&loaded.applied.small.schemas);
        let floors = loaded.applied.small.floors.clone();
        self.store.set_floors(&floors);
        self.store.set_kept_above(loaded.applied.small.kept_above);
        self.rows.replace((loaded.tables, floors), schemas, loaded.applied.index(), loaded.complete_at);
        self.warm_up_again();
        *small = loaded.applied;
        self.set_clock(&small);
        self.set_mark(mark_of(&state));
        Ok(())
    }
}

pub(crate) fn mark_of(state: &FlushedState) -> SnapshotMark {
    SnapshotMark { position: state.replay_from.map(log_position), membership: state.membership.clone() }
}

fn snapshot_error(directory: &Path, error: StoreError) -> SnapshotError {
    match error {
        StoreError::Io { path, source } | StoreError::Sync { path, source } => {
            SnapshotError::Io { path, source }
        }
        StoreError::Rocks { path, doing, message } => {
            SnapshotError::Io { path, source: std::io::Error::other(format!("{doing}: {message}")) }
        }
        other => SnapshotError::Invalid(format!("{}: {other}", directory.display())),
    }
}
