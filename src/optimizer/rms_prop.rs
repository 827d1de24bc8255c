//! RMSprop (Hinton 2012; centred: Graves 2013), in the order of operations of `torch.optim.RMSprop`.
//!
//! State a weight: the mean square; then, when centred, the mean; then, with momentum, the velocity. All lazy.

/// Hyper-parameters of RMSprop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsProp {
    /// Learning rate.
    pub lr: f32,
    /// What is kept of the means.
    pub alpha: f32,
    /// Keeps the division finite.
    pub eps: f32,
    /// What is kept of the velocity; 0 for none, and no state for it.
    pub momentum: f32,
    /// Divides by the standard deviation in place of the root mean square.
    pub centered: bool,
}

impl RmsProp {
    /// State floats a weight.
    pub(super) fn floats_a_weight(&self) -> u32 {
        1 + u32::from(self.centered) + u32::from(self.momentum > 0.0)
    }
}

/// Updates one row.
pub(super) fn step(weights: &mut [f32], state: &mut [f32], gradient: &mut [f32], lr: f32, rule: &RmsProp) {
    let (squares, rest) = state.split_at_mut(weights.len().min(state.len()));
    let up = (1.0 - f64::from(rule.alpha)) as f32;
    for (square, gradient) in squares.iter_mut().zip(gradient.iter()) {
        *square = *square * rule.alpha + (up * *gradient) * *gradient;
    }
    // From here on `gradient` holds the gradient over its measure.
    let velocities = if rule.centered {
        let (means, velocities) = rest.split_at_mut(weights.len().min(rest.len()));
        for ((mean, square), gradient) in means.iter_mut().zip(squares.iter()).zip(gradient.iter_mut()) {
            *mean += up * (*gradient - *mean);
            // Rounding can take the variance below zero; PyTorch then makes NaN of the weight.
            let variance = (*square - *mean * *mean).max(0.0);
            *gradient /= variance.sqrt() + rule.eps;
        }
        velocities
    } else {
        for (square, gradient) in squares.iter().zip(gradient.iter_mut()) {
            *gradient /= square.sqrt() + rule.eps;
        }
        rest
    };
    if rule.momentum > 0.0 {
        for ((weight, velocity), measured) in weights.iter_mut().zip(velocities).zip(gradient.iter()) {
            *velocity = *velocity * rule.momentum + *measured;
            *weight -= lr * *velocity;
        }
    } else {
        for (weight, measured) in weights.iter_mut().zip(gradient.iter()) {
            *weight -= lr * *measured;
        }
    }
}
