//! Definitions of tables and tensors in few words.

use evershard_proto::tensor::TensorLayout;
use evershard_proto::v1::{self, TableDefinition, TableKind, TensorDefinition, initializer, optimizer};

/// A sparse table (u64 id -> row of `dim` floats) that starts from zeros.
#[must_use]
pub fn sparse(name: &str, dim: u32, optimizer: Option<v1::Optimizer>) -> TableDefinition {
    TableDefinition { name: name.into(), dim, optimizer, ..Default::default() }
}

/// A dense tensor of f32 that starts from zeros. The server says what is wrong with a shape that cannot be.
#[must_use]
pub fn dense(name: &str, shape: &[u64], optimizer: Option<v1::Optimizer>) -> TableDefinition {
    TableDefinition {
        name: name.into(),
        kind: TableKind::Dense.into(),
        dim: TensorLayout::new(shape).map_or(0, |layout| layout.dim()),
        optimizer,
        tensor: Some(TensorDefinition { shape: shape.to_vec(), ..Default::default() }),
        ..Default::default()
    }
}

/// Plain gradient descent.
#[must_use]
pub fn sgd(lr: f32) -> Option<v1::Optimizer> {
    Some(v1::Optimizer {
        kind: Some(optimizer::Kind::Sgd(v1::Sgd { lr })),
        weight_decay: 0.0,
        ..Default::default()
    })
}

/// Adagrad with eps 1e-10.
#[must_use]
pub fn adagrad(lr: f32) -> Option<v1::Optimizer> {
    let adagrad = v1::Adagrad { lr, eps: 1e-10, initial_accumulator: 0.0 };
    Some(v1::Optimizer {
        kind: Some(optimizer::Kind::Adagrad(adagrad)),
        weight_decay: 0.0,
        ..Default::default()
    })
}

/// Adam with betas (0.9, 0.999) and eps 1e-8.
#[must_use]
pub fn adam(lr: f32) -> Option<v1::Optimizer> {
    let adam = v1::Adam { lr, beta1: 0.9, beta2: 0.999, eps: 1e-8 };
    Some(v1::Optimizer { kind: Some(optimizer::Kind::Adam(adam)), weight_decay: 0.0, ..Default::default() })
}

/// Rows start normally distributed.
#[must_use]
pub fn normal(mean: f32, std: f32, seed: u64) -> Option<v1::Initializer> {
    Some(v1::Initializer { kind: Some(initializer::Kind::Normal(v1::Normal { mean, std })), seed })
}

/// Rows start uniformly distributed over `[low, high)`.
#[must_use]
pub fn uniform(low: f32, high: f32, seed: u64) -> Option<v1::Initializer> {
    Some(v1::Initializer { kind: Some(initializer::Kind::Uniform(v1::Uniform { low, high })), seed })
}
