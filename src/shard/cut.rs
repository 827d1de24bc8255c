//! A checkpoint's cut on one replica: its state as of one entry, handed over row by row while everything else goes on.
//!
//! Who writes the shard's part asks for a [`CutTicket`] before the cut is proposed. When the entry is applied, apply begins a scan
//! (`scans`) for the ticket, and tells it; a replica without a ticket for the cut does nothing. The ticket's owner runs the scan on a
//! thread of its own. Rows come in no order: those that were unflushed first, then those of the store by their keys.
//!
//! Invariants:
//! - what is handed over is of the entry: whoever changes a row before it was, copies it first (`scans`);
//! - with a cut to build upon, rows and tombstones of higher versions are handed over, and tables that were cleared since are named;
//!   what was removed is still known, since apply refuses a cut that builds upon less than what is remembered (`apply::cut`);
//! - a ticket that goes takes its scan with it.
//!
//! What is copied takes memory until the sink has taken it: at the most what was unflushed at the cut.
//!
//! Not here: what becomes of the rows (`crate::checkpoint`), when cuts are proposed (`crate::cluster`).

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use bytes::Bytes;
use evershard_storage::table::{RowHeader, RowRef, RowShape};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::machine::ShardMachine;
use super::rows::{Floors, Rows};
use super::scans::{ScanId, SkipReason};
use crate::read::Digest;

/// Takes the rows of a cut.
pub trait CutSink {
    /// The next row or tombstone: the floats that a run has of it (all of a live row, the notes of a counting one, none of a
    /// tombstone). Breaking off ends the scan.
    fn row(&mut self, table: u32, key: u64, header: RowHeader, floats: &[f32]) -> ControlFlow<()>;
}

/// The cut was applied: the state as of it is being kept for the ticket's owner.
#[derive(Debug, Clone, PartialEq)]
pub struct CutBegun {
    /// The cut's index.
    pub index: u64,
    /// The term of the cut's entry.
    pub term: u64,
    /// Rows of higher versions are handed over, and removed ones; `None`: all rows.
    pub above: Option<u64>,
    /// The small state as of the cut, without sessions.
    pub small_state: Bytes,
    /// Tables that were cleared since the cut that this one builds upon, and the entries that did it.
    pub cleared: BTreeMap<u32, u64>,
}

/// What was handed over.
#[derive(Debug, Clone, PartialEq)]
pub struct CutRows {
    /// Every table as of the cut, in ascending order of their numbers.
    pub tables: Vec<CutTable>,
}

/// A table as of a cut, on one shard.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CutTable {
    /// Its permanent number.
    pub table: u32,
    /// Its live rows, whether they were handed over or not.
    pub rows: u64,
    /// Of all its rows.
    pub digest: Digest,
}

type Begun = Result<CutBegun, SkipReason>;

/// The tables that were cleared above an entry.
pub(crate) fn cleared_above(floors: &Floors, above: u64) -> BTreeMap<u32, u64> {
    floors.iter().filter(|(_, index)| **index > above).map(|(table, index)| (*table, *index)).collect()
}

/// Tickets whose cuts are not applied yet.
#[derive(Debug, Default)]
pub(crate) struct AwaitedCuts {
    tickets: Mutex<Vec<(u64, oneshot::Sender<Begun>)>>,
}

impl AwaitedCuts {
    fn add(&self, checkpoint: u64) -> oneshot::Receiver<Begun> {
        let (told, begun) = oneshot::channel();
        let mut tickets = self.tickets.lock();
        tickets.retain(|(_, other)| !other.is_closed());
        tickets.push((checkpoint, told));
        begun
    }

    /// The cut of this checkpoint is applied: `begin` makes the state be kept, if somebody waits for it.
    pub(crate) fn tell(&self, checkpoint: u64, rows: &Rows, begin: impl FnOnce() -> Begun) {
        let waiting = {
            let mut tickets = self.tickets.lock();
            let at = tickets.iter().position(|(id, _)| *id == checkpoint);
            at.map(|at| tickets.swap_remove(at).1)
        };
        if let Some(told) = waiting
            && told.send(begin()).is_err()
        {
            rows.read().scans().finish(ScanId::Cut(checkpoint));
        }
    }
}

impl ShardMachine {
    /// Makes this replica keep its state as of a checkpoint's cut, once that is applied.
    #[must_use]
    pub fn await_cut(&self, checkpoint: u64) -> CutTicket {
        CutTicket::new(&self.rows, &self.awaited_cuts, checkpoint)
    }

    /// The lowest cut that a delta can build upon; `None` when nothing was cut yet.
    #[must_use]
    pub fn remembered_above(&self) -> Option<u64> {
        self.lock_small().small.kept_above
    }
}

/// The right to write a cut's rows, and the duty to: see the [module](self).
#[derive(Debug)]
pub struct CutTicket {
    rows: Arc<Rows>,
    checkpoint: u64,
    begun: Option<oneshot::Receiver<Begun>>,
}

impl CutTicket {
    fn new(rows: &Arc<Rows>, awaited: &AwaitedCuts, checkpoint: u64) -> Self {
        CutTicket { rows: Arc::clone(rows), checkpoint, begun: Some(awaited.add(checkpoint)) }
    }

    /// Waits until the cut is applied here. To be asked once.
    ///
    /// # Errors
    /// [`SkipReason`] when this replica cannot give its rows.
    pub async fn begun(&mut self) -> Result<CutBegun, SkipReason> {
        let Some(begun) = self.begun.take() else { return Err(SkipReason::Stopped) };
        begun.await.unwrap_or(Err(SkipReason::Stopped))
    }

    /// The shapes of the tables there are. To be asked once the cut was applied.
    #[must_use]
    pub fn shapes(&self) -> BTreeMap<u32, RowShape> {
        self.rows.read().scans().shapes(ScanId::Cut(self.checkpoint))
    }

    /// Hands the rows to `sink`, on this thread, which blocks on the disk. `go_on` is asked now and then: false ends it.
    ///
    /// # Errors
    /// [`SkipReason`]: what the sink has is of no use.
    pub fn rows(
        &self,
        sink: &mut dyn CutSink,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<CutRows, SkipReason> {
        let id = ScanId::Cut(self.checkpoint);
        let gathered = self.rows.scan(id, go_on, Some(sink)).map_err(|reason| {
            // Apply may have ended it, and said why.
            match self.rows.scan_result(id) {
                Some(super::ScrubResult::Skipped(known)) if reason == SkipReason::Stopped => known,
                _ => reason,
            }
        })?;
        let table = |(number, scanned): (&u32, &super::scans::ScannedTable)| CutTable {
            table: *number,
            rows: scanned.rows,
            digest: scanned.digest,
        };
        Ok(CutRows { tables: gathered.tables.iter().map(table).collect() })
    }
}

impl Drop for CutTicket {
    fn drop(&mut self) {
        self.rows.read().scans().finish(ScanId::Cut(self.checkpoint));
    }
}

/// Rows that were copied out of memory, until the sink takes them.
#[derive(Debug)]
pub(super) struct CutCopies {
    /// 0: all rows, and no tombstones.
    above: u64,
    heads: Vec<(u32, u64, RowHeader, usize)>,
    floats: Vec<f32>,
}

impl CutCopies {
    pub(super) fn above(above: u64) -> Self {
        CutCopies { above, heads: Vec::new(), floats: Vec::new() }
    }

    pub(super) fn threshold(&self) -> u64 {
        self.above
    }

    pub(super) fn push(&mut self, table: u32, key: u64, row: RowRef<'_>) {
        let header = row.header();
        let is_needed = if self.above == 0 { !header.is_tombstone() } else { header.version > self.above };
        if !is_needed {
            return;
        }
        if !header.is_tombstone() {
            self.floats.extend_from_slice(if header.is_counting() { row.notes() } else { row.floats() });
        }
        self.heads.push((table, key, header, self.floats.len()));
    }

    /// What there is; more may come.
    pub(super) fn take(&mut self) -> Self {
        std::mem::replace(self, CutCopies::above(self.above))
    }

    pub(super) fn hand_over(&self, sink: &mut dyn CutSink) -> ControlFlow<()> {
        let mut start = 0;
        for (table, key, header, end) in &self.heads {
            sink.row(*table, *key, *header, &self.floats[start..*end])?;
            start = *end;
        }
        ControlFlow::Continue(())
    }
}
