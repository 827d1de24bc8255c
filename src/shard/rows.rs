//! A replica's rows, table by table, behind one lock: apply writes, pulls and scans read.
//!
//! Invariants:
//! - every schema of the small state has its table here, and no other has one;
//! - `applied` is the index of the last entry whose changes to rows are all in; it is read under the lock to say what a
//!   pull reflects, and advances only after the rows did;
//! - a row that is not in memory is in the store as it is; what the store has below its table's floor is no row;
//! - what is in memory is counted against the node's budget.
//!
//! Not here: what changes a row (`apply`), how one is found (`evershard_storage::table`), reading the store (`cold`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use evershard_storage::rocks::ReplicaStore;
use evershard_storage::table::{RowHeader, Slot, Table};
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::cold::{ColdCounts, rows_a_lock};
use super::cut::CutCopies;
use super::error::ShardError;
use super::scans::{ScanId, Scans, ScrubResult, ScrubResults, SkipReason};
use crate::apply::ShardScope;
use crate::memory::{Account, MemoryBudget};
use crate::model::TableSchema;
use crate::read::Digest;

/// Schemas by table number.
pub(crate) type Schemas = BTreeMap<u32, Arc<TableSchema>>;

/// By table that was cleared, the entry that did it: rows of lower versions are no rows.
pub(crate) type Floors = BTreeMap<u32, u64>;

/// Called with the reason when the store turns out to be damaged.
pub type OnDamage = Arc<dyn Fn(String) + Send + Sync>;

/// Rows that leave at a time, so that the next few find room; fewer of wide ones.
const EVICTED_AT_ONCE: usize = 64;
/// Slots of each table that one turn of the sweeper looks at.
const SWEPT_AT_ONCE: u32 = 1 << 16;
/// Slots that giving memory back looks at under one taking of the lock.
const GIVEN_BACK_AT_ONCE: u32 = 1 << 12;

/// A replica's rows. Shared by apply, readers and scans.
pub struct Rows {
    scope: ShardScope,
    set: RwLock<RowSet>,
    /// As in the small state, for the doors: read without a lock.
    schemas: ArcSwap<Schemas>,
    applied: AtomicU64,
    complete_at: AtomicU64,
    scrubs: Mutex<ScrubResults>,
    store: Arc<ReplicaStore>,
    budget: Arc<MemoryBudget>,
    lacking: Arc<AtomicBool>,
    cold_counts: ColdCounts,
    on_damage: Option<OnDamage>,
    damaged: AtomicBool,
}

impl std::fmt::Debug for Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rows").field("scope", &self.scope).field("store", &self.store).finish_non_exhaustive()
    }
}

/// The tables, and the scans that are running over them.
#[derive(Debug)]
pub(crate) struct RowSet {
    tables: BTreeMap<u32, Table>,
    scans: Scans,
    /// As in the small state.
    floors: Floors,
    account: Account,
    /// Whether some table is not whole: as of the last [`RowSet::account`].
    lacking: Arc<AtomicBool>,
    /// Grows when other rows take the place of all there were.
    generation: u64,
    /// Rows of tables that are not whole, as of a scan: how many there were, and the table's `live_changes` then.
    counted: BTreeMap<u32, (u64, i64)>,
}

/// A table to change, with the scans that must hear of it first.
#[derive(Debug)]
pub(crate) struct TableEntry<'a> {
    pub(crate) table: &'a mut Table,
    pub(crate) scans: &'a mut Scans,
    number: u32,
    budget: &'a MemoryBudget,
}

impl TableEntry<'_> {
    /// Whether so many rows more find a place within the budget, and none has to go for them.
    pub(crate) fn has_room(&self, rows: usize) -> bool {
        let grow = rows.saturating_sub(self.table.free_slots() as usize);
        grow == 0 || self.budget.has_room_for(grow as u64 * self.table.row_bytes() as u64)
    }

    /// Lets go of rows until so many others find a place within the budget, if there are rows that can go.
    pub(crate) fn make_room(&mut self, rows: usize) {
        if !self.has_room(rows) {
            let grow = rows - self.table.free_slots() as usize;
            let at_once = grow.max(rows_a_lock(EVICTED_AT_ONCE, self.table.shape()));
            self.evict(u32::try_from(at_once).unwrap_or(u32::MAX), u32::MAX);
        }
    }

    /// Lets go of rows that are not used, looking at so many slots at the most.
    fn evict(&mut self, rows: u32, slots_max: u32) -> u32 {
        let (scans, number) = (&mut *self.scans, self.number);
        self.table.evict(rows, slots_max, |slot, key, row| scans.before_leave(number, slot, key, row))
    }

    /// Leaves a tombstone in the place of what is there, with the version of the entry that removes it.
    pub(crate) fn bury(&mut self, number: u32, slot: Slot, key: u64, version: u64) {
        self.scans.before_change(number, slot, key, self.table.row(slot));
        let mut row = self.table.row_mut(slot);
        row.floats_mut().fill(0.0);
        *row.header_mut() = RowHeader { version, steps: 0, flags: RowHeader::TOMBSTONE };
    }

    /// Forgets a tombstone that replay does not need any more and that the store has.
    pub(crate) fn forget_tombstone(&mut self, key: u64) {
        if let Some(slot) = self.table.find_slot(key)
            && self.table.row(slot).is_tombstone()
        {
            self.scans.before_leave(self.number, slot, key, self.table.row(slot));
            self.table.remove_entry(key);
        }
    }
}

impl RowSet {
    fn new(
        (tables, floors): (BTreeMap<u32, Table>, Floors),
        budget: &Arc<MemoryBudget>,
        lacking: &Arc<AtomicBool>,
    ) -> Self {
        let mut set = RowSet {
            tables,
            floors,
            scans: Scans::default(),
            account: Account::new(Arc::clone(budget)),
            lacking: Arc::clone(lacking),
            generation: 0,
            counted: BTreeMap::new(),
        };
        set.account();
        set
    }

    pub(crate) fn table(&self, number: u32) -> Option<&Table> {
        self.tables.get(&number)
    }

    /// Rows of this table with a lower version are no rows; 0 when it was never cleared.
    pub(crate) fn floor(&self, number: u32) -> u64 {
        self.floors.get(&number).copied().unwrap_or(0)
    }

    pub(crate) fn tables(&self) -> &BTreeMap<u32, Table> {
        &self.tables
    }

    /// Whether what the store holds now must stay in it until a scan has opened it.
    pub(crate) fn scans_need_the_store(&self) -> bool {
        self.scans.any_unviewed()
    }

    pub(super) fn scans(&self) -> &Scans {
        &self.scans
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    pub(crate) fn table_mut(&mut self, number: u32) -> Option<TableEntry<'_>> {
        let table = self.tables.get_mut(&number)?;
        Some(TableEntry { table, scans: &mut self.scans, number, budget: self.account.budget() })
    }

    /// Counts what is in memory now: after rows or tables came or went.
    pub(crate) fn account(&mut self) {
        self.account.set(self.tables.values().map(|table| table.memory_bytes() as u64).sum());
        self.lacking.store(self.tables.values().any(|table| !table.is_whole()), Ordering::Relaxed);
    }

    /// A scan counted the rows of a table: so many when `live_changes` was as given.
    pub(super) fn set_counted(&mut self, number: u32, rows: u64, live_changes: i64) {
        if self.tables.contains_key(&number) {
            self.counted.insert(number, (rows, live_changes));
        }
    }

    /// Live rows of a table, in memory and on disk; `None` until they were counted.
    pub(crate) fn live_rows(&self, number: u32) -> Option<u64> {
        let table = self.tables.get(&number)?;
        if table.is_whole() {
            return Some(table.len());
        }
        let (rows, live_changes) = self.counted.get(&number)?;
        Some(rows.saturating_add_signed(table.live_changes() - live_changes))
    }
}

impl Rows {
    pub(crate) fn new(
        scope: ShardScope,
        tables: (BTreeMap<u32, Table>, Floors),
        schemas: Arc<Schemas>,
        (applied, complete_at): (u64, u64),
        store: Arc<ReplicaStore>,
        (budget, on_damage): (Arc<MemoryBudget>, Option<OnDamage>),
    ) -> Self {
        let lacking = Arc::default();
        Rows {
            scope,
            set: RwLock::new(RowSet::new(tables, &budget, &lacking)),
            schemas: ArcSwap::new(schemas),
            applied: AtomicU64::new(applied),
            complete_at: AtomicU64::new(complete_at),
            scrubs: Mutex::default(),
            store,
            budget,
            lacking,
            cold_counts: ColdCounts::default(),
            on_damage,
            damaged: AtomicBool::new(false),
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

    /// The node's budget.
    #[must_use]
    pub fn budget(&self) -> &Arc<MemoryBudget> {
        &self.budget
    }

    /// Whether some table is not whole, so that a row may have to be read from disk. Without a lock: a hint.
    pub(crate) fn may_lack_rows(&self) -> bool {
        self.lacking.load(Ordering::Relaxed)
    }

    /// How pushes came by rows that were on disk only.
    #[must_use]
    pub fn cold_counts(&self) -> &ColdCounts {
        &self.cold_counts
    }

    pub(crate) fn complete_at(&self) -> u64 {
        self.complete_at.load(Ordering::Acquire)
    }

    pub(crate) fn set_applied(&self, index: u64) {
        self.applied.store(index, Ordering::Release);
    }

    pub(crate) fn store(&self) -> &ReplicaStore {
        &self.store
    }

    /// Tells whoever looks after the replica that its store is damaged, once. Other errors may pass.
    pub(crate) fn report(&self, error: &ShardError) {
        if !error.is_damage() {
            tracing::warn!(%error, "reading the store failed");
        } else if !self.damaged.swap(true, Ordering::AcqRel) {
            tracing::error!(%error, "the store is damaged");
            if let Some(on_damage) = &self.on_damage {
                on_damage(error.to_string());
            }
        }
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, RowSet> {
        self.set.read()
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, RowSet> {
        self.set.write()
    }

    /// Makes a table, empty and whole. A flush before a crash may have written rows for it that the store's record does not know
    /// of yet: whoever replays the entry that makes the table replays all of its rows too, and serves nobody meanwhile.
    pub(crate) fn create_table(&self, schema: &TableSchema, schemas: &Arc<Schemas>) {
        {
            let mut set = self.set.write();
            set.tables.insert(schema.number(), Table::new(schema.shape()));
            set.account();
        }
        self.schemas.store(Arc::clone(schemas));
    }

    /// Other hyper-parameters for tables that stay as they are, rows and all.
    pub(crate) fn set_schemas(&self, schemas: &Arc<Schemas>) {
        self.schemas.store(Arc::clone(schemas));
    }

    pub(crate) fn drop_table(&self, number: u32, schemas: &Arc<Schemas>) {
        let dropped = {
            let mut set = self.set.write();
            self.schemas.store(Arc::clone(schemas));
            set.counted.remove(&number);
            set.floors.remove(&number);
            let table = set.tables.remove(&number).map(Arc::new);
            if let Some(table) = &table {
                set.scans.keep_dropped(number, table);
            }
            set.account();
            table
        };
        // Gigabytes may be given back to the kernel: not under the lock.
        drop(dropped);
    }

    /// All rows of a table below the entry at `index` are gone. Rows above it can be on disk only while this replica replays:
    /// those in memory came from there and are clean, so the whole table in memory goes, however many rows it has.
    pub(crate) fn clear_table(&self, number: u32, index: u64) {
        let cleared = {
            let mut set = self.set.write();
            let RowSet { tables, scans, floors, counted, .. } = &mut *set;
            let Some(table) = tables.get_mut(&number) else { return };
            floors.insert(number, index);
            counted.remove(&number);
            let shape = table.shape();
            let is_replaying = self.complete_at() >= index;
            let empty = if is_replaying { Table::on_disk(shape) } else { Table::new(shape) };
            let cleared = Arc::new(std::mem::replace(table, empty));
            for id in scans.keep_cleared(number, &cleared) {
                self.scrubs.lock().put(id, ScrubResult::Skipped(SkipReason::Cleared));
            }
            set.account();
            cleared
        };
        // Gigabytes may be given back to the kernel: not under the lock.
        drop(cleared);
    }

    /// Puts other rows in the place of all there are (a snapshot was installed). Running scans are over.
    pub(crate) fn replace(
        &self,
        tables: (BTreeMap<u32, Table>, Floors),
        schemas: Arc<Schemas>,
        applied: u64,
        complete_at: u64,
    ) {
        let mut set = RowSet::new(tables, &self.budget, &self.lacking);
        let old = {
            let mut current = self.set.write();
            self.scrubs.lock().skip_all(current.scans.running());
            self.schemas.store(schemas);
            // Not ready in between: the higher one first.
            self.complete_at.store(complete_at.max(applied), Ordering::Release);
            self.applied.store(applied, Ordering::Release);
            self.complete_at.store(complete_at, Ordering::Release);
            set.generation = current.generation + 1;
            std::mem::replace(&mut *current, set)
        };
        drop(old);
    }

    /// Lets go of up to so many clean rows of each table, whatever the budget and however they are used; answers how many went.
    /// For operators and tests: rows come back on use.
    pub fn let_go(&self, rows_per_table: u32) -> u64 {
        // A row that is used all the time outlasts this many turns less one.
        const TURNS: u32 = 4;
        let numbers: Vec<u32> = self.read().tables.keys().copied().collect();
        let mut gone = 0;
        for number in numbers {
            let mut set = self.write();
            if let Some(mut entry) = set.table_mut(number) {
                let mut left = rows_per_table;
                for _ in 0..TURNS {
                    left -= entry.evict(left, u32::MAX);
                }
                gone += u64::from(rows_per_table - left);
            }
            set.account();
        }
        gone
    }

    /// One turn of the sweeper: see `crate::memory`.
    pub(crate) fn sweep(&self) {
        let numbers: Vec<u32> = self.read().tables.keys().copied().collect();
        for number in numbers {
            let mut set = self.write();
            let Some(mut entry) = set.table_mut(number) else { continue };
            let slots = entry.table.slots();
            // What is free already is enough for what comes; a hundredth of the table goes at a time.
            if entry.table.free_slots() <= slots / 16 {
                entry.evict((slots / 100).max(1), SWEPT_AT_ONCE);
            }
            let piece = entry.table.slots_per_piece();
            if entry.table.free_slots() > 2 * piece {
                let (scans, table) = (entry.scans, entry.table);
                table.give_back(GIVEN_BACK_AT_ONCE, |slot, key, row| {
                    scans.before_leave(number, slot, key, row)
                });
            }
            set.account();
        }
    }

    /// Begins a digest of the state as of `index`, the entry just applied, from that of what is beside the rows. A replica
    /// that holds rows from behind it skips it.
    pub(crate) fn begin_scan(&self, id: ScanId, index: u64, beside: Digest) {
        if index <= self.complete_at() {
            self.scrubs.lock().put(id, ScrubResult::Skipped(SkipReason::Replaying));
        } else {
            self.begin_scan_now(id, index, beside);
        }
    }

    /// As [`Rows::begin_scan`], when the caller knows that no row is ahead of `index`.
    pub(crate) fn begin_scan_now(&self, id: ScanId, index: u64, beside: Digest) {
        let begun = self.begin_scan_of(id, index, (beside, None));
        let result = if begun { ScrubResult::Pending } else { ScrubResult::Skipped(SkipReason::Busy) };
        self.scrubs.lock().put(id, result);
    }

    /// Begins to keep the state as of a cut, the entry at `index` just applied. Its ticket runs the scan.
    pub(crate) fn begin_cut(&self, checkpoint: u64, index: u64, above: u64) -> Result<(), SkipReason> {
        if index <= self.complete_at() {
            return Err(SkipReason::Replaying);
        }
        let copies = Some(CutCopies::above(above));
        let begun = self.begin_scan_of(ScanId::Cut(checkpoint), index, (Digest::default(), copies));
        if begun { Ok(()) } else { Err(SkipReason::Busy) }
    }

    fn begin_scan_of(&self, id: ScanId, index: u64, of: (Digest, Option<CutCopies>)) -> bool {
        let mut set = self.set.write();
        let RowSet { tables, scans, floors, .. } = &mut *set;
        scans.begin(id, index, of, (&*tables, &*floors))
    }

    /// True while a scan waits for somebody to run it.
    pub(crate) fn has_scans(&self) -> bool {
        self.set.read().scans.any_unviewed()
    }

    pub(super) fn put_scan_result(&self, id: ScanId, result: ScrubResult) {
        self.scrubs.lock().put(id, result);
    }

    /// What became of a scan; `None` when it never began here, or is forgotten (the last 16 are kept).
    pub(crate) fn scan_result(&self, id: ScanId) -> Option<ScrubResult> {
        self.scrubs.lock().get(id)
    }
}
