//! What a gradient does to a row: pure functions on slices, with no idea of tables, sessions or logs.
//!
//! A row's optimizer state lies next to its weights: nothing for SGD, one float for row-wise Adagrad, one to three times
//! `dim` for the others (`Optimizer::state_floats`, docs/optimizers.md).
//! Step counts live in the row's header, so that each row counts its own (lazy Adam).
//!
//! Invariants:
//! - **Deterministic** (design 4, rule 4): f32 arithmetic in one fixed order, no fused multiply-add, no `powf`, `exp` or
//!   `ln` of the platform. Operations are element-wise, or reductions of one fixed shape (`reduce`), so however many lanes the compiler uses, the bits are those
//!   of a plain scalar loop (`scalar.rs` compares them).
//! - A row's update depends on the row, its gradient and its own step count only; rows can be updated in any order.
//! - Changing the arithmetic changes what replicas compute from the same log: it is gated by a cluster version
//!   (design 14.13), and the golden bits in the tests notice.
//!
//! Not here: summing duplicates (`apply`), validation of hyper-parameters (`model::schema`).

mod adagrad;
mod adam;
mod clipping;
mod ftrl;
mod initializer;
mod momentum;
mod normal;
mod power;
#[cfg(test)]
mod pytorch;
mod reduce;
mod rms_prop;
mod rowwise_adagrad;
#[cfg(test)]
mod scalar;
mod schedule;
mod sgd;
#[cfg(test)]
mod tests;

pub use adagrad::Adagrad;
pub use adam::Adam;
pub use clipping::Clipping;
pub use ftrl::Ftrl;
pub use initializer::{Distribution, Initializer};
pub use momentum::Momentum;
pub use rms_prop::RmsProp;
pub use rowwise_adagrad::RowwiseAdagrad;
pub use schedule::{Decay, Schedule};
pub use sgd::Sgd;

/// How a table learns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Optimizer {
    /// The rule.
    pub rule: Rule,
    /// L2 penalty: `weight_decay x weight` is added to the gradient first, as PyTorch does. 0 for none. For AdamW it is
    /// taken from the weight instead, times the learning rate.
    pub weight_decay: f32,
    /// What the gradient is clipped to before anything else.
    pub clipping: Clipping,
    /// How the learning rate changes with the step of a push.
    pub schedule: Schedule,
}

/// The rule of an [`Optimizer`], with its hyper-parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// Stochastic gradient descent.
    Sgd(Sgd),
    /// Adagrad (Duchi et al. 2011).
    Adagrad(Adagrad),
    /// Adam (Kingma and Ba 2015), each row with its own step count.
    Adam(Adam),
    /// SGD with momentum, heavy ball or Nesterov's.
    Momentum(Momentum),
    /// Adagrad with one accumulator a row.
    RowwiseAdagrad(RowwiseAdagrad),
    /// RMSprop.
    RmsProp(RmsProp),
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019).
    AdamW(Adam),
    /// FTRL-proximal (McMahan et al. 2013).
    Ftrl(Ftrl),
}

impl Optimizer {
    /// Floats of optimizer state in a row of `dim` weights.
    #[must_use]
    pub fn state_floats(&self, dim: u32) -> u32 {
        match self.rule {
            Rule::Sgd(_) => 0,
            Rule::RowwiseAdagrad(_) => 1,
            Rule::Adagrad(_) | Rule::Momentum(_) => dim,
            Rule::Adam(_) | Rule::AdamW(_) | Rule::Ftrl(_) => dim.saturating_mul(2),
            Rule::RmsProp(rule) => dim.saturating_mul(rule.floats_a_weight()),
        }
    }

    /// Whether every float of a row's state means the same to both: they are of one kind, and differ in numbers only.
    #[must_use]
    pub fn keeps_state_of(&self, other: &Optimizer) -> bool {
        match (self.rule, other.rule) {
            // What it keeps depends on its numbers.
            (Rule::RmsProp(own), Rule::RmsProp(other)) => {
                own.centered == other.centered && (own.momentum == 0.0) == (other.momentum == 0.0)
            }
            (own, other) => std::mem::discriminant(&own) == std::mem::discriminant(&other),
        }
    }

    /// Writes the state of a row that has not been trained yet.
    pub fn initial_state(&self, state: &mut [f32]) {
        match self.rule {
            Rule::Adagrad(adagrad) => state.fill(adagrad.initial_accumulator),
            Rule::RowwiseAdagrad(rule) => state.fill(rule.initial_accumulator),
            Rule::Sgd(_)
            | Rule::Adam(_)
            | Rule::Momentum(_)
            | Rule::RmsProp(_)
            | Rule::AdamW(_)
            | Rule::Ftrl(_) => state.fill(0.0),
        }
    }

    /// The table's learning rate.
    #[must_use]
    pub fn learning_rate(&self) -> f32 {
        match self.rule {
            Rule::Sgd(sgd) => sgd.lr,
            Rule::Adagrad(adagrad) => adagrad.lr,
            Rule::Adam(adam) | Rule::AdamW(adam) => adam.lr,
            Rule::Momentum(rule) => rule.lr,
            Rule::RowwiseAdagrad(rule) => rule.lr,
            Rule::RmsProp(rule) => rule.lr,
            Rule::Ftrl(rule) => rule.lr,
        }
    }

    /// Gets the rule ready for the rows of one push: `lr` replaces the table's learning rate when given, else that is
    /// scheduled by `step`, the clock of the push.
    #[must_use]
    pub fn stepper(&self, lr: Option<f32>, step: u64) -> Stepper {
        let lr = lr.unwrap_or_else(|| self.schedule.rate(self.learning_rate(), step));
        Stepper {
            rule: self.rule,
            weight_decay: self.weight_decay,
            clipping: self.clipping,
            lr,
            correction: adam::Correction::default(),
        }
    }
}

/// An optimizer with the learning rate of one push, stepping row after row.
#[derive(Debug, Clone)]
pub struct Stepper {
    rule: Rule,
    weight_decay: f32,
    clipping: Clipping,
    lr: f32,
    correction: adam::Correction,
}

impl Stepper {
    /// Updates one row. `steps` counts this update too: it is 1 at a row's first. `gradient` is scratch: it is
    /// clipped, and weight decay added to it, in place.
    ///
    /// The slices are as long as the table's shape says (the caller allocated them by it); a shorter one updates only
    /// what all of them have.
    pub fn step(&mut self, weights: &mut [f32], state: &mut [f32], gradient: &mut [f32], steps: u32) {
        self.clipping.clip(gradient);
        let decoupled = matches!(self.rule, Rule::AdamW(_));
        if self.weight_decay != 0.0 && !decoupled {
            add_weight_decay(gradient, weights, self.weight_decay);
        }
        match self.rule {
            Rule::Sgd(_) => sgd::step(weights, gradient, self.lr),
            Rule::Adagrad(rule) => adagrad::step(weights, state, gradient, self.lr, rule.eps),
            Rule::Adam(rule) => {
                let rates = self.correction.rates(&rule, self.lr, steps);
                adam::step(weights, state, gradient, &rates);
            }
            Rule::AdamW(rule) => {
                if self.weight_decay != 0.0 {
                    let keep = (1.0 - f64::from(self.lr) * f64::from(self.weight_decay)) as f32;
                    weights.iter_mut().for_each(|weight| *weight *= keep);
                }
                let rates = self.correction.rates(&rule, self.lr, steps);
                adam::step(weights, state, gradient, &rates);
            }
            Rule::Momentum(rule) => momentum::step(weights, state, gradient, self.lr, &rule, steps),
            Rule::RowwiseAdagrad(rule) => {
                rowwise_adagrad::step(weights, state, gradient, self.lr, rule.eps);
            }
            Rule::RmsProp(rule) => rms_prop::step(weights, state, gradient, self.lr, &rule),
            Rule::Ftrl(rule) => ftrl::step(weights, state, gradient, self.lr, &rule),
        }
        make_nan_one(weights);
        make_nan_one(state);
    }
}

/// Overflow can end in NaN (an infinity less an infinity). Sign and payload of a NaN are the processor's and the
/// compiler's choice, so every one becomes the same: replicas' bytes are compared.
fn make_nan_one(values: &mut [f32]) {
    for value in values {
        *value = if value.is_nan() { f32::from_bits(0x7fc0_0000) } else { *value };
    }
}

/// `gradient += weight_decay x weights`.
fn add_weight_decay(gradient: &mut [f32], weights: &[f32], weight_decay: f32) {
    for (gradient, weight) in gradient.iter_mut().zip(weights) {
        *gradient += weight_decay * *weight;
    }
}
