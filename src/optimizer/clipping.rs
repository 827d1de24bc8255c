//! Gradient clipping, row by row: by value, then by L2 norm, after duplicates are summed and before weight decay.
//!
//! Total: while a table clips, NaN counts as 0 and an infinity as the largest finite value of its sign. The norm is taken
//! of values scaled by the largest magnitude, so that no finite gradient makes it overflow or vanish.

use super::reduce::sum_of_squares;

/// The clipping of a table's gradients.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Clipping {
    /// Every value is brought into `[-value, value]`; 0 for no bound.
    pub value: f32,
    /// A row's norm is brought down to this; 0 for no bound.
    pub norm: f32,
}

/// What `torch.nn.utils.clip_grad_norm_` adds to the norm.
const NORM_EPS: f64 = 1e-6;

impl Clipping {
    /// Clips the gradient of one row.
    pub(super) fn clip(&self, gradient: &mut [f32]) {
        if self.value > 0.0 || self.norm > 0.0 {
            let bound = if self.value > 0.0 { self.value } else { f32::MAX };
            for gradient in gradient.iter_mut() {
                *gradient = if gradient.is_nan() { 0.0 } else { gradient.clamp(-bound, bound) };
            }
        }
        if self.norm > 0.0 {
            clip_norm(gradient, self.norm);
        }
    }
}

fn clip_norm(gradient: &mut [f32], bound: f32) {
    let largest = gradient.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    if largest == 0.0 {
        return;
    }
    let norm = f64::from(largest) * f64::from(sum_of_squares(gradient, largest)).sqrt();
    let factor = f64::from(bound) / (norm + NORM_EPS);
    if factor < 1.0 {
        // `factor` alone can be below what f32 holds well; times the largest value it is at most `bound`.
        let factor = (factor * f64::from(largest)) as f32;
        for gradient in gradient {
            *gradient = (*gradient / largest) * factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clipped(value: f32, norm: f32, gradient: &[f32]) -> Vec<f32> {
        let mut gradient = gradient.to_vec();
        Clipping { value, norm }.clip(&mut gradient);
        gradient
    }

    #[test]
    fn by_value() {
        assert_eq!(clipped(1.0, 0.0, &[-3.0, 0.5, 2.0]), [-1.0, 0.5, 1.0]);
        assert_eq!(clipped(1.0, 0.0, &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]), [0.0, 1.0, -1.0]);
        assert_eq!(clipped(1.0, 0.0, &[-0.0])[0].to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn by_norm_as_pytorch_scales() {
        let small = [0.3f32, -0.4];
        assert_eq!(clipped(0.0, 1.0, &small), small);
        for (ours, theirs) in clipped(0.0, 1.0, &[3.0, -4.0]).iter().zip([0.599_999_9, -0.799_999_9]) {
            assert!((ours - theirs).abs() < 1e-6, "{ours} {theirs}");
        }
    }

    #[test]
    fn the_norm_of_any_gradient_is_right() {
        for gradient in [[1e38f32; 64], [f32::MAX; 64], [f32::INFINITY; 64]] {
            for value in clipped(0.0, 1.0, &gradient) {
                assert!((value - 0.125).abs() < 1e-6, "{value}");
            }
        }
        let tiny = [f32::from_bits(1); 8];
        assert_eq!(clipped(0.0, 1.0, &tiny), tiny);
        assert_eq!(clipped(0.0, 1.0, &[0.0, -0.0])[1].to_bits(), (-0.0f32).to_bits());
        let mixed = clipped(0.0, 2.0, &[f32::NAN, f32::NEG_INFINITY, 1.0]);
        assert_eq!(mixed[0], 0.0);
        assert!((mixed[1] + 2.0).abs() < 1e-6 && mixed[2] >= 0.0 && mixed[2] < 1e-30);
    }

    #[test]
    fn none_touches_nothing() {
        assert_eq!(clipped(0.0, 0.0, &[f32::INFINITY, 1e38]), [f32::INFINITY, 1e38]);
        assert!(clipped(0.0, 0.0, &[f32::NAN])[0].is_nan());
    }
}
