//! The optimizers once more, one element at a time behind `black_box`, so that the compiler can use no lanes: the
//! production loops must give the same bits, at every length.

use std::hint::black_box as b;

use super::*;
use proptest::prelude::*;

fn power(base: f64, exponent: u32) -> f64 {
    let (mut result, mut square, mut rest) = (1.0, base, exponent);
    while rest > 0 {
        if rest & 1 == 1 {
            result = b(b(result) * b(square));
        }
        square = b(b(square) * b(square));
        rest >>= 1;
    }
    result
}

fn step(
    optimizer: &Optimizer,
    lr: f32,
    weights: &mut [f32],
    state: &mut [f32],
    gradient: &[f32],
    steps: u32,
) {
    let dim = weights.len();
    for i in 0..dim {
        let mut g = b(gradient[i]);
        if optimizer.weight_decay != 0.0 {
            g = b(g + b(b(optimizer.weight_decay) * b(weights[i])));
        }
        let update = match optimizer.rule {
            Rule::Sgd(_) => b(b(lr) * g),
            Rule::Adagrad(rule) => {
                state[i] = b(b(state[i]) + b(g * g));
                b(b(b(lr) * g) / b(b(b(state[i]).sqrt()) + b(rule.eps)))
            }
            Rule::Adam(rule) => {
                let (beta1, beta2) = (f64::from(rule.beta1), f64::from(rule.beta2));
                let (up1, up2) = ((1.0 - beta1) as f32, (1.0 - beta2) as f32);
                state[i] = b(b(b(state[i]) * b(rule.beta1)) + b(b(up1) * g));
                state[dim + i] = b(b(b(state[dim + i]) * b(rule.beta2)) + b(b(b(up2) * g) * g));
                let size = (f64::from(lr) / (1.0 - power(beta1, steps))) as f32;
                let correction = (1.0 - power(beta2, steps)).sqrt() as f32;
                let denominator = b(b(b(b(state[dim + i]).sqrt()) / b(correction)) + b(rule.eps));
                b(b(b(size) * b(state[i])) / denominator)
            }
        };
        weights[i] = b(b(weights[i]) - update);
    }
}

fn optimizers() -> impl Strategy<Value = Optimizer> {
    let rule = prop_oneof![
        (0.0001f32..2.0).prop_map(|lr| Rule::Sgd(Sgd { lr })),
        (0.0001f32..2.0, 0.0f32..1.0).prop_map(|(lr, start)| Rule::Adagrad(Adagrad {
            lr,
            eps: 1e-10,
            initial_accumulator: start
        })),
        (0.0001f32..2.0, 0.0f32..0.999, 0.0f32..0.9999).prop_map(|(lr, beta1, beta2)| Rule::Adam(Adam {
            lr,
            beta1,
            beta2,
            eps: 1e-8
        })),
    ];
    (rule, prop_oneof![Just(0.0f32), 0.0f32..0.1])
        .prop_map(|(rule, weight_decay)| Optimizer { rule, weight_decay })
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

proptest! {
    #[test]
    fn the_fast_loops_give_the_bits_of_the_scalar_ones(
        optimizer in optimizers(),
        rows in proptest::collection::vec((-10.0f32..10.0, prop_oneof![-3.0f32..3.0, -1e-30f32..1e-30, Just(0.0f32)]), 1..70),
        lr in proptest::option::of(0.0f32..1.0),
        rounds in 1u32..12,
    ) {
        let mut weights: Vec<f32> = rows.iter().map(|r| r.0).collect();
        let gradient: Vec<f32> = rows.iter().map(|r| r.1).collect();
        let mut state = vec![0.0; optimizer.state_floats(weights.len() as u32) as usize];
        optimizer.initial_state(&mut state);
        let (mut weights2, mut state2) = (weights.clone(), state.clone());
        let mut stepper = optimizer.stepper(lr);
        for steps in 1..=rounds {
            stepper.step(&mut weights, &mut state, &mut gradient.clone(), steps);
            step(&optimizer, lr.unwrap_or(optimizer.learning_rate()), &mut weights2, &mut state2, &gradient, steps);
            prop_assert_eq!(bits(&weights), bits(&weights2));
            prop_assert_eq!(bits(&state), bits(&state2));
        }
    }
}
