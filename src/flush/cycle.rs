//! One flush cycle of one replica.

use std::collections::BTreeMap;

use bytes::Bytes;
use evershard_raft::state_machine::{LogPosition, SnapshotMark};
use evershard_storage::rocks::{FlushedState, RunWriter, StoreError};
use evershard_storage::table::{DirtyRow, FlushCursor, RowHeader, Table};

use super::DurableIndex;
use crate::shard::{Debts, ShardError, ShardMachine, rows_a_lock, store_position};

/// Rows copied under one taking of the lock for reading.
const ROWS_PER_LOCK: usize = if cfg!(test) { 2 } else { 256 };
/// Slots looked at for dirty bits under one taking of the lock.
const SLOTS_PER_LOCK: u32 = 1 << 20;

/// What a cycle did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlushReport {
    /// The store now holds everything up to here.
    pub position: LogPosition,
    /// Rows and tombstones written.
    pub rows: u64,
    /// Bytes of them.
    pub bytes: u64,
}

/// What is noted at the beginning: the state as of `s`.
struct Noted {
    position: LogPosition,
    membership: Bytes,
    small_state: Bytes,
    floors: BTreeMap<u32, u64>,
    kept_above: Option<u64>,
    tables: Vec<u32>,
    /// Dropped tables whose rows may be on disk.
    unsettled: Vec<u32>,
}

/// Runs one cycle; `None` when there was nothing to flush. Blocks on the disk and on the log.
///
/// # Errors
/// [`ShardError`]; everything is as dirty as before.
pub fn flush_replica(
    machine: &ShardMachine,
    log: &dyn DurableIndex,
) -> Result<Option<FlushReport>, ShardError> {
    let mut debts = machine.lock_debts();
    settle_absent(machine, &mut debts)?;
    let Some(noted) = note(machine, &debts) else { return Ok(None) };
    let mut cycle = Cycle { machine, noted, tombstones: Vec::new() };
    match cycle.run(log) {
        Ok(report) => {
            cycle.finish(&mut debts);
            Ok(Some(report))
        }
        Err(error) => {
            cycle.abort();
            Err(error)
        }
    }
}

/// Dropped tables that have nothing on disk need no clearing: after a restart that is to be found out.
fn settle_absent(machine: &ShardMachine, debts: &mut Debts) -> Result<(), ShardError> {
    let unsettled = debts.unsettled(&machine.lock_small().small);
    for number in unsettled {
        let has_rows = machine.store().has_rows(number);
        if !has_rows.map_err(|source| machine.rows().store_error(source))? {
            debts.settle(&[number]);
        }
    }
    Ok(())
}

/// Step 1: between two entries, so that rows, small state and position belong together.
fn note(machine: &ShardMachine, debts: &Debts) -> Option<Noted> {
    let _between_entries = machine.lock_applier();
    let state = machine.lock_small();
    let position = state.position?;
    if machine.flushed_position() == Some(position) && debts.is_empty(&state.small) {
        return None;
    }
    let tables: Vec<u32> = state.small.schemas.keys().copied().collect();
    let mut set = machine.rows().write();
    for number in &tables {
        if let Some(entry) = set.table_mut(*number) {
            entry.table.begin_flush();
        }
    }
    Some(Noted {
        position,
        membership: state.membership.clone(),
        small_state: state.small.encode(),
        floors: state.small.floors.clone(),
        kept_above: state.small.kept_above,
        tables,
        // A scan that has not opened the store yet may need the rows of a table that was dropped since it began.
        unsettled: if set.scans_need_the_store() { Vec::new() } else { debts.unsettled(&state.small) },
    })
}

struct Cycle<'a> {
    machine: &'a ShardMachine,
    noted: Noted,
    /// Tombstones written by this cycle.
    tombstones: Vec<((u32, u64), u64)>,
}

impl Cycle<'_> {
    fn run(&mut self, log: &dyn DurableIndex) -> Result<FlushReport, ShardError> {
        let store = self.machine.store();
        let mut run = store.begin_run().map_err(|error| self.store_error(error))?;
        let mut dropped_at = 0;
        for number in self.noted.tables.clone() {
            self.write_table(&mut run, number, log).map_err(|error| self.store_error(error))?;
        }
        for number in &self.noted.unsettled {
            run.drop_table(*number);
        }
        // A table dropped or cleared since the beginning: its rows are not all in this run, and nobody may see what replay makes
        // of them before that.
        {
            let state = self.machine.lock_small();
            for (number, index) in state.small.dropped.iter().chain(&state.small.floors) {
                if self.noted.tables.contains(number) {
                    dropped_at = dropped_at.max(*index);
                }
            }
        }
        let complete_at = run.version_max().max(dropped_at).max(self.noted.position.index);
        if !log.wait_durable(complete_at) {
            let identity = self.machine.identity();
            let (shard, group) = (identity.shard, identity.group);
            return Err(ShardError::LogNotDurable { shard, group, index: complete_at });
        }
        let report = FlushReport { position: self.noted.position, rows: run.rows(), bytes: run.bytes() };
        let replay = FlushedState {
            replay_from: Some(store_position(self.noted.position)),
            complete_at,
            membership: self.noted.membership.clone(),
            small_state: self.noted.small_state.clone(),
        };
        // Before the record: from then on compaction may forget what this does not keep.
        store.set_kept_above(self.noted.kept_above);
        store.commit(run, complete_at, replay).map_err(|error| self.store_error(error))?;
        Ok(report)
    }

    /// Step 2 for one table: dirty rows, in order of their keys.
    fn write_table(
        &mut self,
        run: &mut RunWriter<'_>,
        number: u32,
        log: &dyn DurableIndex,
    ) -> Result<(), StoreError> {
        let dirty = self.dirty_rows(number);
        let mut copies = Copies::default();
        let shape = self.machine.rows().read().table(number).map(Table::shape);
        let at_once = shape.map_or(ROWS_PER_LOCK, |shape| rows_a_lock(ROWS_PER_LOCK, shape));
        for batch in dirty.chunks(at_once) {
            log.pace(run.bytes());
            copies.clear();
            if let Some(table) = self.machine.rows().read().table(number) {
                table.flush_rows(batch, |key, header, floats| copies.push(key, header, floats));
            }
            for (key, header, floats) in copies.iter() {
                run.put(number, key, header, floats)?;
                if header.is_tombstone() {
                    self.tombstones.push(((number, key), header.version));
                }
            }
        }
        Ok(())
    }

    /// The rows that the flush owes, in order of their keys.
    fn dirty_rows(&self, number: u32) -> Vec<DirtyRow> {
        let mut dirty = Vec::new();
        let mut cursor = FlushCursor::default();
        while !cursor.is_done() {
            match self.machine.rows().read().table(number) {
                Some(table) => table.flush_keys(&mut cursor, SLOTS_PER_LOCK, &mut dirty),
                None => break,
            }
        }
        dirty.sort_unstable();
        dirty
    }

    /// After the commit: what was flushed is clean, and the snapshot mark moves.
    fn finish(self, debts: &mut Debts) {
        for number in &self.noted.tables {
            if let Some(entry) = self.machine.rows().write().table_mut(*number) {
                entry.table.commit_flush();
            }
        }
        debts.tombstones.extend(self.tombstones);
        // Replay begins behind these: nobody needs them any more. The store forgets its own when it compacts.
        let old: Vec<(u32, u64)> = {
            let is_old = |_: &(u32, u64), version: &mut u64| *version <= self.noted.position.index;
            debts.tombstones.extract_if(.., is_old).map(|(place, _)| place).collect()
        };
        for old in old.chunks(ROWS_PER_LOCK) {
            let mut set = self.machine.rows().write();
            for (number, key) in old {
                if let Some(mut entry) = set.table_mut(*number) {
                    // Stays when it was pushed again meanwhile.
                    entry.forget_tombstone(*key);
                }
            }
        }
        debts.settle(&self.noted.unsettled);
        // The record has them: compaction may forget what is below.
        self.machine.store().set_floors(&self.noted.floors);
        let mark = SnapshotMark { position: Some(self.noted.position), membership: self.noted.membership };
        self.machine.set_mark(mark);
    }

    fn abort(self) {
        for number in &self.noted.tables {
            if let Some(entry) = self.machine.rows().write().table_mut(*number) {
                entry.table.abort_flush();
            }
        }
    }

    fn store_error(&self, source: StoreError) -> ShardError {
        self.machine.rows().store_error(source)
    }
}

/// Rows copied out of memory, until they are written.
#[derive(Debug, Default)]
struct Copies {
    heads: Vec<(u64, RowHeader, usize)>,
    floats: Vec<f32>,
}

impl Copies {
    fn clear(&mut self) {
        self.heads.clear();
        self.floats.clear();
    }

    fn push(&mut self, key: u64, header: RowHeader, floats: &[f32]) {
        self.floats.extend_from_slice(floats);
        self.heads.push((key, header, self.floats.len()));
    }

    fn iter(&self) -> impl Iterator<Item = (u64, RowHeader, &[f32])> {
        let mut start = 0;
        self.heads.iter().map(move |(key, header, end)| {
            let floats = &self.floats[start..*end];
            start = *end;
            (*key, *header, floats)
        })
    }
}
