//! How a node's log is to be run.
//!
//! Not here: reading these from a configuration file (the server's), the groups.

use super::LogError;
use crate::disk::{FatalHandler, stop_process};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// When an append counts as done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// After `fdatasync`: survives a power cut.
    #[default]
    Fsync,
    /// After `write(2)`: survives `kill -9`. Synced in the background; after an unclean restart of the operating
    /// system every group of the log is quarantined.
    Memory,
}

/// Who runs the writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Driver {
    /// Production: one thread writes, one does the background work.
    #[default]
    Threaded,
    /// The owner calls `Log::pump`, which commits one batch (and `Log::housekeep` for the background work).
    Manual,
    /// Every call commits what is queued, and does the background work, before it returns.
    Inline,
}

/// How a node's log is to be run.
#[derive(Clone)]
pub struct LogOptions {
    /// Where the segments are.
    pub directory: PathBuf,
    /// A segment that has grown this long is followed by a new one.
    pub segment_bytes: u64,
    /// Recent entries kept in memory, over all groups. Entries that are not durable yet are kept beyond it.
    pub cache_bytes: u64,
    /// Bytes in the writer's queue from which `GroupLog::admitted` waits.
    pub queue_bytes_max: u64,
    /// Bytes taken into one batch, and so into one sync.
    pub batch_bytes_max: u64,
    /// When an append counts as done.
    pub durability: Durability,
    /// With `Durability::Memory`: how long written bytes may stay unsynced.
    pub sync_interval: Duration,
    /// Identifies this run of the operating system. See [`system_boot_id`].
    pub boot_id: String,
    /// Refuse to open when there is no log, instead of creating one: replicas are known to have been here.
    pub must_exist: bool,
    /// Called once, when a write or a sync failed.
    pub on_fatal: FatalHandler,
}

impl LogOptions {
    /// The defaults for a log in `directory`: fsync, and a failed write or sync ends the process.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        LogOptions {
            directory: directory.into(),
            segment_bytes: 64 << 20,
            cache_bytes: 64 << 20,
            queue_bytes_max: 64 << 20,
            batch_bytes_max: 8 << 20,
            durability: Durability::Fsync,
            sync_interval: Duration::from_millis(5),
            boot_id: system_boot_id(),
            must_exist: false,
            on_fatal: Arc::new(stop_process),
        }
    }

    /// Refuses what cannot work.
    pub fn validate(&self) -> Result<(), LogError> {
        let refuse = |field, reason| Err(LogError::InvalidOption { field, reason });
        if self.segment_bytes < 1024 {
            return refuse("segment_bytes", "a segment has at least 1024 bytes");
        }
        if self.batch_bytes_max == 0 {
            return refuse("batch_bytes_max", "a batch has at least one byte");
        }
        if self.queue_bytes_max == 0 {
            return refuse("queue_bytes_max", "the queue holds at least one byte");
        }
        if self.boot_id.len() > 64 {
            return refuse("boot_id", "a boot id has at most 64 bytes");
        }
        Ok(())
    }
}

impl fmt::Debug for LogOptions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("LogOptions")
            .field("directory", &self.directory)
            .field("segment_bytes", &self.segment_bytes)
            .field("cache_bytes", &self.cache_bytes)
            .field("queue_bytes_max", &self.queue_bytes_max)
            .field("batch_bytes_max", &self.batch_bytes_max)
            .field("durability", &self.durability)
            .field("sync_interval", &self.sync_interval)
            .field("boot_id", &self.boot_id)
            .field("must_exist", &self.must_exist)
            .finish_non_exhaustive()
    }
}

/// This run of the operating system, as the kernel names it; empty where it does not.
pub fn system_boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}
