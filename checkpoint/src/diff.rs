//! Compares two checkpoints, row by row, by a merge of both.
//!
//! Tables are the same when they have the same name, number and number of weights. Keys depend on the number: a table that was dropped
//! and made again is another, and its rows have nothing to do with each other.
//!
//! Live rows alone: a record that counts how often an id came is no row yet. Versions are left out: they differ between groups that
//! hold the same rows.
//!
//! Not here: the rows of one checkpoint (`crate::reader`).

use std::cmp::Ordering;
use std::collections::BTreeMap;

use crate::manifest::{Content, TableEntry};
use crate::reader::{Batch, BatchRow, Selection, TableRows};
use crate::target::{Target, TargetError};

#[cfg(test)]
mod tests;

/// A checkpoint, and where it is.
pub type Side<'a> = (&'a Target, &'a Content);

/// What became of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableFate {
    /// It is in both.
    Kept,
    /// Only the second has it.
    Added,
    /// Only the first has it.
    Removed,
    /// Another one has its name: all rows of the first are removed, all of the second added.
    Replaced,
}

/// How a table differs.
#[derive(Debug, Clone, PartialEq)]
pub struct TableDiff {
    /// Its name.
    pub name: String,
    /// What became of it.
    pub fate: TableFate,
    /// Rows that only the second has.
    pub added: u64,
    /// Rows that only the first has.
    pub removed: u64,
    /// Rows whose weights differ, to the bit.
    pub changed: u64,
    /// Rows whose weights are equal, but not their optimizer state, steps or notes.
    pub state_changed: u64,
    /// Rows that are equal.
    pub equal: u64,
    /// The largest difference of a weight, of those that are finite.
    pub max_abs_difference: f64,
    /// Rows with a weight whose difference is not finite.
    pub non_finite: u64,
}

impl TableDiff {
    fn new(name: &str, fate: TableFate) -> Self {
        TableDiff {
            name: name.to_owned(),
            fate,
            added: 0,
            removed: 0,
            changed: 0,
            state_changed: 0,
            equal: 0,
            max_abs_difference: 0.0,
            non_finite: 0,
        }
    }

    /// Whether there is no difference.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.fate == TableFate::Kept && self.added + self.removed + self.changed + self.state_changed == 0
    }

    /// Counts a row that both have.
    fn count(&mut self, before: &BatchRow<'_>, after: &BatchRow<'_>) {
        if is_same(before.weights(), after.weights()) {
            let is_equal = before.head.steps == after.head.steps
                && is_same(before.state(), after.state())
                && is_same(before.notes, after.notes);
            if is_equal {
                self.equal += 1;
            } else {
                self.state_changed += 1;
            }
            return;
        }
        self.changed += 1;
        let mut is_finite = true;
        for (before, after) in before.weights().iter().zip(after.weights()) {
            if before.to_bits() == after.to_bits() {
                continue;
            }
            // Of two f32 the difference is finite in f64 if both are.
            let difference = (f64::from(*after) - f64::from(*before)).abs();
            if difference.is_finite() {
                self.max_abs_difference = self.max_abs_difference.max(difference);
            } else {
                is_finite = false;
            }
        }
        self.non_finite += u64::from(!is_finite);
    }
}

fn is_same(before: &[f32], after: &[f32]) -> bool {
    before.len() == after.len() && before.iter().zip(after).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// A stream of rows, one row ahead.
struct Ahead {
    rows: TableRows,
    batch: Batch,
    at: usize,
}

impl Ahead {
    async fn new((target, content): Side<'_>, table: u32) -> Result<Self, TargetError> {
        let rows = TableRows::new(target, content, table, Selection::live());
        let mut ahead = Ahead { rows, batch: Batch::default(), at: 0 };
        ahead.rows.next_batch(&mut ahead.batch).await?;
        Ok(ahead)
    }

    fn row(&self) -> Option<BatchRow<'_>> {
        self.batch.row(self.at)
    }

    async fn advance(&mut self) -> Result<(), TargetError> {
        self.at += 1;
        if self.at >= self.batch.len() {
            self.at = 0;
            self.rows.next_batch(&mut self.batch).await?;
        }
        Ok(())
    }

    /// How many are left.
    async fn count(mut self) -> Result<u64, TargetError> {
        let mut count = 0;
        while !self.batch.is_empty() {
            count += (self.batch.len() - self.at) as u64;
            self.at = 0;
            self.rows.next_batch(&mut self.batch).await?;
        }
        Ok(count)
    }
}

/// How the second differs from the first: every table of either, in ascending order of their names.
///
/// # Errors
/// A file is missing or damaged, or the store fails.
pub async fn diff(before: Side<'_>, after: Side<'_>) -> Result<Vec<TableDiff>, TargetError> {
    let mut tables: BTreeMap<&str, (Option<&TableEntry>, Option<&TableEntry>)> = BTreeMap::new();
    for table in &before.1.tables {
        tables.entry(&table.name).or_default().0 = Some(table);
    }
    for table in &after.1.tables {
        tables.entry(&table.name).or_default().1 = Some(table);
    }
    let mut found = Vec::new();
    for (name, tables) in tables {
        found.push(match tables {
            (Some(one), Some(two)) if is_one(one, two) => both(name, (before, after), one.number).await?,
            (one, two) => apart(name, (before, one), (after, two)).await?,
        });
    }
    Ok(found)
}

fn is_one(before: &TableEntry, after: &TableEntry) -> bool {
    let dim = |table: &TableEntry| table.decode().map(|definition| definition.dim).ok();
    before.number == after.number && dim(before) == dim(after)
}

async fn apart(
    name: &str,
    (before, one): (Side<'_>, Option<&TableEntry>),
    (after, two): (Side<'_>, Option<&TableEntry>),
) -> Result<TableDiff, TargetError> {
    let fate = match (one, two) {
        (Some(_), None) => TableFate::Removed,
        (None, _) => TableFate::Added,
        (Some(_), Some(_)) => TableFate::Replaced,
    };
    let mut diff = TableDiff::new(name, fate);
    if let Some(table) = one {
        diff.removed = Ahead::new(before, table.number).await?.count().await?;
    }
    if let Some(table) = two {
        diff.added = Ahead::new(after, table.number).await?.count().await?;
    }
    Ok(diff)
}

async fn both(
    name: &str,
    (before, after): (Side<'_>, Side<'_>),
    number: u32,
) -> Result<TableDiff, TargetError> {
    let mut diff = TableDiff::new(name, TableFate::Kept);
    let (mut before, mut after) = (Ahead::new(before, number).await?, Ahead::new(after, number).await?);
    while let (Some(one), Some(two)) = (before.row(), after.row()) {
        match one.key.cmp(&two.key) {
            Ordering::Less => {
                diff.removed += 1;
                before.advance().await?;
            }
            Ordering::Greater => {
                diff.added += 1;
                after.advance().await?;
            }
            Ordering::Equal => {
                diff.count(&one, &two);
                before.advance().await?;
                after.advance().await?;
            }
        }
    }
    diff.removed += before.count().await?;
    diff.added += after.count().await?;
    Ok(diff)
}
