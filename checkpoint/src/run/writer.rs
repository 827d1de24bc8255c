//! Takes rows in ascending order of their keys.

use bytes::Bytes;

use super::error::{RunError, RunFault};
use super::head::{BLOCK_HEAD_BYTES, HEAD_BYTES, ROW_HEAD_BYTES, RowHead, RunHead, RunShape};
use super::{BLOCK_BYTES, RUN_BYTES_MAX};

/// A run that is complete.
#[derive(Debug, Clone)]
pub struct Run {
    /// What its head says.
    pub head: RunHead,
    /// The file.
    pub bytes: Bytes,
}

/// A run on its way: see the [module](super).
#[derive(Debug)]
pub struct RunWriter {
    head: RunHead,
    bytes: Vec<u8>,
    bytes_max: usize,
    /// Where the open block begins; its head is filled in when it ends.
    block_at: usize,
    block_rows: u32,
}

impl RunWriter {
    /// An empty run.
    ///
    /// # Errors
    /// A shape that no table has.
    pub fn new(table: u32, shape: RunShape) -> Result<Self, RunError> {
        Self::with_bytes_max(table, shape, RUN_BYTES_MAX)
    }

    /// An empty run that is full earlier: for tests, which want many runs of few rows. A row always goes in.
    ///
    /// # Errors
    /// A shape that no table has.
    pub fn with_bytes_max(table: u32, shape: RunShape, bytes_max: usize) -> Result<Self, RunError> {
        let head = RunHead { table, shape, rows: 0, first_key: 0, last_key: 0, blocks: 0 };
        let (bytes, bytes_max) = (vec![0; HEAD_BYTES], bytes_max.min(RUN_BYTES_MAX));
        let writer = RunWriter { head, bytes, bytes_max, block_at: 0, block_rows: 0 };
        shape.check().map_err(|fault| writer.error(fault))?;
        Ok(writer)
    }

    fn error(&self, fault: RunFault) -> RunError {
        let file = format!("a run of table {}", self.head.table);
        RunError { file, offset: self.bytes.len() as u64, fault }
    }

    /// Whether there is no row yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.head.rows == 0
    }

    /// Whether a row, however long, might not go in.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let longest = self.head.shape.row_bytes_max() + BLOCK_HEAD_BYTES;
        !self.is_empty() && self.bytes.len() + longest > self.bytes_max
    }

    /// Adds a row: `floats` are its weights, state and notes; the notes alone of a counting record; none of a tombstone.
    ///
    /// # Errors
    /// The row does not come after the one before, has flags that no row has, or other floats than its shape; or the run is full.
    /// Nothing was added then.
    pub fn push(&mut self, key: u64, row: RowHead, floats: &[f32]) -> Result<(), RunError> {
        let expected = self.head.shape.floats(&row);
        let fault = if self.is_full() {
            Some(RunFault::Full)
        } else if row.flags & !RowHead::FLAGS != 0 {
            Some(RunFault::Flags { found: row.flags })
        } else if floats.len() != expected {
            Some(RunFault::Floats { expected, found: floats.len() })
        } else if !self.is_empty() && key <= self.head.last_key {
            Some(RunFault::Order { key, before: self.head.last_key })
        } else {
            None
        };
        if let Some(fault) = fault {
            return Err(self.error(fault));
        }
        let row_bytes = ROW_HEAD_BYTES + 4 * floats.len();
        let body = self.bytes.len() - self.block_at - BLOCK_HEAD_BYTES.min(self.bytes.len() - self.block_at);
        if self.block_rows > 0 && body + row_bytes > BLOCK_BYTES {
            self.end_block();
        }
        if self.block_rows == 0 {
            self.block_at = self.bytes.len();
            self.bytes.extend_from_slice(&[0; BLOCK_HEAD_BYTES]);
        }
        self.bytes.extend_from_slice(&key.to_le_bytes());
        self.bytes.extend_from_slice(&row.version.to_le_bytes());
        self.bytes.extend_from_slice(&row.steps.to_le_bytes());
        self.bytes.extend_from_slice(&row.flags.to_le_bytes());
        for float in floats {
            self.bytes.extend_from_slice(&float.to_bits().to_le_bytes());
        }
        self.block_rows += 1;
        if self.is_empty() {
            self.head.first_key = key;
        }
        self.head.last_key = key;
        self.head.rows += 1;
        Ok(())
    }

    fn end_block(&mut self) {
        let body_at = self.block_at + BLOCK_HEAD_BYTES;
        let body_bytes = (self.bytes.len() - body_at) as u32;
        let mut head = [0; 8];
        head[..4].copy_from_slice(&body_bytes.to_le_bytes());
        head[4..].copy_from_slice(&self.block_rows.to_le_bytes());
        let crc = block_crc(&head, &self.bytes[body_at..]);
        self.bytes[self.block_at..self.block_at + 8].copy_from_slice(&head);
        self.bytes[self.block_at + 8..body_at].copy_from_slice(&crc.to_le_bytes());
        self.block_rows = 0;
        self.head.blocks += 1;
    }

    /// The run, complete.
    ///
    /// # Errors
    /// There is no row in it.
    pub fn finish(mut self) -> Result<Run, RunError> {
        if self.is_empty() {
            return Err(self.error(RunFault::Empty));
        }
        self.end_block();
        let head = self.head.encode();
        self.bytes[..HEAD_BYTES].copy_from_slice(&head);
        Ok(Run { head: self.head, bytes: self.bytes.into() })
    }
}

pub(super) fn block_crc(head: &[u8], body: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(head);
    crc.update(body);
    crc.finalize()
}
