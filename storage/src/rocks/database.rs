//! One open RocksDB folder of a replica: read rows, take in runs, link.
//!
//! Not here: which folder counts and what its rows mean for replay (`store`, `meta_record`).

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{MappedRwLockReadGuard, RwLock, RwLockReadGuard};
use rocksdb::checkpoint::Checkpoint;
use rocksdb::statistics::Ticker;
use rocksdb::{DB, IngestExternalFileOptions, Options, ReadOptions};

use super::dead_rows::Dead;
use super::durable;
use super::error::StoreError;
use super::meta_record::MetaRecord;
use super::options::RocksShared;
use crate::codec::decode_row;
use crate::keyspace::DiskKey;
use crate::table::RowHeader;

/// The column family that rows are in.
const FAMILY: &str = "default";

/// An open folder. Closed when dropped; when it was retired, the folder goes too.
pub(super) struct Database {
    path: PathBuf,
    shared: RocksShared,
    /// `None` after a reopening that failed, and in `drop`.
    open: RwLock<Option<Open>>,
    /// What the durable record that names this folder says of rows that nobody needs any more.
    dead: Dead,
    /// Compacted before the last reopening.
    compacted_before: AtomicU64,
    retired: AtomicBool,
}

struct Open {
    db: DB,
    /// The options it was opened with: they hold its counters.
    options: Options,
}

impl Database {
    /// Opens the folder that `record` names.
    pub(super) fn open(
        path: PathBuf,
        shared: &RocksShared,
        create: bool,
        record: &MetaRecord,
    ) -> Result<Self, StoreError> {
        let dead = Dead::default();
        dead.set_replayed_to(record.state.replayed_to());
        let opened = open_whole(&path, shared, create, &dead, record)?;
        let open = RwLock::new(Some(opened));
        Ok(Self {
            path,
            shared: shared.clone(),
            open,
            dead,
            compacted_before: AtomicU64::new(0),
            retired: AtomicBool::new(false),
        })
    }

    /// Closes and opens the folder: what RocksDB needs after an error of its own (a full disk), which it does not forget
    /// otherwise. Waits for readers.
    pub(super) fn reopen(&self, record: &MetaRecord) -> Result<(), StoreError> {
        let mut open = self.open.write();
        if let Some(closed) = open.take() {
            self.compacted_before.fetch_add(closed.compacted_bytes(), Ordering::Relaxed);
        }
        *open = Some(open_whole(&self.path, &self.shared, false, &self.dead, record)?);
        Ok(())
    }

    /// A record with this `replay_from` is durable: tombstones at or below it are not needed any more.
    pub(super) fn set_replayed_to(&self, index: u64) {
        self.dead.set_replayed_to(index);
    }

    /// Tombstones above `index` are needed by the next checkpoint; `None`: there is none to come.
    pub(super) fn set_kept_above(&self, index: Option<u64>) {
        self.dead.set_kept_above(index);
    }

    /// A record of which these are the floors is durable: rows below them are none.
    pub(super) fn set_floors(&self, floors: &BTreeMap<u32, u64>) {
        self.dead.set_floors(floors);
    }

    /// The folder is no longer the one that counts: remove it when the last user is gone.
    pub(super) fn retire(&self) {
        self.retired.store(true, Ordering::Release);
    }

    /// Recursively: a reader may read again, also while a reopening waits.
    fn db(&self) -> Result<MappedRwLockReadGuard<'_, DB>, StoreError> {
        let open = RwLockReadGuard::try_map(self.open.read_recursive(), Option::as_ref);
        open.map(|open| MappedRwLockReadGuard::map(open, |open| &open.db)).map_err(|_| StoreError::Rocks {
            path: self.path.clone(),
            doing: "answer",
            message: "it was closed after an error and could not be opened again".to_owned(),
        })
    }

    fn error<'a>(&'a self, doing: &'static str) -> impl Fn(rocksdb::Error) -> StoreError + 'a {
        move |error| StoreError::rocks(&self.path, doing, &error)
    }

    /// Takes in files, all or none. Later files win over earlier ones, and all over what is there. Answers the sequence number
    /// that this has reached: higher than before.
    pub(super) fn ingest(&self, files: &[PathBuf]) -> Result<u64, StoreError> {
        let mut options = IngestExternalFileOptions::default();
        options.set_move_files(true);
        // Iterators of ours may be older than the run; RocksDB gives it a sequence number of its own.
        options.set_snapshot_consistency(true);
        options.set_allow_global_seqno(true);
        options.set_allow_blocking_flush(true);
        let db = self.db()?;
        // With a snapshot held every run gets a sequence number, also one whose keys are new: see `MetaRecord::sequence`.
        let _held = db.snapshot();
        db.ingest_external_file_opts(&options, files.to_vec()).map_err(self.error("ingest a run"))?;
        Ok(db.latest_sequence_number())
    }

    /// Calls `found` with every row in order, of one table from a key on or of all, until it says to stop. `opened` is called once what is to
    /// be seen is settled: runs that are taken in after it are not seen.
    pub(super) fn scan(
        &self,
        table: Option<(u32, u64)>,
        opened: impl FnOnce(),
        mut found: impl FnMut(u32, u64, RowHeader, &[f32]) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        let db = self.db()?;
        let mut rows = db.raw_iterator_opt(scan_options(table));
        opened();
        let mut floats = Vec::new();
        rows.seek_to_first();
        while let Some((key, value)) = rows.item() {
            let DiskKey::Row { table, key } =
                DiskKey::from_bytes(key).map_err(|what| StoreError::corrupt(&self.path, what))?;
            let header = self.decode(table, key, value, &mut floats)?;
            if found(table, key, header, &floats).is_break() {
                return Ok(());
            }
            rows.next();
        }
        rows.status().map_err(self.error("read rows"))
    }

    /// Whether anything of a table is here.
    pub(super) fn has_rows(&self, table: u32) -> Result<bool, StoreError> {
        let db = self.db()?;
        let mut rows = db.raw_iterator_opt(scan_options(Some((table, 0))));
        rows.seek_to_first();
        rows.status().map_err(self.error("read rows"))?;
        Ok(rows.valid())
    }

    /// Calls `found` with the position of each key and its row.
    pub(super) fn get_many(
        &self,
        table: u32,
        keys: &[u64],
        mut found: impl FnMut(usize, Option<(RowHeader, &[f32])>),
    ) -> Result<(), StoreError> {
        const BATCH: usize = 256;
        let db = self.db()?;
        let Some(family) = db.cf_handle(FAMILY) else {
            return Err(StoreError::corrupt(&self.path, "no default column family"));
        };
        let mut floats = Vec::new();
        for (batch, keys) in keys.chunks(BATCH).enumerate() {
            let bytes: Vec<[u8; DiskKey::ROW_BYTES]> =
                keys.iter().map(|&key| DiskKey::Row { table, key }.to_bytes()).collect();
            let values = db.batched_multi_get_cf(&family, &bytes, false);
            for (offset, (value, &key)) in values.into_iter().zip(keys).enumerate() {
                let position = batch * BATCH + offset;
                match value.map_err(self.error("read rows"))? {
                    Some(value) => {
                        let header = self.decode(table, key, &value, &mut floats)?;
                        found(position, Some((header, &floats)));
                    }
                    None => found(position, None),
                }
            }
        }
        Ok(())
    }

    fn decode(
        &self,
        table: u32,
        key: u64,
        value: &[u8],
        floats: &mut Vec<f32>,
    ) -> Result<RowHeader, StoreError> {
        decode_row(value, floats).map_err(|error| {
            StoreError::corrupt(&self.path, format_args!("table {table}, key {key:#018x}: {error}"))
        })
    }

    /// Makes `directory` (which does not exist) a folder of hard links to what is here now.
    pub(super) fn link_to(&self, directory: &Path) -> Result<(), StoreError> {
        let db = self.db()?;
        let checkpoint = Checkpoint::new(&db).map_err(self.error("prepare links"))?;
        checkpoint.create_checkpoint(directory).map_err(self.error("link"))
    }

    /// Drops files that hold nothing but a table's rows. Quick, and leaves the rest to a range tombstone.
    pub(super) fn drop_files_of(&self, table: u32) -> Result<(), StoreError> {
        let (first, end) = DiskKey::table_range(table);
        self.db()?.delete_file_in_range(first, end).map_err(self.error("drop a table's files"))
    }

    /// Files of runs that no compaction has touched yet.
    pub(super) fn level_0_files(&self) -> u64 {
        let text =
            self.db().ok().and_then(|db| db.property_value("rocksdb.num-files-at-level0").ok().flatten());
        text.and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    /// Bytes that compaction has written since the folder was opened first.
    pub(super) fn compacted_bytes(&self) -> u64 {
        let now = self.open.read_recursive().as_ref().map_or(0, Open::compacted_bytes);
        self.compacted_before.load(Ordering::Relaxed) + now
    }

    /// A number that RocksDB keeps; 0 when it has none.
    pub(super) fn number(&self, property: &str) -> u64 {
        self.db().ok().and_then(|db| db.property_int_value(property).ok().flatten()).unwrap_or(0)
    }
}

impl Open {
    fn compacted_bytes(&self) -> u64 {
        self.options.get_ticker_count(Ticker::CompactWriteBytes)
    }
}

/// For reading in order, once: past the cache, with readahead.
fn scan_options(table: Option<(u32, u64)>) -> ReadOptions {
    let mut options = ReadOptions::default();
    options.fill_cache(false);
    options.set_verify_checksums(true);
    options.set_readahead_size(1 << 20);
    options.set_total_order_seek(true);
    if let Some((table, key)) = table {
        let (_, end) = DiskKey::table_range(table);
        options.set_iterate_lower_bound(DiskKey::Row { table, key }.to_bytes());
        options.set_iterate_upper_bound(end);
    }
    options
}

/// As [`open_folder`]; damage when what it has is less than `record` says.
fn open_whole(
    path: &Path,
    shared: &RocksShared,
    create: bool,
    dead: &Dead,
    record: &MetaRecord,
) -> Result<Open, StoreError> {
    // Opening makes another one.
    let current = std::fs::read_to_string(path.join("CURRENT")).unwrap_or_default();
    let opened = open_folder(path, shared, create, dead)?;
    // A MANIFEST that ends in the middle of a record is taken by RocksDB for what a crash leaves, and what stood behind is
    // forgotten without a word.
    let (found, expected) = (opened.db.latest_sequence_number(), record.sequence);
    if found < expected {
        let what = format_args!("it ends at run {found}, {expected} have been taken in: its end is missing");
        return Err(StoreError::corrupt(&path.join(current.trim()), what));
    }
    Ok(opened)
}

fn open_folder(path: &Path, shared: &RocksShared, create: bool, dead: &Dead) -> Result<Open, StoreError> {
    if !create && !path.join("CURRENT").is_file() {
        return Err(StoreError::corrupt(
            path,
            "missing, or not a RocksDB folder, though the meta record names it",
        ));
    }
    // By name, so that batched reads have a handle; it is the only family there is.
    let options = shared.database(create, dead);
    let db = DB::open_cf_with_opts(&options, path, [(FAMILY, options.clone())])
        .map_err(|error| StoreError::rocks(path, "open", &error))?;
    Ok(Open { db, options })
}

impl Drop for Database {
    fn drop(&mut self) {
        drop(self.open.get_mut().take());
        if self.retired.load(Ordering::Acquire)
            && let Err(error) = durable::remove_directory(&self.path)
        {
            // The next open removes it.
            tracing::warn!(%error, "cannot remove a replaced RocksDB folder");
        }
    }
}
