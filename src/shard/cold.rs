//! Rows that are on disk only: reading them, and bringing them to memory.
//!
//! Who needs a row that is absent from a table that is not whole, reads it from the store: without a lock, in batches. What is
//! read is the row's current content as long as the key stays absent (`evershard_storage::table`, `residency`), because what is
//! not in memory is in the store as it is.
//!
//! - A pull reads, answers, and offers what it read to memory ([`Rows::take_in`]).
//! - Apply is the only one that changes rows: what it read stays right until it has changed it, whoever comes and goes.
//! - A prefetch is a pull that answers nobody.
//!
//! Not here: when rows leave (`rows`, `crate::memory`).

use std::sync::atomic::{AtomicU64, Ordering};

use evershard_storage::rocks::StoreError;
use evershard_storage::table::{Departures, RowHeader, RowShape};

use super::error::ShardError;
use super::rows::Rows;
use crate::telemetry::metric_definitions as metric;

/// Rows taken in under one taking of the lock.
const TAKEN_IN_AT_ONCE: usize = 256;
/// Bytes of rows that are copied under one taking of the lock, unless a single row has more.
const LOCKED_BYTES_MAX: usize = 1 << 20;

/// Rows to copy under one taking of the lock: at most `rows_max`, and fewer of wide ones. A block of a dense tensor has a hundred
/// times the bytes of an embedding, and pulls and pushes wait as long.
pub(crate) fn rows_a_lock(rows_max: usize, shape: RowShape) -> usize {
    let row_bytes = shape.floats() * size_of::<f32>();
    (LOCKED_BYTES_MAX / row_bytes.max(1)).clamp(1, rows_max)
}

/// How pushes came by their cold rows since the replica was opened; the node's metrics count the same over all its replicas.
#[derive(Debug, Default)]
pub struct ColdCounts {
    prefetched: AtomicU64,
    read_by_apply: AtomicU64,
}

impl ColdCounts {
    /// Rows that a prefetch brought to memory, before apply had to.
    #[must_use]
    pub fn prefetched(&self) -> u64 {
        self.prefetched.load(Ordering::Relaxed)
    }

    /// Rows that apply read while it and all pushes behind it waited.
    #[must_use]
    pub fn read_by_apply(&self) -> u64 {
        self.read_by_apply.load(Ordering::Relaxed)
    }

    pub(super) fn add_prefetched(&self, rows: usize) {
        self.prefetched.fetch_add(rows as u64, Ordering::Relaxed);
        metrics::counter!(metric::PREFETCHED_ROWS_TOTAL).increment(rows as u64);
    }

    pub(crate) fn add_read_by_apply(&self, rows: usize) {
        self.read_by_apply.fetch_add(rows as u64, Ordering::Relaxed);
        metrics::counter!(metric::APPLY_COLD_ROWS_TOTAL).increment(rows as u64);
    }
}

/// Rows read from the store, by their positions in the list of keys that was asked for. Reused.
#[derive(Debug, Default)]
pub(crate) struct Fetched {
    /// Position, header, end in `floats`.
    heads: Vec<(usize, RowHeader, usize)>,
    floats: Vec<f32>,
}

impl Fetched {
    pub(crate) fn clear(&mut self) {
        self.heads.clear();
        self.floats.clear();
    }

    pub(crate) fn push(&mut self, position: usize, header: RowHeader, floats: &[f32]) {
        self.floats.extend_from_slice(floats);
        self.heads.push((position, header, self.floats.len()));
    }

    /// Rows and tombstones, in ascending order of their positions.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, RowHeader, &[f32])> {
        (0..self.heads.len()).map(|number| self.get(number))
    }

    /// The row of a number from 0 on, in the order of [`Fetched::iter`].
    pub(crate) fn get(&self, number: usize) -> (usize, RowHeader, &[f32]) {
        let (position, header, end) = self.heads[number];
        let start = number.checked_sub(1).map_or(0, |before| self.heads[before].2);
        (position, header, &self.floats[start..end])
    }

    pub(crate) fn len(&self) -> usize {
        self.heads.len()
    }
}

/// Keys of a table that were absent from memory at one moment.
#[derive(Debug, Default)]
pub(crate) struct Absent {
    pub(crate) table: u32,
    pub(crate) keys: Vec<u64>,
    seen: Vec<Departures>,
    generation: u64,
    /// The table's floor: another one says that it was cleared since.
    floor: u64,
}

impl Absent {
    /// Of a table, under the lock.
    pub(crate) fn new(set: &super::rows::RowSet, table: u32) -> Self {
        Absent {
            table,
            keys: Vec::new(),
            seen: Vec::new(),
            generation: set.generation(),
            floor: set.floor(table),
        }
    }

    /// Adds a key that is absent from `table`, under the lock.
    pub(crate) fn push(&mut self, table: &evershard_storage::table::Table, key: u64) {
        self.keys.push(key);
        self.seen.push(table.departures(key));
    }
}

impl Rows {
    /// The keys that are absent from memory and may be on disk, with the shape of their rows; `None` when there are none.
    pub(crate) fn absent(&self, number: u32, keys: &[u64]) -> Option<(Absent, RowShape)> {
        let set = self.read();
        let table = set.table(number).filter(|table| !table.is_whole())?;
        let mut absent = Absent::new(&set, number);
        table.visit(keys, |position, row| {
            if row.is_none() {
                absent.push(table, keys[position]);
            }
        });
        Some((absent, table.shape())).filter(|(absent, _)| !absent.keys.is_empty())
    }

    /// Reads rows and tombstones from the store, adding those to `fetched` that are not below the table's floor. Blocks on the
    /// disk.
    ///
    /// # Errors
    /// [`ShardError`]; damage was reported.
    pub(crate) fn fetch(
        &self,
        table: u32,
        shape: RowShape,
        keys: &[u64],
        fetched: &mut Fetched,
    ) -> Result<(), ShardError> {
        fail::fail_point!("fetch::before_read");
        let floor = self.read().floor(table);
        let mut misfit = None;
        let read = self.store().get_many(table, keys, |position, row| {
            let Some((header, floats)) = row.filter(|(header, _)| header.version >= floor) else { return };
            if !header.is_tombstone() && floats.len() != shape.stored_floats(header) {
                misfit.get_or_insert((keys[position], floats.len()));
                return;
            }
            fetched.push(position, header, floats);
        });
        let read = read.map_err(|source| self.store_error(source));
        let result = read.and(match misfit {
            Some((key, found)) => Err(self.misfit(table, key, found, shape)),
            None => Ok(()),
        });
        result.inspect_err(|error| self.report(error))
    }

    /// Brings rows to memory that were read from the store after `absent` was taken; others leave for them. Rows whose keys came
    /// or went meanwhile stay out. How many it brought.
    pub(crate) fn take_in(&self, absent: &Absent, fetched: &Fetched) -> usize {
        let (mut taken_in, mut first) = (0, 0);
        while first < fetched.len() {
            let mut set = self.write();
            if set.generation() != absent.generation || set.floor(absent.table) != absent.floor {
                break;
            }
            let Some(mut entry) = set.table_mut(absent.table) else { break };
            let at_once = rows_a_lock(TAKEN_IN_AT_ONCE, entry.table.shape());
            let last = (first + at_once).min(fetched.len());
            entry.make_room(last - first);
            for number in first..last {
                let (position, header, floats) = fetched.get(number);
                // A tombstone says what an absent key says.
                if !header.is_tombstone() {
                    let (key, seen) = (absent.keys[position], absent.seen[position]);
                    taken_in += usize::from(entry.table.load_absent(key, seen, header, floats));
                }
            }
            set.account();
            first = last;
        }
        taken_in
    }

    pub(crate) fn store_error(&self, source: StoreError) -> ShardError {
        let identity = self.store().identity();
        ShardError::Store { shard: identity.shard, group: identity.group, source }
    }

    pub(crate) fn misfit(&self, table: u32, key: u64, found: usize, shape: RowShape) -> ShardError {
        let identity = self.store().identity();
        ShardError::RowShape {
            shard: identity.shard,
            group: identity.group,
            table,
            key,
            found,
            expected: shape.floats(),
        }
    }
}
