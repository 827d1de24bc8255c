//! One replica's log: the handle (signatures first; bodies follow).
#![allow(clippy::todo, missing_docs, clippy::new_without_default)]

use super::{Entry, EntryId, GroupKey, GroupLogState};
use bytes::Bytes;
use std::io;
use std::ops::Range;
use std::time::Duration;
use tokio::sync::watch;

/// Called once the operation is durable, or has failed; on the writer's thread, in order, so it must be cheap.
pub type DurableCallback = Box<dyn FnOnce(io::Result<()>) + Send>;

/// One replica's log; a cheap handle.
#[derive(Debug, Clone)]
pub struct GroupLog {}

impl GroupLog {
    /// Which replica's log this is.
    pub fn key(&self) -> GroupKey {
        todo!()
    }
    /// Waits (any runtime) until the writer's queue is below its limit. Await it before `append`.
    pub async fn admitted(&self) {
        todo!()
    }
    /// Appends; readable on return. Must follow the last entry without a gap. Never blocks.
    pub fn append(&self, _entries: Vec<Entry>, _durable: DurableCallback) {
        todo!()
    }
    pub fn save_vote(&self, _vote: Bytes, _durable: DurableCallback) {
        todo!()
    }
    /// The last vote saved (queued ones included).
    pub fn vote(&self) -> Option<Bytes> {
        todo!()
    }
    /// Lazily durable: goes out with the next batch, no callback.
    pub fn save_committed(&self, _committed: Bytes) {
        todo!()
    }
    pub fn committed(&self) -> Option<Bytes> {
        todo!()
    }
    /// Removes `index..`.
    pub fn truncate_from(&self, _index: u64, _durable: DurableCallback) {
        todo!()
    }
    /// Removes `..=id.index` and remembers `id`; may lie beyond the last entry (snapshot installed): then the log is empty.
    pub fn purge_through(&self, _id: EntryId, _durable: DurableCallback) {
        todo!()
    }
    pub fn state(&self) -> GroupLogState {
        todo!()
    }
    /// Term and leader of an entry there is; no disk.
    pub fn entry_id(&self, _index: u64) -> Option<EntryId> {
        todo!()
    }
    /// Whether `read` of this range would go to the disk (then call it off the runtime).
    pub fn needs_disk(&self, _range: Range<u64>) -> bool {
        todo!()
    }
    /// Entries of the range that exist, from its first on, at least one if there is one, then while they fit `bytes_max`.
    pub fn read(&self, _range: Range<u64>, _bytes_max: u64) -> io::Result<Vec<Entry>> {
        todo!()
    }
    pub fn durable_index(&self) -> Option<u64> {
        todo!()
    }
    /// Blocks; true once all up to `index` is durable, false on timeout; error once the log stopped.
    pub fn wait_durable(&self, _index: u64, _timeout: Duration) -> io::Result<bool> {
        todo!()
    }
    /// The durable index as it changes, for async code (works on any runtime).
    pub fn durable_changes(&self) -> watch::Receiver<Option<u64>> {
        todo!()
    }
    /// Log bytes after `index`.
    pub fn bytes_since(&self, _index: u64) -> u64 {
        todo!()
    }
    /// Forgets the group; all handles of it are dead afterwards.
    pub fn destroy(&self, _durable: DurableCallback) {
        todo!()
    }
}
