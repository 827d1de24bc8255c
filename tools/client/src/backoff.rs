//! Pauses between tries: exponential with jitter, bounded.

use std::time::Duration;

use rand::Rng;

const FIRST: Duration = Duration::from_millis(5);
const MOST: Duration = Duration::from_millis(100);

/// The pauses of one operation.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    next: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Backoff { next: FIRST }
    }
}

impl Backoff {
    /// The next pause, at least `asked` (what a server suggested).
    pub(crate) fn pause(&mut self, asked_ms: u32) -> Duration {
        let jitter = rand::rng().random_range(0.5..1.0);
        let pause = self.next.mul_f64(jitter).max(Duration::from_millis(u64::from(asked_ms)));
        self.next = (self.next * 2).min(MOST);
        pause
    }

    /// Starts over after a success.
    pub(crate) fn reset(&mut self) {
        self.next = FIRST;
    }
}
