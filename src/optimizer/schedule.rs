//! Learning-rate schedules: a factor of the table's rate, a pure function of a step number, in f64 with the pinned `libm`.
//!
//! The step is the clock of the push, which every replica reads from the log: 0 outside a job.

use super::power::power;

/// A schedule: linear warm-up, then a decay that counts from the warm-up's end.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Schedule {
    /// Steps of warm-up; 0 for none.
    pub warmup_steps: u64,
    /// What follows.
    pub decay: Decay,
}

/// The decay of a [`Schedule`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Decay {
    /// None.
    #[default]
    Constant,
    /// `factor^(step / every)`.
    Step {
        /// Steps between two drops, at least 1.
        every: u64,
        /// What is left at each drop.
        factor: f32,
    },
    /// Half a cosine from 1 to `floor`, which holds from step `steps` on.
    Cosine {
        /// Steps to the floor, at least 1.
        steps: u64,
        /// What is left in the end.
        floor: f32,
    },
}

impl Schedule {
    /// `lr` as it is at a step.
    #[must_use]
    pub fn rate(&self, lr: f32, step: u64) -> f32 {
        (f64::from(lr) * self.factor(step)) as f32
    }

    fn factor(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return (step + 1) as f64 / self.warmup_steps as f64;
        }
        let step = step - self.warmup_steps;
        match self.decay {
            Decay::Constant => 1.0,
            Decay::Step { every, factor } => {
                let drops = u32::try_from(step / every.max(1)).unwrap_or(u32::MAX);
                power(f64::from(factor), drops)
            }
            Decay::Cosine { steps, floor } if step >= steps => f64::from(floor),
            Decay::Cosine { steps, floor } => {
                let cosine = libm::cos(std::f64::consts::PI * (step as f64 / steps as f64));
                let floor = f64::from(floor);
                floor + (1.0 - floor) * (0.5 * (1.0 + cosine))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(schedule: Schedule, steps: &[u64]) -> Vec<f32> {
        steps.iter().map(|step| schedule.rate(0.5, *step)).collect()
    }

    #[test]
    fn constant_is_the_rate_itself() {
        assert_eq!(rates(Schedule::default(), &[0, 1, u64::MAX]), [0.5; 3]);
    }

    #[test]
    fn warm_up_then_step_decay() {
        let schedule = Schedule { warmup_steps: 4, decay: Decay::Step { every: 10, factor: 0.5 } };
        assert_eq!(rates(schedule, &[0, 1, 3, 4, 13, 14, 24]), [0.125, 0.25, 0.5, 0.5, 0.5, 0.25, 0.125]);
        assert_eq!(rates(schedule, &[u64::MAX]), [0.0]);
        let longest = Schedule { warmup_steps: u64::MAX, ..schedule };
        assert_eq!(rates(longest, &[u64::MAX - 1, u64::MAX]), [0.5, 0.5]);
    }

    #[test]
    fn cosine_goes_from_one_to_its_floor() {
        let schedule = Schedule { warmup_steps: 0, decay: Decay::Cosine { steps: 100, floor: 0.5 } };
        assert_eq!(rates(schedule, &[0, 50, 100, 101, u64::MAX]), [0.5, 0.375, 0.25, 0.25, 0.25]);
        assert!(rates(schedule, &(0..=100).collect::<Vec<_>>()).windows(2).all(|pair| pair[1] <= pair[0]));
    }

    #[test]
    fn golden_bits() {
        let cosine = Schedule { warmup_steps: 10, decay: Decay::Cosine { steps: 1000, floor: 0.1 } };
        let drops = Schedule { warmup_steps: 3, decay: Decay::Step { every: 7, factor: 0.9 } };
        let bits = |schedule: Schedule| [0, 9, 17, 333, 777].map(|step| schedule.rate(0.05, step).to_bits());
        assert_eq!(bits(cosine), COSINE);
        assert_eq!(bits(drops), DROPS);
    }

    const COSINE: [u32; 5] = [0x3ba3_d70a, 0x3d4c_cccd, 0x3d4c_c719, 0x3d21_4947, 0x3c30_5954];
    const DROPS: [u32; 5] = [0x3c88_8889, 0x3d4c_cccd, 0x3d25_e354, 0x39b9_5390, 0x34f8_9b95];
}
