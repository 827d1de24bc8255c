//! FTRL-proximal (McMahan et al. 2013, algorithm 1). State: `z` of every weight, then `n` of every weight.
//!
//! ```text
//! sigma = (sqrt(n + g^2) - sqrt(n)) / alpha      z += g - sigma w      n += g^2
//! w = 0 where |z| <= l1, else -(z - sign(z) l1) / ((beta + sqrt(n)) / alpha + l2)
//! ```
//!
//! Weights are derived from the state: a value assigned, or an initial value, counts once as `w` in the first line and is
//! then gone. Every value is held at f32's largest magnitude.

/// Hyper-parameters of FTRL-proximal.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ftrl {
    /// The paper's alpha.
    pub lr: f32,
    /// Slows the first steps.
    pub beta: f32,
    /// Weights with less evidence than this are exactly 0.
    pub l1: f32,
    /// Pulls weights to 0.
    pub l2: f32,
}

/// Updates one row. A rate that is not above 0 leaves it as it is: the rule divides by it.
pub(super) fn step(weights: &mut [f32], state: &mut [f32], gradient: &[f32], lr: f32, rule: &Ftrl) {
    if lr <= 0.0 {
        return;
    }
    let half = state.len() / 2;
    let (zs, ns) = state.split_at_mut(half);
    let rule = *rule;
    for (((weight, z), n), gradient) in weights.iter_mut().zip(zs).zip(ns).zip(gradient) {
        let gradient = *gradient;
        // Held at the largest finite values, so that no gradient makes an infinity less an infinity.
        let more = held(*n + gradient * gradient);
        let root = more.sqrt();
        let sigma = held((root - n.sqrt()) / lr);
        *z = held(*z + (gradient - held(sigma * *weight)));
        *n = more;
        let shrunk = (z.abs() - rule.l1).copysign(-*z);
        let derived = held(shrunk / ((rule.beta + root) / lr + rule.l2));
        *weight = if z.abs() <= rule.l1 { 0.0 } else { derived };
    }
}

fn held(value: f32) -> f32 {
    value.clamp(-f32::MAX, f32::MAX)
}
