//! The small replicated state beside the rows: sessions, schemas, clocks, steps. Changed by `apply` in log order, noted whole by
//! each flush cycle.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use evershard_raft::state_machine::LogPosition;

use crate::model::{SessionTable, StepTable, TableSchema, needed_cluster_version};

/// What a replica's state holds besides rows. Everything in it follows from the log.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SmallState {
    /// Exactly-once bookkeeping.
    pub sessions: SessionTable,
    /// The tables on this shard.
    pub schemas: Arc<BTreeMap<u32, Arc<TableSchema>>>,
    /// Numbers of dropped tables, and the entries that dropped them. They never come back.
    pub dropped: BTreeMap<u32, u64>,
    /// The replicated clock: the highest leader time seen in an entry, in milliseconds since 1970 (design 14.11; the
    /// leader bounds how far it advances).
    pub clock_ms: u64,
    /// How far the steps of jobs are that sum them.
    pub steps: StepTable,
    /// Tables that were cleared, and the entry that did it last: rows of lower versions are no rows.
    pub floors: BTreeMap<u32, u64>,
    /// Of tables whose rows live for so many steps: the highest clock of the pushes that changed them.
    pub clocks: BTreeMap<u32, u64>,
    /// Removed rows of higher versions are remembered, for the next checkpoint; `None` until the first cut.
    pub kept_above: Option<u64>,
}

impl SmallState {
    /// Whether some table admits or evicts rows, or is a dense tensor: earlier builds must not read it.
    #[must_use]
    pub fn needs_newer_builds(&self) -> bool {
        self.schemas.values().any(|schema| needed_cluster_version(schema.definition()) > 0)
    }
}

/// The small state with its place in the log.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct AppliedState {
    /// The last entry applied.
    pub(crate) position: Option<LogPosition>,
    /// The membership as of it, encoded by the raft crate.
    pub(crate) membership: Bytes,
    /// The state as of it.
    pub(crate) small: SmallState,
}

impl AppliedState {
    /// The last applied index, 0 before the first.
    pub(crate) fn index(&self) -> u64 {
        self.position.map_or(0, |position| position.index)
    }
}
