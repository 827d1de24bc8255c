//! The rows of a table of a checkpoint: one stream, in ascending order of keys, merged over the runs of all links of each part.
//!
//! Of a key that comes more than once the last link counts; within a link equal keys have equal rows. A tombstone is no row, nor is a
//! version below a floor that this link or a later one sets for the table.
//!
//! Invariants:
//! - memory is bounded by a block a run, of those runs that overlap where the merge is; a run is opened when the merge gets to its first key,
//!   and closed behind its last row;
//! - what a run's head says is what its manifest says, and the versions of its rows are of its link;
//! - a run that is read to its end had its hash: [`TableRows::next_batch`] has said `false` only if all were right.
//!
//! Not here: runs (`crate::run`), bytes (`crate::target`), the order of blocks in memory of who takes the rows.

mod batch;
#[cfg(test)]
mod boundary_tests;
mod cursor;
mod part;
#[cfg(test)]
mod tests;

use std::ops::RangeInclusive;

use crate::manifest::{Content, ShardEntry};
use crate::run::RunShape;
use crate::target::{Target, TargetError};
pub use batch::{Batch, BatchRow};
use part::PartRows;

/// Which rows of a table.
#[derive(Debug, Clone, PartialEq)]
pub struct Selection {
    /// Of these keys. A run of which a part was read is checked block by block, and not as a whole.
    pub keys: RangeInclusive<u64>,
    /// Counting records too, which are no rows yet.
    pub counting: bool,
}

impl Selection {
    /// All live rows, and counting records.
    #[must_use]
    pub fn all() -> Self {
        Selection { keys: 0..=u64::MAX, counting: true }
    }

    /// All live rows.
    #[must_use]
    pub fn live() -> Self {
        Selection { keys: 0..=u64::MAX, counting: false }
    }
}

/// The rows of a table on their way in.
#[derive(Debug)]
pub struct TableRows {
    target: Target,
    table: u32,
    selection: Selection,
    /// Those not begun yet, the next one last.
    shards: Vec<ShardEntry>,
    part: Option<PartRows>,
    shape: Option<RunShape>,
}

impl TableRows {
    /// Begins to read the table of this number: all its parts that have keys in the range.
    #[must_use]
    pub fn new(target: &Target, content: &Content, table: u32, selection: Selection) -> Self {
        let overlaps = |shard: &&ShardEntry| {
            shard.first_key <= *selection.keys.end() && shard.last_key >= *selection.keys.start()
        };
        let shards = content.shards.iter().rev().filter(overlaps).cloned().collect();
        TableRows { target: target.clone(), table, selection, shards, part: None, shape: None }
    }

    /// The floats of its rows, once the first run was opened.
    #[must_use]
    pub fn shape(&self) -> Option<RunShape> {
        self.shape
    }

    /// Writes the next rows over those in `batch`. `false`: there are no more, and none were written.
    ///
    /// # Errors
    /// A file is missing, damaged, or contradicts its manifest or another file; or the store fails.
    pub async fn next_batch(&mut self, batch: &mut Batch) -> Result<bool, TargetError> {
        batch.clear();
        loop {
            if self.part.is_none() {
                let Some(shard) = self.shards.pop() else { return Ok(false) };
                self.part = Some(PartRows::new(&self.target, &shard, self.table, self.selection.clone()));
            }
            if let Some(part) = &mut self.part {
                part.next_rows(batch, &mut self.shape).await?;
            }
            if !batch.is_empty() {
                return Ok(true);
            }
            self.part = None;
        }
    }
}
