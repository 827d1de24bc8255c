//! What no reader and no replay can need any more is forgotten when its files are compacted: old tombstones, and rows of
//! tables that were cleared.
//!
//! A tombstone keeps replay from bringing a removed row back (design 4, rule 6). Replay begins behind `replay_from`, so one whose
//! version is not above it keeps nothing back: an absent row says the same. A row below its table's floor is no row as of the
//! entry that cleared the table, and replay begins behind that too.
//!
//! A checkpoint's delta says what was removed since the one before it, so tombstones above that one's cut are kept too.
//!
//! Invariant: what is compared with is of a record that is durable, and names these files, or of an older one.
//!
//! Not here: tombstones in memory, and who knows the floors (the server).

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;
use rocksdb::CompactionDecision;
use rocksdb::compaction_filter::CompactionFilter;
use rocksdb::compaction_filter_factory::{CompactionFilterContext, CompactionFilterFactory};

use crate::codec::{row_version, tombstone_version};
use crate::keyspace::DiskKey;

const NAME: &CStr = c"evershard.dead_rows";

/// By table, the version below which its rows are none.
type Floors = Arc<BTreeMap<u32, u64>>;

/// How far replay is past, and which rows are none; shared by a database's compactions.
#[derive(Debug, Clone, Default)]
pub(super) struct Dead {
    replayed_to: Arc<AtomicU64>,
    /// Tombstones above it are kept: all, until somebody says what the next checkpoint needs.
    kept_above: Arc<AtomicU64>,
    floors: Arc<RwLock<Floors>>,
}

impl Dead {
    pub(super) fn set_replayed_to(&self, index: u64) {
        self.replayed_to.store(index, Ordering::Release);
    }

    pub(super) fn set_kept_above(&self, index: Option<u64>) {
        self.kept_above.store(index.unwrap_or(u64::MAX), Ordering::Release);
    }

    pub(super) fn set_floors(&self, floors: &BTreeMap<u32, u64>) {
        if **self.floors.read() != *floors {
            *self.floors.write() = Arc::new(floors.clone());
        }
    }
}

/// Makes a filter a compaction.
#[derive(Debug)]
pub(super) struct DeadRows(pub(super) Dead);

impl CompactionFilterFactory for DeadRows {
    type Filter = Filter;

    fn create(&mut self, _: CompactionFilterContext) -> Filter {
        let Dead { replayed_to, kept_above, floors } = &self.0;
        // In this order: what is kept is told before a record is that no longer needs the rest.
        let replayed_to = replayed_to.load(Ordering::Acquire);
        let forgotten_to = replayed_to.min(kept_above.load(Ordering::Acquire));
        Filter { forgotten_to, floors: Arc::clone(&floors.read()) }
    }

    fn name(&self) -> &CStr {
        NAME
    }
}

/// One compaction's.
#[derive(Debug)]
pub(super) struct Filter {
    /// Tombstones up to this version go.
    forgotten_to: u64,
    floors: Floors,
}

impl Filter {
    fn is_cleared(&self, key: &[u8], value: &[u8]) -> bool {
        let Ok(DiskKey::Row { table, .. }) = DiskKey::from_bytes(key) else { return false };
        let floor = self.floors.get(&table);
        floor.is_some_and(|floor| row_version(value).is_some_and(|version| version < *floor))
    }
}

impl CompactionFilter for Filter {
    fn filter(&mut self, _level: u32, key: &[u8], value: &[u8]) -> CompactionDecision {
        let is_old = tombstone_version(value).is_some_and(|version| version <= self.forgotten_to);
        if is_old || (!self.floors.is_empty() && self.is_cleared(key, value)) {
            // RocksDB leaves a deletion in its place where older files may have the row.
            return CompactionDecision::Remove;
        }
        CompactionDecision::Keep
    }

    fn name(&self) -> &CStr {
        NAME
    }
}
