//! A replica's store: its folder, the record that counts, the steps that change it.
//!
//! Invariants:
//! - the meta record on disk is the one pointer: it names the RocksDB folder that counts, and what its rows hold;
//! - `complete_at` is durable before a run with versions up to it is ingested, and the run is durable before `replay_from`
//!   moves: a crash between any two steps leaves a state that replay completes exactly;
//! - commits, links and installs exclude each other; reading excludes nobody;
//! - whatever a crash left behind is either what counts or is removed by the next open.
//!
//! Not here: what else a folder may hold (`folder`), what is dirty (`table`), when to flush (the server), installing a snapshot (`install`).

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use super::database::Database;
use super::durable;
use super::error::StoreError;
use super::folder::{find_record, remove_leftovers, rocks_path};
use super::meta_record::MetaRecord;
use super::options::RocksShared;
use super::run::RunWriter;
use super::state::{FlushedState, ReplicaIdentity};
use crate::disk::RealDisk;
use crate::keyspace::ReplicaFile;
use crate::table::RowHeader;

/// What counts now: the record as it is on disk, and the folder it names.
pub(super) struct Current {
    pub(super) record: MetaRecord,
    pub(super) database: Arc<Database>,
}

/// Held by whoever changes the store.
#[derive(Debug, Default)]
pub(super) struct Changes {
    runs_begun: u64,
    /// An fsync failed: only a new process may look at this folder.
    poisoned: bool,
    /// RocksDB failed, and takes nothing in until it was opened anew.
    reopen: bool,
}

/// A replica's store. Shared by reference; all methods may block on the disk.
pub struct ReplicaStore {
    directory: PathBuf,
    shared: RocksShared,
    pub(super) changes: Mutex<Changes>,
    pub(super) current: RwLock<Current>,
}

impl std::fmt::Debug for ReplicaStore {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("ReplicaStore").field("directory", &self.directory).finish_non_exhaustive()
    }
}

/// Figures of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreMetrics {
    /// Bytes of the files that count.
    pub disk_bytes: u64,
    /// About how many rows and tombstones they hold.
    pub rows_estimate: u64,
    /// Files in level 0: runs waiting for compaction.
    pub level_0_files: u64,
    /// Bytes that compaction owes.
    pub compaction_pending_bytes: u64,
    /// Memory that is not the shared cache.
    pub memory_bytes: u64,
    /// Bytes that compaction has written since the store was opened or installed.
    pub compacted_bytes: u64,
}

impl ReplicaStore {
    /// Makes an empty store in a folder that does not exist or is empty.
    ///
    /// # Errors
    /// [`StoreError::Exists`] when a replica is there; others when the disk or RocksDB says no.
    pub fn create(
        directory: &Path,
        identity: &ReplicaIdentity,
        shared: &RocksShared,
    ) -> Result<Self, StoreError> {
        shared.watch(Self::create_new(directory, identity, shared))
    }

    fn create_new(
        directory: &Path,
        identity: &ReplicaIdentity,
        shared: &RocksShared,
    ) -> Result<Self, StoreError> {
        match find_record(directory) {
            Err(StoreError::Absent { .. }) => {}
            Ok(_) => return Err(StoreError::Exists { path: directory.to_owned() }),
            Err(error) => return Err(error),
        }
        fs::create_dir_all(directory).map_err(|source| StoreError::io(directory, source))?;
        let record = MetaRecord {
            identity: identity.clone(),
            generation: 1,
            sequence: 0,
            state: FlushedState::default(),
        };
        // The record comes first: a folder with data and no record is a mistake of somebody, never of a crash.
        record.write(&RealDisk, directory)?;
        if let Some(parent) = directory.parent() {
            durable::sync_directory(parent)?;
        }
        Self::open_found(directory, record, shared)
    }

    /// Opens the store in a folder, for the identity that must be written there; removes what a crash left behind.
    ///
    /// # Errors
    /// [`StoreError::Absent`] when no replica is there, [`StoreError::IdentityMismatch`] naming the field,
    /// [`StoreError::Corrupt`] naming the file; others when the disk or RocksDB says no.
    pub fn open(
        directory: &Path,
        expected: &ReplicaIdentity,
        shared: &RocksShared,
    ) -> Result<(Self, FlushedState), StoreError> {
        let record = find_record(directory)?;
        expected.expect(&record.identity, &directory.join(ReplicaFile::Meta.to_string()))?;
        let store = shared.watch(Self::open_found(directory, record, shared))?;
        let state = store.state();
        Ok((store, state))
    }

    fn open_found(directory: &Path, record: MetaRecord, shared: &RocksShared) -> Result<Self, StoreError> {
        remove_leftovers(directory, record.generation)?;
        let runs = directory.join(ReplicaFile::Runs.to_string());
        fs::create_dir_all(&runs).map_err(|source| StoreError::io(&runs, source))?;
        // Nothing was ever flushed: the crash came before RocksDB was made, or it holds nothing that counts.
        let create = record.generation == 1 && record.state == FlushedState::default();
        let database = Database::open(rocks_path(directory, record.generation), shared, create, &record)?;
        durable::sync_directory(directory)?;
        Ok(Self {
            directory: directory.to_owned(),
            shared: shared.clone(),
            changes: Mutex::default(),
            current: RwLock::new(Current { record, database: Arc::new(database) }),
        })
    }

    /// Rows of these tables with versions below what is named here are none, as of the record that the store has: compaction
    /// may forget them. To be told after opening, installing and each commit.
    pub fn set_floors(&self, floors: &BTreeMap<u32, u64>) {
        self.database().set_floors(floors);
    }

    /// Which tombstones the next checkpoint needs: those above `index`, none when no checkpoint was ever made. Until it is said,
    /// none is forgotten. To be told after opening and installing, and before each commit.
    pub fn set_kept_above(&self, index: Option<u64>) {
        self.database().set_kept_above(index);
    }

    /// How far the store reaches.
    #[must_use]
    pub fn state(&self) -> FlushedState {
        self.current.read().record.state.clone()
    }

    /// Whose it is.
    #[must_use]
    pub fn identity(&self) -> ReplicaIdentity {
        self.current.read().record.identity.clone()
    }

    /// Its folder.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Calls `found` with every row and tombstone, in (table, key) order, until it says to stop; a tombstone has no floats.
    /// `opened` is called once what is to be seen is settled: what is committed after it is not seen. Verifies checksums, and
    /// leaves the block cache as it was.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] naming the row, [`StoreError::Rocks`].
    pub fn scan_rows(
        &self,
        opened: impl FnOnce(),
        found: impl FnMut(u32, u64, RowHeader, &[f32]) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        self.database().scan(None, opened, found)
    }

    /// As [`ReplicaStore::scan_rows`], for one table from a key on.
    ///
    /// # Errors
    /// As [`ReplicaStore::scan_rows`].
    pub fn scan_table(
        &self,
        (table, from_key): (u32, u64),
        opened: impl FnOnce(),
        mut found: impl FnMut(u64, RowHeader, &[f32]) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        let found = |_, key, header, floats: &[f32]| found(key, header, floats);
        self.database().scan(Some((table, from_key)), opened, found)
    }

    /// As [`ReplicaStore::scan_rows`], to the end.
    ///
    /// # Errors
    /// As [`ReplicaStore::scan_rows`].
    pub fn load_rows(&self, mut load: impl FnMut(u32, u64, RowHeader, &[f32])) -> Result<(), StoreError> {
        let all = |table, key, header, floats: &[f32]| {
            load(table, key, header, floats);
            ControlFlow::Continue(())
        };
        self.database().scan(None, || (), all)
    }

    /// Whether there is a row or tombstone of a table: one seek.
    ///
    /// # Errors
    /// As [`ReplicaStore::scan_rows`].
    pub fn has_rows(&self, table: u32) -> Result<bool, StoreError> {
        self.database().has_rows(table)
    }

    /// Calls `found` with the position of each key and its row or tombstone, if there is one.
    ///
    /// # Errors
    /// As [`ReplicaStore::scan_rows`].
    pub fn get_many(
        &self,
        table: u32,
        keys: &[u64],
        found: impl FnMut(usize, Option<(RowHeader, &[f32])>),
    ) -> Result<(), StoreError> {
        self.database().get_many(table, keys, found)
    }

    /// Begins a sorted run. Dropping it leaves nothing. When RocksDB failed before (a full disk), it is opened anew first.
    ///
    /// # Errors
    /// [`StoreError::Poisoned`] after a failed fsync; [`StoreError::Rocks`] when RocksDB does not open.
    pub fn begin_run(&self) -> Result<RunWriter<'_>, StoreError> {
        let number = {
            let mut changes = self.changes()?;
            if changes.reopen {
                let (record, database) = {
                    let current = self.current.read();
                    (current.record.clone(), Arc::clone(&current.database))
                };
                self.shared.watch(database.reopen(&record))?;
                changes.reopen = false;
            }
            changes.runs_begun += 1;
            changes.runs_begun
        };
        Ok(RunWriter::new(self, self.current.read().record.generation, number))
    }

    /// Makes a run count: design 5, step 3. `replay` is what was noted before the first row was copied. `complete_at` is the
    /// index up to which the run may reflect the log; the store raises it to the highest version in the run and never lowers
    /// it, but it cannot see a table that was cleared or dropped before its rows were copied: the entry that did so must be
    /// at or below it. The index applied when the last row was copied is always right. The caller has waited for its log to be
    /// durable up to there.
    ///
    /// # Errors
    /// [`StoreError::Superseded`] when a snapshot was installed since the run began, [`StoreError::Refused`] when
    /// `replay_from` would go back: nothing changed. Otherwise the disk or RocksDB said no: rows of the run may have become
    /// durable, `replay_from` has not moved, so the run's rows are still dirty.
    pub fn commit(
        &self,
        run: RunWriter<'_>,
        complete_at: u64,
        replay: FlushedState,
    ) -> Result<(), StoreError> {
        self.shared.watch(self.commit_run(run, complete_at, replay))
    }

    fn commit_run(
        &self,
        mut run: RunWriter<'_>,
        complete_at: u64,
        replay: FlushedState,
    ) -> Result<(), StoreError> {
        let mut changes = self.changes()?;
        let record = self.current.read().record.clone();
        if !std::ptr::eq(run.store(), self) {
            return Err(StoreError::Refused { what: "the run was begun by another store".to_owned() });
        }
        if run.generation() != record.generation {
            return Err(StoreError::Superseded);
        }
        let index = |state: &FlushedState| state.replay_from.map(|position| position.index);
        if index(&replay) < index(&record.state) {
            return Err(StoreError::Refused {
                what: format!(
                    "replay_from would go back from {:?} to {:?}",
                    index(&record.state),
                    index(&replay)
                ),
            });
        }
        let complete_at = complete_at
            .max(replay.complete_at)
            .max(record.state.complete_at)
            .max(run.version_max())
            .max(index(&replay).unwrap_or(0));
        let files = if run.is_empty() { Vec::new() } else { run.finish()? };

        fail::fail_point!("flush::before_complete_at");
        let mut raised = record;
        if !files.is_empty() && complete_at > raised.state.complete_at {
            raised.state.complete_at = complete_at;
            self.replace_record(&mut changes, &raised)?;
        }
        fail::fail_point!("flush::before_ingest");
        if !files.is_empty() {
            raised.sequence = self.ingest(&mut changes, &files)?;
        }
        fail::fail_point!("flush::before_meta");
        raised.state = FlushedState { complete_at, ..replay };
        self.replace_record(&mut changes, &raised)?;
        fail::fail_point!("flush::after_meta");
        Ok(())
    }

    /// Removes a dropped table's rows from disk. Only when `replay_from` has passed the entry that dropped it; may be called
    /// again. Not part of a flush: see [`RunWriter::drop_table`] for that.
    ///
    /// # Errors
    /// When the disk or RocksDB says no.
    pub fn delete_table(&self, table: u32) -> Result<(), StoreError> {
        self.shared.watch(self.delete_rows_of(table))
    }

    fn delete_rows_of(&self, table: u32) -> Result<(), StoreError> {
        let mut run = self.begin_run()?;
        let mut changes = self.changes()?;
        if run.generation() != self.current.read().record.generation {
            return Err(StoreError::Superseded);
        }
        let database = self.database();
        // Whole files first, while there is no range tombstone that could go with them and uncover older rows.
        database.drop_files_of(table)?;
        run.drop_table(table);
        let files = run.finish()?;
        self.ingest(&mut changes, &files).map(drop)
    }

    /// Makes `directory` (which does not exist, on the same file system) hold this store as it is now: hard links to its
    /// files and a meta record that fits them. Whatever happens to `directory` later does not touch the store.
    ///
    /// # Errors
    /// When the disk or RocksDB says no; then nothing is left in `directory`.
    pub fn link_to(&self, directory: &Path) -> Result<FlushedState, StoreError> {
        self.shared.watch(self.link_in(directory))
    }

    fn link_in(&self, directory: &Path) -> Result<FlushedState, StoreError> {
        let _changes = self.changes()?;
        let mut record = self.current.read().record.clone();
        fs::create_dir(directory).map_err(|source| StoreError::io(directory, source))?;
        record.generation = 0;
        let linked = self
            .database()
            .link_to(&directory.join(ReplicaFile::LinkedRocks.to_string()))
            .and_then(|()| record.write(&RealDisk, directory));
        match linked {
            Ok(()) => Ok(record.state),
            Err(error) => {
                durable::remove_directory(directory)?;
                Err(error)
            }
        }
    }

    /// Figures as of now.
    #[must_use]
    pub fn metrics(&self) -> StoreMetrics {
        let database = self.database();
        StoreMetrics {
            disk_bytes: database.number("rocksdb.live-sst-files-size"),
            rows_estimate: database.number("rocksdb.estimate-num-keys"),
            level_0_files: database.level_0_files(),
            compaction_pending_bytes: database.number("rocksdb.estimate-pending-compaction-bytes"),
            memory_bytes: database.number("rocksdb.cur-size-all-mem-tables")
                + database.number("rocksdb.estimate-table-readers-mem"),
            compacted_bytes: database.compacted_bytes(),
        }
    }

    pub(super) fn shared(&self) -> &RocksShared {
        &self.shared
    }

    pub(super) fn database(&self) -> Arc<Database> {
        Arc::clone(&self.current.read().database)
    }

    pub(super) fn changes(&self) -> Result<parking_lot::MutexGuard<'_, Changes>, StoreError> {
        let changes = self.changes.lock();
        if changes.poisoned {
            return Err(StoreError::Poisoned { path: self.directory.clone() });
        }
        Ok(changes)
    }

    pub(super) fn run_path(&self, run: u64, file: usize) -> PathBuf {
        self.directory.join(ReplicaFile::Runs.to_string()).join(format!("{run:016x}-{file}.sst"))
    }

    pub(super) fn rocks_path(&self, generation: u64) -> PathBuf {
        rocks_path(&self.directory, generation)
    }

    pub(super) fn ingest(&self, changes: &mut Changes, files: &[PathBuf]) -> Result<u64, StoreError> {
        // Whether the files are in is unknown then, and either is right: `complete_at` covers them.
        let (known, database) = {
            let current = self.current.read();
            (current.record.sequence, Arc::clone(&current.database))
        };
        fail::fail_point!("store::lost_runs", |_| {
            let rocks = self.rocks_path(self.current.read().record.generation);
            Err(StoreError::corrupt(&rocks, "a failpoint says that runs are lost"))
        });
        let sequence = database.ingest(files).inspect_err(|_| changes.reopen = true)?;
        if sequence <= known {
            let what =
                format_args!("a run was taken in as {sequence}, {known} had been before: runs are lost");
            return Err(StoreError::corrupt(&self.rocks_path(self.current.read().record.generation), what));
        }
        Ok(sequence)
    }

    /// Writes the record and, once it is durable, makes it the current one.
    fn replace_record(&self, changes: &mut Changes, record: &MetaRecord) -> Result<(), StoreError> {
        self.write_record(changes, record)?;
        let mut current = self.current.write();
        current.record = record.clone();
        current.database.set_replayed_to(record.state.replayed_to());
        Ok(())
    }

    pub(super) fn write_record(&self, changes: &mut Changes, record: &MetaRecord) -> Result<(), StoreError> {
        record.write(&RealDisk, &self.directory).inspect_err(|error| {
            // The old record or the new one is on disk, and only a new process can find out which.
            changes.poisoned |= matches!(error, StoreError::Sync { .. });
        })
    }
}
