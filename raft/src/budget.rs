//! The bound on what a group has proposed and not yet answered: bytes and entries.
//!
//! Invariants:
//! - taken and given back are equal: a permit gives back on drop, wherever it is dropped;
//! - one proposal larger than the whole budget is admitted when nothing else is in flight, so no size is starved.
//!
//! Not here: what happens to a proposal that does not fit (`group` answers `Exhausted`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// See the module.
#[derive(Debug)]
pub(crate) struct Budget {
    bytes_max: u64,
    entries_max: u64,
    bytes: AtomicU64,
    entries: AtomicU64,
}

/// What one proposal occupies; gives it back on drop.
#[derive(Debug)]
pub(crate) struct InFlight {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    pub(crate) fn new(bytes_max: u64, entries_max: u64) -> Arc<Self> {
        Arc::new(Self { bytes_max, entries_max, bytes: AtomicU64::new(0), entries: AtomicU64::new(0) })
    }

    /// Takes `bytes` for one entry, or `None` when it does not fit now.
    pub(crate) fn take(self: &Arc<Self>, bytes: u64) -> Option<InFlight> {
        let entries = self.entries.fetch_add(1, Ordering::AcqRel);
        let before = self.bytes.fetch_add(bytes, Ordering::AcqRel);
        let permit = InFlight { budget: Arc::clone(self), bytes };
        let fits =
            entries < self.entries_max && (before == 0 || before.saturating_add(bytes) <= self.bytes_max);
        fits.then_some(permit)
    }

    /// Bytes in flight now.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Acquire)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.budget.bytes.fetch_sub(self.bytes, Ordering::AcqRel);
        self.budget.entries.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_bytes_and_entries_and_gives_back() {
        let budget = Budget::new(10, 2);
        let first = budget.take(6).expect("fits");
        assert!(budget.take(5).is_none(), "11 bytes do not fit 10");
        let second = budget.take(4).expect("fits exactly");
        assert!(budget.take(0).is_none(), "two entries at most");
        drop(first);
        drop(second);
        assert_eq!(budget.bytes(), 0);
        assert!(budget.take(100).is_some(), "a giant goes alone");
    }
}
