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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_never_shorter_than_was_asked_for() {
        for asked_ms in [0, 1, 50, 100, 250, 60_000] {
            let asked = Duration::from_millis(u64::from(asked_ms));
            let mut backoff = Backoff::default();
            for _ in 0..100 {
                let pause = backoff.pause(asked_ms);
                assert!(
                    pause >= asked && pause <= asked.max(MOST),
                    "{pause:?} where {asked:?} was asked for"
                );
            }
        }
    }

    #[test]
    fn pauses_grow_and_a_success_makes_them_short_again() {
        let mut backoff = Backoff::default();
        assert!(backoff.pause(0) <= FIRST);
        for _ in 0..10 {
            backoff.pause(0);
        }
        assert!(backoff.pause(0) >= MOST / 2);
        backoff.reset();
        assert!(backoff.pause(0) <= FIRST);
    }
}
