//! One replica's log: the handle.
//!
//! Every change is taken in at once (what was appended can be read when `append` returns) and made durable in the
//! order of the calls; its callback says when.
//!
//! Invariants:
//! - No call blocks on the disk, except `read`, `wait_durable`, and everything with `Driver::Inline`.
//! - A callback is called exactly once: after the change is durable, or with an error after which nothing is
//!   acknowledged any more. It runs on the writer's thread, so it must be cheap.
//! - A refused call (a gap, an oversized body, a forgotten or damaged group) changes nothing; its callback gets the error.
//!
//! Not here: batching and syncing (`writer`), what survives a crash (`recovery`).

use super::group::Group;
use super::queue::Action;
use super::reader;
use super::record::BODY_BYTES_MAX;
use super::room::LogRoom;
use super::shared::Shared;
use super::{Entry, EntryId, GroupKey, GroupLogState};
use crate::log::group_index::{GroupIndex, Source};
use bytes::Bytes;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Called once the change is durable, or has failed.
pub type DurableCallback = Box<dyn FnOnce(io::Result<()>) + Send>;

/// One replica's log; a cheap handle.
#[derive(Clone)]
pub struct GroupLog {
    shared: Arc<Shared>,
    group: Arc<Group>,
}

impl GroupLog {
    pub(super) fn new(shared: Arc<Shared>, group: Arc<Group>) -> Self {
        GroupLog { shared, group }
    }

    /// Whose log this is.
    pub fn key(&self) -> GroupKey {
        self.group.key
    }

    /// Waits until the writer's queue is below its limit, on any runtime. Await it before `append`: that is what
    /// bounds the queue.
    pub async fn admitted(&self) {
        self.shared.queue.admitted().await;
    }

    /// Whether this may be appended now: on a full disk the reserve is for what `is_essential` to the group, and what else
    /// there is may use the first half of it. Asked by whoever can still refuse; `append` takes what it is given.
    pub fn has_room(&self, bytes: u64, is_essential: bool) -> bool {
        match self.shared.log_room() {
            LogRoom::Ample => true,
            LogRoom::Reserve { bytes: left } if is_essential => left > bytes,
            LogRoom::Reserve { bytes: left } => {
                left.saturating_sub(bytes) >= self.shared.options.segment_bytes / 2
            }
            LogRoom::Out => false,
        }
    }

    /// Appends; readable on return. The first entry must follow the last one there is (or the purged one); on a blank
    /// log it may have any index.
    pub fn append(&self, entries: Vec<Entry>, durable: DurableCallback) {
        if let Some(entry) = entries.iter().find(|entry| entry.payload.len() > BODY_BYTES_MAX) {
            return durable(Err(too_long(entry.payload.len())));
        }
        self.change(durable, |index| {
            let ticket = index.append(&entries).map_err(|misplaced| {
                let (found, expected) = (misplaced.found, misplaced.expected);
                invalid(format!("entry {found} where {expected} is due in {}", self.group.key))
            })?;
            Ok(Some(Action::Append { ticket, entries }))
        });
    }

    /// Replaces the vote.
    pub fn save_vote(&self, vote: Bytes, durable: DurableCallback) {
        if vote.len() > BODY_BYTES_MAX {
            return durable(Err(too_long(vote.len())));
        }
        self.change(durable, |index| {
            index.vote = Some(vote.clone());
            Ok(Some(Action::Vote(vote)))
        });
    }

    /// The last vote saved, durable or not.
    pub fn vote(&self) -> Option<Bytes> {
        self.group.lock().vote.clone()
    }

    /// Replaces the commit position; goes out with the next batch, or within about a second, and costs no sync of its
    /// own otherwise. Nobody is told when. Too long a one is dropped. It may reach the disk before changes made before
    /// it: who reads it after a restart has to compare it with the entries there are.
    pub fn save_committed(&self, committed: Bytes) {
        if committed.len() > BODY_BYTES_MAX {
            return;
        }
        self.change(Box::new(|_| ()), |index| {
            index.committed = Some(committed);
            let is_queued = std::mem::replace(&mut index.is_committed_queued, true);
            Ok((!is_queued).then_some(Action::Committed))
        });
    }

    /// The last commit position saved, durable or not.
    pub fn committed(&self) -> Option<Bytes> {
        self.group.lock().committed.clone()
    }

    /// Removes the entries from `index` on.
    pub fn truncate_from(&self, index: u64, durable: DurableCallback) {
        self.change(durable, |state| {
            let freed = state.truncate_from(index);
            Ok(Some(Action::Truncate { index, freed }))
        });
    }

    /// Removes the entries up to `id` and remembers it as the last purged one. It may lie beyond the last entry (a
    /// snapshot was installed): then the log is empty and goes on after `id`. Already purged ones change nothing.
    pub fn purge_through(&self, id: EntryId, durable: DurableCallback) {
        self.change(durable, |index| Ok(index.purge_through(id).map(|freed| Action::Purge { id, freed })));
    }

    /// What the log holds, durable or not.
    pub fn state(&self) -> GroupLogState {
        self.group.lock().state()
    }

    /// Term and leader of an entry, if it is there. Never reads the disk.
    pub fn entry_id(&self, index: u64) -> Option<EntryId> {
        self.group.lock().entry_id(index)
    }

    /// As [`GroupLog::read`], from memory; `None` when some of it is on the disk only: then `read` should run off the
    /// runtime.
    pub fn read_cached(&self, range: Range<u64>, bytes_max: u64) -> Option<Vec<Entry>> {
        let index = self.group.lock();
        if index.needs_disk(&range) || index.is_spoiled() {
            return None;
        }
        let sources = index.sources(range, bytes_max);
        let cached = |source| match source {
            Source::Memory(entry) => Some(entry),
            Source::Disk(_) => None,
        };
        sources.into_iter().map(cached).collect()
    }

    /// The entries of `range` that exist, from the first of them on: at least one, then while their payloads together
    /// fit `bytes_max`.
    pub fn read(&self, range: Range<u64>, bytes_max: u64) -> io::Result<Vec<Entry>> {
        reader::read(&self.shared, &self.group, range, bytes_max)
    }

    /// All entries up to this one are durable, and so are the truncations before them.
    pub fn durable_index(&self) -> Option<u64> {
        self.group.lock().durable()
    }

    /// Blocks until everything up to `index` is durable (true) or the time is over (false). An error once the log is
    /// stopped.
    pub fn wait_durable(&self, index: u64, timeout: Duration) -> io::Result<bool> {
        let is_stopped = || self.shared.queue.stopped().is_some();
        let is_durable = self.group.wait_durable(index, timeout, is_stopped);
        if !is_durable && is_stopped() {
            return Err(self.shared.stopped_error());
        }
        if !is_durable && self.group.lock().is_destroyed {
            return Err(self.forgotten());
        }
        Ok(is_durable)
    }

    /// The durable index as it changes, for async code on any runtime.
    pub fn durable_changes(&self) -> watch::Receiver<Option<u64>> {
        self.group.durable_changes()
    }

    /// How long the node's log has written and synced since it was opened, over all groups: two looks tell how busy it keeps its
    /// disk.
    pub fn disk_time(&self) -> Duration {
        self.shared.stall.disk_time()
    }

    /// Bytes of the log after `index`.
    pub fn bytes_since(&self, index: u64) -> u64 {
        self.group.lock().bytes_since(index)
    }

    /// Forgets the group. All handles of it refuse from now on.
    pub fn destroy(&self, durable: DurableCallback) {
        self.change_whatever(durable, true, |index| {
            index.destroy();
            Ok(Some(Action::Destroy))
        });
    }

    fn forgotten(&self) -> io::Error {
        io::Error::new(io::ErrorKind::NotFound, format!("{} is forgotten", self.group.key))
    }

    /// Changes the index and queues the action, in one step; an error or no action answers at once.
    fn change(
        &self,
        durable: DurableCallback,
        change: impl FnOnce(&mut GroupIndex) -> io::Result<Option<Action>>,
    ) {
        self.change_whatever(durable, false, change);
    }

    /// The same; `is_last` goes through on a damaged log too.
    fn change_whatever(
        &self,
        durable: DurableCallback,
        is_last: bool,
        change: impl FnOnce(&mut GroupIndex) -> io::Result<Option<Action>>,
    ) {
        let mut index = self.group.lock();
        if index.is_destroyed {
            drop(index);
            return durable(Err(self.forgotten()));
        }
        let cached_before = index.cached_bytes();
        let action = match self.shared.queue.stopped() {
            Some(_) => Err(self.shared.stopped_error()),
            None if is_last => change(&mut index),
            None => index.check_whole(self.group.key).and_then(|()| change(&mut index)),
        };
        self.shared.note_cached(cached_before, index.cached_bytes());
        match action {
            Ok(Some(action)) => {
                let refused = self.shared.queue(&self.group, action, Some(durable));
                drop(index);
                refused.answer();
                self.shared.drive();
            }
            Ok(None) => {
                drop(index);
                durable(Ok(()));
            }
            Err(error) => {
                drop(index);
                durable(Err(error));
            }
        }
    }
}

impl fmt::Debug for GroupLog {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("GroupLog").field("key", &self.group.key).finish_non_exhaustive()
    }
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

fn too_long(bytes: usize) -> io::Error {
    invalid(format!("{bytes} bytes in one record, at most {BODY_BYTES_MAX} are allowed"))
}
