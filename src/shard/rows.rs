//! A replica's rows, table by table, behind one lock: apply writes, pulls and scans read.
//!
//! Invariants:
//! - every schema of the small state has its table here, and no other has one;
//! - `applied` is the index of the last entry whose changes to rows are all in; it is read under the lock to say what a
//!   pull reflects, and advances only after the rows did.
//!
//! Not here: what changes a row (`apply`), how one is found (`evershard_storage::table`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use evershard_storage::table::{RowHeader, Table};
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::scans::{ScanId, Scans, ScrubResult, ScrubResults};
use crate::apply::ShardScope;
use crate::model::TableSchema;
use crate::read::Digest;

/// Schemas by table number.
pub(crate) type Schemas = BTreeMap<u32, Arc<TableSchema>>;

/// A replica's rows. Shared by apply, readers and scans.
#[derive(Debug)]
pub struct Rows {
    scope: ShardScope,
    set: RwLock<RowSet>,
    /// As in the small state, for the doors: read without a lock.
    schemas: ArcSwap<Schemas>,
    applied: AtomicU64,
    complete_at: AtomicU64,
    scrubs: Mutex<ScrubResults>,
}

/// Rows found on disk whose table is created by an entry that is still to be replayed.
pub(crate) type Orphans = BTreeMap<u32, Vec<(u64, RowHeader, Vec<f32>)>>;

/// The tables, and the scans that are running over them.
#[derive(Debug, Default)]
pub(crate) struct RowSet {
    tables: BTreeMap<u32, Table>,
    orphans: Orphans,
    scans: Scans,
}

/// A row on disk does not fit the table that replay created for it: corruption.
#[derive(Debug, thiserror::Error)]
#[error("row {key:016x} of table {table} on disk has {found} floats, the table has {expected}")]
pub(crate) struct OrphanMisfit {
    table: u32,
    key: u64,
    found: usize,
    expected: usize,
}

/// A table to change, with the scans that must hear of it first.
#[derive(Debug)]
pub(crate) struct TableEntry<'a> {
    pub(crate) table: &'a mut Table,
    pub(crate) scans: &'a mut Scans,
}

impl RowSet {
    pub(crate) fn new(tables: BTreeMap<u32, Table>, orphans: Orphans) -> Self {
        RowSet { tables, orphans, scans: Scans::default() }
    }

    pub(crate) fn table(&self, number: u32) -> Option<&Table> {
        self.tables.get(&number)
    }

    pub(crate) fn tables(&self) -> &BTreeMap<u32, Table> {
        &self.tables
    }

    pub(crate) fn table_mut(&mut self, number: u32) -> Option<TableEntry<'_>> {
        let table = self.tables.get_mut(&number)?;
        Some(TableEntry { table, scans: &mut self.scans })
    }
}

impl Rows {
    pub(crate) fn new(
        scope: ShardScope,
        set: RowSet,
        schemas: Arc<Schemas>,
        applied: u64,
        complete_at: u64,
    ) -> Self {
        Rows {
            scope,
            set: RwLock::new(set),
            schemas: ArcSwap::new(schemas),
            applied: AtomicU64::new(applied),
            complete_at: AtomicU64::new(complete_at),
            scrubs: Mutex::default(),
        }
    }

    /// The shard's number and range.
    #[must_use]
    pub fn scope(&self) -> ShardScope {
        self.scope
    }

    /// The tables as of the last applied entry.
    #[must_use]
    pub fn schemas(&self) -> Arc<BTreeMap<u32, Arc<TableSchema>>> {
        self.schemas.load_full()
    }

    /// The last entry whose changes are in the rows; 0 before the first.
    #[must_use]
    pub fn applied(&self) -> u64 {
        self.applied.load(Ordering::Acquire)
    }

    /// False while rows may hold entries that are not applied yet: nothing is served then (design 5).
    #[must_use]
    pub fn ready(&self) -> bool {
        self.applied() >= self.complete_at()
    }

    pub(crate) fn complete_at(&self) -> u64 {
        self.complete_at.load(Ordering::Acquire)
    }

    pub(crate) fn set_applied(&self, index: u64) {
        self.applied.store(index, Ordering::Release);
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, RowSet> {
        self.set.read()
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, RowSet> {
        self.set.write()
    }

    /// Makes an empty table, or takes in the rows that a flush before a crash wrote for it.
    pub(crate) fn create_table(
        &self,
        schema: &TableSchema,
        schemas: &Arc<Schemas>,
    ) -> Result<(), OrphanMisfit> {
        let mut table = Table::new(schema.shape());
        let mut set = self.set.write();
        for (key, header, floats) in set.orphans.remove(&schema.number()).unwrap_or_default() {
            let expected = schema.shape().floats();
            if !header.is_tombstone() && floats.len() != expected {
                return Err(OrphanMisfit { table: schema.number(), key, found: floats.len(), expected });
            }
            table.load(key, header, &floats);
        }
        set.tables.insert(schema.number(), table);
        self.schemas.store(Arc::clone(schemas));
        Ok(())
    }

    pub(crate) fn drop_table(&self, number: u32, schemas: &Arc<Schemas>) {
        let dropped = {
            let mut set = self.set.write();
            self.schemas.store(Arc::clone(schemas));
            let table = set.tables.remove(&number);
            if let Some(table) = &table {
                set.scans.before_drop(number, table);
            }
            table
        };
        // Gigabytes may be given back to the kernel: not under the lock.
        drop(dropped);
    }

    /// Puts other rows in the place of all there are (a snapshot was installed). Running scans are over.
    pub(crate) fn replace(&self, set: RowSet, schemas: Arc<Schemas>, applied: u64, complete_at: u64) {
        let old = {
            let mut current = self.set.write();
            self.scrubs.lock().skip_all(current.scans.running());
            self.schemas.store(schemas);
            // Not ready in between: the higher one first.
            self.complete_at.store(complete_at.max(applied), Ordering::Release);
            self.applied.store(applied, Ordering::Release);
            self.complete_at.store(complete_at, Ordering::Release);
            std::mem::replace(&mut *current, set)
        };
        drop(old);
    }

    /// Begins a digest of the state as of `index`, the entry just applied, from that of what is beside the rows. A replica
    /// that holds rows from behind it skips it.
    pub(crate) fn begin_scan(&self, id: ScanId, index: u64, beside: Digest) {
        if index <= self.complete_at() {
            self.scrubs.lock().put(id, ScrubResult::Skipped);
        } else {
            self.begin_scan_now(id, index, beside);
        }
    }

    /// As [`Rows::begin_scan`], when the caller knows that no row is ahead of `index`.
    pub(crate) fn begin_scan_now(&self, id: ScanId, index: u64, beside: Digest) {
        let mut set = self.set.write();
        let mut scrubs = self.scrubs.lock();
        if !set.scans.begin(id, index, beside) {
            scrubs.put(id, ScrubResult::Skipped);
        } else {
            scrubs.put(id, ScrubResult::Pending);
        }
    }

    /// True while a scan runs.
    pub(crate) fn has_scans(&self) -> bool {
        !self.set.read().scans.running().is_empty()
    }

    /// Scans some rows for every running scrub; false when there is nothing to scan. Holds the lock for reading, briefly.
    pub(crate) fn scan_slice(&self, rows_max: usize) -> bool {
        let set = self.set.read();
        let (more, done) = set.scans.scan(&set.tables, rows_max);
        if !done.is_empty() {
            let mut scrubs = self.scrubs.lock();
            for (id, result) in done {
                scrubs.put(id, result);
            }
        }
        more
    }

    /// What became of a scan; `None` when it never began here, or is forgotten (the last 16 are kept).
    pub(crate) fn scan_result(&self, id: ScanId) -> Option<ScrubResult> {
        self.scrubs.lock().get(id)
    }
}
