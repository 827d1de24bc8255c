//! A shard's replica: rows in memory, the small state beside them, the store behind them, and the state machine that the
//! raft crate drives.
//!
//! Committed entries come in through [`ShardMachine`]'s `StateMachine::apply`, which holds the small state and hands them
//! to `apply`; pulls read [`Rows`] through `read::Reader`; `flush` moves dirty rows to the store and the snapshot mark
//! with them.
//!
//! Locks, always taken in this order: `debts` (one flush, link or install at a time) -> `applier` (one entry at a time) ->
//! `small` (moments: the doors look at sessions) -> the rows' lock (short: a section, a batch of a pull, a slice of a scan).
//! No lock is held over I/O but `debts`.
//!
//! Not here: what an entry means (`apply`), when to flush (`flush`), which replica leads (the raft crate).

mod cold;
mod cut;
mod error;
mod hot_rows;
mod machine;
mod offence_journal;
mod prefetcher;
mod recovery;
mod rows;
mod scan_run;
mod scans;
mod scrubber;
mod small_codec;
mod small_state;
mod snapshot;
mod status;
#[cfg(test)]
mod tests;

pub use cold::ColdCounts;
pub(crate) use cold::{Absent, Fetched, rows_a_lock};
pub(crate) use cut::{AwaitedCuts, cleared_above};
pub use cut::{CutBegun, CutRows, CutSink, CutTable, CutTicket};
pub use error::ShardError;
pub use machine::{ShardMachine, ShardOptions};
pub use offence_journal::{OffenceJournal, OffenceLedger, Side, TableOffences};
pub use prefetcher::{Prefetcher, Prefetches};
pub(crate) use recovery::{Debts, store_position};
pub use rows::{OnDamage, Rows};
pub(crate) use rows::{Schemas, TableEntry};
pub(crate) use scans::ScanId;
pub use scans::{ScrubResult, SkipReason};
pub use scrubber::{ScrubWaker, Scrubber};
pub use small_codec::SmallStateError;
pub(crate) use small_state::AppliedState;
pub use small_state::SmallState;
pub use status::{ShardStatus, TableStatus};
