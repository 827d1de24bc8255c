//! What a row is before its first push: a pure function of (seed, id, column), so that every replica, and every pull of an
//! id never pushed, sees the same values and nothing has to be written (design 4, rule 5).
//!
//! ```text
//! row    = mix64(mix64(seed + G) ^ id)          G = 0x9e3779b97f4a7c15, mix64 of evershard_proto::key
//! bits_c = mix64(row ^ mix64((c + 1) x G))      64 random bits of column c (uniform) or of the pair c = column / 2 (normal)
//! ```
//!
//! Counter-based: column c needs no other column. These formulas are part of the format: golden values in the tests.
//! The id enters, not the key: a table's values do not depend on its number.

use evershard_proto::key::mix64;

use super::normal;

const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Initial weights of a table's rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Initializer {
    /// Tables with different seeds start differently.
    pub seed: u64,
    /// What the values look like.
    pub distribution: Distribution,
}

/// The distribution of an [`Initializer`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Distribution {
    /// All zero.
    Zeros,
    /// All the same.
    Constant {
        /// The value.
        value: f32,
    },
    /// Uniform over `[low, high)`.
    Uniform {
        /// Inclusive.
        low: f32,
        /// Exclusive (unless it equals `low`).
        high: f32,
    },
    /// Normal; the most extreme value is 6.7 standard deviations out.
    Normal {
        /// Mean.
        mean: f32,
        /// Standard deviation.
        std: f32,
    },
    /// Normal, without what lies outside `mean + std x [low, high]`.
    TruncatedNormal {
        /// Mean before truncation.
        mean: f32,
        /// Standard deviation before truncation.
        std: f32,
        /// At most 0.
        low: f32,
        /// At least 0, and at least 1 above `low`.
        high: f32,
    },
}

/// Tries of a truncated normal. A third of them and more fall inside: that none does has a chance of 1e-22.
const TRIES: u64 = 128;

impl Initializer {
    /// Writes the initial weights of `id`.
    pub fn fill(&self, id: u64, weights: &mut [f32]) {
        match self.distribution {
            Distribution::Zeros => weights.fill(0.0),
            Distribution::Constant { value } => weights.fill(value),
            Distribution::Uniform { low, high } => {
                let row = self.row(id);
                for (column, weight) in weights.iter_mut().enumerate() {
                    *weight = uniform(bits(row, column as u64), low, high);
                }
            }
            Distribution::Normal { mean, std } => {
                let row = self.row(id);
                for (pair, weights) in weights.chunks_mut(2).enumerate() {
                    let values = normal::pair(bits(row, pair as u64));
                    for (weight, value) in weights.iter_mut().zip(values) {
                        *weight = mean + std * value;
                    }
                }
            }
            Distribution::TruncatedNormal { mean, std, low, high } => {
                let row = self.row(id);
                for (column, weight) in weights.iter_mut().enumerate() {
                    *weight = mean + std * truncated(bits(row, column as u64), low, high);
                }
            }
        }
    }

    fn row(&self, id: u64) -> u64 {
        mix64(mix64(self.seed.wrapping_add(GOLDEN_GAMMA)) ^ id)
    }
}

fn bits(row: u64, counter: u64) -> u64 {
    mix64(row ^ mix64((counter + 1).wrapping_mul(GOLDEN_GAMMA)))
}

/// The first try that falls inside: try `t` of a column is the first of the pair of `mix64(bits_c + t G)`.
fn truncated(bits: u64, low: f32, high: f32) -> f32 {
    let tries = (0..TRIES).map(|t| normal::pair(mix64(bits.wrapping_add(t.wrapping_mul(GOLDEN_GAMMA))))[0]);
    let inside = tries.into_iter().find(|value| (low..=high).contains(value));
    inside.unwrap_or(0.0)
}

/// 24 random bits as a float in `[0, 1)`, exact.
pub(super) fn unit(bits: u64) -> f32 {
    const STEP: f32 = 1.0 / (1u32 << 24) as f32;
    (bits >> 40) as f32 * STEP
}

fn uniform(bits: u64, low: f32, high: f32) -> f32 {
    let value = low + unit(bits) * (high - low);
    // Rounding can reach the end that is not included.
    if value >= high && high > low { high.next_down() } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(distribution: Distribution, seed: u64, id: u64, dim: usize) -> Vec<f32> {
        let mut weights = vec![f32::NAN; dim];
        Initializer { seed, distribution }.fill(id, &mut weights);
        weights
    }

    const UNIFORM: Distribution = Distribution::Uniform { low: -1.0, high: 1.0 };
    const TRUNCATED: Distribution =
        Distribution::TruncatedNormal { mean: 0.0, std: 1.0, low: -2.0, high: 2.0 };
    const NORMAL: Distribution = Distribution::Normal { mean: 0.0, std: 1.0 };

    #[test]
    fn golden_bits_never_change() {
        let hex = |values: Vec<f32>| {
            values.iter().map(|v| format!("{:08x}", v.to_bits())).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(hex(fill(UNIFORM, 42, 7, 5)), "bf6115ac 3f0f4f5a bf715138 3ec3f57c be981b2c");
        assert_eq!(hex(fill(UNIFORM, 42, u64::MAX, 3)), "3d828dd0 3eeb95f0 bf72903e");
        assert_eq!(hex(fill(NORMAL, 42, 7, 5)), "3f248c1f 3e833616 3ea453a9 bfd81420 40352a3d");
        assert_eq!(hex(fill(TRUNCATED, 42, 7, 5)), "3fcae151 bf2407c1 bd1a3352 bf3ac07c 3fed9dba");
        assert_eq!(hex(fill(NORMAL, 0, 0, 3)), "3e22ef97 3fbc7290 bf2b8b76");
    }

    #[test]
    fn a_column_does_not_depend_on_how_many_there_are() {
        for distribution in [UNIFORM, NORMAL, TRUNCATED] {
            let long = fill(distribution, 3, 9, 65);
            assert_eq!(fill(distribution, 3, 9, 1), long[..1]);
            assert_eq!(fill(distribution, 3, 9, 32), long[..32]);
        }
    }

    #[test]
    fn seeds_ids_and_columns_all_matter() {
        let base = fill(UNIFORM, 1, 1, 2);
        assert_ne!(base[0], base[1]);
        assert_ne!(base, fill(UNIFORM, 2, 1, 2));
        assert_ne!(base, fill(UNIFORM, 1, 2, 2));
        assert_ne!(fill(UNIFORM, 1, 2, 2), fill(UNIFORM, 2, 1, 2));
    }

    #[test]
    fn uniform_fills_its_interval_evenly() {
        let mut buckets = [0u32; 16];
        let (mut sum, mut count) = (0.0, 0.0);
        for id in 0..4096 {
            for value in fill(Distribution::Uniform { low: -2.0, high: 6.0 }, 5, id, 16) {
                assert!((-2.0..6.0).contains(&value));
                buckets[((value + 2.0) / 0.5) as usize] += 1;
                sum += f64::from(value);
                count += 1.0;
            }
        }
        assert!((sum / count - 2.0).abs() < 0.05, "mean {}", sum / count);
        // Chi-square with 15 degrees of freedom: 44.3 is the 0.0001 tail.
        let expected = count / 16.0;
        let chi: f64 = buckets.iter().map(|b| (f64::from(*b) - expected).powi(2) / expected).sum();
        assert!(chi < 44.3, "chi-square {chi}");
    }

    #[test]
    fn uniform_never_reaches_its_upper_end() {
        let high = 1.0f32;
        let low = high.next_down();
        for id in 0..100 {
            assert!(fill(Distribution::Uniform { low, high }, 1, id, 8).iter().all(|v| *v == low));
        }
        assert!(fill(Distribution::Uniform { low: 3.0, high: 3.0 }, 1, 1, 8).iter().all(|v| *v == 3.0));
    }

    #[test]
    fn normal_has_the_moments_of_a_normal() {
        let (mut n, mut m1, mut m2, mut m3, mut m4) = (0.0, 0.0, 0.0, 0.0, 0.0);
        let mut beyond_two = 0.0;
        for id in 0..8192 {
            for value in fill(NORMAL, 11, id, 16) {
                let v = f64::from(value);
                assert!(v.is_finite() && v.abs() < 6.8);
                (n, m1, m2, m3, m4) = (n + 1.0, m1 + v, m2 + v * v, m3 + v.powi(3), m4 + v.powi(4));
                if v.abs() > 2.0 {
                    beyond_two += 1.0;
                }
            }
        }
        assert!((m1 / n).abs() < 0.015, "mean {}", m1 / n);
        assert!((m2 / n - 1.0).abs() < 0.02, "variance {}", m2 / n);
        assert!((m3 / n).abs() < 0.05, "skewness {}", m3 / n);
        assert!((m4 / n - 3.0).abs() < 0.1, "kurtosis {}", m4 / n);
        assert!((beyond_two / n - 0.0455).abs() < 0.004, "beyond two deviations: {}", beyond_two / n);
    }

    #[test]
    fn columns_and_neighbouring_ids_are_uncorrelated() {
        for distribution in [UNIFORM, NORMAL, TRUNCATED] {
            let (mut across, mut down, mut square) = (0.0, 0.0, 0.0);
            for id in 0..16_384 {
                let row = fill(distribution, 1, id, 4);
                let next = fill(distribution, 1, id + 1, 4);
                across += f64::from(row[0] * row[1]) + f64::from(row[1] * row[2]);
                down += f64::from(row[0] * next[0]) + f64::from(row[1] * next[1]);
                square += f64::from(row[0] * row[0]) + f64::from(row[1] * row[1]);
            }
            assert!((across / square).abs() < 0.03, "columns correlate: {}", across / square);
            assert!((down / square).abs() < 0.03, "ids correlate: {}", down / square);
        }
    }

    #[test]
    fn truncated_normal_keeps_its_bounds_and_moments() {
        let (mut n, mut sum, mut square) = (0.0, 0.0, 0.0);
        for id in 0..8192 {
            for value in fill(TRUNCATED, 3, id, 8) {
                assert!((-2.0..=2.0).contains(&value));
                let v = f64::from(value);
                (n, sum, square) = (n + 1.0, sum + v, square + v * v);
            }
        }
        assert!((sum / n).abs() < 0.015, "mean {}", sum / n);
        // 1 - 4 phi(2) / (2 Phi(2) - 1).
        assert!((square / n - 0.7737).abs() < 0.015, "variance {}", square / n);
        let one_sided = Distribution::TruncatedNormal { mean: 5.0, std: 2.0, low: 0.0, high: 1.0 };
        assert!((0..4096).flat_map(|id| fill(one_sided, 3, id, 4)).all(|v| (5.0..=7.0).contains(&v)));
    }

    #[test]
    fn zeros_and_edge_ids() {
        assert_eq!(fill(Distribution::Constant { value: 0.25 }, 9, 9, 4), [0.25; 4]);
        assert!(fill(Distribution::Zeros, 9, 9, 4).iter().all(|v| v.to_bits() == 0));
        let rows: Vec<_> = [0, 1, u64::MAX, u64::MAX - 1, i64::MIN as u64]
            .into_iter()
            .map(|id| fill(NORMAL, 1, id, 4))
            .collect();
        for (i, a) in rows.iter().enumerate() {
            assert!(rows[i + 1..].iter().all(|b| a != b));
        }
    }
}
