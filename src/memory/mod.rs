//! How much of a node's rows may be in memory, and who sees to it.
//!
//! Whoever brings a row in lets go of another when the budget is used up (`shard::rows`); the [`Sweeper`] does the same ahead of
//! need and for tables that nobody uses any more, and gives memory back to the system.
//!
//! Not here: which rows of a table go (`evershard_storage::table`), reading them again (`shard`).

mod budget;
mod sweeper;

pub(crate) use budget::Account;
pub use budget::MemoryBudget;
pub use sweeper::Sweeper;
