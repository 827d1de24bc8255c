//! The node's log: open, groups, close (signatures first; bodies follow).
#![allow(clippy::todo, missing_docs)]

use super::{Driver, GroupKey, GroupLog, GroupLogState, LogError, LogOptions};
use crate::disk::Disk;
use bytes::Bytes;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The node-wide log; a cheap handle.
#[derive(Debug, Clone)]
pub struct Log {}

/// A group found at recovery.
#[derive(Debug, Clone)]
pub struct RecoveredGroup {
    pub key: GroupKey,
    pub state: GroupLogState,
    pub vote: Option<Bytes>,
    pub committed: Option<Bytes>,
}

/// What opening found.
#[derive(Debug, Clone, Default)]
pub struct Recovery {
    /// The log was created just now. A node with an identity and a fresh log has lost its log: refuse to start.
    pub fresh: bool,
    /// Healthy groups.
    pub groups: Vec<RecoveredGroup>,
    /// These neither vote nor serve; sticky until `Log::forget`. A replica directory in neither list is lost too.
    pub quarantined: Vec<(GroupKey, String)>,
    /// Bytes of a torn tail that were cut.
    pub torn_bytes: u64,
    /// `Durability::Memory` and the operating system restarted uncleanly: every group is in `quarantined`.
    pub boot_changed: bool,
}

/// Counters and sizes at a moment.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogStats {
    pub segments: u64,
    pub disk_bytes: u64,
    pub live_bytes: u64,
    pub cached_bytes: u64,
    pub queued_bytes: u64,
    pub batches: u64,
    pub written_bytes: u64,
    pub syncs: u64,
}

impl Log {
    pub fn open(
        _options: LogOptions,
        _disk: Arc<dyn Disk>,
        _driver: Driver,
    ) -> Result<(Log, Recovery), LogError> {
        todo!()
    }
    /// Creates or opens the log of a replica.
    pub fn group(&self, _group: u64, _replica: u64) -> Result<GroupLog, LogError> {
        todo!()
    }
    /// Forgets a group, quarantined or not; durable when it returns.
    pub fn forget(&self, _key: GroupKey) -> io::Result<()> {
        todo!()
    }
    pub fn queued_bytes(&self) -> u64 {
        todo!()
    }
    pub fn stats(&self) -> LogStats {
        todo!()
    }
    /// How long the write or sync in progress has taken; zero when there is none. A leader on a hung disk steps down.
    pub fn stalled_for(&self) -> Duration {
        todo!()
    }
    /// `Driver::Manual`: commits one batch; false if nothing was queued.
    pub fn pump(&self) -> bool {
        todo!()
    }
    /// `Driver::Manual`: does the background work that is due.
    pub fn housekeep(&self) {
        todo!()
    }
    /// Writes out what is queued, syncs, marks the log as cleanly closed, joins the threads.
    pub fn close(&self) -> Result<(), LogError> {
        todo!()
    }
}
