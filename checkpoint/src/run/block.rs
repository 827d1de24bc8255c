//! The rows of a block, one after the other.

use bytes::Bytes;

use super::error::RunFault;
use super::head::{ROW_HEAD_BYTES, RowHead, RunShape, le_u32, le_u64};

/// A block whose rows were looked at: each lies within it, in order.
#[derive(Debug, Clone)]
pub struct Block {
    body: Bytes,
    shape: RunShape,
    rows: u32,
}

/// A row as it lies in a block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StoredRow<'a> {
    /// Where it lives.
    pub key: u64,
    /// Version, steps, flags.
    pub head: RowHead,
    floats: &'a [u8],
}

impl StoredRow<'_> {
    /// Writes its floats behind those in `floats`.
    pub fn read_floats(&self, floats: &mut Vec<f32>) {
        let float = |raw: &[u8]| f32::from_bits(le_u32(raw, 0));
        floats.extend(self.floats.chunks_exact(4).map(float));
    }

    /// Whether it is the same, to the bit.
    #[must_use]
    pub fn is_same(&self, other: &StoredRow<'_>) -> bool {
        self == other
    }
}

fn row_at(body: &[u8], shape: RunShape, at: usize) -> Result<(StoredRow<'_>, usize), RunFault> {
    let head_end = at + ROW_HEAD_BYTES;
    let raw = body.get(at..head_end).ok_or(RunFault::RowLength)?;
    let head = RowHead { version: le_u64(raw, 8), steps: le_u32(raw, 16), flags: le_u32(raw, 20) };
    if head.flags & !RowHead::FLAGS != 0 {
        return Err(RunFault::Flags { found: head.flags });
    }
    let end = head_end + 4 * shape.floats(&head);
    let floats = body.get(head_end..end).ok_or(RunFault::RowLength)?;
    Ok((StoredRow { key: le_u64(raw, 0), head, floats }, end))
}

impl Block {
    /// Looks at the rows of a body whose checksum was right: `rows` of them, with keys above `before`.
    pub(super) fn parse(
        body: Bytes,
        shape: RunShape,
        rows: u32,
        mut before: Option<u64>,
    ) -> Result<Self, (usize, RunFault)> {
        let mut at = 0;
        for _ in 0..rows {
            let (row, end) = row_at(&body, shape, at).map_err(|fault| (at, fault))?;
            if let Some(before) = before.filter(|before| row.key <= *before) {
                return Err((at, RunFault::Order { key: row.key, before }));
            }
            (before, at) = (Some(row.key), end);
        }
        if at != body.len() {
            return Err((at, RunFault::RowLength));
        }
        Ok(Block { body, shape, rows })
    }

    /// How many rows there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows as usize
    }

    /// Never: a block has a row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// Its rows, in ascending order of their keys.
    pub fn rows(&self) -> impl Iterator<Item = StoredRow<'_>> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let (row, end) = row_at(&self.body, self.shape, at).ok()?;
            at = end;
            Some(row)
        })
    }

    /// The row that begins at byte `at`, and where the next one does; `None` behind the last.
    pub(crate) fn row_at(&self, at: usize) -> Option<(StoredRow<'_>, usize)> {
        row_at(&self.body, self.shape, at).ok()
    }
}
