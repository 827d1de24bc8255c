//! Tombstones that no replay can need any more are forgotten when their files are compacted.
//!
//! A tombstone keeps replay from bringing a removed row back (design 4, rule 6). Replay begins behind `replay_from`, so one whose
//! version is not above it keeps nothing back: an absent row says the same.
//!
//! Invariant: what is compared with is a `replay_from` that is durable, of the record that names these files or an older one.
//!
//! Not here: tombstones in memory (the server's flush).

use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rocksdb::CompactionDecision;
use rocksdb::compaction_filter::CompactionFilter;
use rocksdb::compaction_filter_factory::{CompactionFilterContext, CompactionFilterFactory};

use crate::codec::tombstone_version;

const NAME: &CStr = c"evershard.old_tombstones";

/// How far replay is past; shared by a database's compactions.
#[derive(Debug, Clone, Default)]
pub(super) struct ReplayedTo(Arc<AtomicU64>);

impl ReplayedTo {
    pub(super) fn set(&self, index: u64) {
        self.0.store(index, Ordering::Release);
    }
}

/// Makes a filter a compaction.
#[derive(Debug)]
pub(super) struct OldTombstones(pub(super) ReplayedTo);

impl CompactionFilterFactory for OldTombstones {
    type Filter = Filter;

    fn create(&mut self, _: CompactionFilterContext) -> Filter {
        Filter { replayed_to: self.0.0.load(Ordering::Acquire) }
    }

    fn name(&self) -> &CStr {
        NAME
    }
}

/// One compaction's.
#[derive(Debug)]
pub(super) struct Filter {
    replayed_to: u64,
}

impl CompactionFilter for Filter {
    fn filter(&mut self, _level: u32, _key: &[u8], value: &[u8]) -> CompactionDecision {
        match tombstone_version(value) {
            // RocksDB leaves a deletion in its place where older files may have the row.
            Some(version) if version <= self.replayed_to => CompactionDecision::Remove,
            _ => CompactionDecision::Keep,
        }
    }

    fn name(&self) -> &CStr {
        NAME
    }
}
