//! Table definitions from Python: kinds and their numbers, as `python/evershard/definitions.py` gives them.
//!
//! Not here: their defaults (Python), and whether they make sense (the server).

use std::collections::HashMap;

use evershard::{TableDefinition, TensorDtype, definition};
use evershard_proto::v1::{
    Adagrad, Adam, AdamW, Admission, Constant, CosineDecay, Eviction, Ftrl, Glorot, Initializer, Momentum,
    NonFinitePolicy, Normal, Optimizer, RmsProp, RowwiseAdagrad, Schedule, Sgd, StepDecay, TruncatedNormal,
    Uniform, Zeros, initializer, optimizer, schedule,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::errors::InvalidArgument;

/// A kind and its numbers: `("Adagrad", {"lr": 0.05, ...})`.
#[derive(Debug, FromPyObject)]
pub(crate) struct Kind(String, HashMap<String, Number>);

/// Seeds are whole numbers of 64 bits, which a float would round.
#[derive(Debug, Clone, Copy, FromPyObject)]
enum Number {
    Whole(u64),
    Float(f64),
}

impl Kind {
    fn float(&self, name: &str) -> PyResult<f32> {
        self.double(name).map(|value| value as f32)
    }

    fn double(&self, name: &str) -> PyResult<f64> {
        match self.1.get(name) {
            Some(Number::Float(value)) => Ok(*value),
            Some(Number::Whole(value)) => Ok(*value as f64),
            None => Err(PyTypeError::new_err(format!("{} needs {name}", self.0))),
        }
    }

    /// A number of which 0, or none, means the default.
    fn optional(&self, name: &str) -> PyResult<f32> {
        if self.1.contains_key(name) { self.float(name) } else { Ok(0.0) }
    }

    fn flag(&self, name: &str) -> PyResult<bool> {
        Ok(self.optional(name)? != 0.0)
    }

    fn whole(&self, name: &str) -> PyResult<u64> {
        match self.1.get(name) {
            Some(Number::Whole(value)) => Ok(*value),
            _ => Err(PyTypeError::new_err(format!("{} needs {name}, an integer of at least 0", self.0))),
        }
    }

    fn seed(&self) -> PyResult<u64> {
        match self.1.get("seed") {
            Some(Number::Whole(value)) => Ok(*value),
            None => Ok(0),
            Some(Number::Float(_)) => Err(PyTypeError::new_err(format!(
                "the seed of {} must be an integer from 0 to 2**64-1",
                self.0
            ))),
        }
    }
}

/// The definition of a sparse table.
///
/// # Errors
/// A kind or policy that does not exist, or a kind that lacks a number.
pub(crate) fn sparse(
    name: String,
    dim: u32,
    (optimizer, initializer): (Option<&Kind>, Option<&Kind>),
    (admission, eviction): (Option<&Kind>, Option<&Kind>),
    non_finite: &str,
) -> PyResult<TableDefinition> {
    let non_finite = match non_finite {
        "reject" => NonFinitePolicy::Reject,
        "skip_row" => NonFinitePolicy::SkipRow,
        "clip" => NonFinitePolicy::Clip,
        other => {
            let what =
                format!("table {name:?}: non_finite is \"reject\", \"skip_row\" or \"clip\", not {other:?}");
            return Err(InvalidArgument::new_err(what));
        }
    };
    Ok(TableDefinition {
        name,
        dim,
        optimizer: optimizer.map(optimizer_of).transpose()?,
        initializer: initializer.map(initializer_of).transpose()?,
        non_finite: non_finite.into(),
        admission: admission.map(admission_of).transpose()?,
        eviction: eviction.map(eviction_of).transpose()?,
        ..TableDefinition::default()
    })
}

fn expect(kind: &Kind, name: &str) -> PyResult<()> {
    let other = || PyTypeError::new_err(format!("expected {name}, not {}", kind.0));
    if kind.0 == name { Ok(()) } else { Err(other()) }
}

fn admission_of(kind: &Kind) -> PyResult<Admission> {
    expect(kind, "Admission")?;
    let filter_freq = u32::try_from(kind.whole("filter_freq")?)
        .map_err(|_| PyTypeError::new_err("filter_freq of Admission must be below 2**32"))?;
    Ok(Admission { filter_freq, admit_probability: kind.double("admit_probability")?, seed: kind.seed()? })
}

fn eviction_of(kind: &Kind) -> PyResult<Eviction> {
    expect(kind, "Eviction")?;
    Ok(Eviction {
        expire_seconds: kind.whole("expire_seconds")?,
        steps_to_live: kind.whole("steps_to_live")?,
        min_l2: kind.float("min_l2")?,
        max_rows: kind.whole("max_rows")?,
    })
}

/// The definition of a dense tensor.
///
/// # Errors
/// As [`sparse`]; a dtype that does not exist.
pub(crate) fn dense(
    name: &str,
    shape: &[u64],
    dtype: &str,
    optimizer: Option<&Kind>,
    initializer: Option<&Kind>,
) -> PyResult<TableDefinition> {
    let dtype = match dtype {
        "float32" => TensorDtype::F32,
        "float16" => TensorDtype::F16,
        "bfloat16" => TensorDtype::Bf16,
        other => {
            let what = format!("dtype is float32, float16 or bfloat16, not {other}");
            return Err(PyTypeError::new_err(what));
        }
    };
    let mut definition = definition::dense(name, shape, optimizer.map(optimizer_of).transpose()?);
    if let Some(tensor) = &mut definition.tensor {
        tensor.dtype = dtype.into();
    }
    definition.initializer = initializer.map(initializer_of).transpose()?;
    Ok(definition)
}

/// An optimizer, its schedule among its numbers.
///
/// # Errors
/// As [`sparse`].
pub(crate) fn optimizer_of(kind: &Kind) -> PyResult<Optimizer> {
    let lr = kind.float("lr");
    let which = match kind.0.as_str() {
        "SGD" if kind.optional("momentum")? != 0.0 || kind.flag("nesterov")? => {
            optimizer::Kind::Momentum(Momentum {
                lr: lr?,
                momentum: kind.float("momentum")?,
                dampening: kind.float("dampening")?,
                nesterov: kind.flag("nesterov")?,
            })
        }
        "SGD" => optimizer::Kind::Sgd(Sgd { lr: lr? }),
        "Adagrad" if kind.flag("rowwise")? => optimizer::Kind::RowwiseAdagrad(RowwiseAdagrad {
            lr: lr?,
            eps: kind.float("eps")?,
            initial_accumulator: kind.float("initial_accumulator")?,
        }),
        "Adagrad" => optimizer::Kind::Adagrad(Adagrad {
            lr: lr?,
            eps: kind.float("eps")?,
            initial_accumulator: kind.float("initial_accumulator")?,
        }),
        "Adam" => optimizer::Kind::Adam(Adam {
            lr: lr?,
            beta1: kind.float("beta1")?,
            beta2: kind.float("beta2")?,
            eps: kind.float("eps")?,
        }),
        "AdamW" => optimizer::Kind::AdamW(AdamW {
            lr: lr?,
            beta1: kind.float("beta1")?,
            beta2: kind.float("beta2")?,
            eps: kind.float("eps")?,
        }),
        "RMSprop" => optimizer::Kind::RmsProp(RmsProp {
            lr: lr?,
            alpha: kind.float("alpha")?,
            eps: kind.float("eps")?,
            momentum: kind.float("momentum")?,
            centered: kind.flag("centered")?,
        }),
        "FTRL" => optimizer::Kind::Ftrl(Ftrl {
            lr: lr?,
            beta: kind.float("beta")?,
            l1: kind.float("l1")?,
            l2: kind.float("l2")?,
        }),
        other => return Err(PyTypeError::new_err(format!("{other} is not an optimizer"))),
    };
    Ok(Optimizer {
        kind: Some(which),
        weight_decay: kind.optional("weight_decay")?,
        clip_value: kind.optional("clip_value")?,
        clip_norm: kind.optional("clip_norm")?,
        schedule: schedule_of(kind)?,
    })
}

/// The numbers of a schedule, as `python/evershard/schedules.py` gives them.
fn schedule_of(kind: &Kind) -> PyResult<Option<Schedule>> {
    let has = |name| kind.1.contains_key(name);
    if !has("warmup_steps") {
        return Ok(None);
    }
    let decay = if has("step_every") {
        let (every, factor) = (kind.whole("step_every")?, kind.float("step_factor")?);
        Some(schedule::Decay::Step(StepDecay { every, factor }))
    } else if has("cosine_steps") {
        let (steps, floor) = (kind.whole("cosine_steps")?, kind.float("cosine_floor")?);
        Some(schedule::Decay::Cosine(CosineDecay { steps, floor }))
    } else {
        None
    };
    Ok(Some(Schedule { warmup_steps: kind.whole("warmup_steps")?, decay }))
}

fn initializer_of(kind: &Kind) -> PyResult<Initializer> {
    let which = match kind.0.as_str() {
        "Zeros" => initializer::Kind::Zeros(Zeros {}),
        "Uniform" => {
            initializer::Kind::Uniform(Uniform { low: kind.float("low")?, high: kind.float("high")? })
        }
        "Normal" => initializer::Kind::Normal(Normal { mean: kind.float("mean")?, std: kind.float("std")? }),
        "Constant" => initializer::Kind::Constant(Constant { value: kind.float("value")? }),
        "TruncatedNormal" => initializer::Kind::TruncatedNormal(TruncatedNormal {
            mean: kind.float("mean")?,
            std: kind.float("std")?,
            low: kind.float("low")?,
            high: kind.float("high")?,
        }),
        "Glorot" => initializer::Kind::Glorot(Glorot {
            normal: kind.flag("normal")?,
            fan_in: kind.whole("fan_in")?,
            fan_out: kind.whole("fan_out")?,
            gain: kind.float("gain")?,
        }),
        other => return Err(PyTypeError::new_err(format!("{other} is not an initialiser"))),
    };
    Ok(Initializer { kind: Some(which), seed: kind.seed()? })
}
