//! A run: rows of one table of one shard, in ascending order of their keys, in a file of at most 32 MiB.
//!
//! ```text
//! head, 64 bytes     magic "EVSHRUN\0" | version u32 = 1 | table u32 | dim u32 | state u32 | notes u32 | reserved u32 = 0
//!                    rows u64 | first key u64 | last key u64 | blocks u32 | crc32 u32 of the 60 bytes before
//! block              bytes u32 of its body | rows u32 | crc32 u32 of both numbers and the body | body
//! row                key u64 | version u64 | steps u32 | flags u32 | f32*: weights, state, notes; the notes alone of a counting
//!                    record (flag 2); none of a tombstone (flag 1)
//! ```
//!
//! All little-endian. The numbers of floats follow from the flags and the head. The head stands before what it counts, so a run
//! is written in memory ([`RunWriter`]) and read block by block ([`RunDecoder`]), as its bytes come.
//!
//! Invariants:
//! - keys ascend strictly over the whole run; a run has a row, a block has a row;
//! - a block's body is at most 64 KiB, or one row;
//! - equal rows make equal bytes: there is one way to write a run, so a row that did not change is not uploaded again;
//! - floats keep their bits, NaNs too.
//!
//! Not here: what a run means beside others (`crate::reader`), where it lies (`crate::target`).

mod block;
mod decoder;
mod error;
mod head;
#[cfg(test)]
mod tests;
mod writer;

pub use block::{Block, StoredRow};
pub use decoder::RunDecoder;
pub use error::{RunError, RunFault};
pub use head::{RowHead, RunHead, RunShape};
pub use writer::{Run, RunWriter};

/// Bytes of a run.
pub const RUN_BYTES_MAX: usize = 32 << 20;
/// Bytes of a block's body, unless it is one row.
pub const BLOCK_BYTES: usize = 64 << 10;
/// Floats of a row.
pub const ROW_FLOATS_MAX: usize = 1 << 22;
