//! A look over all records of a table: those in memory, then those that are on disk only.
//!
//! Rows come and go meanwhile: some may be met twice, or not at all. Who is met twice goes once, and who is not met is met the
//! next time.
//!
//! Invariants:
//! - the lock is held for a slice at a time, never over I/O;
//! - no more than [`ROWS_PER_SECOND`] records a second.
//!
//! Not here: which of them go (`judge`).

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use evershard_proto::shard_command::EvictedRow;
use evershard_storage::table::{RowHeader, RowRef, RowShape};

use super::judge::{CutOff, Judge};
use crate::model::TableSchema;
use crate::shard::{Fetched, Rows, ShardError};

/// Records looked at under one taking of the lock.
const SLICE: u32 = if cfg!(test) { 3 } else { 1024 };
/// Records a second: a look is in no hurry, and pushes are.
const ROWS_PER_SECOND: u32 = 1_000_000;

/// What a look over a table found to go, by what it was decided.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) table: u32,
    pub(crate) cut_off: CutOff,
    /// In order of their keys.
    pub(crate) rows: Vec<EvictedRow>,
}

/// Looks over a table. `None` when `go_on`, asked between slices, said no, or the table was dropped. Blocks on the disk, and to
/// keep to its rate.
///
/// # Errors
/// [`ShardError`] when the store cannot be read; damage was reported.
pub(crate) fn look(
    rows: &Rows,
    schema: &TableSchema,
    cut_off: CutOff,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Option<Found>, ShardError> {
    let mut look = Look {
        rows,
        number: schema.number(),
        shape: schema.shape(),
        judge: Judge::new(*schema.rules(), cut_off, rows.scope().range),
        begun: Instant::now(),
        seen: 0,
    };
    if !look.memory(go_on) || !look.disk(go_on)? {
        return Ok(None);
    }
    Ok(Some(Found { table: schema.number(), cut_off, rows: look.judge.finish() }))
}

struct Look<'a> {
    rows: &'a Rows,
    number: u32,
    shape: RowShape,
    judge: Judge,
    begun: Instant,
    seen: u32,
}

impl Look<'_> {
    fn memory(&mut self, go_on: &mut dyn FnMut() -> bool) -> bool {
        let mut next = 0;
        loop {
            {
                let set = self.rows.read();
                let Some(table) = set.table(self.number) else { return false };
                let end = table.slots().min(next + SLICE);
                for number in next..end {
                    if let Some((key, row)) = table.row_at(number)
                        && !row.is_tombstone()
                    {
                        self.judge.hear(key, row);
                    }
                }
                if end == table.slots() {
                    return true;
                }
                next = end;
            }
            if !go_on() {
                return false;
            }
            self.pace(SLICE);
        }
    }

    fn disk(&mut self, go_on: &mut dyn FnMut() -> bool) -> Result<bool, ShardError> {
        let floor = {
            let set = self.rows.read();
            match set.table(self.number) {
                Some(table) if !table.is_whole() => set.floor(self.number),
                Some(_) => return Ok(true),
                None => return Ok(false),
            }
        };
        let (mut keys, mut fetched) = (Vec::new(), Fetched::default());
        let (mut misfit, mut stopped) = (None, false);
        let (rows, number, shape) = (self.rows, self.number, self.shape);
        let found = |key, header: RowHeader, floats: &[f32]| {
            // A table that is cleared while this looks may be judged by rows that are none: those go by version, so none is lost.
            if header.is_tombstone() || header.version < floor {
                return ControlFlow::Continue(());
            }
            if floats.len() != shape.stored_floats(header) {
                misfit = Some((key, floats.len()));
                return ControlFlow::Break(());
            }
            fetched.push(keys.len(), header, floats);
            keys.push(key);
            if keys.len() < SLICE as usize {
                return ControlFlow::Continue(());
            }
            self.hear_cold(&mut keys, &mut fetched);
            self.pace(SLICE);
            if go_on() {
                return ControlFlow::Continue(());
            }
            stopped = true;
            ControlFlow::Break(())
        };
        let scanned =
            rows.store().scan_table((number, 0), || (), found).map_err(|source| rows.store_error(source));
        let scanned = scanned.and(match misfit {
            Some((key, found)) => Err(rows.misfit(number, key, found, shape)),
            None => Ok(()),
        });
        scanned.inspect_err(|error| rows.report(error))?;
        self.hear_cold(&mut keys, &mut fetched);
        Ok(!stopped)
    }

    /// What is in memory was heard of there, as it is now.
    fn hear_cold(&mut self, keys: &mut Vec<u64>, fetched: &mut Fetched) {
        if let Some(table) = self.rows.read().table(self.number) {
            for (position, header, floats) in fetched.iter() {
                if table.find_slot(keys[position]).is_none() {
                    self.judge.hear(keys[position], RowRef::from_parts(header, floats, self.shape));
                }
            }
        }
        keys.clear();
        fetched.clear();
    }

    fn pace(&mut self, rows: u32) {
        self.seen = self.seen.saturating_add(rows);
        let due = Duration::from_secs(1) * self.seen / ROWS_PER_SECOND;
        std::thread::sleep(due.saturating_sub(self.begun.elapsed()));
    }
}
