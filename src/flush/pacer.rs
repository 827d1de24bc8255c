//! How fast a flush may write: it shares a disk with the log, and nobody waits for a flush.
//!
//! After each megabyte the pacer looks how busy the log kept its disk meanwhile.
//! - A log that hardly uses the disk: the flush goes on as fast as it can.
//! - A busy one: the flush keeps to the rate at which everything that is dirty on this node is written within half the flush
//!   interval. So it makes no burst that the log's syncs wait behind, and still ends in time.
//! - A flush that is late (dirty rows that fill their part of the memory, or a long log behind the last flush): no pause.
//!
//! Not here: when a cycle is due (`flusher`), what it writes (`cycle`). Compaction has a limit of its own
//! (`evershard_storage::rocks`).

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::DurableIndex;

/// Bytes between two looks.
const STEP: u64 = 1 << 20;
/// The log is busy when its disk works for more than this part of the time.
const BUSY: f64 = 0.1;
/// A pause is no longer than this: the log may have fallen silent meanwhile.
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// The rate is never below this, in bytes a second.
const RATE_MIN: f64 = (16 << 20) as f64;

/// The rate at which `dirty` bytes are written within half of `interval`, in bytes a second.
pub(super) fn rate(dirty: u64, interval: Duration) -> f64 {
    (dirty as f64 / (interval.as_secs_f64() / 2.0).max(0.001)).max(RATE_MIN)
}

/// What a step took, and how long to pause after it.
fn pause_after(bytes: u64, took: Duration, log_busy: Duration, rate: f64) -> Duration {
    if log_busy.as_secs_f64() <= BUSY * took.as_secs_f64() {
        return Duration::ZERO;
    }
    let due = Duration::from_secs_f64(bytes as f64 / rate);
    due.saturating_sub(took).min(PAUSE_MAX)
}

/// The log of a replica, for one cycle that is paced.
pub(super) struct Paced<'a> {
    log: &'a dyn DurableIndex,
    rate: f64,
    /// Whether the flush is late or not wanted any more: asked before each pause.
    hurry: &'a (dyn Fn() -> bool + Sync),
    /// Waits so long, or less when the flusher is to end.
    wait: &'a (dyn Fn(Duration) + Sync),
    state: Mutex<State>,
}

/// As of the last look.
struct State {
    looked: Instant,
    written: u64,
    disk_time: Duration,
    paused: Duration,
}

impl<'a> Paced<'a> {
    pub(super) fn new(
        log: &'a dyn DurableIndex,
        rate: f64,
        hurry: &'a (dyn Fn() -> bool + Sync),
        wait: &'a (dyn Fn(Duration) + Sync),
    ) -> Self {
        let (looked, disk_time) = (Instant::now(), log.disk_time());
        let state = Mutex::new(State { looked, written: 0, disk_time, paused: Duration::ZERO });
        Paced { log, rate, hurry, wait, state }
    }

    /// How long the cycle has paused.
    pub(super) fn paused(&self) -> Duration {
        self.state.lock().paused
    }
}

impl DurableIndex for Paced<'_> {
    fn wait_durable(&self, index: u64) -> bool {
        self.log.wait_durable(index)
    }

    fn bytes_since(&self, index: u64) -> u64 {
        self.log.bytes_since(index)
    }

    fn disk_time(&self) -> Duration {
        self.log.disk_time()
    }

    fn pace(&self, written: u64) {
        // One thread runs the cycle: nobody waits for this lock.
        let mut state = self.state.lock();
        let bytes = written.saturating_sub(state.written);
        if bytes < STEP {
            return;
        }
        let busy = self.log.disk_time().saturating_sub(state.disk_time);
        let pause = pause_after(bytes, state.looked.elapsed(), busy, self.rate);
        if !pause.is_zero() && !(self.hurry)() {
            let began = Instant::now();
            (self.wait)(pause);
            state.paused += began.elapsed();
        }
        (state.looked, state.written, state.disk_time) = (Instant::now(), written, self.log.disk_time());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_flush_beside_a_silent_log_does_not_pause() {
        assert_eq!(pause_after(STEP, 10 * MS, MS, RATE_MIN), Duration::ZERO);
        assert_eq!(pause_after(STEP, 10 * MS, Duration::ZERO, RATE_MIN), Duration::ZERO);
    }

    #[test]
    fn beside_a_busy_one_it_keeps_to_its_rate() {
        // 1 MiB at 16 MiB a second takes 62.5 ms, 10 of which are over.
        assert_eq!(pause_after(STEP, 10 * MS, 5 * MS, RATE_MIN), Duration::from_micros(52_500));
        assert_eq!(
            pause_after(STEP, 70 * MS, 50 * MS, RATE_MIN),
            Duration::ZERO,
            "it is slower than that by itself"
        );
        assert_eq!(pause_after(64 * STEP, 10 * MS, 5 * MS, RATE_MIN), PAUSE_MAX);
    }

    #[test]
    fn the_rate_writes_all_that_is_dirty_in_half_the_interval() {
        assert_eq!(rate(512 << 20, 2000 * MS), (512 << 20) as f64);
        assert_eq!(rate(1 << 20, 2000 * MS), RATE_MIN);
        assert!(rate(u64::MAX, Duration::ZERO).is_finite());
    }

    /// A log that is busy all the time.
    struct Busy(Instant);

    impl DurableIndex for Busy {
        fn wait_durable(&self, _: u64) -> bool {
            true
        }

        fn bytes_since(&self, _: u64) -> u64 {
            0
        }

        fn disk_time(&self) -> Duration {
            self.0.elapsed()
        }
    }

    #[test]
    fn a_late_flush_does_not_pause() {
        let (log, waited) = (Busy(Instant::now()), Mutex::new(0));
        let wait = |_| *waited.lock() += 1;
        let late = Paced::new(&log, RATE_MIN, &|| true, &wait);
        let early = Paced::new(&log, RATE_MIN, &|| false, &wait);
        for paced in [&late, &early] {
            paced.pace(STEP / 2);
            paced.pace(STEP);
            paced.pace(STEP + STEP / 2);
        }
        assert_eq!(*waited.lock(), 1, "only the one that has time, and only after a whole step");
    }
}
