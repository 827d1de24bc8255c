//! The node's budget for rows in memory, over all its replicas.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that rows, their index and bookkeeping may take on this node. Shared by its replicas.
///
/// The limit is kept by whoever brings rows in: it lets others go first. Rows that are not flushed yet cannot go, so writes may
/// take up to [`MemoryBudget::hard_limit`]; at that point applying waits for the flush.
#[derive(Debug)]
pub struct MemoryBudget {
    limit: u64,
    used: AtomicU64,
}

impl MemoryBudget {
    /// A budget of so many bytes; 0: no limit.
    #[must_use]
    pub fn new(limit: u64) -> Arc<Self> {
        let limit = if limit == 0 { u64::MAX } else { limit };
        Arc::new(MemoryBudget { limit, used: AtomicU64::new(0) })
    }

    /// Rows are never let go of.
    #[must_use]
    pub fn unlimited() -> Arc<Self> {
        Self::new(0)
    }

    /// Bytes taken.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The limit; `None` when there is none.
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        Some(self.limit).filter(|limit| *limit != u64::MAX)
    }

    /// Whether so many bytes more stay within the limit.
    #[must_use]
    pub fn has_room_for(&self, bytes: u64) -> bool {
        self.used().saturating_add(bytes) <= self.limit
    }

    /// Above this nothing is applied until a flush has made rows clean, so that they can go: a 32nd over the limit.
    #[must_use]
    pub fn hard_limit(&self) -> u64 {
        self.limit.saturating_add(self.limit / 32)
    }

    /// Whether the hard limit is passed.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.used() > self.hard_limit()
    }

    /// Near the limit: rows that nobody uses should go before others need their place.
    pub(super) fn is_crowded(&self) -> bool {
        self.limit != u64::MAX && self.used() > self.limit - self.limit / 32
    }
}

/// What one holder takes of a budget; gives it back when dropped.
#[derive(Debug)]
pub(crate) struct Account {
    budget: Arc<MemoryBudget>,
    counted: u64,
}

impl Account {
    pub(crate) fn new(budget: Arc<MemoryBudget>) -> Self {
        Account { budget, counted: 0 }
    }

    pub(crate) fn budget(&self) -> &Arc<MemoryBudget> {
        &self.budget
    }

    /// The holder takes so many bytes now.
    pub(crate) fn set(&mut self, bytes: u64) {
        let delta = bytes.wrapping_sub(self.counted);
        self.budget.used.fetch_add(delta, Ordering::Relaxed);
        self.counted = bytes;
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_add_up_and_give_back() {
        let budget = MemoryBudget::new(1000);
        let mut first = Account::new(Arc::clone(&budget));
        let mut second = Account::new(Arc::clone(&budget));
        first.set(700);
        second.set(300);
        assert!(budget.has_room_for(0) && !budget.has_room_for(1) && !budget.is_exhausted());
        second.set(401);
        assert!(budget.is_exhausted());
        first.set(100);
        assert_eq!(budget.used(), 501);
        drop(first);
        drop(second);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn no_limit_is_never_reached() {
        let budget = MemoryBudget::unlimited();
        assert_eq!(budget.limit(), None);
        assert!(budget.has_room_for(u64::MAX) && !budget.is_exhausted() && !budget.is_crowded());
    }
}
