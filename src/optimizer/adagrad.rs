//! Adagrad: `s += g^2; w -= lr g / (sqrt(s) + eps)`, in the order of operations of `torch.optim.Adagrad` (lr_decay = 0).

/// Hyper-parameters of Adagrad.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adagrad {
    /// Learning rate.
    pub lr: f32,
    /// Keeps the division finite.
    pub eps: f32,
    /// What the sum of squares starts from.
    pub initial_accumulator: f32,
}

/// Updates one row; `sums` are the sums of squared gradients.
pub(super) fn step(weights: &mut [f32], sums: &mut [f32], gradient: &[f32], lr: f32, eps: f32) {
    for ((weight, sum), gradient) in weights.iter_mut().zip(sums).zip(gradient) {
        *sum += *gradient * *gradient;
        *weight -= (lr * *gradient) / (sum.sqrt() + eps);
    }
}
