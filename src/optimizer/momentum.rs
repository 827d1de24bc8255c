//! SGD with momentum, heavy ball (Polyak 1964) or Nesterov's (Sutskever et al. 2013), in the order of operations of
//! `torch.optim.SGD`. State: one velocity a weight. A row's velocity changes only when the row is pushed (lazy).

/// Hyper-parameters of SGD with momentum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Momentum {
    /// Learning rate.
    pub lr: f32,
    /// What is kept of the velocity.
    pub momentum: f32,
    /// What is left out of the gradient, but not at a row's first step.
    pub dampening: f32,
    /// Looks one step ahead.
    pub nesterov: bool,
}

/// Updates one row; `steps` is 1 at its first.
pub(super) fn step(
    weights: &mut [f32],
    velocities: &mut [f32],
    gradient: &[f32],
    lr: f32,
    rule: &Momentum,
    steps: u32,
) {
    // A row's first velocity is its gradient, undampened: as in PyTorch.
    let share = if steps <= 1 { 1.0 } else { (1.0 - f64::from(rule.dampening)) as f32 };
    let momentum = rule.momentum;
    let rows = weights.iter_mut().zip(velocities).zip(gradient);
    if rule.nesterov {
        for ((weight, velocity), gradient) in rows {
            *velocity = *velocity * momentum + share * *gradient;
            *weight -= lr * (*gradient + momentum * *velocity);
        }
    } else {
        for ((weight, velocity), gradient) in rows {
            *velocity = *velocity * momentum + share * *gradient;
            *weight -= lr * *velocity;
        }
    }
}
