//! Digests taken while everything else goes on: of the state as of one index, although rows change meanwhile.
//!
//! A scan goes over the tables in order of their numbers, over each in its arena's order, a slice at a time. What keeps it
//! exact (design 4, `Scrub`):
//! - a row that the scan has not reached yet is added, with its old value, by whoever is about to change it;
//! - a row whose version is above the scan's index is not part of it: its old value was added by whoever changed it, or
//!   there was none;
//! - the digest is a sum, so the order does not matter.
//!
//! Invariant: every live row as of the index is added exactly once.
//!
//! Not here: the digest of one row (`read::digest`), who drives the scan (`scrubber`).

use std::collections::{BTreeMap, VecDeque};

use evershard_storage::table::{RowRef, Slot, Table};
use parking_lot::Mutex;

use crate::read::Digest;

/// Results that are kept for whoever asks.
const RESULTS_MAX: usize = 16;
/// Scans at a time; one more answers `Skipped`.
const RUNNING_MAX: usize = 4;

/// What became of a scrub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScrubResult {
    /// The scan runs.
    Pending,
    /// This replica cannot tell: its rows were ahead of the entry, it has too many scans already, or a snapshot came between.
    Skipped,
    /// The digest of the state as of `index`.
    Done {
        /// The scrub entry's index.
        index: u64,
        /// The digest.
        digest: Digest,
    },
}

/// Whose scan it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScanId {
    /// A scrub entry's.
    Scrub(u64),
    /// Of this replica alone.
    Local(u64),
}

/// One scan.
#[derive(Debug)]
struct Scan {
    id: ScanId,
    index: u64,
    /// The place to look at next: everything before it was looked at.
    next: (u32, u32),
    digest: Digest,
}

impl Scan {
    fn add(&mut self, table: u32, key: u64, row: RowRef<'_>) {
        if row.header().version <= self.index && !row.is_tombstone() {
            self.digest.add_row(table, key, &row);
        }
    }

    /// Looks at up to `slots_max` slots; true when it is at the end.
    fn advance(&mut self, tables: &BTreeMap<u32, Table>, slots_max: usize) -> bool {
        let mut left = slots_max;
        while let Some((&number, table)) = tables.range(self.next.0..).next() {
            if number != self.next.0 {
                self.next = (number, 0);
            }
            while self.next.1 < table.slots() {
                if left == 0 {
                    return false;
                }
                left -= 1;
                if let Some((key, row)) = table.row_at(self.next.1) {
                    self.add(number, key, row);
                }
                self.next.1 += 1;
            }
            match number.checked_add(1) {
                Some(next) => self.next = (next, 0),
                None => return true,
            }
        }
        true
    }
}

/// The scans that run over a replica's rows.
#[derive(Debug, Default)]
pub(crate) struct Scans {
    /// Locked only by scans, which hold the rows' lock for reading; apply holds that for writing and needs no lock here.
    running: Mutex<Vec<Scan>>,
}

impl Scans {
    /// Begins a scan of the state as of `index`, on top of a digest; false when there are too many.
    pub(crate) fn begin(&mut self, id: ScanId, index: u64, digest: Digest) -> bool {
        let running = self.running.get_mut();
        if running.len() >= RUNNING_MAX {
            return false;
        }
        running.push(Scan { id, index, next: (0, 0), digest });
        true
    }

    /// To be told before a row changes.
    #[inline]
    pub(crate) fn before_change(&mut self, table: u32, slot: Slot, key: u64, row: RowRef<'_>) {
        for scan in self.running.get_mut() {
            if (table, slot.number()) >= scan.next {
                scan.add(table, key, row);
            }
        }
    }

    /// To be told before a table's rows go away.
    pub(crate) fn before_drop(&mut self, number: u32, table: &Table) {
        for scan in self.running.get_mut() {
            let from = match scan.next {
                (at, _) if at < number => 0,
                (at, slot) if at == number => slot,
                _ => continue,
            };
            for slot in from..table.slots() {
                if let Some((key, row)) = table.row_at(slot) {
                    scan.add(number, key, row);
                }
            }
        }
    }

    /// Lets every scan look at some slots. Answers whether there is more to do, and the scans that ended.
    pub(crate) fn scan(
        &self,
        tables: &BTreeMap<u32, Table>,
        slots_max: usize,
    ) -> (bool, Vec<(ScanId, ScrubResult)>) {
        let mut running = self.running.lock();
        let mut done = Vec::new();
        running.retain_mut(|scan| {
            if !scan.advance(tables, slots_max) {
                return true;
            }
            done.push((scan.id, ScrubResult::Done { index: scan.index, digest: scan.digest }));
            false
        });
        (!running.is_empty(), done)
    }

    /// The scans that run.
    pub(crate) fn running(&self) -> Vec<ScanId> {
        self.running.lock().iter().map(|scan| scan.id).collect()
    }
}

/// The last results.
#[derive(Debug, Default)]
pub(crate) struct ScrubResults {
    results: VecDeque<(ScanId, ScrubResult)>,
}

impl ScrubResults {
    pub(crate) fn put(&mut self, id: ScanId, result: ScrubResult) {
        if let Some(known) = self.results.iter_mut().find(|(known, _)| *known == id) {
            known.1 = result;
            return;
        }
        if self.results.len() == RESULTS_MAX {
            self.results.pop_front();
        }
        self.results.push_back((id, result));
    }

    pub(crate) fn get(&self, id: ScanId) -> Option<ScrubResult> {
        self.results.iter().find(|(known, _)| *known == id).map(|(_, result)| *result)
    }

    pub(crate) fn skip_all(&mut self, ids: Vec<ScanId>) {
        for id in ids {
            self.put(id, ScrubResult::Skipped);
        }
    }
}
