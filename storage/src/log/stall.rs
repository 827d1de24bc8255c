//! How long the write or sync in progress has taken: a hung disk shows here, though nothing fails. And how long all of the writer's
//! have taken together: how busy the log keeps its disk.
//!
//! Not here: what follows from it (a leader on a hung disk gives way, a flush leaves the disk to the log: the server's).

use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Who does I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    Writer = 0,
    Chores = 1,
}

/// When the I/O in progress began.
#[derive(Debug, Default)]
pub(super) struct Stall {
    since: [Mutex<Option<Instant>>; 2],
    /// Nanoseconds of the writer's I/O that has ended.
    writing: AtomicU64,
}

impl Stall {
    /// Runs `act` as I/O in progress.
    pub(super) fn watch<T>(&self, who: Who, act: impl FnOnce() -> T) -> T {
        let since = &self.since[who as usize];
        *since.lock() = Some(Instant::now());
        let result = act();
        let began = since.lock().take();
        if let Some(began) = began.filter(|_| who == Who::Writer) {
            // Fits for five hundred years.
            self.writing.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
        result
    }

    /// How long the writer's I/O has taken since the log was opened, without what is in progress.
    pub(super) fn disk_time(&self) -> Duration {
        Duration::from_nanos(self.writing.load(Ordering::Relaxed))
    }

    /// The age of the oldest I/O in progress.
    pub(super) fn stalled_for(&self) -> Duration {
        let age =
            |since: &Mutex<Option<Instant>>| since.lock().map_or(Duration::ZERO, |since| since.elapsed());
        self.since.iter().map(age).max().unwrap_or_default()
    }
}
