//! A sorted run: what one flush cycle writes, as files that RocksDB takes in with one step.
//!
//! Invariants:
//! - rows are put in ascending (table, key) order, each once;
//! - files are durable before they are ingested;
//! - a run that is not committed leaves nothing (its files go when it is dropped, or at the next open).
//!
//! Not here: the steps of the commit (`store`).

use std::path::PathBuf;

use rocksdb::SstFileWriter;

use super::durable;
use super::error::StoreError;
use super::store::ReplicaStore;
use crate::codec::encode_row;
use crate::keyspace::DiskKey;
use crate::table::RowHeader;

/// Asking a writer for its size crosses into C++: not for every row.
const ROWS_BETWEEN_SIZE_CHECKS: u64 = 256;

/// A run being written. Made by [`ReplicaStore::begin_run`], ended by [`ReplicaStore::commit`] or by dropping it.
pub struct RunWriter<'store> {
    store: &'store ReplicaStore,
    /// The install that the rows belong to.
    generation: u64,
    number: u64,
    files: Vec<PathBuf>,
    writer: Option<SstFileWriter<'store>>,
    dropped: Vec<u32>,
    last: Option<(u32, u64)>,
    rows: u64,
    bytes: u64,
    version_max: u64,
    value: Vec<u8>,
}

impl std::fmt::Debug for RunWriter<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("RunWriter")
            .field("number", &self.number)
            .field("rows", &self.rows)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl<'store> RunWriter<'store> {
    pub(super) fn new(store: &'store ReplicaStore, generation: u64, number: u64) -> Self {
        Self {
            store,
            generation,
            number,
            files: Vec::new(),
            writer: None,
            dropped: Vec::new(),
            last: None,
            rows: 0,
            bytes: 0,
            version_max: 0,
            value: Vec::new(),
        }
    }

    /// Adds a row or a tombstone. A tombstone's floats are not written.
    ///
    /// # Errors
    /// [`StoreError::Refused`] when not in ascending (table, key) order; [`StoreError::Rocks`] when the file cannot be written.
    pub fn put(&mut self, table: u32, key: u64, header: RowHeader, floats: &[f32]) -> Result<(), StoreError> {
        // A file that is full is synced.
        let put = self.write(table, key, header, floats);
        self.store.shared().watch(put)
    }

    fn write(&mut self, table: u32, key: u64, header: RowHeader, floats: &[f32]) -> Result<(), StoreError> {
        self.advance(table, key)?;
        let mut value = std::mem::take(&mut self.value);
        encode_row(header, floats, &mut value);
        let bytes = DiskKey::Row { table, key }.to_bytes();
        let put = self.file()?.put(bytes, &value);
        self.bytes += (bytes.len() + value.len()) as u64;
        self.value = value;
        self.version_max = self.version_max.max(header.version);
        put.map_err(|error| self.error("write a run", &error))
    }

    /// Forgets every row that a table has on disk before this run; rows of the table in this run stay. At any time. The
    /// commit's `complete_at` must reach the log entry that says so.
    pub fn drop_table(&mut self, table: u32) {
        if !self.dropped.contains(&table) {
            self.dropped.push(table);
        }
    }

    /// Rows and tombstones so far.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Bytes of keys and values so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The highest version put so far; 0 when none.
    #[must_use]
    pub fn version_max(&self) -> u64 {
        self.version_max
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows == 0 && self.dropped.is_empty()
    }

    pub(super) fn store(&self) -> &'store ReplicaStore {
        self.store
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// Ends the files and makes them durable. Files that drop tables come first: the others win over them.
    pub(super) fn finish(&mut self) -> Result<Vec<PathBuf>, StoreError> {
        self.end_file()?;
        if !self.dropped.is_empty() {
            let rows = self.files.len();
            for table in std::mem::take(&mut self.dropped) {
                let (first, end) = DiskKey::table_range(table);
                let dropped = self.file()?.delete_range(first, end);
                dropped.map_err(|error| self.error("write a run", &error))?;
            }
            self.end_file()?;
            let drops = self.files.len() - rows;
            self.files.rotate_right(drops);
        }
        for file in &self.files {
            durable::sync_file(file)?;
        }
        Ok(self.files.clone())
    }

    fn advance(&mut self, table: u32, key: u64) -> Result<(), StoreError> {
        let next = (table, key);
        if let Some(last) = self.last.filter(|last| *last >= next) {
            return Err(StoreError::Refused {
                what: format!("row {next:?} behind row {last:?}: a run ascends by (table, key)"),
            });
        }
        self.last = Some(next);
        self.rows += 1;
        let full = |writer: &SstFileWriter<'_>| {
            writer.file_size() >= self.store.shared().options().run_file_bytes_max
        };
        if self.rows.is_multiple_of(ROWS_BETWEEN_SIZE_CHECKS) && self.writer.as_ref().is_some_and(full) {
            self.end_file()?;
        }
        Ok(())
    }

    /// The file being written; a new one when there is none.
    fn file(&mut self) -> Result<&mut SstFileWriter<'store>, StoreError> {
        let writer = match self.writer.take() {
            Some(writer) => writer,
            None => {
                let path = self.store.run_path(self.number, self.files.len());
                let writer = SstFileWriter::create(self.store.shared().run());
                self.files.push(path.clone());
                writer.open(&path).map_err(|error| StoreError::rocks(&path, "create a run", &error))?;
                writer
            }
        };
        Ok(self.writer.insert(writer))
    }

    fn end_file(&mut self) -> Result<(), StoreError> {
        match self.writer.take() {
            Some(mut writer) => writer.finish().map_err(|error| self.error("finish a run", &error)),
            None => Ok(()),
        }
    }

    fn error(&self, doing: &'static str, error: &rocksdb::Error) -> StoreError {
        let path = self.store.run_path(self.number, self.files.len().saturating_sub(1));
        StoreError::rocks(&path, doing, error)
    }
}

impl Drop for RunWriter<'_> {
    fn drop(&mut self) {
        drop(self.writer.take());
        for file in &self.files {
            // Ingested files have moved; one that cannot be removed goes at the next open.
            if let Err(error) = durable::remove_file(file) {
                tracing::warn!(%error, "cannot remove a file of a run");
            }
        }
    }
}
