//! Table definitions from Python: kinds and their numbers, as `python/evershard/definitions.py` gives them.
//!
//! Not here: their defaults (Python), and whether they make sense (the server).

use std::collections::HashMap;

use evershard::TableDefinition;
use evershard_proto::v1::{
    Adagrad, Adam, Initializer, Normal, Optimizer, Sgd, Uniform, Zeros, initializer, optimizer,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

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
        match self.1.get(name) {
            Some(Number::Float(value)) => Ok(*value as f32),
            Some(Number::Whole(value)) => Ok(*value as f32),
            None => Err(PyTypeError::new_err(format!("{} needs {name}", self.0))),
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
/// A kind that does not exist, or lacks a number.
pub(crate) fn sparse(
    name: String,
    dim: u32,
    optimizer: Option<&Kind>,
    initializer: Option<&Kind>,
) -> PyResult<TableDefinition> {
    Ok(TableDefinition {
        name,
        dim,
        optimizer: optimizer.map(optimizer_of).transpose()?,
        initializer: initializer.map(initializer_of).transpose()?,
        ..TableDefinition::default()
    })
}

fn optimizer_of(kind: &Kind) -> PyResult<Optimizer> {
    let lr = kind.float("lr");
    let which = match kind.0.as_str() {
        "SGD" => optimizer::Kind::Sgd(Sgd { lr: lr? }),
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
        other => return Err(PyTypeError::new_err(format!("{other} is not an optimizer"))),
    };
    Ok(Optimizer { kind: Some(which), weight_decay: kind.float("weight_decay")? })
}

fn initializer_of(kind: &Kind) -> PyResult<Initializer> {
    let which = match kind.0.as_str() {
        "Zeros" => initializer::Kind::Zeros(Zeros {}),
        "Uniform" => {
            initializer::Kind::Uniform(Uniform { low: kind.float("low")?, high: kind.float("high")? })
        }
        "Normal" => initializer::Kind::Normal(Normal { mean: kind.float("mean")?, std: kind.float("std")? }),
        other => return Err(PyTypeError::new_err(format!("{other} is not an initialiser"))),
    };
    Ok(Initializer { kind: Some(which), seed: kind.seed()? })
}
