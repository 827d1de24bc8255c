//! What the handles, the writer and the chores share.
//!
//! Lock order: writer, then groups, then one group, then any one of the small locks (queue, segments, progress, floor,
//! chores, damaged). No lock but the writer's is held over I/O, except the floor's over the floor's own.
//!
//! Not here: what each of them does.

use super::chores::Chores;
use super::floor::Floor;
use super::group::Group;
use super::group_log::DurableCallback;
use super::queue::{Action, Operation, Queue};
use super::room::{LogRoom, Room};
use super::segment::{Position, Segment};
use super::segment_set::SegmentSet;
use super::stall::Stall;
use super::writer::Writer;
use super::{Driver, GroupKey, LogError, LogOptions, QuarantineCause};
use crate::disk::Disk;
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How far the log is written and synced.
#[derive(Debug, Clone)]
pub(super) struct Progress {
    /// The segment being written.
    pub(super) active: Arc<Segment>,
    /// The end of what is written.
    pub(super) written: Position,
    /// The end of what is synced.
    pub(super) synced: Position,
}

/// Counters since the log was opened.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) batches: AtomicU64,
    pub(super) written_bytes: AtomicU64,
    pub(super) syncs: AtomicU64,
    pub(super) relocated_bytes: AtomicU64,
}

/// What the handles, the writer and the chores share.
pub(super) struct Shared {
    pub(super) options: LogOptions,
    pub(super) disk: Arc<dyn Disk>,
    pub(super) driver: Driver,
    pub(super) queue: Queue,
    pub(super) groups: RwLock<BTreeMap<GroupKey, Arc<Group>>>,
    pub(super) segments: SegmentSet,
    pub(super) progress: Mutex<Progress>,
    pub(super) floor: Mutex<Floor>,
    pub(super) writer: Mutex<Writer>,
    pub(super) chores: Chores,
    pub(super) cached_bytes: AtomicU64,
    pub(super) counters: Counters,
    pub(super) stall: Stall,
    pub(super) room: Room,
    /// Groups whose logs were found damaged since this one was opened, and are not forgotten yet.
    pub(super) damaged: Mutex<BTreeMap<GroupKey, String>>,
    pub(super) is_failed: AtomicBool,
}

impl Shared {
    /// Queues an operation (the group's lock is held by the caller). If the log is stopped, what to tell the caller
    /// comes back: call it after the lock is released.
    #[must_use = "a refused operation must be answered"]
    pub(super) fn queue(&self, group: &Arc<Group>, action: Action, done: Option<DurableCallback>) -> Refused {
        let operation = Operation { group: group.clone(), action, done };
        Refused(
            self.queue
                .push(operation)
                .err()
                .map(|(operation, reason)| (operation.done, stopped_error(&reason))),
        )
    }

    /// With the inline driver: commits all that is queued. Callbacks may queue more.
    pub(super) fn drive(&self) {
        if self.driver != Driver::Inline {
            return;
        }
        // Somebody else is driving (or a callback of ours got here): they will see what we queued.
        while let Some(mut writer) = self.writer.try_lock() {
            while self.pump_with(&mut writer) {}
            drop(writer);
            self.chores.run_all(self);
            if self.queue.is_empty() || self.room.is_out() {
                return;
            }
        }
    }

    /// Commits one batch; false if nothing is queued.
    pub(super) fn pump_with(&self, writer: &mut Writer) -> bool {
        loop {
            let operations = self.queue.take(self.room.batch_bytes(self.options.batch_bytes_max));
            if operations.is_empty() {
                return false;
            }
            let is_one = operations.len() == 1;
            if writer.commit(self, operations) {
                return true;
            }
            if is_one {
                return false;
            }
        }
    }

    /// The group's log turned out to be damaged: from now on it refuses everything but to be forgotten, and nothing of
    /// it is needed any more once that is durable. Takes the group's lock; waits for nothing.
    pub(super) fn spoil(&self, group: &Arc<Group>, reason: String, done: Option<DurableCallback>) {
        let mut index = group.lock();
        if index.is_destroyed || index.is_spoiled() {
            drop(index);
            if let Some(done) = done {
                done(Ok(()));
            }
            return;
        }
        tracing::error!(group = %group.key, reason, "the log of a replica is damaged: it is quarantined");
        let cause = QuarantineCause::Damage;
        index.quarantine = Some((cause, reason.clone()));
        self.damaged.lock().insert(group.key, reason.clone());
        let refused = self.queue(group, Action::Quarantine { cause, reason }, done);
        drop(index);
        refused.answer();
    }

    /// What room there is on the disk.
    pub(super) fn log_room(&self) -> LogRoom {
        if self.room.is_out() {
            return LogRoom::Out;
        }
        if !self.room.is_full() {
            return LogRoom::Ample;
        }
        let ahead = self.chores.segments_ahead() * self.options.segment_bytes;
        LogRoom::Reserve { bytes: (self.room.left() + ahead).saturating_sub(self.queue.bytes()) }
    }

    /// The log is closed and the disk full: whoever still waits is told.
    pub(super) fn refuse_queued(&self) {
        loop {
            let operations = self.queue.take(u64::MAX);
            if operations.is_empty() {
                return;
            }
            self.queue.finish(operations.iter().map(Operation::bytes).sum());
            for done in operations.into_iter().filter_map(|operation| operation.done) {
                done(Err(io::Error::new(
                    io::ErrorKind::StorageFull,
                    format!("{} is full: the log ends without this", self.options.directory.display()),
                )));
            }
        }
    }

    /// A write or a sync failed: the fatal handler, and nothing is acknowledged from now on.
    pub(super) fn fail(&self, path: &Path, error: &io::Error) {
        if !self.is_failed.swap(true, Ordering::SeqCst) {
            (self.options.on_fatal)(path, error);
        }
        self.queue.stop(&format!("cannot write or sync {}: {error}", path.display()));
        self.wake_all();
    }

    pub(super) fn fail_with(&self, error: &LogError) {
        match error {
            LogError::Io { path, source, .. } => self.fail(path, source),
            other => self.fail(&self.options.directory, &io::Error::other(other.to_string())),
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.is_failed.load(Ordering::SeqCst)
    }

    pub(super) fn wake_all(&self) {
        let groups: Vec<Arc<Group>> = self.groups.read().values().cloned().collect();
        groups.iter().for_each(|group| group.wake());
    }

    /// The error every operation gets once the log is stopped.
    pub(super) fn stopped_error(&self) -> io::Error {
        stopped_error(self.queue.stopped().as_deref().unwrap_or("stopped"))
    }

    /// The segment is synced up to here: says so in the floor, if nobody is busy with it.
    pub(super) fn note_synced(&self, synced: Position) {
        {
            let mut progress = self.progress.lock();
            progress.synced = progress.synced.max(synced);
        }
        if let Some(mut floor) = self.floor.try_lock()
            && let Err(error) = floor.note_synced(synced)
        {
            self.fail(floor.path(), &error);
        }
    }

    /// Accounts for a change of a group's cached bytes.
    pub(super) fn note_cached(&self, before: u64, after: u64) {
        if after >= before {
            self.cached_bytes.fetch_add(after - before, Ordering::Relaxed);
        } else {
            self.cached_bytes.fetch_sub(before - after, Ordering::Relaxed);
        }
    }
}

/// Whom to tell that the log is stopped, if it is.
pub(super) struct Refused(Option<(Option<DurableCallback>, io::Error)>);

impl Refused {
    /// Tells the caller, if the operation was refused.
    pub(super) fn answer(self) {
        if let Some((Some(done), error)) = self.0 {
            done(Err(error));
        }
    }
}

fn stopped_error(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, format!("the log is stopped: {reason}"))
}

impl fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Shared").field("options", &self.options).finish_non_exhaustive()
    }
}
