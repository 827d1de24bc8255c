//! Reads a run as its bytes come.
//!
//! Invariant: memory is bounded by a block and by what came at a time, whatever lengths the file declares.

use bytes::{Buf, Bytes, BytesMut};

use super::block::Block;
use super::error::{RunError, RunFault};
use super::head::{BLOCK_HEAD_BYTES, HEAD_BYTES, ROW_HEAD_BYTES, RunHead, le_u32};
use super::writer::block_crc;
use super::{BLOCK_BYTES, RUN_BYTES_MAX};

/// A run on its way in.
#[derive(Debug)]
pub struct RunDecoder {
    file: String,
    pending: BytesMut,
    /// Bytes that were taken off `pending`.
    offset: u64,
    head: Option<RunHead>,
    blocks: u32,
    rows: u64,
    last_key: Option<u64>,
}

impl RunDecoder {
    /// Reads the run that errors call `file`.
    #[must_use]
    pub fn new(file: impl Into<String>) -> Self {
        let (file, pending) = (file.into(), BytesMut::new());
        RunDecoder { file, pending, offset: 0, head: None, blocks: 0, rows: 0, last_key: None }
    }

    fn error(&self, at: usize, fault: RunFault) -> RunError {
        RunError { file: self.file.clone(), offset: self.offset + at as u64, fault }
    }

    /// Takes the next bytes of the file.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// The head, once it came.
    ///
    /// # Errors
    /// [`RunError`]: it is not the head of a run, or damaged.
    pub fn head(&mut self) -> Result<Option<RunHead>, RunError> {
        if self.head.is_none()
            && let Some(raw) = self.pending.first_chunk::<HEAD_BYTES>()
        {
            let head = RunHead::decode(raw).map_err(|fault| self.error(0, fault))?;
            self.advance(HEAD_BYTES);
            self.head = Some(head);
        }
        Ok(self.head)
    }

    fn advance(&mut self, bytes: usize) {
        self.pending.advance(bytes);
        self.offset += bytes as u64;
    }

    /// The next block; `None` when more bytes are needed first, or all blocks were given out.
    ///
    /// # Errors
    /// [`RunError`]: what came is no block, is damaged, or is out of order.
    pub fn block(&mut self) -> Result<Option<Block>, RunError> {
        let Some(head) = self.head()? else { return Ok(None) };
        if self.blocks == head.blocks || self.pending.len() < BLOCK_HEAD_BYTES {
            return Ok(None);
        }
        let (bytes, rows) = (le_u32(&self.pending, 0), le_u32(&self.pending, 4));
        let longest = if rows == 1 { BLOCK_BYTES.max(head.shape.row_bytes_max()) } else { BLOCK_BYTES };
        let fits = rows > 0
            && (bytes as usize) <= longest.min(RUN_BYTES_MAX)
            && (rows as usize).saturating_mul(ROW_HEAD_BYTES) <= bytes as usize;
        if !fits {
            return Err(self.error(0, RunFault::BlockLength { bytes, rows }));
        }
        let end = BLOCK_HEAD_BYTES + bytes as usize;
        if self.pending.len() < end {
            return Ok(None);
        }
        if le_u32(&self.pending, 8) != block_crc(&self.pending[..8], &self.pending[BLOCK_HEAD_BYTES..end]) {
            return Err(self.error(0, RunFault::BlockChecksum));
        }
        let body: Bytes = self.pending.split_to(end).split_off(BLOCK_HEAD_BYTES).freeze();
        let block = Block::parse(body, head.shape, rows, self.last_key)
            .map_err(|(at, fault)| self.error(BLOCK_HEAD_BYTES + at, fault))?;
        let (mut first, mut last) = (None, None);
        for row in block.rows() {
            first.get_or_insert(row.key);
            last = Some(row.key);
        }
        let contradiction = |what, expected, found| RunFault::Contradiction { what, expected, found };
        if let Some(found) = first.filter(|first| self.blocks == 0 && *first != head.first_key) {
            return Err(self.error(0, contradiction("first key", head.first_key, found)));
        }
        self.offset += end as u64;
        self.last_key = last;
        self.blocks += 1;
        self.rows += u64::from(rows);
        if self.blocks == head.blocks {
            if self.rows != head.rows {
                return Err(self.error(0, contradiction("number of rows", head.rows, self.rows)));
            }
            if let Some(found) = last.filter(|last| *last != head.last_key) {
                return Err(self.error(0, contradiction("last key", head.last_key, found)));
            }
        }
        Ok(Some(block))
    }

    /// After the last byte: that all came.
    ///
    /// # Errors
    /// [`RunError`]: the file ends too early, goes on, or has other rows than its head says.
    pub fn finish(&mut self) -> Result<(), RunError> {
        let is_whole = self.head()?.is_some_and(|head| head.blocks == self.blocks);
        if !is_whole {
            return Err(self.error(self.pending.len(), RunFault::Short));
        }
        if !self.pending.is_empty() {
            return Err(self.error(0, RunFault::Long));
        }
        Ok(())
    }
}
