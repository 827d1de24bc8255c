//! A group's log in memory, shared between its callers and the writer: the index behind its lock, and who waits.
//!
//! Invariants:
//! - The lock is never held over I/O, nor while a callback runs.
//! - Whoever changes the index and queues the operation does both under the lock: the queue has the group's order.
//!
//! Not here: what the operations mean (`group_index`), the handle (`group_log`).

use super::GroupKey;
use super::group_index::GroupIndex;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// A group's log in memory.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) key: GroupKey,
    index: Mutex<GroupIndex>,
    changed: Condvar,
    durable: watch::Sender<Option<u64>>,
}

impl Group {
    pub(super) fn new(key: GroupKey, index: GroupIndex) -> Self {
        let (durable, _) = watch::channel(index.durable());
        Group { key, index: Mutex::new(index), changed: Condvar::new(), durable }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, GroupIndex> {
        self.index.lock()
    }

    /// Changes the index and tells those who wait for the durable index.
    pub(super) fn publish<T>(&self, change: impl FnOnce(&mut GroupIndex) -> T) -> T {
        let mut index = self.index.lock();
        let result = change(&mut index);
        let durable = index.durable();
        // Under the lock, so that the watched value never goes back behind a later one.
        self.durable.send_if_modified(|seen| std::mem::replace(seen, durable) != durable);
        drop(index);
        self.changed.notify_all();
        result
    }

    /// Wakes everybody: the log stopped.
    pub(super) fn wake(&self) {
        let _index = self.index.lock();
        self.changed.notify_all();
    }

    pub(super) fn durable_changes(&self) -> watch::Receiver<Option<u64>> {
        self.durable.subscribe()
    }

    /// Blocks until `index` is durable (true), or `is_stopped`, or the time is over.
    pub(super) fn wait_durable(&self, index: u64, timeout: Duration, is_stopped: impl Fn() -> bool) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.index.lock();
        loop {
            if state.durable() >= Some(index) {
                return true;
            }
            if state.is_destroyed || is_stopped() || self.changed.wait_until(&mut state, deadline).timed_out()
            {
                return state.durable() >= Some(index);
            }
        }
    }
}
