//! Digests taken while everything else goes on: of the state as of one index, although rows change, come to memory and leave it
//! meanwhile.
//!
//! As of its index, a row is in the store as it is, or it is unflushed and in memory. So a scan has two parts:
//! 1. the rows that were unflushed at its index, from memory, a slice at a time: a set of slots, noted when it began;
//! 2. all others, from the store, in one pass over what it held soon after.
//!
//! What keeps it exact (design 4, `Scrub`):
//! - whoever is about to change an unflushed row, or to let go of one that was flushed since, adds its old value first;
//! - until the pass over the store has opened, so does whoever is about to change any other row: the store may have its new
//!   value by then;
//! - what was added from memory is remembered by its key, and left out of the pass;
//! - a row whose version is above the scan's index was not there, or was added when it changed;
//! - the digest is a sum, so the order does not matter.
//!
//! A checkpoint's scan hands its rows over, too: what is added from memory is copied, since it is about to change or to leave.
//!
//! Invariant: every live row and counting record as of the index is added exactly once; and every tombstone that a checkpoint
//! needs is handed over exactly once.
//!
//! Not here: the digest of one row (`read::digest`), who drives the scan (`scrubber`, `cut`), the pass (`scan_run`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use evershard_storage::table::{AllDepartures, RowRef, RowShape, Slot, SlotSet, Table};
use parking_lot::Mutex;

use super::cold::rows_a_lock;
use super::cut::CutCopies;
use super::rows::Floors;
use crate::read::{AddRow, Digest};

/// Results that are kept for whoever asks.
const RESULTS_MAX: usize = 16;
/// Scans at a time; one more is skipped.
const RUNNING_MAX: usize = 4;

/// What became of a scrub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScrubResult {
    /// The scan runs.
    Pending,
    /// This replica cannot tell.
    Skipped(SkipReason),
    /// The digest of the state as of `index`.
    Done {
        /// The scrub entry's index.
        index: u64,
        /// The digest.
        digest: Digest,
    },
}

/// Why a replica has no digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SkipReason {
    /// Its rows are ahead of the entry.
    Replaying,
    /// As many scans run as may.
    Busy,
    /// A snapshot took the place of the rows.
    Replaced,
    /// The scan ended with the process, or was given up.
    Stopped,
    /// Its rows could not be read.
    ReadFailed,
    /// A table was cleared before the scan had seen what its rows were.
    Cleared,
    /// A cut that builds upon one that is too long ago.
    CutTooOld,
}

impl std::fmt::Display for SkipReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Replaying => "was still replaying its log",
            Self::Busy => "was busy with other scrubs",
            Self::Replaced => "took in a snapshot meanwhile",
            Self::Stopped => "gave the scrub up",
            Self::Cleared => "had a table cleared meanwhile",
            Self::CutTooOld => "remembers too little for a checkpoint that builds upon another",
            Self::ReadFailed => "could not read its rows: its log names the error",
        })
    }
}

/// Whose scan it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScanId {
    /// A scrub entry's.
    Scrub(u64),
    /// Of this replica alone.
    Local(u64),
    /// Of this replica alone, to bring its rows to memory and to count them.
    WarmUp,
    /// A checkpoint's.
    Cut(u64),
}

/// A table as a scan sees it.
#[derive(Debug)]
pub(super) struct ScannedTable {
    pub(super) shape: RowShape,
    /// Slots of rows that were unflushed at the scan's index and are still to be added.
    unflushed: SlotSet,
    /// Before this one there are none left.
    next: u32,
    /// The table as it was, when it was dropped or cleared since.
    dropped: Option<Arc<Table>>,
    /// Rows of lower versions were none, as of the index.
    pub(super) floor: u64,
    /// Live rows added.
    pub(super) rows: u64,
    /// Of all rows added.
    pub(super) digest: Digest,
    /// The table's `live_changes` at the index.
    pub(super) live_changes: i64,
    /// Keys that had left memory at the index.
    pub(super) departures: AllDepartures,
}

/// What a scan has gathered.
#[derive(Debug)]
pub(super) struct Gathered {
    pub(super) index: u64,
    /// Of what is beside the rows.
    beside: Digest,
    /// Of a checkpoint's scan: what is handed over.
    pub(super) copies: Option<CutCopies>,
    pub(super) tables: BTreeMap<u32, ScannedTable>,
    /// Keys that were added from memory, or are no rows there: not to be added again, from memory or from the store. A row may
    /// be flushed, leave, and come back with its old version before the pass over the store has opened.
    pub(super) taken: BTreeSet<(u32, u64)>,
}

impl Gathered {
    pub(super) fn add(&mut self, number: u32, key: u64, row: RowRef<'_>) {
        if !self.taken.insert((number, key)) {
            return;
        }
        if row.header().version > self.index {
            return;
        }
        if let Some(table) = self.tables.get_mut(&number)
            && !row.is_tombstone()
        {
            table.digest.add_row(number, key, &row);
            table.rows += u64::from(row.is_live());
        }
        if let Some(copies) = &mut self.copies {
            copies.push(number, key, row);
        }
    }

    /// Of the whole state.
    pub(super) fn digest(&self) -> Digest {
        self.tables.values().fold(self.beside, |sum, table| sum.merge(table.digest))
    }
}

/// One scan.
#[derive(Debug)]
struct Scan {
    id: ScanId,
    gathered: Gathered,
    /// Somebody runs it.
    claimed: bool,
    /// The pass over the store has opened.
    viewed: bool,
}

/// The scans that run over a replica's rows.
#[derive(Debug, Default)]
pub(crate) struct Scans {
    /// Locked only by scans, which hold the rows' lock for reading; apply holds that for writing and needs no lock here.
    running: Mutex<Vec<Scan>>,
}

impl Scans {
    /// Begins a scan of the state as of `index`, on top of a digest; false when there are too many. With `copies` it is its
    /// beginner's to run.
    pub(super) fn begin(
        &mut self,
        id: ScanId,
        index: u64,
        (beside, copies): (Digest, Option<CutCopies>),
        (tables, floors): (&BTreeMap<u32, Table>, &Floors),
    ) -> bool {
        let running = self.running.get_mut();
        if running.len() >= RUNNING_MAX {
            return false;
        }
        let scanned = |number: u32, table: &Table| ScannedTable {
            floor: floors.get(&number).copied().unwrap_or(0),
            shape: table.shape(),
            unflushed: table.unflushed(),
            next: 0,
            dropped: None,
            rows: 0,
            digest: Digest::default(),
            live_changes: table.live_changes(),
            departures: table.all_departures(),
        };
        let tables = tables.iter().map(|(number, table)| (*number, scanned(*number, table))).collect();
        let claimed = copies.is_some();
        let gathered = Gathered { index, beside, copies, tables, taken: BTreeSet::new() };
        running.push(Scan { id, gathered, claimed, viewed: false });
        true
    }

    /// To be told before a row changes.
    #[inline]
    pub(crate) fn before_change(&mut self, number: u32, slot: Slot, key: u64, row: RowRef<'_>) {
        for scan in self.running.get_mut() {
            let Some(table) = scan.gathered.tables.get_mut(&number) else { continue };
            if table.dropped.is_some() {
                // Cleared since: these are other rows.
                continue;
            }
            let was_unflushed = table.unflushed.take(slot.number());
            if was_unflushed || (!scan.viewed && row.header().version <= scan.gathered.index) {
                scan.gathered.add(number, key, row);
            }
        }
    }

    /// To be told before a row leaves memory: it was unflushed when the scan began, and is in the store since.
    #[inline]
    pub(crate) fn before_leave(&mut self, number: u32, slot: Slot, key: u64, row: RowRef<'_>) {
        for scan in self.running.get_mut() {
            let table = scan.gathered.tables.get_mut(&number);
            if table.is_some_and(|table| table.dropped.is_none() && table.unflushed.take(slot.number())) {
                scan.gathered.add(number, key, row);
            }
        }
    }

    /// To be told when a table's rows go away: scans that need them keep them.
    pub(crate) fn keep_dropped(&mut self, number: u32, table: &Arc<Table>) {
        for scan in self.running.get_mut() {
            if let Some(scanned) = scan.gathered.tables.get_mut(&number) {
                scanned.dropped = Some(Arc::clone(table));
            }
        }
    }

    /// To be told when a table is cleared, which scans that have opened the store keep as it was; the others cannot go on: the
    /// store may have new rows in the place of the old ones by then. Answers which those are. A warm-up has nothing to bring
    /// to memory any more.
    pub(crate) fn keep_cleared(&mut self, number: u32, table: &Arc<Table>) -> Vec<ScanId> {
        let mut lost = Vec::new();
        self.running.get_mut().retain_mut(|scan| {
            if scan.id == ScanId::WarmUp {
                scan.gathered.tables.remove(&number);
                return true;
            }
            let Some(scanned) = scan.gathered.tables.get_mut(&number) else { return true };
            if !scan.viewed {
                lost.push(scan.id);
                return false;
            }
            scanned.dropped.get_or_insert_with(|| Arc::clone(table));
            true
        });
        lost
    }

    /// The first scan that nobody runs yet; it is the caller's to run.
    pub(super) fn claim(&self) -> Option<ScanId> {
        let mut running = self.running.lock();
        let scan = running.iter_mut().find(|scan| !scan.claimed)?;
        scan.claimed = true;
        Some(scan.id)
    }

    /// The pass over the store has opened.
    pub(super) fn set_viewed(&self, id: ScanId) {
        if let Some(scan) = self.running.lock().iter_mut().find(|scan| scan.id == id) {
            scan.viewed = true;
        }
    }

    /// Adds some rows that were unflushed at the scan's index. `None` when there is no such scan any more, else whether there
    /// are more.
    pub(super) fn add_unflushed(
        &self,
        id: ScanId,
        tables: &BTreeMap<u32, Table>,
        rows_max: usize,
    ) -> Option<bool> {
        let mut running = self.running.lock();
        let gathered = &mut running.iter_mut().find(|scan| scan.id == id)?.gathered;
        let numbers: Vec<u32> = gathered.tables.keys().copied().collect();
        let mut left = rows_max;
        for number in numbers {
            let Some(scanned) = gathered.tables.get_mut(&number) else { continue };
            let dropped = scanned.dropped.clone();
            let table = dropped.as_deref().or_else(|| tables.get(&number));
            let at_once = table.map_or(left, |table| rows_a_lock(left, table.shape()));
            let (slots, next) = scanned.unflushed.take_some(scanned.next, at_once);
            scanned.next = next.unwrap_or(u32::MAX);
            for slot in &slots {
                if let Some((key, row)) = table.and_then(|table| table.row_at(*slot)) {
                    gathered.add(number, key, row);
                }
            }
            left = left.saturating_sub(slots.len());
            if left == 0 || slots.len() >= at_once {
                return Some(true);
            }
        }
        Some(false)
    }

    /// The tables of a scan.
    pub(super) fn shapes(&self, id: ScanId) -> BTreeMap<u32, RowShape> {
        let running = self.running.lock();
        let tables = running.iter().find(|scan| scan.id == id).map(|scan| &scan.gathered.tables);
        tables.into_iter().flatten().map(|(number, table)| (*number, table.shape)).collect()
    }

    /// What was copied for a checkpoint's scan since it was last asked for.
    pub(super) fn take_copies(&self, id: ScanId) -> Option<CutCopies> {
        let mut running = self.running.lock();
        running.iter_mut().find(|scan| scan.id == id)?.gathered.copies.as_mut().map(CutCopies::take)
    }

    /// Takes out a scan that has nothing more to hear of.
    pub(super) fn finish(&self, id: ScanId) -> Option<Gathered> {
        let mut running = self.running.lock();
        let at = running.iter().position(|scan| scan.id == id)?;
        Some(running.remove(at).gathered)
    }

    /// Whether the pass of some scan is still to open: what it must find in the store has to stay there.
    pub(crate) fn any_unviewed(&self) -> bool {
        self.running.lock().iter().any(|scan| !scan.viewed)
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
            self.put(id, ScrubResult::Skipped(SkipReason::Replaced));
        }
    }
}
