//! What a flush needs to know of the log.

use std::time::Duration;

use evershard_storage::log::GroupLog;

/// A group's log, as a flush sees it.
pub trait DurableIndex: Send + Sync {
    /// Blocks until every entry up to `index` is durable on this node; false when it gives up, because the log is slow or
    /// has ended.
    fn wait_durable(&self, index: u64) -> bool;

    /// Bytes of log behind `index`: what a restart would replay if nothing was flushed after it.
    fn bytes_since(&self, index: u64) -> u64;

    /// How long the node's log has kept its disk busy, all in all.
    fn disk_time(&self) -> Duration {
        Duration::ZERO
    }

    /// Called between two batches of rows, with no lock of the rows held: the place to hold a flush back, and, in tests, to
    /// apply entries in the middle of one. The cycle has written so many bytes by then.
    fn pace(&self, _written: u64) {}
}

/// How long a cycle waits for the log before it is put off.
const PATIENCE: Duration = Duration::from_secs(10);

impl DurableIndex for GroupLog {
    fn wait_durable(&self, index: u64) -> bool {
        GroupLog::wait_durable(self, index, PATIENCE).unwrap_or_else(|error| {
            tracing::warn!(%error, "the log has ended, nothing is flushed any more");
            false
        })
    }

    fn bytes_since(&self, index: u64) -> u64 {
        GroupLog::bytes_since(self, index)
    }

    fn disk_time(&self) -> Duration {
        GroupLog::disk_time(self)
    }
}
