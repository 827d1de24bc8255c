//! The oracle of the kill tests: SGD with lr = 1 on integer gradients, sums below 2^24, is exact in f32. What was
//! acknowledged must be in the table, once.

use std::collections::BTreeMap;

/// Sums of acknowledged gradients, by id.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ledger {
    sums: BTreeMap<u64, i64>,
    pub(crate) pushes: u64,
}

impl Ledger {
    /// A push was acknowledged: each row got its integer gradient in every column.
    pub(crate) fn acknowledge(&mut self, ids: &[u64], gradients: &[i64]) {
        for (id, gradient) in ids.iter().zip(gradients) {
            *self.sums.entry(*id).or_default() += gradient;
        }
        self.pushes += 1;
    }

    /// Adds what another client was told.
    pub(crate) fn merge(&mut self, other: &Ledger) {
        for (id, sum) in &other.sums {
            *self.sums.entry(*id).or_default() += sum;
        }
        self.pushes += other.pushes;
    }

    pub(crate) fn ids(&self) -> Vec<u64> {
        self.sums.keys().copied().collect()
    }

    /// Fails the test unless the rows, in the order of `ids()`, are exactly the negated sums.
    pub(crate) fn assert_matches(&self, rows: &[f32], dim: usize) {
        assert_eq!(rows.len(), self.sums.len() * dim);
        let mut wrong = Vec::new();
        for ((id, sum), row) in self.sums.iter().zip(rows.chunks_exact(dim)) {
            assert!(sum.abs() < 1 << 24, "the test pushes more than f32 can count");
            let expected = -(*sum as f32);
            if row.iter().any(|value| *value != expected) {
                wrong.push(format!("id {id}: {row:?}, acknowledged {expected}"));
            }
        }
        assert!(
            wrong.is_empty(),
            "{} of {} rows are wrong:\n{}",
            wrong.len(),
            self.sums.len(),
            wrong.join("\n")
        );
    }
}
