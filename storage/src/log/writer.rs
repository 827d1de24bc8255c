//! The writer: takes what is queued, writes it with one gather write, syncs once for all groups, tells everybody.
//!
//! Whoever drives it (a thread, a simulation, the caller) holds its lock; the code is the same.
//!
//! Invariants:
//! - A batch is written after everything before it, in one segment; a new segment is begun only when all before it is
//!   synced, so only the last one can have a torn tail.
//! - With `Durability::Fsync` nobody is told before the sync has returned. After a failed write or sync nobody is told
//!   anything but the failure, and nothing is tried again.
//! - Space is taken from the disk before anything is written into it. Where there is none, nothing of the batch counts,
//!   and the operations wait in the queue, in their order.
//!
//! Not here: the records (`batch`), background work (`chores`).

use super::batch::{self, Batch, Placed};
use super::queue::{Action, Operation};
use super::segment::{Position, SEGMENT_HEADER_BYTES, Segment, Space};
use super::shared::Shared;
use super::stall::Who;
use super::{Durability, LogError};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The writer's own state: where the next batch goes.
#[derive(Debug)]
pub(super) struct Writer {
    active: Arc<Segment>,
    offset: u64,
}

impl Writer {
    pub(super) fn new(active: Arc<Segment>, offset: u64) -> Self {
        Writer { active, offset }
    }

    /// Commits the operations in order, or fails the log. False if the disk is full: they are in the queue again.
    pub(super) fn commit(&mut self, shared: &Shared, operations: Vec<Operation>) -> bool {
        let bytes = operations.iter().map(Operation::bytes).sum();
        let result = if shared.has_failed() {
            None
        } else {
            match shared.stall.watch(Who::Writer, || self.write(shared, &operations, bytes)) {
                Ok(placed) => Some(placed),
                Err(error) if error.is_disk_full() => {
                    match operations.len() {
                        1 => shared.room.note_out(&error),
                        _ => shared.room.note_narrow(),
                    }
                    shared.queue.put_back(operations);
                    return false;
                }
                Err(error) => {
                    shared.fail_with(&error);
                    None
                }
            }
        };
        match result {
            Some(placed) => {
                shared.room.note_written();
                self.publish(shared, operations, &placed);
            }
            None => refuse(shared, operations),
        }
        shared.queue.finish(bytes);
        true
    }

    /// Writes and syncs.
    fn write(
        &mut self,
        shared: &Shared,
        operations: &[Operation],
        bytes: u64,
    ) -> Result<Vec<Placed>, LogError> {
        let is_begun = self.offset > SEGMENT_HEADER_BYTES;
        if is_begun && self.offset + bytes > shared.options.segment_bytes {
            self.roll(shared)?;
        }
        let start = Position { segment: self.active.number, offset: self.offset };
        let mut batch = Batch::new(start, shared.progress.lock().synced);
        let placed: Vec<Placed> = operations.iter().map(|operation| batch.add(operation)).collect();
        if batch.is_blank() {
            // Relocations of which nothing was left.
            return Ok(placed);
        }
        self.active.extend(start.offset + batch.bytes())?;
        before_write(operations);
        let path = &self.active.path;
        let written = self.active.file.write_all_vectored_at(&batch.slices(), start.offset);
        if let Err(error) = written.map_err(LogError::io("write", path)) {
            if error.is_disk_full() {
                // A file system that takes no space ahead. What is there of the batch must not lie behind the next one.
                self.active.cut(start.offset)?;
            }
            return Err(error);
        }
        self.offset += batch.bytes();
        shared.room.set_left(self.active.reserved().saturating_sub(self.offset));
        let end = Position { segment: start.segment, offset: self.offset };
        shared.progress.lock().written = end;
        shared.segments.set_bytes(end.segment, end.offset);
        shared.counters.batches.fetch_add(1, Ordering::Relaxed);
        shared.counters.written_bytes.fetch_add(batch.bytes(), Ordering::Relaxed);
        before_sync(operations);
        match shared.options.durability {
            Durability::Fsync => self.sync(shared, end)?,
            Durability::Memory => shared.chores.request_sync(),
        }
        after_sync(operations);
        if self.offset > shared.options.segment_bytes / 8 {
            shared.chores.request_segment(self.active.number + 1);
        }
        Ok(placed)
    }

    fn sync(&self, shared: &Shared, end: Position) -> Result<(), LogError> {
        fail::fail_point!("log::sync_error", |_| Err(LogError::io("sync", &self.active.path)(
            std::io::Error::from_raw_os_error(libc::EIO)
        )));
        self.active.file.sync_data().map_err(LogError::io("sync", &self.active.path))?;
        shared.counters.syncs.fetch_add(1, Ordering::Relaxed);
        shared.note_synced(end);
        Ok(())
    }

    /// Goes on in a new segment, normally prepared in the background.
    fn roll(&mut self, shared: &Shared) -> Result<(), LogError> {
        let end = Position { segment: self.active.number, offset: self.offset };
        if shared.progress.lock().synced < end {
            self.sync(shared, end)?;
        }
        fail::fail_point!("roll::before_switch");
        let number = self.active.number + 1;
        let next = match shared.chores.take_segment(number) {
            Some(next) => next,
            None => {
                let space = Space::foreground(shared.options.segment_bytes);
                let spare = shared.chores.take_spare();
                Segment::create(&*shared.disk, &shared.options.directory, number, end, spare, &space)?
            }
        };
        shared.chores.request_trim(self.active.clone(), self.offset);
        self.active = Arc::new(next);
        self.offset = SEGMENT_HEADER_BYTES;
        shared.room.set_left(self.active.reserved().saturating_sub(self.offset));
        shared.segments.insert(self.active.clone(), self.offset);
        let mut progress = shared.progress.lock();
        progress.active = self.active.clone();
        progress.written = Position { segment: number, offset: self.offset };
        drop(progress);
        shared.chores.request_retire();
        Ok(())
    }

    /// Tells the groups and the callers, in order.
    fn publish(&self, shared: &Shared, operations: Vec<Operation>, placed: &[Placed]) {
        let mut frees_segments = false;
        for (operation, placed) in operations.into_iter().zip(placed) {
            batch::publish(&operation, placed, self.active.number);
            match &operation.action {
                Action::Destroy => {
                    shared.groups.write().remove(&operation.group.key);
                    shared.damaged.lock().remove(&operation.group.key);
                    frees_segments = true;
                }
                Action::Purge { .. } | Action::Truncate { .. } | Action::Quarantine { .. } => {
                    frees_segments = true;
                }
                Action::Relocate { entries, .. } => {
                    let bytes = entries.iter().map(|(_, entry)| entry.payload.len() as u64).sum();
                    shared.counters.relocated_bytes.fetch_add(bytes, Ordering::Relaxed);
                    shared.chores.relocations.fetch_sub(1, Ordering::AcqRel);
                    frees_segments = true;
                }
                _ => {}
            }
            if let Some(done) = operation.done {
                done(Ok(()));
            }
        }
        if frees_segments {
            shared.chores.request_retire();
        }
        evict(shared);
    }
}

/// The log has failed: nothing is acknowledged.
fn refuse(shared: &Shared, operations: Vec<Operation>) {
    for done in operations.into_iter().filter_map(|operation| operation.done) {
        done(Err(shared.stopped_error()));
    }
}

/// Brings the cached entries somewhat below their limit, each group by the same part. What is not durable stays.
fn evict(shared: &Shared) {
    let limit = shared.options.cache_bytes;
    let total = shared.cached_bytes.load(Ordering::Relaxed);
    if total <= limit {
        return;
    }
    let groups: Vec<_> = shared.groups.read().values().cloned().collect();
    let kept_part = (limit - limit / 8) as f64 / total as f64;
    for group in groups {
        let mut index = group.lock();
        let before = index.cached_bytes();
        index.evict_to((before as f64 * kept_part) as u64);
        shared.note_cached(before, index.cached_bytes());
    }
}

fn has(operations: &[Operation], is_it: impl Fn(&Action) -> bool) -> bool {
    operations.iter().any(|operation| is_it(&operation.action))
}

fn before_write(operations: &[Operation]) {
    if has(operations, |action| matches!(action, Action::Append { .. })) {
        fail::fail_point!("append::before_write");
    }
}

fn before_sync(operations: &[Operation]) {
    if has(operations, |action| matches!(action, Action::Append { .. })) {
        fail::fail_point!("append::before_sync");
    }
    if has(operations, |action| matches!(action, Action::Vote(_))) {
        fail::fail_point!("save_vote::before_sync");
    }
    if has(operations, |action| matches!(action, Action::Truncate { .. })) {
        fail::fail_point!("truncate::before_sync");
    }
    if has(operations, |action| matches!(action, Action::Purge { .. })) {
        fail::fail_point!("purge::before_sync");
    }
}

fn after_sync(operations: &[Operation]) {
    if has(operations, |action| matches!(action, Action::Append { .. })) {
        fail::fail_point!("append::after_sync");
    }
}
