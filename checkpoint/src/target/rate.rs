//! Holds uploads and downloads to so many bytes a second.
//!
//! Each transfer reserves the time that its bytes take behind those reserved before, and waits until its turn has come. Whoever was
//! idle gets no credit: there are no bursts.

use std::num::NonZeroU64;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Shared by all who share a target.
#[derive(Debug)]
pub(super) struct Rate {
    bytes_per_second: NonZeroU64,
    /// When all that was reserved is over.
    free_at: Mutex<Instant>,
}

impl Rate {
    pub(super) fn new(bytes_per_second: NonZeroU64) -> Self {
        Rate { bytes_per_second, free_at: Mutex::new(Instant::now()) }
    }

    /// Reserves the time for some bytes, and says when it begins.
    fn reserve(&self, bytes: u64, now: Instant) -> Instant {
        let takes = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second.get() as f64);
        // A time in there is right at any moment, whoever panicked.
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let begins = now.max(*free_at);
        *free_at = begins + takes;
        begins
    }

    /// Waits until so many bytes may go.
    pub(super) async fn take(&self, bytes: u64) {
        let begins = self.reserve(bytes, Instant::now());
        tokio::time::sleep_until(begins.into()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_later_waits_for_those_before_and_idle_time_is_no_credit() {
        let rate = Rate::new(NonZeroU64::new(1000).expect("not zero"));
        let start = Instant::now() + Duration::from_secs(1);
        let second = Duration::from_secs(1);
        assert_eq!(rate.reserve(500, start), start);
        assert_eq!(rate.reserve(1500, start), start + second / 2);
        assert_eq!(rate.reserve(1, start), start + 2 * second);
        // Idle for a while: what was not used is gone.
        let later = start + 10 * second;
        assert_eq!(rate.reserve(3000, later), later);
        assert_eq!(rate.reserve(1, later), later + 3 * second);
    }
}
