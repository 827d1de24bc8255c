//! Stochastic gradient descent: `w -= lr g`, as `torch.optim.SGD` without momentum.

/// Hyper-parameters of SGD.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Learning rate.
    pub lr: f32,
}

/// Updates one row.
pub(super) fn step(weights: &mut [f32], gradient: &[f32], lr: f32) {
    for (weight, gradient) in weights.iter_mut().zip(gradient) {
        *weight -= lr * *gradient;
    }
}
