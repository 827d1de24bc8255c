//! Counters of a client, for a worker that wants to show what it sees.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Counters; cheap to update.
#[derive(Debug)]
pub(crate) struct Stats {
    messages_acked: AtomicU64,
    rows_pushed: AtomicU64,
    rows_pulled: AtomicU64,
    retries: AtomicU64,
    longest_gap_us: AtomicU64,
}

/// The counters at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StatsSnapshot {
    /// Push messages acknowledged.
    pub messages_acked: u64,
    /// Distinct rows in them.
    pub rows_pushed: u64,
    /// Rows pulled, repetitions included.
    pub rows_pulled: u64,
    /// Times something was sent again.
    pub retries: u64,
    /// The longest time an operation took from its call to its answer, in microseconds, since the last reset.
    pub longest_gap_us: u64,
}

impl Default for Stats {
    fn default() -> Self {
        Stats {
            messages_acked: AtomicU64::new(0),
            rows_pushed: AtomicU64::new(0),
            rows_pulled: AtomicU64::new(0),
            retries: AtomicU64::new(0),
            longest_gap_us: AtomicU64::new(0),
        }
    }
}

impl Stats {
    pub(crate) fn acked(&self, rows: u64) {
        self.messages_acked.fetch_add(1, Ordering::Relaxed);
        self.rows_pushed.fetch_add(rows, Ordering::Relaxed);
    }

    pub(crate) fn pulled(&self, rows: u64) {
        self.rows_pulled.fetch_add(rows, Ordering::Relaxed);
    }

    pub(crate) fn retried(&self) {
        self.retries.fetch_add(1, Ordering::Relaxed);
    }

    /// An operation that began at `since` was answered.
    pub(crate) fn answered(&self, since: Instant) {
        self.longest_gap_us.fetch_max(since.elapsed().as_micros() as u64, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self, reset_gap: bool) -> StatsSnapshot {
        let longest_gap_us = if reset_gap {
            self.longest_gap_us.swap(0, Ordering::Relaxed)
        } else {
            self.longest_gap_us.load(Ordering::Relaxed)
        };
        StatsSnapshot {
            messages_acked: self.messages_acked.load(Ordering::Relaxed),
            rows_pushed: self.rows_pushed.load(Ordering::Relaxed),
            rows_pulled: self.rows_pulled.load(Ordering::Relaxed),
            retries: self.retries.load(Ordering::Relaxed),
            longest_gap_us,
        }
    }
}
