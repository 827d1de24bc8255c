//! Rows that go by themselves: the leader of a shard looks for those that its tables' rules let go of, and proposes it.
//!
//! Once an interval, and table by table: a look over the replica's records (`look`), in memory and on disk, at a bounded rate ->
//! whether a rule lets go of each (`judge`) -> [`EVICTED_ROWS_MAX`](evershard_proto::limits::EVICTED_ROWS_MAX) of them an entry,
//! each with its version.
//!
//! Invariants:
//! - nothing here is exact, and nothing has to be: a row that changed since it was looked at has another version, and stays;
//! - decided by the replicated clock and the table's replicated step, never by a clock of this node.
//!
//! Not here: what an entry does (`apply::evict`), letting go of memory (`crate::memory`), when to look (`cluster/evictions`).

mod judge;
mod look;

pub(crate) use judge::CutOff;
pub(crate) use look::{Found, look};
