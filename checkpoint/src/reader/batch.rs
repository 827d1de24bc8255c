//! Rows on their way to whoever wants them.

use crate::run::{RowHead, RunShape, StoredRow};

/// Rows of one table, in ascending order of their keys. Used again and again, it takes no new memory.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    heads: Vec<(u64, RowHead, usize)>,
    floats: Vec<f32>,
    shape: Option<RunShape>,
}

/// A row of a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchRow<'a> {
    /// Where it lives.
    pub key: u64,
    /// Version, steps, flags.
    pub head: RowHead,
    /// Weights, then optimizer state; none of a counting record.
    pub values: &'a [f32],
    /// Notes.
    pub notes: &'a [f32],
    /// Of `values`, how many are weights.
    pub weights: usize,
}

impl BatchRow<'_> {
    /// Its weights alone.
    #[must_use]
    pub fn weights(&self) -> &[f32] {
        &self.values[..self.weights]
    }

    /// Its optimizer state alone.
    #[must_use]
    pub fn state(&self) -> &[f32] {
        &self.values[self.weights..]
    }
}

impl Batch {
    /// How many rows there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.heads.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.heads.is_empty()
    }

    /// A row, by its place.
    #[must_use]
    pub fn row(&self, at: usize) -> Option<BatchRow<'_>> {
        let (key, head, end) = self.heads.get(at)?;
        let start = at.checked_sub(1).map_or(0, |before| self.heads[before].2);
        let floats = &self.floats[start..*end];
        let dim = self.shape.map_or(0, |shape| shape.dim as usize);
        let state = self.shape.map_or(0, |shape| shape.state as usize);
        let (weights, values) = if head.is_live() { (dim, dim + state) } else { (0, 0) };
        let (values, notes) = floats.split_at(values.min(floats.len()));
        Some(BatchRow { key: *key, head: *head, values, notes, weights })
    }

    /// All of them.
    pub fn rows(&self) -> impl Iterator<Item = BatchRow<'_>> {
        (0..self.len()).filter_map(|at| self.row(at))
    }

    pub(super) fn clear(&mut self) {
        self.heads.clear();
        self.floats.clear();
    }

    pub(super) fn push(&mut self, row: &StoredRow<'_>, shape: RunShape) {
        self.shape = Some(shape);
        row.read_floats(&mut self.floats);
        self.heads.push((row.key, row.head, self.floats.len()));
    }
}
