//! How long the write or sync in progress has taken: a hung disk shows here, though nothing fails.
//!
//! Not here: what follows from it (a leader on a hung disk gives way: the server's).

use parking_lot::Mutex;
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
}

impl Stall {
    /// Runs `act` as I/O in progress.
    pub(super) fn watch<T>(&self, who: Who, act: impl FnOnce() -> T) -> T {
        let since = &self.since[who as usize];
        *since.lock() = Some(Instant::now());
        let result = act();
        *since.lock() = None;
        result
    }

    /// The age of the oldest I/O in progress.
    pub(super) fn stalled_for(&self) -> Duration {
        let age =
            |since: &Mutex<Option<Instant>>| since.lock().map_or(Duration::ZERO, |since| since.elapsed());
        self.since.iter().map(age).max().unwrap_or_default()
    }
}
