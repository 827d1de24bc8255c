//! The work in the background: syncing with `Durability::Memory`, preparing the next segment, keeping a spare ahead of
//! it, trimming the last one, letting old segments go.
//!
//! One thread in production; with another driver whoever drives runs what is due.
//!
//! Not here: which segments may go (`retire`).

use super::LogError;
use super::retire;
use super::segment::{Segment, Space, file_name, spare_name};
use super::shared::Shared;
use super::stall::Who;
use parking_lot::{Condvar, Mutex};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Segments kept for next ones to be made of.
const SPARES_MAX: usize = 3;
/// Between two tries to make a spare while the disk is full.
const FULL_PAUSE: Duration = Duration::from_millis(500);

#[derive(Debug, Default)]
struct Due {
    sync_since: Option<Instant>,
    segment: Option<u64>,
    preparing: Option<u64>,
    unpreparable: Option<u64>,
    prepared: Option<Segment>,
    spares: Vec<Segment>,
    spare: bool,
    /// When to try again to make one.
    spare_at: Option<Instant>,
    trims: Vec<(Arc<Segment>, u64)>,
    retire: bool,
    stop: bool,
}

impl Due {
    fn has_work(&self) -> bool {
        self.segment.is_some() || self.spare || !self.trims.is_empty() || self.retire
    }
}

/// What is due in the background.
#[derive(Debug, Default)]
pub(super) struct Chores {
    due: Mutex<Due>,
    arrived: Condvar,
    prepared: Condvar,
    /// The writer waits for the segment being prepared.
    is_urgent: AtomicBool,
    /// Held by whoever runs them.
    running: Mutex<()>,
    /// Relocations queued and not yet published.
    pub(super) relocations: AtomicU64,
}

impl Chores {
    pub(super) fn request_sync(&self) {
        let mut due = self.due.lock();
        if due.sync_since.is_none() {
            due.sync_since = Some(Instant::now());
            self.arrived.notify_one();
        }
    }

    /// Asks for the segment of this number to be prepared, if it is not.
    pub(super) fn request_segment(&self, number: u64) {
        let mut due = self.due.lock();
        let is_asked = [due.segment, due.preparing, due.unpreparable].contains(&Some(number));
        if !is_asked && due.prepared.as_ref().is_none_or(|prepared| prepared.number != number) {
            due.segment = Some(number);
            self.arrived.notify_one();
        }
    }

    /// The prepared segment; waits for one being prepared, and cancels one that is only asked for.
    pub(super) fn take_segment(&self, number: u64) -> Option<Segment> {
        let mut due = self.due.lock();
        loop {
            if let Some(prepared) = due.prepared.take_if(|prepared| prepared.number == number) {
                return Some(prepared);
            }
            if due.segment.take_if(|asked| *asked == number).is_some() || due.preparing != Some(number) {
                return None;
            }
            self.is_urgent.store(true, Ordering::Relaxed);
            self.prepared.wait(&mut due);
        }
    }

    /// A spare for a segment that is needed now and was not prepared.
    pub(super) fn take_spare(&self) -> Option<Segment> {
        let mut due = self.due.lock();
        let spare = due.spares.pop();
        due.spare = true;
        self.arrived.notify_one();
        spare
    }

    /// Asks for a spare to be made, if there is none.
    pub(super) fn request_spare(&self) {
        self.due.lock().spare = true;
        self.arrived.notify_one();
    }

    /// Segments that have their space and are not written yet.
    pub(super) fn segments_ahead(&self) -> u64 {
        let due = self.due.lock();
        let prepared = u64::from(due.prepared.is_some() || due.preparing.is_some());
        prepared + due.spares.len() as u64
    }

    pub(super) fn request_trim(&self, segment: Arc<Segment>, bytes: u64) {
        self.due.lock().trims.push((segment, bytes));
        self.arrived.notify_one();
    }

    /// Keeps a segment that is not needed any more for a next one to be made of; gives it back if there are enough.
    pub(super) fn offer_spare(&self, shared: &Shared, segment: Segment) -> Result<(), Segment> {
        if self.due.lock().spares.len() >= SPARES_MAX {
            return Err(segment);
        }
        // Whole, so that it is there for good when the disk is full; else it gives its space back.
        let filled = segment.reserved();
        if segment.extend(shared.options.segment_bytes).is_err() {
            return Err(segment);
        }
        let path = shared.options.directory.join(spare_name(segment.number));
        if shared.disk.rename(&segment.path, &path).is_err() {
            return Err(segment);
        }
        self.due.lock().spares.push(segment.into_spare(path, filled));
        shared.room.note_spare();
        Ok(())
    }

    pub(super) fn request_retire(&self) {
        self.due.lock().retire = true;
        self.arrived.notify_one();
    }

    pub(super) fn stop(&self) {
        self.due.lock().stop = true;
        self.arrived.notify_all();
    }

    /// The thread: does what is due until stopped.
    pub(super) fn run(&self, shared: &Shared) {
        loop {
            {
                let mut due = self.due.lock();
                loop {
                    if due.stop {
                        return;
                    }
                    let sync_at = due.sync_since.map(|since| since + shared.options.sync_interval);
                    if due.spare_at.take_if(|at| *at <= Instant::now()).is_some() {
                        due.spare = true;
                    }
                    if due.has_work() || sync_at.is_some_and(|at| at <= Instant::now()) {
                        break;
                    }
                    match sync_at.into_iter().chain(due.spare_at).min() {
                        Some(at) => {
                            let _timed_out = self.arrived.wait_until(&mut due, at);
                        }
                        None => self.arrived.wait(&mut due),
                    }
                }
            }
            self.run_once(shared);
        }
    }

    /// Does everything that is due, unless somebody is at it.
    pub(super) fn run_all(&self, shared: &Shared) {
        let Some(_running) = self.running.try_lock() else { return };
        if shared.room.is_full() {
            self.due.lock().spare = true;
        }
        loop {
            let is_due = {
                let due = self.due.lock();
                due.has_work() || due.sync_since.is_some()
            };
            if !is_due || shared.has_failed() {
                return;
            }
            self.run_once(shared);
        }
    }

    fn run_once(&self, shared: &Shared) {
        if shared.has_failed() {
            *self.due.lock() = Due { stop: true, ..Due::default() };
            self.prepared.notify_all();
            return;
        }
        // Only what acknowledged bytes wait for counts as a stall.
        shared.stall.watch(Who::Chores, || self.sync(shared));
        self.prepare(shared);
        self.trim(shared);
        self.keep_spare(shared);
        let retire = std::mem::take(&mut self.due.lock().retire);
        if retire {
            retire::run(shared);
        }
    }

    /// Makes what was written durable (`Durability::Memory`).
    fn sync(&self, shared: &Shared) {
        if self.due.lock().sync_since.take().is_none() {
            return;
        }
        sync_written(shared);
    }

    fn prepare(&self, shared: &Shared) {
        let (number, spare) = {
            let mut due = self.due.lock();
            let Some(number) = due.segment.take() else { return };
            due.preparing = Some(number);
            self.is_urgent.store(false, Ordering::Relaxed);
            due.spare = true;
            (number, due.spares.pop())
        };
        let bytes = shared.options.segment_bytes;
        // Under a fast writer zeros would only take its bandwidth: then the rest is allocated.
        let is_urgent = || {
            // What is acknowledged waits for its sync no longer than one step of this.
            shared.stall.watch(Who::Chores, || self.sync(shared));
            let written = shared.progress.lock().written;
            self.is_urgent.load(Ordering::Relaxed)
                || (written.segment + 1 == number && written.offset > bytes / 2)
        };
        let space = Space { bytes, filled: bytes, is_urgent: &is_urgent };
        let synced = shared.progress.lock().synced;
        let result = Segment::create(&*shared.disk, &shared.options.directory, number, synced, spare, &space);
        let mut due = self.due.lock();
        due.preparing = None;
        match result {
            Ok(segment) => due.prepared = Some(segment),
            Err(error) if error.is_failed_sync() => {
                drop(due);
                shared.fail_with(&error);
            }
            Err(error) => {
                // A full disk, perhaps. It is tried again when there is a spare, or by the writer when it needs it.
                tracing::warn!(%error, "cannot prepare the next log segment");
                due.unpreparable = Some(number);
                let path = shared.options.directory.join(file_name(number));
                let _absent = shared.disk.remove_file(&path);
            }
        }
        self.prepared.notify_all();
    }

    /// Makes a spare where there is none: space for what comes after the prepared segment, or the writer's last resort.
    fn keep_spare(&self, shared: &Shared) {
        {
            let mut due = self.due.lock();
            if !std::mem::take(&mut due.spare) {
                return;
            }
            if !due.spares.is_empty() {
                drop(due);
                return shared.room.note_spare();
            }
        }
        match make_spare(shared) {
            Ok(spare) => {
                let mut due = self.due.lock();
                due.spares.push(spare);
                // What could not be prepared for want of space may be asked for again.
                due.unpreparable = None;
                drop(due);
                shared.room.note_spare();
            }
            Err(error) => {
                shared.room.note_full(&error);
                self.due.lock().spare_at = Some(Instant::now() + FULL_PAUSE);
            }
        }
    }

    /// Gives back the reserved space behind the last record. Not synced: recovery knows the end anyway.
    fn trim(&self, shared: &Shared) {
        let trims = std::mem::take(&mut self.due.lock().trims);
        for (segment, bytes) in trims {
            if let Err(error) = segment.cut(bytes) {
                shared.fail_with(&error);
            }
        }
    }
}

fn make_spare(shared: &Shared) -> Result<Segment, LogError> {
    let options = &shared.options;
    // A try that fails halfway takes, for a moment, what little there is from everybody else.
    if shared.disk.free_bytes(&options.directory).is_some_and(|free| free < options.segment_bytes) {
        let error = io::Error::from(io::ErrorKind::StorageFull);
        return Err(LogError::io("reserve a segment in", &options.directory)(error));
    }
    Segment::create_spare(&*shared.disk, &options.directory, options.segment_bytes)
}

/// Syncs all that is written by now.
pub(super) fn sync_written(shared: &Shared) {
    let progress = shared.progress.lock().clone();
    if progress.synced >= progress.written || shared.has_failed() {
        return;
    }
    match progress.active.file.sync_data() {
        Ok(()) => {
            shared.counters.syncs.fetch_add(1, Ordering::Relaxed);
            shared.note_synced(progress.written);
        }
        Err(error) => shared.fail(&progress.active.path, &error),
    }
}
