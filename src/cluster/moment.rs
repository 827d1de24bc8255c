//! Time that only goes forward, also while the machine sleeps.
//!
//! `std::time::Instant` stands still while a Linux machine is suspended: what was fresh before would seem fresh after. This
//! one goes on. Moments of two machines have nothing to do with each other.

use std::time::Duration;

/// A point in time on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(Duration);

impl Moment {
    /// Now.
    #[must_use]
    pub fn now() -> Self {
        Moment(since_boot())
    }

    /// How long ago `earlier` was; nothing when it was not.
    #[must_use]
    pub fn since(self, earlier: Moment) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// So much later.
    #[must_use]
    pub fn after(self, time: Duration) -> Moment {
        Moment(self.0.saturating_add(time))
    }
}

#[cfg(target_os = "linux")]
fn since_boot() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec of ours, to be written to for the length of the call.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) } != 0;
    // Linux has had the clock since 2.6.39, and fails for no other reason.
    debug_assert!(!failed, "{}", std::io::Error::last_os_error());
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0))
}

/// Elsewhere the standard clock goes on while the machine sleeps, or there is nothing better.
#[cfg(not(target_os = "linux"))]
fn since_boot() -> Duration {
    static FIRST: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
    FIRST.elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_forward() {
        let first = Moment::now();
        let second = Moment::now();
        assert!(second >= first);
        assert_eq!(first.since(second.after(Duration::from_secs(1))), Duration::ZERO);
        assert_eq!(first.after(Duration::from_secs(2)).since(first), Duration::from_secs(2));
    }
}
