//! Checks of a table's hyper-parameters: optimizer, clipping, schedule, initialiser. Every refusal names its field.
//!
//! Not here: the rest of a definition (`schema`), the arithmetic (`optimizer`).

use evershard_proto::v1;

use super::{SchemaError, tensor_schema};
use crate::optimizer::{
    Adagrad, Adam, Clipping, Decay, Distribution, Ftrl, Initializer, Momentum, Optimizer, RmsProp,
    RowwiseAdagrad, Rule, Schedule, Sgd,
};

/// Checks the numbers of one table's definition.
pub(super) struct Checker<'a> {
    /// The table's name, for errors.
    pub(super) table: &'a str,
}

impl Checker<'_> {
    fn value(
        &self,
        field: &'static str,
        value: f32,
        must: &'static str,
        good: bool,
    ) -> Result<f32, SchemaError> {
        if value.is_finite() && good {
            Ok(value)
        } else {
            Err(SchemaError::Value { table: self.table.to_owned(), field, value, must })
        }
    }

    fn positive(&self, field: &'static str, value: f32) -> Result<f32, SchemaError> {
        self.value(field, value, "finite and above 0", value > 0.0)
    }

    fn not_negative(&self, field: &'static str, value: f32) -> Result<f32, SchemaError> {
        self.value(field, value, "finite and at least 0", value >= 0.0)
    }

    fn decay(&self, field: &'static str, value: f32) -> Result<f32, SchemaError> {
        self.value(field, value, "at least 0 and below 1", (0.0..1.0).contains(&value))
    }

    /// The optimizer as the server uses it.
    pub(super) fn optimizer(&self, optimizer: &v1::Optimizer) -> Result<Optimizer, SchemaError> {
        use v1::optimizer::Kind;
        let rule = match optimizer.kind.as_ref() {
            Some(Kind::Sgd(sgd)) => Rule::Sgd(Sgd { lr: self.positive("sgd.lr", sgd.lr)? }),
            Some(Kind::Adagrad(adagrad)) => Rule::Adagrad(Adagrad {
                lr: self.positive("adagrad.lr", adagrad.lr)?,
                eps: self.positive("adagrad.eps", adagrad.eps)?,
                initial_accumulator: self
                    .not_negative("adagrad.initial_accumulator", adagrad.initial_accumulator)?,
            }),
            Some(Kind::Adam(adam)) => Rule::Adam(Adam {
                lr: self.positive("adam.lr", adam.lr)?,
                beta1: self.decay("adam.beta1", adam.beta1)?,
                beta2: self.decay("adam.beta2", adam.beta2)?,
                eps: self.positive("adam.eps", adam.eps)?,
            }),
            Some(Kind::Momentum(momentum)) => Rule::Momentum(self.momentum(momentum)?),
            Some(Kind::RowwiseAdagrad(adagrad)) => Rule::RowwiseAdagrad(RowwiseAdagrad {
                lr: self.positive("rowwise_adagrad.lr", adagrad.lr)?,
                eps: self.positive("rowwise_adagrad.eps", adagrad.eps)?,
                initial_accumulator: self
                    .not_negative("rowwise_adagrad.initial_accumulator", adagrad.initial_accumulator)?,
            }),
            Some(Kind::RmsProp(rms_prop)) => Rule::RmsProp(RmsProp {
                lr: self.positive("rms_prop.lr", rms_prop.lr)?,
                alpha: self.decay("rms_prop.alpha", rms_prop.alpha)?,
                eps: self.positive("rms_prop.eps", rms_prop.eps)?,
                momentum: self.decay("rms_prop.momentum", rms_prop.momentum)?,
                centered: rms_prop.centered,
            }),
            Some(Kind::AdamW(adam)) => Rule::AdamW(Adam {
                lr: self.positive("adam_w.lr", adam.lr)?,
                beta1: self.decay("adam_w.beta1", adam.beta1)?,
                beta2: self.decay("adam_w.beta2", adam.beta2)?,
                eps: self.positive("adam_w.eps", adam.eps)?,
            }),
            Some(Kind::Ftrl(ftrl)) => Rule::Ftrl(Ftrl {
                lr: self.positive("ftrl.lr", ftrl.lr)?,
                // Above 0: else the rate of a weight whose squares vanish is infinite.
                beta: self.positive("ftrl.beta", ftrl.beta)?,
                l1: self.not_negative("ftrl.l1", ftrl.l1)?,
                l2: self.not_negative("ftrl.l2", ftrl.l2)?,
            }),
            None => {
                return Err(SchemaError::Kind { table: self.table.to_owned(), field: "optimizer" });
            }
        };
        let weight_decay = self.not_negative("optimizer.weight_decay", optimizer.weight_decay)?;
        if let Rule::Ftrl(_) = rule {
            self.value(
                "optimizer.weight_decay",
                weight_decay,
                "0 with FTRL, whose l2 it is",
                weight_decay == 0.0,
            )?;
        }
        let clipping = Clipping {
            value: self.not_negative("optimizer.clip_value", optimizer.clip_value)?,
            norm: self.not_negative("optimizer.clip_norm", optimizer.clip_norm)?,
        };
        let schedule = self.schedule(optimizer.schedule.as_ref())?;
        Ok(Optimizer { rule, weight_decay, clipping, schedule })
    }

    fn momentum(&self, momentum: &v1::Momentum) -> Result<Momentum, SchemaError> {
        let must = "at least 0 and below 1, and 0 with nesterov";
        let dampening = momentum.dampening;
        let good = (0.0..1.0).contains(&dampening) && !(momentum.nesterov && dampening != 0.0);
        Ok(Momentum {
            lr: self.positive("momentum.lr", momentum.lr)?,
            momentum: self.decay("momentum.momentum", momentum.momentum)?,
            dampening: self.value("momentum.dampening", dampening, must, good)?,
            nesterov: momentum.nesterov,
        })
    }

    fn schedule(&self, schedule: Option<&v1::Schedule>) -> Result<Schedule, SchemaError> {
        use v1::schedule::Decay as Kind;
        let Some(schedule) = schedule else { return Ok(Schedule::default()) };
        let share = |field, value: f32| {
            self.value(field, value, "at least 0 and at most 1", (0.0..=1.0).contains(&value))
        };
        let decay = match schedule.decay.as_ref() {
            None => Decay::Constant,
            Some(Kind::Step(step)) => Decay::Step {
                every: self.count("schedule.step.every", step.every)?,
                factor: share("schedule.step.factor", step.factor)?,
            },
            Some(Kind::Cosine(cosine)) => Decay::Cosine {
                steps: self.count("schedule.cosine.steps", cosine.steps)?,
                floor: share("schedule.cosine.floor", cosine.floor)?,
            },
        };
        Ok(Schedule { warmup_steps: schedule.warmup_steps, decay })
    }

    fn count(&self, field: &'static str, value: u64) -> Result<u64, SchemaError> {
        self.value(field, value as f32, "at least 1", value > 0)?;
        Ok(value)
    }

    /// The initialiser as the server uses it, for rows of `dim` values, or for a tensor of this shape.
    pub(super) fn initializer(
        &self,
        initializer: Option<&v1::Initializer>,
        dim: u32,
        shape: Option<&[u64]>,
    ) -> Result<Initializer, SchemaError> {
        use v1::initializer::Kind;
        let Some(initializer) = initializer else {
            return Ok(Initializer { seed: 0, distribution: Distribution::Zeros });
        };
        let distribution = match initializer.kind.as_ref() {
            Some(Kind::Zeros(_)) => Distribution::Zeros,
            Some(Kind::Uniform(uniform)) => {
                let low = self.value("uniform.low", uniform.low, "finite", true)?;
                let high = self.value("uniform.high", uniform.high, "finite, and not below low", {
                    uniform.high >= low && (uniform.high - low).is_finite()
                })?;
                Distribution::Uniform { low, high }
            }
            Some(Kind::Normal(normal)) => Distribution::Normal {
                mean: self.value("normal.mean", normal.mean, "finite", true)?,
                // Seven deviations out must still be finite.
                std: self.value("normal.std", normal.std, "at least 0, and finite with room to spare", {
                    normal.std >= 0.0 && (normal.mean.abs() + 7.0 * normal.std).is_finite()
                })?,
            },
            Some(Kind::Constant(constant)) => Distribution::Constant {
                value: self.value("constant.value", constant.value, "finite", true)?,
            },
            Some(Kind::TruncatedNormal(truncated)) => self.truncated_normal(truncated)?,
            Some(Kind::Glorot(glorot)) => self.glorot(glorot, dim, shape)?,
            None => {
                return Err(SchemaError::Kind { table: self.table.to_owned(), field: "initializer" });
            }
        };
        Ok(Initializer { seed: initializer.seed, distribution })
    }

    fn truncated_normal(&self, truncated: &v1::TruncatedNormal) -> Result<Distribution, SchemaError> {
        let (low, high) = if truncated.low == 0.0 && truncated.high == 0.0 {
            (-2.0, 2.0)
        } else {
            (truncated.low, truncated.high)
        };
        // So wide that a third of all tries fall inside.
        let good = low <= 0.0 && high >= 0.0 && high - low >= 1.0;
        let must = "around 0, at least 1 wide, and finite";
        Ok(Distribution::TruncatedNormal {
            mean: self.value("truncated_normal.mean", truncated.mean, "finite", true)?,
            std: self.value(
                "truncated_normal.std",
                truncated.std,
                "at least 0, and finite with room to spare",
                truncated.std >= 0.0 && (truncated.mean.abs() + 7.0 * truncated.std).is_finite(),
            )?,
            low: self.value("truncated_normal.low", low, must, good)?,
            high: self.value("truncated_normal.high", high, must, good)?,
        })
    }

    /// The uniform or normal distribution that it stands for.
    fn glorot(
        &self,
        glorot: &v1::Glorot,
        dim: u32,
        shape: Option<&[u64]>,
    ) -> Result<Distribution, SchemaError> {
        let given = (glorot.fan_in, glorot.fan_out);
        let (fan_in, fan_out) = match shape.filter(|_| given == (0, 0)).and_then(tensor_schema::fans) {
            Some(fans) => fans,
            None => {
                let fan_in = self.count("glorot.fan_in", given.0)?;
                // A tensor's blocks are no rows: both or none.
                let is_dim = given.1 == 0 && shape.is_none();
                let fan_out = if is_dim { dim.into() } else { self.count("glorot.fan_out", given.1)? };
                (fan_in, fan_out)
            }
        };
        let gain = self.value("glorot.gain", glorot.gain, "at least 0 and at most 1e6", {
            (0.0..=1e6).contains(&glorot.gain)
        })?;
        let gain = if gain == 0.0 { 1.0 } else { f64::from(gain) };
        let fans = fan_in as f64 + fan_out as f64;
        Ok(if glorot.normal {
            Distribution::Normal { mean: 0.0, std: (gain * (2.0 / fans).sqrt()) as f32 }
        } else {
            let bound = (gain * (6.0 / fans).sqrt()) as f32;
            Distribution::Uniform { low: -bound, high: bound }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use v1::optimizer::Kind;

    const CHECK: Checker<'static> = Checker { table: "items" };

    fn rule(kind: Kind) -> v1::Optimizer {
        v1::Optimizer { kind: Some(kind), ..Default::default() }
    }

    fn refused(optimizer: &v1::Optimizer) -> String {
        CHECK.optimizer(optimizer).expect_err("must be refused").to_string()
    }

    #[test]
    fn state_floats_of_every_rule() {
        let rms_prop = |momentum, centered| {
            Kind::RmsProp(v1::RmsProp { lr: 0.1, alpha: 0.9, eps: 1e-8, momentum, centered })
        };
        let adagrad = v1::RowwiseAdagrad { lr: 0.1, eps: 1e-8, initial_accumulator: 0.0 };
        for (kind, floats) in [
            (Kind::Momentum(v1::Momentum { lr: 0.1, momentum: 0.9, dampening: 0.0, nesterov: true }), 16),
            (Kind::RowwiseAdagrad(adagrad), 1),
            (rms_prop(0.0, false), 16),
            (rms_prop(0.5, false), 32),
            (rms_prop(0.5, true), 48),
            (Kind::AdamW(v1::AdamW { lr: 0.1, beta1: 0.9, beta2: 0.99, eps: 1e-8 }), 32),
            (Kind::Ftrl(v1::Ftrl { lr: 0.1, beta: 1.0, l1: 0.0, l2: 0.0 }), 32),
        ] {
            assert_eq!(CHECK.optimizer(&rule(kind)).expect("valid").state_floats(16), floats);
        }
    }

    #[test]
    fn refusals_name_the_field() {
        let ftrl = v1::Ftrl { lr: 0.1, beta: 1.0, l1: 0.0, l2: 0.0 };
        let momentum = v1::Momentum { lr: 0.1, momentum: 0.9, dampening: 0.5, nesterov: true };
        let good = rule(Kind::Ftrl(ftrl));
        let scheduled = |decay| v1::Optimizer {
            schedule: Some(v1::Schedule { warmup_steps: 0, decay: Some(decay) }),
            ..good
        };
        let step = v1::schedule::Decay::Step(v1::StepDecay { every: 0, factor: 0.5 });
        let cosine = v1::schedule::Decay::Cosine(v1::CosineDecay { steps: 9, floor: 1.5 });
        for (optimizer, field) in [
            (rule(Kind::Momentum(momentum)), "momentum.dampening"),
            (rule(Kind::Ftrl(v1::Ftrl { beta: 0.0, ..ftrl })), "ftrl.beta"),
            (v1::Optimizer { weight_decay: 0.1, ..good }, "optimizer.weight_decay"),
            (v1::Optimizer { clip_norm: f32::NAN, ..good }, "optimizer.clip_norm"),
            (v1::Optimizer { clip_value: -1.0, ..good }, "optimizer.clip_value"),
            (scheduled(step), "schedule.step.every"),
            (scheduled(cosine), "schedule.cosine.floor"),
        ] {
            assert!(refused(&optimizer).contains(field), "{}", refused(&optimizer));
        }
    }

    #[test]
    fn glorot_is_the_distribution_of_its_fans() {
        let glorot = |glorot| {
            let kind = Some(v1::initializer::Kind::Glorot(glorot));
            CHECK.initializer(Some(&v1::Initializer { kind, seed: 1 }), 50, None).map(|i| i.distribution)
        };
        let base = v1::Glorot { normal: false, fan_in: 100, fan_out: 0, gain: 0.0 };
        assert_eq!(glorot(base), Ok(Distribution::Uniform { low: -0.2, high: 0.2 }));
        let normal = v1::Glorot { normal: true, fan_out: 100, gain: 2.0, ..base };
        assert_eq!(glorot(normal), Ok(Distribution::Normal { mean: 0.0, std: 0.2 }));
        let error = glorot(v1::Glorot { fan_in: 0, ..base }).expect_err("no fan");
        assert!(error.to_string().contains("glorot.fan_in"));
    }
}
