//! What a gradient does to a row: pure functions on slices, with no idea of tables, sessions or logs.
//!
//! A row's optimizer state lies next to its weights: nothing for SGD, `dim` floats for Adagrad, `2 x dim` for Adam.
//! Step counts live in the row's header, so that each row counts its own (lazy Adam).
//!
//! Invariants:
//! - **Deterministic** (design 4, rule 4): f32 arithmetic in one fixed order, no fused multiply-add, no `powf`, `exp` or
//!   `ln` of the platform. Every operation is element-wise, so however many lanes the compiler uses, the bits are those
//!   of a plain scalar loop (`scalar.rs` compares them).
//! - A row's update depends on the row, its gradient and its own step count only; rows can be updated in any order.
//! - Changing the arithmetic changes what replicas compute from the same log: it is gated by a cluster version
//!   (design 14.13), and the golden bits in the tests notice.
//!
//! Not here: summing duplicates (`apply`), validation of hyper-parameters (`model::schema`).

mod adagrad;
mod adam;
mod initializer;
mod normal;
mod power;
#[cfg(test)]
mod pytorch;
#[cfg(test)]
mod scalar;
mod sgd;

pub use adagrad::Adagrad;
pub use adam::Adam;
pub use initializer::{Distribution, Initializer};
pub use sgd::Sgd;

/// How a table learns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Optimizer {
    /// The rule.
    pub rule: Rule,
    /// L2 penalty: `weight_decay x weight` is added to the gradient first, as PyTorch does. 0 for none.
    pub weight_decay: f32,
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
}

impl Optimizer {
    /// Floats of optimizer state in a row of `dim` weights.
    #[must_use]
    pub fn state_floats(&self, dim: u32) -> u32 {
        match self.rule {
            Rule::Sgd(_) => 0,
            Rule::Adagrad(_) => dim,
            Rule::Adam(_) => dim.saturating_mul(2),
        }
    }

    /// Writes the state of a row that has not been trained yet.
    pub fn initial_state(&self, state: &mut [f32]) {
        match self.rule {
            Rule::Adagrad(adagrad) => state.fill(adagrad.initial_accumulator),
            Rule::Sgd(_) | Rule::Adam(_) => state.fill(0.0),
        }
    }

    /// The table's learning rate.
    #[must_use]
    pub fn learning_rate(&self) -> f32 {
        match self.rule {
            Rule::Sgd(sgd) => sgd.lr,
            Rule::Adagrad(adagrad) => adagrad.lr,
            Rule::Adam(adam) => adam.lr,
        }
    }

    /// Gets the rule ready for the rows of one push: `lr` replaces the table's learning rate when given.
    #[must_use]
    pub fn stepper(&self, lr: Option<f32>) -> Stepper {
        let lr = lr.unwrap_or_else(|| self.learning_rate());
        Stepper {
            rule: self.rule,
            weight_decay: self.weight_decay,
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
    lr: f32,
    correction: adam::Correction,
}

impl Stepper {
    /// Updates one row. `steps` counts this update too: it is 1 at a row's first. `gradient` is scratch: weight decay is
    /// added to it in place.
    ///
    /// The slices are as long as the table's shape says (the caller allocated them by it); a shorter one updates only
    /// what all of them have.
    pub fn step(&mut self, weights: &mut [f32], state: &mut [f32], gradient: &mut [f32], steps: u32) {
        if self.weight_decay != 0.0 {
            add_weight_decay(gradient, weights, self.weight_decay);
        }
        match self.rule {
            Rule::Sgd(_) => sgd::step(weights, gradient, self.lr),
            Rule::Adagrad(rule) => adagrad::step(weights, state, gradient, self.lr, rule.eps),
            Rule::Adam(rule) => {
                let rates = self.correction.rates(&rule, self.lr, steps);
                adam::step(weights, state, gradient, &rates);
            }
        }
    }
}

/// `gradient += weight_decay x weights`.
fn add_weight_decay(gradient: &mut [f32], weights: &[f32], weight_decay: f32) {
    for (gradient, weight) in gradient.iter_mut().zip(weights) {
        *gradient += weight_decay * *weight;
    }
}
