//! Row-wise Adagrad: `s += mean(g^2); w -= lr g / (sqrt(s) + eps)`, one `s` a row, as in FBGEMM and DLRM (Naumov et al. 2019).

use super::reduce::sum_of_squares;

/// Hyper-parameters of row-wise Adagrad.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowwiseAdagrad {
    /// Learning rate.
    pub lr: f32,
    /// Keeps the division finite.
    pub eps: f32,
    /// What the sum of mean squares starts from.
    pub initial_accumulator: f32,
}

/// Updates one row; `sums` holds its one sum. Squares that overflow make the sum infinite and the row rest, as in Adagrad.
pub(super) fn step(weights: &mut [f32], sums: &mut [f32], gradient: &[f32], lr: f32, eps: f32) {
    let Some(sum) = sums.first_mut() else { return };
    *sum += sum_of_squares(gradient, 1.0) / gradient.len() as f32;
    let denominator = sum.sqrt() + eps;
    for (weight, gradient) in weights.iter_mut().zip(gradient) {
        *weight -= (lr * *gradient) / denominator;
    }
}
