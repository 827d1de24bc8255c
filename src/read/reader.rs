//! Pulls.

use std::sync::Arc;

use bytes::{BufMut, BytesMut};
use evershard_proto::key::id_of;
use evershard_proto::limits::PULL_REPLY_BYTES_MAX;
use evershard_storage::table::Table;

use super::ReadError;
use crate::model::{KeyRange, TableSchema};
use crate::shard::Rows;

/// Keys read under one taking of the lock: long pulls let apply in between.
const KEYS_PER_LOCK: usize = 8 * Table::BATCH;

/// Reads a shard's rows; cheap to clone. Has no method that writes.
#[derive(Debug, Clone)]
pub struct Reader {
    rows: Arc<Rows>,
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
    /// byte a key to `exists` when given: 1 when the row was ever pushed and not removed. A row that does not exist is
    /// computed by the table's initialiser, and not written. Each row is whole; rows of one pull may reflect different
    /// entries, none older than the answered index.
    ///
    /// # Errors
    /// [`ReadError`]; nothing was appended then.
    pub fn pull(
        &self,
        table: u32,
        keys: &[u8],
        mut exists: Option<&mut BytesMut>,
        rows: &mut BytesMut,
    ) -> Result<PullInfo, ReadError> {
        let schema = self.check(table, keys)?;
        let dim = schema.dim() as usize;
        let start = rows.len();
        let exists_start = exists.as_ref().map_or(0, |exists| exists.len());
        rows.reserve(keys.len() / 8 * dim * 4);
        let mut pull =
            Pull { keys: Vec::with_capacity(KEYS_PER_LOCK.min(keys.len() / 8)), absent: Vec::new(), done: 0 };
        let mut index = None;
        for chunk in keys.chunks(KEYS_PER_LOCK * 8) {
            pull.keys.clear();
            pull.keys.extend(chunk.chunks_exact(8).map(key_of_bytes));
            let set = self.rows.read();
            index.get_or_insert_with(|| self.rows.applied());
            let Some(found) = set.table(table) else {
                // Dropped between two batches.
                rows.truncate(start);
                if let Some(exists) = exists {
                    exists.truncate(exists_start);
                }
                return Err(ReadError::UnknownTable { shard: self.rows.scope().shard, table });
            };
            pull.gather(found, rows, exists.as_deref_mut());
        }
        let mut initial = vec![0.0; if pull.absent.is_empty() { 0 } else { dim }];
        for (position, key) in pull.absent {
            schema.initializer().fill(id_of(table, key), &mut initial);
            let at = start + position * dim * 4;
            write_floats(&initial, &mut rows[at..at + dim * 4]);
        }
        Ok(PullInfo { index: index.unwrap_or_else(|| self.rows.applied()), dim: schema.dim() })
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

    fn check(&self, table: u32, keys: &[u8]) -> Result<Arc<TableSchema>, ReadError> {
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
        Ok(schema)
    }
}

/// One pull under way.
struct Pull {
    /// Of the batch in hand.
    keys: Vec<u64>,
    /// Rows to compute: position in the pull, key.
    absent: Vec<(usize, u64)>,
    /// Keys read before this batch.
    done: usize,
}

impl Pull {
    fn gather(&mut self, table: &Table, rows: &mut BytesMut, mut exists: Option<&mut BytesMut>) {
        let row_bytes = table.shape().dim as usize * 4;
        let Pull { keys, absent, done } = self;
        table.visit(keys, |position, row| {
            let row = row.filter(|row| !row.is_tombstone());
            match row {
                Some(row) => put_floats(row.weights(), rows),
                None => {
                    absent.push((*done + position, keys[position]));
                    rows.put_bytes(0, row_bytes);
                }
            }
            if let Some(exists) = exists.as_deref_mut() {
                exists.put_u8(u8::from(row.is_some()));
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
