//! The optimizers against PyTorch's own, on the same gradients: 1000 steps, with and without weight decay.
//!
//! `tests/optimizer_golden/generate.py` ran PyTorch and wrote `vectors.json`. PyTorch may contract or reorder single
//! operations, so its bits are not ours: the bound is a few units in the last place after 1000 steps.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::*;
use evershard_proto::key::mix64;

#[derive(Deserialize)]
struct Vectors {
    dim: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    rule: String,
    lr: f32,
    weight_decay: f32,
    #[serde(default)]
    eps: f32,
    #[serde(default)]
    initial_accumulator: f32,
    #[serde(default)]
    beta1: f32,
    #[serde(default)]
    beta2: f32,
    #[serde(default)]
    momentum: f32,
    #[serde(default)]
    dampening: f32,
    #[serde(default)]
    nesterov: bool,
    #[serde(default)]
    alpha: f32,
    #[serde(default)]
    centered: bool,
    weights: BTreeMap<u32, Vec<u32>>,
}

fn value(stream: u64, step: u32, column: usize) -> f32 {
    let bits = mix64((stream << 40) ^ (u64::from(step) << 20) ^ column as u64) >> 40;
    bits as f32 * (1.0 / f32::from(1u16 << 15) / 256.0) - 1.0
}

fn row(stream: u64, step: u32, dim: usize) -> Vec<f32> {
    (0..dim).map(|column| value(stream, step, column)).collect()
}

impl Case {
    fn optimizer(&self) -> Optimizer {
        let (lr, eps) = (self.lr, self.eps);
        let rule = match self.rule.as_str() {
            "sgd" => Rule::Sgd(Sgd { lr }),
            "adagrad" => Rule::Adagrad(Adagrad { lr, eps, initial_accumulator: self.initial_accumulator }),
            "adam" => Rule::Adam(Adam { lr, beta1: self.beta1, beta2: self.beta2, eps }),
            "adamw" => Rule::AdamW(Adam { lr, beta1: self.beta1, beta2: self.beta2, eps }),
            "momentum" => Rule::Momentum(Momentum {
                lr,
                momentum: self.momentum,
                dampening: self.dampening,
                nesterov: self.nesterov,
            }),
            "rowwise_adagrad" => Rule::RowwiseAdagrad(RowwiseAdagrad {
                lr,
                eps,
                initial_accumulator: self.initial_accumulator,
            }),
            "rmsprop" => Rule::RmsProp(RmsProp {
                lr,
                alpha: self.alpha,
                eps,
                momentum: self.momentum,
                centered: self.centered,
            }),
            other => panic!("unknown rule {other}"),
        };
        Optimizer {
            rule,
            weight_decay: self.weight_decay,
            clipping: Clipping::default(),
            schedule: Schedule::default(),
        }
    }
}

#[test]
fn a_thousand_steps_as_pytorch_does_them() {
    let vectors: Vectors = serde_json::from_str(include_str!("../../tests/optimizer_golden/vectors.json"))
        .expect("our own file");
    assert_eq!(vectors.cases.len(), 26);
    let mut worst_of_all = 0.0f64;
    for (number, case) in vectors.cases.iter().enumerate() {
        let number = number as u64;
        let optimizer = case.optimizer();
        let mut weights = row(2 * number, 0, vectors.dim);
        let mut state = vec![0.0; optimizer.state_floats(vectors.dim as u32) as usize];
        optimizer.initial_state(&mut state);
        let mut compared = 0;
        for step in 1..=1000 {
            let mut gradient = row(2 * number + 1, step, vectors.dim);
            optimizer.stepper(None, 0).step(&mut weights, &mut state, &mut gradient, step);
            let Some(expected) = case.weights.get(&step) else { continue };
            compared += 1;
            let worst = weights
                .iter()
                .zip(expected)
                .map(|(ours, theirs)| {
                    let theirs = f32::from_bits(*theirs);
                    f64::from((ours - theirs).abs()) / f64::from(theirs.abs().max(0.1))
                })
                .fold(0.0f64, f64::max);
            worst_of_all = worst_of_all.max(worst);
            assert!(
                worst < BOUND,
                "{} wd {} after {step} steps: off by {worst:e}",
                case.rule,
                case.weight_decay
            );
        }
        assert_eq!(compared, case.weights.len());
    }
    println!("worst relative difference from PyTorch: {worst_of_all:e}");
}

/// Relative, of weights of 0.1 and more; one unit in the last place is 6e-8 to 1.2e-7.
const BOUND: f64 = 5e-6;
