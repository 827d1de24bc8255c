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
    let clipped = clip(&optimizer.clipping, gradient);
    let decoupled = matches!(optimizer.rule, Rule::AdamW(_));
    if let Rule::RowwiseAdagrad(_) = optimizer.rule {
        let decayed: Vec<f32> = clipped
            .iter()
            .zip(weights.iter())
            .map(|(g, w)| {
                if optimizer.weight_decay == 0.0 { *g } else { b(*g + b(b(optimizer.weight_decay) * b(*w))) }
            })
            .collect();
        state[0] = b(state[0] + b(squares(&decayed, 1.0) / dim as f32));
    }
    for i in 0..dim {
        let mut g = b(clipped[i]);
        if optimizer.weight_decay != 0.0 && decoupled {
            let keep = (1.0 - f64::from(lr) * f64::from(optimizer.weight_decay)) as f32;
            weights[i] = b(b(weights[i]) * b(keep));
        }
        if optimizer.weight_decay != 0.0 && !decoupled {
            g = b(g + b(b(optimizer.weight_decay) * b(weights[i])));
        }
        let update = match optimizer.rule {
            Rule::Sgd(_) => b(b(lr) * g),
            Rule::Adagrad(rule) => {
                state[i] = b(b(state[i]) + b(g * g));
                b(b(b(lr) * g) / b(b(b(state[i]).sqrt()) + b(rule.eps)))
            }
            Rule::Adam(rule) | Rule::AdamW(rule) => {
                let (beta1, beta2) = (f64::from(rule.beta1), f64::from(rule.beta2));
                let (up1, up2) = ((1.0 - beta1) as f32, (1.0 - beta2) as f32);
                state[i] = b(b(b(state[i]) * b(rule.beta1)) + b(b(up1) * g));
                state[dim + i] = b(b(b(state[dim + i]) * b(rule.beta2)) + b(b(b(up2) * g) * g));
                let size = (f64::from(lr) / (1.0 - power(beta1, steps))) as f32;
                let correction = (1.0 - power(beta2, steps)).sqrt() as f32;
                let denominator = b(b(b(b(state[dim + i]).sqrt()) / b(correction)) + b(rule.eps));
                b(b(b(size) * b(state[i])) / denominator)
            }
            Rule::Momentum(rule) => {
                let share = if steps == 1 { 1.0 } else { (1.0 - f64::from(rule.dampening)) as f32 };
                state[i] = b(b(b(state[i]) * b(rule.momentum)) + b(b(share) * g));
                let way = if rule.nesterov { b(g + b(b(rule.momentum) * b(state[i]))) } else { state[i] };
                b(b(lr) * way)
            }
            Rule::RowwiseAdagrad(rule) => b(b(b(lr) * g) / b(b(b(state[0]).sqrt()) + b(rule.eps))),
            Rule::RmsProp(rule) => {
                let up = (1.0 - f64::from(rule.alpha)) as f32;
                state[i] = b(b(b(state[i]) * b(rule.alpha)) + b(b(b(up) * g) * g));
                let mut measure = b(state[i]);
                let mut next = dim + i;
                if rule.centered {
                    state[next] = b(b(state[next]) + b(b(up) * b(g - b(state[next]))));
                    measure = b(measure - b(b(state[next]) * b(state[next]))).max(0.0);
                    next += dim;
                }
                let mut way = b(g / b(b(measure.sqrt()) + b(rule.eps)));
                if rule.momentum > 0.0 {
                    state[next] = b(b(b(state[next]) * b(rule.momentum)) + way);
                    way = state[next];
                }
                b(b(lr) * way)
            }
            Rule::Ftrl(_) if lr <= 0.0 => continue,
            Rule::Ftrl(rule) => {
                let held = |value: f32| b(b(value).clamp(-f32::MAX, f32::MAX));
                let more = held(b(state[dim + i]) + b(g * g));
                let sigma = held(b(b(more.sqrt()) - b(b(state[dim + i]).sqrt())) / b(lr));
                state[i] = held(b(state[i]) + b(g - held(b(sigma * b(weights[i])))));
                state[dim + i] = more;
                let below = b(b(b(b(rule.beta) + b(more.sqrt())) / b(lr)) + b(rule.l2));
                let z = b(state[i]);
                weights[i] = if z.abs() <= rule.l1 {
                    0.0
                } else if z > 0.0 {
                    held(b(-b(z - b(rule.l1))) / below)
                } else {
                    held(b(-z - b(rule.l1)) / below)
                };
                continue;
            }
        };
        weights[i] = b(b(weights[i]) - update);
    }
    // One NaN: which of its bits an operation leaves is the processor's affair.
    for value in weights.iter_mut().chain(state) {
        if b(*value).is_nan() {
            *value = f32::from_bits(0x7fc0_0000);
        }
    }
}

/// Eight lanes and their tree, one addition at a time.
fn squares(values: &[f32], scale: f32) -> f32 {
    let lane = |lane: usize| {
        values.iter().skip(lane).step_by(8).fold(0.0, |sum, value| {
            let scaled = b(b(*value) / b(scale));
            b(b(sum) + b(scaled * scaled))
        })
    };
    let pair = |at: usize| b(lane(at) + lane(at + 4));
    b(b(pair(0) + pair(2)) + b(pair(1) + pair(3)))
}

fn clip(clipping: &Clipping, gradient: &[f32]) -> Vec<f32> {
    let bound = if clipping.value > 0.0 { clipping.value } else { f32::MAX };
    let mut clipped: Vec<f32> = gradient.iter().map(|g| b(*g).min(bound).max(-bound)).collect();
    let largest = clipped.iter().fold(0.0f32, |largest, g| b(largest).max(b(g.abs())));
    if clipping.norm > 0.0 && largest > 0.0 {
        let norm = f64::from(largest) * f64::from(squares(&clipped, largest)).sqrt();
        let factor = f64::from(clipping.norm) / (norm + 1e-6);
        if factor < 1.0 {
            let factor = (factor * f64::from(largest)) as f32;
            clipped.iter_mut().for_each(|g| *g = b(b(b(*g) / b(largest)) * b(factor)));
        }
    }
    clipped
}

fn optimizers() -> impl Strategy<Value = Optimizer> {
    let rule =
        prop_oneof![
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
            (0.0001f32..2.0, 0.0f32..0.999, 0.0f32..0.5, any::<bool>()).prop_map(
                |(lr, momentum, dampening, nesterov)| Rule::Momentum(Momentum {
                    lr,
                    momentum,
                    dampening: if nesterov { 0.0 } else { dampening },
                    nesterov
                })
            ),
            (0.0001f32..2.0, 0.0f32..1.0).prop_map(|(lr, start)| Rule::RowwiseAdagrad(RowwiseAdagrad {
                lr,
                eps: 1e-10,
                initial_accumulator: start
            })),
            (0.0001f32..2.0, 0.0f32..0.999, prop_oneof![Just(0.0f32), 0.1f32..0.99], any::<bool>()).prop_map(
                |(lr, alpha, momentum, centered)| Rule::RmsProp(RmsProp {
                    lr,
                    alpha,
                    eps: 1e-8,
                    momentum,
                    centered
                })
            ),
            (0.0001f32..2.0, 0.0f32..0.999, 0.0f32..0.9999)
                .prop_map(|(lr, beta1, beta2)| Rule::AdamW(Adam { lr, beta1, beta2, eps: 1e-8 })),
            (0.0001f32..2.0, 0.1f32..2.0, 0.0f32..1.0, 0.0f32..1.0)
                .prop_map(|(lr, beta, l1, l2)| Rule::Ftrl(Ftrl { lr, beta, l1, l2 })),
        ];
    let bound = || prop_oneof![Just(0.0f32), 0.01f32..4.0];
    (rule, prop_oneof![Just(0.0f32), 0.0f32..0.1], bound(), bound()).prop_map(
        |(rule, weight_decay, value, norm)| Optimizer {
            rule,
            weight_decay,
            clipping: Clipping { value, norm },
            schedule: Schedule::default(),
        },
    )
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

proptest! {
    #[test]
    fn the_fast_loops_give_the_bits_of_the_scalar_ones(
        optimizer in optimizers(),
        rows in proptest::collection::vec((-10.0f32..10.0, prop_oneof![-3.0f32..3.0, -1e-30f32..1e-30, -1e38f32..1e38, Just(0.0f32), Just(-0.0f32)]), 1..70),
        lr in proptest::option::of(0.0f32..1.0),
        rounds in 1u32..12,
    ) {
        let mut weights: Vec<f32> = rows.iter().map(|r| r.0).collect();
        let gradient: Vec<f32> = rows.iter().map(|r| r.1).collect();
        let mut state = vec![0.0; optimizer.state_floats(weights.len() as u32) as usize];
        optimizer.initial_state(&mut state);
        let (mut weights2, mut state2) = (weights.clone(), state.clone());
        let mut stepper = optimizer.stepper(lr, 0);
        for steps in 1..=rounds {
            stepper.step(&mut weights, &mut state, &mut gradient.clone(), steps);
            step(&optimizer, lr.unwrap_or(optimizer.learning_rate()), &mut weights2, &mut state2, &gradient, steps);
            prop_assert_eq!(bits(&weights), bits(&weights2));
            prop_assert_eq!(bits(&state), bits(&state2));
        }
    }
}
