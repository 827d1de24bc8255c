//! A table read whole, in pieces: each as of one index, in ascending order of keys, with nothing kept in between.
//!
//! As of an index, a row is in the store as it is, or it is unflushed and in memory (`shard::scans`). So a piece is a merge: of
//! the lowest unflushed rows, copied under the lock, and of what the store holds in the same range of keys, which its iterator,
//! opened under the same lock, shows as it was then, however long it is read. Memory wins where both have a key.
//!
//! Invariants:
//! - a piece takes bounded memory and looks at a bounded number of the store's rows: it may be short, or empty, with more to come;
//! - the lock is held for a look at each unflushed row and a copy of a piece, and not over I/O.
//!
//! Not here: who may read (`crate::service`), digests of whole replicas (`crate::shard`).

use std::iter::Peekable;
use std::ops::ControlFlow;

use bytes::{BufMut, BytesMut};
use evershard_proto::limits::PULL_REPLY_BYTES_MAX;
use evershard_storage::table::{RowHeader, Table};

use super::{ReadError, Reader};

/// Rows of the store that a piece looks at, for each that it may have: tombstones and cleared rows do not get in.
const LOOKS_PER_ROW: usize = 16;

/// A piece of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TablePiece {
    /// As of this entry.
    pub index: u64,
    /// Keys, 8 little-endian bytes each, ascending.
    pub keys: BytesMut,
    /// Their weights, little-endian f32.
    pub rows: BytesMut,
    /// Where to go on; `None` at the end.
    pub next_key: Option<u64>,
}

/// An unflushed row: its key, and where its weights are among the copies; `None` for a removed one.
type Unflushed = (u64, Option<usize>);

impl Reader {
    /// The live rows of a table from `from_key` on: `rows_max` of them at the most (0: as many as a reply takes). Blocks on the
    /// disk.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn scan(&self, table: u32, from_key: u64, rows_max: u32) -> Result<TablePiece, ReadError> {
        let schema = self.check(table, &[])?;
        let shape = schema.shape();
        let dim = shape.dim as usize;
        let fits = (PULL_REPLY_BYTES_MAX / (8 + dim * 4)).max(1);
        let rows_max = if rows_max == 0 { fits } else { fits.min(rows_max as usize) };
        let set = self.rows.read();
        let unknown = || ReadError::UnknownTable { shard: self.rows.scope().shard, table };
        let (index, floor) = (self.rows.applied(), set.floor(table));
        let unflushed = CopiedRows::of(set.table(table).ok_or_else(unknown)?, from_key, rows_max);
        let mut piece = Merge::new(unflushed, dim, rows_max);
        let mut misfit = None;
        let scanned = self.rows.store().scan_table(
            (table, from_key),
            // The iterator shows what is there now.
            move || drop(set),
            |key, header, floats| {
                if header.version >= floor
                    && !header.is_tombstone()
                    && floats.len() != shape.stored_floats(header)
                {
                    misfit = Some((key, floats.len()));
                    return ControlFlow::Break(());
                }
                piece.store_row(key, header, floor, floats)
            },
        );
        let scanned = scanned.map_err(|source| self.rows.store_error(source)).and(match misfit {
            Some((key, found)) => Err(self.rows.misfit(table, key, found, shape)),
            None => Ok(()),
        });
        scanned.map_err(|error| {
            self.rows.report(&error);
            ReadError::Disk { table, reason: error.to_string() }
        })?;
        let (keys, rows, next_key) = piece.finish();
        Ok(TablePiece { index, keys, rows, next_key })
    }

    /// Live rows of a table, and the index that they are counted at; `None` while they are not counted yet.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn size(&self, table: u32) -> Result<Option<(u64, u64)>, ReadError> {
        self.check(table, &[])?;
        let set = self.rows.read();
        Ok(set.live_rows(table).map(|rows| (rows, self.rows.applied())))
    }
}

/// The unflushed rows with the lowest keys.
struct CopiedRows {
    /// Ascending.
    rows: Vec<Unflushed>,
    weights: Vec<f32>,
    /// There may be more above this key.
    last: Option<u64>,
}

impl CopiedRows {
    fn of(table: &Table, from_key: u64, rows_max: usize) -> Self {
        let (slots, _) = table.unflushed().take_some(0, usize::MAX);
        let row = |slot: &u32| table.row_at(*slot).map(|(key, _)| (key, *slot));
        let mut lowest: Vec<(u64, u32)> =
            slots.iter().filter_map(row).filter(|(key, _)| *key >= from_key).collect();
        let is_cut = lowest.len() > rows_max;
        if is_cut {
            lowest.select_nth_unstable(rows_max - 1);
            lowest.truncate(rows_max);
        }
        lowest.sort_unstable();
        let (mut rows, mut weights) = (Vec::with_capacity(lowest.len()), Vec::new());
        for (key, slot) in &lowest {
            let live = table.row_at(*slot).filter(|(_, row)| row.is_live()).map(|(_, row)| {
                let at = weights.len();
                weights.extend_from_slice(row.weights());
                at
            });
            rows.push((*key, live));
        }
        CopiedRows { rows, weights, last: lowest.last().filter(|_| is_cut).map(|(key, _)| *key) }
    }
}

/// A piece in the making.
struct Merge {
    unflushed: Peekable<std::vec::IntoIter<Unflushed>>,
    weights: Vec<f32>,
    last: Option<u64>,
    dim: usize,
    rows_left: usize,
    looks_left: usize,
    keys: BytesMut,
    rows: BytesMut,
    /// Where to go on, once that is known.
    next_key: Option<u64>,
}

impl Merge {
    fn new(unflushed: CopiedRows, dim: usize, rows_max: usize) -> Self {
        Merge {
            unflushed: unflushed.rows.into_iter().peekable(),
            weights: unflushed.weights,
            last: unflushed.last,
            dim,
            rows_left: rows_max,
            looks_left: rows_max.saturating_mul(LOOKS_PER_ROW),
            keys: BytesMut::new(),
            rows: BytesMut::new(),
            next_key: None,
        }
    }

    /// The next row of the store.
    fn store_row(&mut self, key: u64, header: RowHeader, floor: u64, floats: &[f32]) -> ControlFlow<()> {
        if self.last.is_some_and(|last| key > last) {
            // What is unflushed up there was not looked at.
            return ControlFlow::Break(());
        }
        if self.unflushed_below(key).is_break() {
            return ControlFlow::Break(());
        }
        if self.unflushed.peek().is_some_and(|(unflushed, _)| *unflushed == key) {
            // Its turn comes with the next key.
            return ControlFlow::Continue(());
        }
        if self.looks_left == 0 {
            self.next_key = Some(key);
            return ControlFlow::Break(());
        }
        self.looks_left -= 1;
        if !header.is_live() || header.version < floor {
            return ControlFlow::Continue(());
        }
        let dim = self.dim;
        self.put(key, &floats[..dim])
    }

    /// Those before `key`.
    fn unflushed_below(&mut self, key: u64) -> ControlFlow<()> {
        while let Some((unflushed, live)) = self.unflushed.next_if(|(unflushed, _)| *unflushed < key) {
            self.put_unflushed(unflushed, live)?;
        }
        ControlFlow::Continue(())
    }

    fn put_unflushed(&mut self, key: u64, live: Option<usize>) -> ControlFlow<()> {
        let Some(at) = live else { return ControlFlow::Continue(()) };
        let weights = std::mem::take(&mut self.weights);
        let put = self.put(key, &weights[at..at + self.dim]);
        self.weights = weights;
        put
    }

    fn put(&mut self, key: u64, weights: &[f32]) -> ControlFlow<()> {
        if self.rows_left == 0 {
            self.next_key = Some(key);
            return ControlFlow::Break(());
        }
        self.rows_left -= 1;
        self.keys.put_u64_le(key);
        for weight in weights {
            self.rows.put_f32_le(*weight);
        }
        ControlFlow::Continue(())
    }

    /// Keys, rows, and where to go on.
    fn finish(mut self) -> (BytesMut, BytesMut, Option<u64>) {
        while self.next_key.is_none()
            && let Some((key, live)) = self.unflushed.next()
        {
            // One that finds no room says where to go on.
            let _ = self.put_unflushed(key, live);
        }
        let beyond = self.last.and_then(|last| last.checked_add(1));
        let next_key = self.next_key.or(beyond);
        (self.keys, self.rows, next_key)
    }
}
