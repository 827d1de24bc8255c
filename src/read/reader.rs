//! Pulls.

use std::sync::Arc;

use bytes::{BufMut, BytesMut};
use evershard_proto::key::id_of;
use evershard_proto::limits::PULL_REPLY_BYTES_MAX;
use evershard_storage::table::Table;

use super::{Marks, ReadError};
use crate::model::{KeyRange, TableSchema};
use crate::shard::{Absent, Fetched, Rows};

/// Keys read under one taking of the lock: long pulls let apply in between.
const KEYS_PER_LOCK: usize = 8 * Table::BATCH;

/// Reads a shard's rows; cheap to clone. Has no method that writes.
#[derive(Debug, Clone)]
pub struct Reader {
    pub(super) rows: Arc<Rows>,
}

/// What a pull's rows are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PullInfo {
    /// The log index that the rows reflect, all of them at least.
    pub index: u64,
    /// Values a row.
    pub dim: u32,
}

impl Reader {
    /// A reader of these rows.
    #[must_use]
    pub fn new(rows: Arc<Rows>) -> Self {
        Reader { rows }
    }

    /// Appends the weights of `keys` (8 little-endian bytes each), in their order, to `rows` as little-endian f32; and a
    /// byte a key to `marks` when given. A row that does not exist is
    /// computed by the table's initialiser, and not written. Each row is whole; rows of one pull may reflect different
    /// entries, none older than the answered index. Blocks on the disk for rows that are not in memory.
    ///
    /// # Errors
    /// [`ReadError`]; nothing was appended then.
    pub fn pull(
        &self,
        table: u32,
        keys: &[u8],
        mut marks: Option<&mut Marks>,
        rows: &mut BytesMut,
    ) -> Result<PullInfo, ReadError> {
        let lengths = (rows.len(), marks.as_ref().map_or(0, |marks| marks.len()));
        let (info, cold) = self.pull_resident(table, keys, marks.as_deref_mut(), rows)?;
        if let Some(cold) = cold {
            cold.read(marks.as_deref_mut(), rows).inspect_err(|_| {
                rows.truncate(lengths.0);
                if let Some(marks) = marks {
                    marks.truncate(lengths.1);
                }
            })?;
        }
        Ok(info)
    }

    /// As [`Reader::pull`], without a look at the disk: what is missing is in the answer, to be read where that may block.
    ///
    /// # Errors
    /// [`ReadError`]; nothing was appended then.
    pub fn pull_resident(
        &self,
        table: u32,
        keys: &[u8],
        mut marks: Option<&mut Marks>,
        rows: &mut BytesMut,
    ) -> Result<(PullInfo, Option<ColdPull>), ReadError> {
        let schema = self.check(table, keys)?;
        let dim = schema.dim() as usize;
        let start = rows.len();
        let marks_start = marks.as_ref().map_or(0, |marks| marks.len());
        rows.reserve(keys.len() / 8 * dim * 4);
        let mut pull = Pull {
            keys: Vec::with_capacity(KEYS_PER_LOCK.min(keys.len() / 8)),
            initial: Vec::new(),
            cold: Vec::new(),
            absent: None,
            done: 0,
        };
        let mut index = None;
        for chunk in keys.chunks(KEYS_PER_LOCK * 8) {
            pull.keys.clear();
            pull.keys.extend(chunk.chunks_exact(8).map(key_of_bytes));
            let set = self.rows.read();
            index.get_or_insert_with(|| self.rows.applied());
            let Some(found) = set.table(table) else {
                // Dropped between two batches.
                rows.truncate(start);
                if let Some(marks) = marks {
                    marks.truncate(marks_start);
                }
                return Err(ReadError::UnknownTable { shard: self.rows.scope().shard, table });
            };
            if !found.is_whole() && pull.absent.is_none() {
                pull.absent = Some(Absent::new(&set, table));
            }
            pull.gather(found, rows, marks.as_deref_mut());
        }
        let mut initial = vec![0.0; if pull.initial.is_empty() { 0 } else { dim }];
        for (position, key) in pull.initial {
            schema.fill_new_weights(id_of(table, key), &mut initial);
            let at = start + position * dim * 4;
            write_floats(&initial, &mut rows[at..at + dim * 4]);
        }
        let info = PullInfo { index: index.unwrap_or_else(|| self.rows.applied()), dim: schema.dim() };
        let cold = pull.absent.filter(|absent| !absent.keys.is_empty()).map(|absent| ColdPull {
            rows: Arc::clone(&self.rows),
            schema,
            absent,
            positions: pull.cold,
            start,
            marks_start,
        });
        Ok((info, cold))
    }

    /// The table's schema, if it is known here.
    #[must_use]
    pub fn schema(&self, table: u32) -> Option<Arc<TableSchema>> {
        self.rows.schemas().get(&table).cloned()
    }

    /// The last entry whose changes can be read.
    #[must_use]
    pub fn applied(&self) -> u64 {
        self.rows.applied()
    }

    pub(super) fn check(&self, table: u32, keys: &[u8]) -> Result<Arc<TableSchema>, ReadError> {
        let scope = self.rows.scope();
        let shard = scope.shard;
        if !self.rows.ready() {
            let (applied, complete_at) = (self.rows.applied(), self.rows.complete_at());
            return Err(ReadError::NotReady { shard, applied, complete_at });
        }
        let schema = self.schema(table).ok_or(ReadError::UnknownTable { shard, table })?;
        if !keys.len().is_multiple_of(8) {
            return Err(ReadError::KeyBytes { shard, table, bytes: keys.len() });
        }
        let count = keys.len() / 8;
        if count * schema.dim() as usize * 4 > PULL_REPLY_BYTES_MAX {
            let limit = PULL_REPLY_BYTES_MAX;
            return Err(ReadError::TooLarge { shard, table, keys: count, dim: schema.dim(), limit });
        }
        if scope.range != KeyRange::ALL
            && let Some(key) = keys.chunks_exact(8).map(key_of_bytes).find(|key| !scope.range.contains(*key))
        {
            return Err(ReadError::WrongRange {
                shard,
                table,
                id: id_of(table, key),
                key,
                range: scope.range,
            });
        }
        if let Some(layout) = schema.tensor() {
            let mut ids = keys.chunks_exact(8).map(|raw| id_of(table, key_of_bytes(raw)));
            let blocks = layout.blocks();
            if let Some(block) = ids.find(|block| *block >= blocks) {
                let name = schema.name().to_owned();
                return Err(ReadError::OutOfRange { shard, table, name, block, blocks });
            }
        }
        Ok(schema)
    }
}

/// The rows of a pull that are not in memory.
#[derive(Debug)]
#[must_use = "these rows are still zeros"]
pub struct ColdPull {
    rows: Arc<Rows>,
    schema: Arc<TableSchema>,
    absent: Absent,
    /// Where in the pull each of the keys is.
    positions: Vec<usize>,
    /// Where the pull's rows and flags begin.
    start: usize,
    marks_start: usize,
}

impl ColdPull {
    /// Rows to read.
    #[must_use]
    pub fn len(&self) -> usize {
        self.absent.keys.len()
    }

    /// Never: there is no such pull without rows to read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.absent.keys.is_empty()
    }

    /// Reads the rows and puts them in their places in what the pull appended to; brings them to memory. Blocks on the disk.
    ///
    /// # Errors
    /// [`ReadError::Disk`]; some rows may be in their places then.
    pub fn read(self, mut marks: Option<&mut Marks>, rows: &mut BytesMut) -> Result<(), ReadError> {
        let (table, shape) = (self.absent.table, self.schema.shape());
        let row_bytes = shape.dim as usize * 4;
        let mut fetched = Fetched::default();
        self.rows
            .fetch(table, shape, &self.absent.keys, &mut fetched)
            .map_err(|error| ReadError::Disk { table, reason: error.to_string() })?;
        let mut found = fetched.iter().filter(|(_, header, _)| header.is_live()).peekable();
        let mut initial = vec![0.0; shape.dim as usize];
        for (number, (key, position)) in self.absent.keys.iter().zip(&self.positions).enumerate() {
            let at = self.start + position * row_bytes;
            let place = &mut rows[at..at + row_bytes];
            match found.next_if(|(of, ..)| *of == number) {
                Some((_, header, floats)) => {
                    write_floats(&floats[..shape.dim as usize], place);
                    if let Some(marks) = marks.as_deref_mut() {
                        marks.found(self.marks_start + position, header.version);
                    }
                }
                None => {
                    self.schema.fill_new_weights(id_of(table, *key), &mut initial);
                    write_floats(&initial, place);
                }
            }
        }
        drop(found);
        self.rows.take_in(&self.absent, &fetched);
        Ok(())
    }
}

/// One pull under way.
struct Pull {
    /// Of the batch in hand.
    keys: Vec<u64>,
    /// Rows to compute: position in the pull, key.
    initial: Vec<(usize, u64)>,
    /// Positions of the rows to read from disk.
    cold: Vec<usize>,
    /// Their keys.
    absent: Option<Absent>,
    /// Keys read before this batch.
    done: usize,
}

impl Pull {
    fn gather(&mut self, table: &Table, rows: &mut BytesMut, mut marks: Option<&mut Marks>) {
        let row_bytes = table.shape().dim as usize * 4;
        let may_be_cold = !table.is_whole();
        let Pull { keys, initial, cold, absent, done } = self;
        table.visit(keys, |position, row| {
            let is_absent = row.is_none();
            let row = row.filter(|row| row.is_live());
            match (row, absent.as_mut()) {
                (Some(row), _) => put_floats(row.weights(), rows),
                (None, Some(absent)) if is_absent && may_be_cold => {
                    absent.push(table, keys[position]);
                    cold.push(*done + position);
                    rows.put_bytes(0, row_bytes);
                }
                (None, _) => {
                    initial.push((*done + position, keys[position]));
                    rows.put_bytes(0, row_bytes);
                }
            }
            if let Some(marks) = marks.as_deref_mut() {
                marks.push(row);
            }
        });
        *done += keys.len();
    }
}

fn key_of_bytes(raw: &[u8]) -> u64 {
    raw.try_into().map_or(0, u64::from_le_bytes)
}

#[cfg(target_endian = "little")]
fn put_floats(values: &[f32], out: &mut BytesMut) {
    // SAFETY: f32 has no padding, any of its bytes is a valid u8, u8 has no alignment, and the length is that of `values`;
    // on this target the bytes are little-endian already.
    let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
    out.put_slice(bytes);
}

#[cfg(not(target_endian = "little"))]
fn put_floats(values: &[f32], out: &mut BytesMut) {
    for value in values {
        out.put_f32_le(*value);
    }
}

fn write_floats(values: &[f32], out: &mut [u8]) {
    for (raw, value) in out.chunks_exact_mut(4).zip(values) {
        raw.copy_from_slice(&value.to_le_bytes());
    }
}
