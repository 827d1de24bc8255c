//! Running a scan: the unflushed rows from memory, then one pass over the store; and, when it is a warm-up, bringing rows to
//! memory on the way, or, when it is a checkpoint's, handing them over.
//!
//! A warm-up takes in rows as long as there is room, and lets go of nothing for it. When it took in all there are, the table is
//! whole again: an absent key needs no look at the disk.
//!
//! Invariants:
//! - no lock is held over I/O;
//! - what was read is taken in only if its key has been out of memory ever since the scan began (`Table::load_absent`).
//!
//! Not here: what makes the digest exact (`scans`).

use std::cell::{Cell, RefCell};
use std::iter::Peekable;
use std::ops::ControlFlow;

use evershard_storage::table::{RowHeader, RowRef};

use super::cold::{Fetched, rows_a_lock};
use super::cut::{CutCopies, CutSink};
use super::error::ShardError;
use super::rows::Rows;
use super::scans::{Gathered, ScanId, ScrubResult, SkipReason};
use crate::read::AddRow;

/// Rows added under one taking of the lock, and rows of the store between two looks at whether to go on.
const SLICE: usize = if cfg!(test) { 3 } else { 1024 };
/// Rows that a warm-up takes in under one taking of the lock.
const TAKEN_IN_AT_ONCE: usize = if cfg!(test) { 2 } else { 256 };

/// Takes what a checkpoint's scan hands over; nobody does of others.
type Taker<'s> = RefCell<Option<&'s mut dyn CutSink>>;

/// The second part of a scan.
struct Pass<'a, 's> {
    rows: &'a Rows,
    generation: u64,
    taker: &'a Taker<'s>,
    /// Rows of higher versions are handed over.
    above: Option<u64>,
    gathered: Gathered,
    taken: Peekable<std::collections::btree_set::IntoIter<(u32, u64)>>,
    seen: usize,
    /// Rows on their way to memory; `None` when this is no warm-up, or there is no more room.
    warm: Option<Warm>,
}

/// Rows of one table that were read.
#[derive(Default)]
struct Warm {
    table: u32,
    keys: Vec<u64>,
    fetched: Fetched,
    /// There was not room for everything.
    partial: bool,
}

impl Rows {
    /// Runs one of the pending scans to its end, on this thread; false when there is none. `go_on` is asked between slices,
    /// while no lock is held: false ends the scan without a result.
    pub(crate) fn run_scan(&self, go_on: &mut dyn FnMut() -> bool) -> bool {
        let Some(id) = self.read().scans().claim() else { return false };
        let result = match self.scan(id, go_on, None) {
            Ok(gathered) => ScrubResult::Done { index: gathered.index, digest: gathered.digest() },
            Err(reason) => ScrubResult::Skipped(reason),
        };
        self.put_scan_result(id, result);
        true
    }

    /// Runs a scan that is the caller's to run.
    pub(super) fn scan(
        &self,
        id: ScanId,
        go_on: &mut dyn FnMut() -> bool,
        sink: Option<&mut dyn CutSink>,
    ) -> Result<Gathered, SkipReason> {
        let (go_on, taker) = (RefCell::new(go_on), RefCell::new(sink));
        let go_on = || (*go_on.borrow_mut())();
        let (pass, stopped) = (RefCell::new(None), Cell::new(false));
        let from_memory = || {
            self.read().scans().set_viewed(id);
            loop {
                if !go_on() || !self.hand_copies_over(id, &taker) {
                    stopped.set(true);
                    return;
                }
                let set = self.read();
                match set.scans().add_unflushed(id, set.tables(), SLICE) {
                    Some(true) => {}
                    Some(false) => {
                        let gathered = set.scans().finish(id);
                        let begun = gathered.map(|gathered| Pass::new(self, &set, (id, &taker), gathered));
                        drop(set);
                        if let Some(mut begun) = begun {
                            stopped.set(!begun.hand_copies_over());
                            *pass.borrow_mut() = Some(begun);
                        }
                        return;
                    }
                    // A snapshot was installed.
                    None => return,
                }
            }
        };
        let damage = Cell::new(None);
        let from_store = |number: u32, key: u64, header: RowHeader, floats: &[f32]| {
            let mut pass = pass.borrow_mut();
            let Some(pass) = pass.as_mut().filter(|_| !stopped.get()) else { return ControlFlow::Break(()) };
            match pass.row(number, key, header, floats) {
                Ok(ControlFlow::Continue(())) => {}
                Ok(ControlFlow::Break(())) => stopped.set(true),
                Err(error) => {
                    damage.set(Some(error));
                    return ControlFlow::Break(());
                }
            }
            if stopped.get() || (pass.seen.is_multiple_of(SLICE) && !go_on()) {
                stopped.set(true);
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        };
        let scanned = self.store().scan_rows(from_memory, from_store);
        let scanned = scanned.map_err(|source| self.store_error(source));
        let result = match (scanned.and(damage.take().map_or(Ok(()), Err)), pass.into_inner()) {
            (Ok(()), Some(pass)) if !stopped.get() => Ok(pass.finish()),
            (Ok(()), _) => Err(SkipReason::Stopped),
            (Err(error), _) => {
                self.report(&error);
                Err(SkipReason::ReadFailed)
            }
        };
        self.read().scans().finish(id);
        result
    }

    /// False when the sink takes no more.
    fn hand_copies_over(&self, id: ScanId, taker: &Taker<'_>) -> bool {
        let mut taker = taker.borrow_mut();
        let Some(sink) = taker.as_mut() else { return true };
        let copies = self.read().scans().take_copies(id);
        copies.is_none_or(|copies| copies.hand_over(*sink).is_continue())
    }
}

impl<'a, 's> Pass<'a, 's> {
    fn new(
        rows: &'a Rows,
        set: &super::rows::RowSet,
        (id, taker): (ScanId, &'a Taker<'s>),
        mut gathered: Gathered,
    ) -> Self {
        let taken = std::mem::take(&mut gathered.taken).into_iter().peekable();
        let warm = (id == ScanId::WarmUp).then(Warm::default);
        let generation = set.generation();
        let above = gathered.copies.as_ref().map(CutCopies::threshold);
        Pass { rows, generation, taker, above, gathered, taken, seen: 0, warm }
    }

    /// What was copied to the last. False when the sink takes no more.
    fn hand_copies_over(&mut self) -> bool {
        let (Some(copies), Some(sink)) = (self.gathered.copies.take(), &mut *self.taker.borrow_mut()) else {
            return true;
        };
        copies.hand_over(*sink).is_continue()
    }

    fn row(
        &mut self,
        number: u32,
        key: u64,
        header: RowHeader,
        floats: &[f32],
    ) -> Result<ControlFlow<()>, ShardError> {
        const GO_ON: Result<ControlFlow<()>, ShardError> = Ok(ControlFlow::Continue(()));
        self.seen += 1;
        while self.taken.next_if(|taken| *taken < (number, key)).is_some() {}
        if self.taken.peek() == Some(&(number, key)) {
            return GO_ON;
        }
        let Some(table) = self.gathered.tables.get_mut(&number) else { return GO_ON };
        if header.version > self.gathered.index || header.version < table.floor {
            return GO_ON;
        }
        if header.is_tombstone() {
            return Ok(self.hand_over(number, key, header, &[]));
        }
        let shape = table.shape;
        if floats.len() != shape.stored_floats(header) {
            return Err(self.rows.misfit(number, key, floats.len(), shape));
        }
        table.rows += u64::from(header.is_live());
        let row = RowRef::from_parts(header, floats, shape);
        table.digest.add_row(number, key, &row);
        if let Some(warm) = &mut self.warm {
            if warm.table != number || warm.keys.len() >= rows_a_lock(TAKEN_IN_AT_ONCE, shape) {
                self.take_in();
            }
            if let Some(warm) = &mut self.warm {
                warm.table = number;
                warm.fetched.push(warm.keys.len(), header, floats);
                warm.keys.push(key);
            }
        }
        Ok(self.hand_over(number, key, header, floats))
    }

    fn hand_over(&self, number: u32, key: u64, header: RowHeader, floats: &[f32]) -> ControlFlow<()> {
        match (&mut *self.taker.borrow_mut(), self.above) {
            // Nothing is removed from no rows.
            (Some(_), Some(0)) if header.is_tombstone() => ControlFlow::Continue(()),
            (Some(sink), Some(above)) if above == 0 || header.version > above => {
                sink.row(number, key, header, floats)
            }
            _ => ControlFlow::Continue(()),
        }
    }

    /// Brings the rows in hand to memory, if there is room.
    fn take_in(&mut self) {
        let Some(warm) = &mut self.warm else { return };
        if let Some(scanned) = self.gathered.tables.get(&warm.table)
            && !warm.keys.is_empty()
        {
            let mut set = self.rows.write();
            if set.generation() != self.generation || set.floor(warm.table) != scanned.floor {
                warm.partial = true;
            } else if let Some(entry) = set.table_mut(warm.table) {
                if entry.has_room(warm.keys.len()) {
                    for (position, header, floats) in warm.fetched.iter() {
                        let key = warm.keys[position];
                        entry.table.load_absent(key, scanned.departures.of(key), header, floats);
                    }
                } else {
                    warm.partial = true;
                }
                set.account();
            }
        }
        warm.keys.clear();
        warm.fetched.clear();
    }

    fn finish(mut self) -> Gathered {
        self.take_in();
        {
            let mut set = self.rows.write();
            if set.generation() == self.generation {
                for (number, scanned) in &self.gathered.tables {
                    if set.floor(*number) != scanned.floor {
                        // Cleared since: what was counted is no more.
                        continue;
                    }
                    set.set_counted(*number, scanned.rows, scanned.live_changes);
                    let all_in = self.warm.as_ref().is_some_and(|warm| !warm.partial);
                    if all_in
                        && let Some(entry) = set.table_mut(*number)
                        && entry.table.all_departures() == scanned.departures
                    {
                        entry.table.set_whole();
                    }
                }
                set.account();
            }
        }
        self.gathered
    }
}
