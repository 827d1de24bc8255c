//! Adam, lazy: a row's moments decay only when it is updated, and its bias correction counts its own updates. For a row
//! updated at every step it is `torch.optim.Adam`, in the same order of operations.

use super::power::power;

/// Hyper-parameters of Adam.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adam {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Keeps the division finite.
    pub eps: f32,
}

/// What one step needs, worked out from the hyper-parameters and the row's step count.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rates {
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    /// `lr / (1 - beta1^steps)`.
    step_size: f32,
    /// `sqrt(1 - beta2^steps)`.
    correction2_sqrt: f32,
    eps: f32,
}

/// Remembers the rates of the last step count: rows of one push often share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Correction {
    steps: u32,
    rates: Rates,
}

impl Correction {
    /// The rates for a row at its `steps`-th update (1 for the first).
    pub(super) fn rates(&mut self, adam: &Adam, lr: f32, steps: u32) -> Rates {
        if self.steps != steps || steps == 0 {
            self.steps = steps;
            self.rates = rates(adam, lr, steps.max(1));
        }
        self.rates
    }
}

fn rates(adam: &Adam, lr: f32, steps: u32) -> Rates {
    let (beta1, beta2) = (f64::from(adam.beta1), f64::from(adam.beta2));
    let correction1 = 1.0 - power(beta1, steps);
    let correction2 = 1.0 - power(beta2, steps);
    Rates {
        beta1: adam.beta1,
        one_minus_beta1: (1.0 - beta1) as f32,
        beta2: adam.beta2,
        one_minus_beta2: (1.0 - beta2) as f32,
        step_size: (f64::from(lr) / correction1) as f32,
        correction2_sqrt: correction2.sqrt() as f32,
        eps: adam.eps,
    }
}

/// Updates one row; the first half of `moments` are first moments, the second half second moments.
pub(super) fn step(weights: &mut [f32], moments: &mut [f32], gradient: &[f32], rates: &Rates) {
    let half = moments.len() / 2;
    let (first, second) = moments.split_at_mut(half);
    let rates = *rates;
    for (((weight, first), second), gradient) in weights.iter_mut().zip(first).zip(second).zip(gradient) {
        let gradient = *gradient;
        *first = *first * rates.beta1 + rates.one_minus_beta1 * gradient;
        *second = *second * rates.beta2 + (rates.one_minus_beta2 * gradient) * gradient;
        let denominator = second.sqrt() / rates.correction2_sqrt + rates.eps;
        *weight -= (rates.step_size * *first) / denominator;
    }
}
