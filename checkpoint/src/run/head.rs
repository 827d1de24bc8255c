//! What stands before the blocks, and before each row's floats.

use super::error::RunFault;
use super::{ROW_FLOATS_MAX, RUN_BYTES_MAX};

const MAGIC: &[u8; 8] = b"EVSHRUN\0";
const VERSION: u32 = 1;
/// The version that is read and written.
pub(super) const KNOWN_VERSION: u32 = VERSION;
/// Bytes of the head.
pub(super) const HEAD_BYTES: usize = 64;
/// Bytes of a row before its floats.
pub(super) const ROW_HEAD_BYTES: usize = 24;
/// Bytes of a block before its body.
pub(super) const BLOCK_HEAD_BYTES: usize = 12;

/// How many floats the rows of a run have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunShape {
    /// Weights.
    pub dim: u32,
    /// Floats of optimizer state.
    pub state: u32,
    /// Notes: words of rules for rows, not numbers.
    pub notes: u32,
}

/// What a row carries besides its floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowHead {
    /// Index of the log entry that last changed the row.
    pub version: u64,
    /// How often the optimizer ran on it; of a counting record, how often its id came.
    pub steps: u32,
    /// [`RowHead::TOMBSTONE`], [`RowHead::COUNTING`] or none.
    pub flags: u32,
}

/// What a run says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunHead {
    /// The table's permanent number.
    pub table: u32,
    /// The floats of its rows.
    pub shape: RunShape,
    /// Rows, tombstones and counting records.
    pub rows: u64,
    /// The lowest key.
    pub first_key: u64,
    /// The highest key.
    pub last_key: u64,
    /// Blocks of rows.
    pub blocks: u32,
}

impl RowHead {
    /// The row was removed.
    pub const TOMBSTONE: u32 = 1;
    /// Not a row yet: its id came less often than its table asks for.
    pub const COUNTING: u32 = 2;
    /// Both. A tombstone that counts is a tombstone.
    pub(super) const FLAGS: u32 = Self::TOMBSTONE | Self::COUNTING;

    /// Whether the row was removed.
    #[must_use]
    pub fn is_tombstone(&self) -> bool {
        self.flags & Self::TOMBSTONE != 0
    }

    /// Whether it only counts how often its id came.
    #[must_use]
    pub fn is_counting(&self) -> bool {
        self.flags & Self::FLAGS == Self::COUNTING
    }

    /// Whether there is a row: neither removed nor only counting.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.flags & Self::FLAGS == 0
    }
}

impl RunShape {
    /// Floats of a row with this head.
    #[must_use]
    pub fn floats(&self, head: &RowHead) -> usize {
        let (dim, state, notes) = (self.dim as usize, self.state as usize, self.notes as usize);
        if head.is_tombstone() {
            0
        } else if head.is_counting() {
            notes
        } else {
            dim + state + notes
        }
    }

    pub(super) fn check(&self) -> Result<(), RunFault> {
        let all = u64::from(self.dim) + u64::from(self.state) + u64::from(self.notes);
        if self.dim == 0 {
            return Err(RunFault::Head { field: "dim", found: 0 });
        }
        if all > ROW_FLOATS_MAX as u64 {
            return Err(RunFault::Head { field: "number of floats", found: all });
        }
        Ok(())
    }

    /// Bytes of the longest row.
    pub(super) fn row_bytes_max(&self) -> usize {
        ROW_HEAD_BYTES + 4 * (self.dim as usize + self.state as usize + self.notes as usize)
    }
}

impl RunHead {
    pub(super) fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        let words = [VERSION, self.table, self.shape.dim, self.shape.state, self.shape.notes, 0];
        for (at, word) in (8..).step_by(4).zip(words) {
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        for (at, word) in (32..).step_by(8).zip([self.rows, self.first_key, self.last_key]) {
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes[56..60].copy_from_slice(&self.blocks.to_le_bytes());
        let crc = crc32fast::hash(&bytes[..60]);
        bytes[60..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HEAD_BYTES]) -> Result<Self, RunFault> {
        if &bytes[..8] != MAGIC {
            return Err(RunFault::Magic);
        }
        let found = le_u32(bytes, 8);
        if found != VERSION {
            return Err(RunFault::Version { found });
        }
        if le_u32(bytes, 60) != crc32fast::hash(&bytes[..60]) {
            return Err(RunFault::HeadChecksum);
        }
        let word = |at: usize| u64::from(le_u32(bytes, at)) | u64::from(le_u32(bytes, at + 4)) << 32;
        let head = RunHead {
            table: le_u32(bytes, 12),
            shape: RunShape { dim: le_u32(bytes, 16), state: le_u32(bytes, 20), notes: le_u32(bytes, 24) },
            rows: word(32),
            first_key: word(40),
            last_key: word(48),
            blocks: le_u32(bytes, 56),
        };
        head.shape.check()?;
        let bad = |field, found| Err(RunFault::Head { field, found });
        if le_u32(bytes, 28) != 0 {
            return bad("reserved word", le_u32(bytes, 28).into());
        }
        if head.rows == 0 || head.rows > (RUN_BYTES_MAX / ROW_HEAD_BYTES) as u64 {
            return bad("number of rows", head.rows);
        }
        if head.blocks == 0 || u64::from(head.blocks) > head.rows {
            return bad("number of blocks", head.blocks.into());
        }
        if head.first_key > head.last_key {
            return bad("first key", head.first_key);
        }
        Ok(head)
    }
}

pub(super) fn le_u32(bytes: &[u8], at: usize) -> u32 {
    let mut raw = [0; 4];
    raw.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(raw)
}

pub(super) fn le_u64(bytes: &[u8], at: usize) -> u64 {
    let mut raw = [0; 8];
    raw.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(raw)
}
