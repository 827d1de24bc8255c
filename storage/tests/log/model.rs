//! What a log must hold, in the simplest way to say it; and how to open one on a simulated disk.

use bytes::Bytes;
use evershard_storage::disk::Disk;
use evershard_storage::log::{
    Driver, Durability, DurableCallback, Entry, EntryId, GroupKey, Log, LogError, LogOptions, Recovery,
};
use evershard_storage::testing::SimDisk;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) const DIRECTORY: &str = "/data/log";

/// One group's log.
#[derive(Clone, Default, PartialEq)]
pub(crate) struct ModelGroup {
    pub(crate) entries: BTreeMap<u64, Entry>,
    pub(crate) purged: Option<EntryId>,
    pub(crate) vote: Option<Bytes>,
    pub(crate) committed: Option<Bytes>,
}

impl ModelGroup {
    pub(crate) fn next(&self) -> u64 {
        let last = self.entries.keys().next_back().copied();
        last.or(self.purged.map(|purged| purged.index)).map_or(0, |last| last + 1)
    }
}

impl fmt::Debug for ModelGroup {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries = self.entries.values();
        let entries: Vec<_> =
            entries.map(|entry| format!("{}:{}:{}", entry.index, entry.term, entry.payload.len())).collect();
        let purged = self.purged.map(|purged| purged.index);
        write!(formatter, "{entries:?} purged {purged:?} vote {:?} committed {:?}", self.vote, self.committed)
    }
}

pub(crate) type Model = BTreeMap<GroupKey, ModelGroup>;

/// Small segments, so that a test sees many; failures are counted, not fatal.
pub(crate) fn options(fatal: &Arc<AtomicU64>) -> LogOptions {
    let fatal = fatal.clone();
    LogOptions {
        segment_bytes: 4096,
        cache_bytes: 2000,
        durability: Durability::Fsync,
        boot_id: "boot-1".to_owned(),
        on_fatal: Arc::new(move |_, _| {
            fatal.fetch_add(1, Ordering::SeqCst);
        }),
        ..LogOptions::new(DIRECTORY)
    }
}

pub(crate) fn open(disk: &SimDisk, driver: Driver) -> Result<(Log, Recovery), LogError> {
    open_with(options(&Arc::default()), disk, driver)
}

pub(crate) fn open_with(
    options: LogOptions,
    disk: &SimDisk,
    driver: Driver,
) -> Result<(Log, Recovery), LogError> {
    let disk: Arc<dyn Disk> = Arc::new(disk.clone());
    Log::open(options, disk, driver)
}

/// What the log's healthy groups hold, every entry read.
pub(crate) fn contents(log: &Log, recovery: &Recovery) -> Model {
    let mut model = Model::new();
    for found in &recovery.groups {
        let group = log.group(found.key.group, found.key.replica).unwrap();
        let state = group.state();
        let next = state.last.map_or(0, |last| last.index + 1);
        let mut entries = BTreeMap::new();
        let mut index = state.first;
        while index < next {
            for entry in group.read(index..next, 300).unwrap() {
                assert_eq!(entry.index, index);
                assert_eq!(group.entry_id(index), Some(entry.id()));
                entries.insert(index, entry);
                index += 1;
            }
        }
        let (vote, committed) = (group.vote(), group.committed());
        model.insert(found.key, ModelGroup { entries, purged: state.last_purged, vote, committed });
    }
    model
}

pub(crate) fn entry(index: u64, term: u64, payload: &[u8]) -> Entry {
    Entry { index, term, leader: term + 100, kind: 3, time_ms: 7, payload: Bytes::copy_from_slice(payload) }
}

/// A callback that counts.
pub(crate) fn count(counter: &Arc<AtomicU64>) -> DurableCallback {
    let counter = counter.clone();
    Box::new(move |result| {
        if result.is_ok() {
            counter.fetch_add(1, Ordering::SeqCst);
        }
    })
}

/// A callback that must not fail.
pub(crate) fn ok() -> DurableCallback {
    Box::new(|result| result.unwrap())
}

/// The segment files, oldest first.
pub(crate) fn segments(disk: &SimDisk) -> Vec<std::path::PathBuf> {
    let is_segment = |path: &std::path::PathBuf| path.extension().is_some_and(|extension| extension == "log");
    disk.files().into_iter().filter(is_segment).collect()
}

pub(crate) fn floor() -> &'static Path {
    Path::new("/data/log/floor")
}
