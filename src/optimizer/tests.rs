//! Every rule at once: golden bits, a restart in the middle, extreme gradients; FTRL against its paper's recurrence.

use super::*;

fn plain(rule: Rule) -> Optimizer {
    Optimizer { rule, weight_decay: 0.0, clipping: Clipping::default(), schedule: Schedule::default() }
}

fn rules() -> Vec<(&'static str, Rule)> {
    let adam = Adam { lr: 0.01, beta1: 0.9, beta2: 0.999, eps: 1e-8 };
    let momentum = Momentum { lr: 0.01, momentum: 0.9, dampening: 0.25, nesterov: false };
    let rms_prop = RmsProp { lr: 0.01, alpha: 0.9, eps: 1e-8, momentum: 0.0, centered: false };
    vec![
        ("sgd", Rule::Sgd(Sgd { lr: 0.1 })),
        ("adagrad", Rule::Adagrad(Adagrad { lr: 0.1, eps: 1e-10, initial_accumulator: 0.1 })),
        ("adam", Rule::Adam(adam)),
        ("momentum", Rule::Momentum(momentum)),
        ("nesterov", Rule::Momentum(Momentum { dampening: 0.0, nesterov: true, ..momentum })),
        (
            "rowwise adagrad",
            Rule::RowwiseAdagrad(RowwiseAdagrad { lr: 0.1, eps: 1e-8, initial_accumulator: 0.1 }),
        ),
        ("rmsprop", Rule::RmsProp(rms_prop)),
        ("centered rmsprop", Rule::RmsProp(RmsProp { momentum: 0.5, centered: true, ..rms_prop })),
        ("adamw", Rule::AdamW(adam)),
        ("ftrl", Rule::Ftrl(Ftrl { lr: 0.1, beta: 1.0, l1: 0.01, l2: 0.001 })),
    ]
}

struct Row {
    weights: Vec<f32>,
    state: Vec<f32>,
    steps: u32,
}

impl Row {
    fn new(optimizer: &Optimizer, dim: u16) -> Row {
        let mut state = vec![f32::NAN; optimizer.state_floats(u32::from(dim)) as usize];
        optimizer.initial_state(&mut state);
        let weights = (0..dim).map(|column| f32::from(column) / 8.0 - 1.0).collect();
        Row { weights, state, steps: 0 }
    }

    fn push(&mut self, optimizer: &Optimizer, mut gradient: Vec<f32>) {
        self.steps += 1;
        let mut stepper = optimizer.stepper(None, 0);
        stepper.step(&mut self.weights, &mut self.state, &mut gradient, self.steps);
    }

    fn bits(&self) -> Vec<u32> {
        self.weights.iter().chain(&self.state).map(|value| value.to_bits()).collect()
    }
}

/// Some gradient, exact in f32.
fn gradient(step: u16, dim: u16) -> Vec<f32> {
    (0..dim).map(|column| f32::from((step * 37 + column * 11) % 64) / 32.0 - 1.0).collect()
}

/// FNV-1a of the words.
fn digest(words: &[u32]) -> u64 {
    words.iter().fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        (hash ^ u64::from(*word)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[test]
fn golden_bits_of_every_rule() {
    let mut seen = vec![];
    for (name, rule) in rules() {
        let weight_decay = if let Rule::Ftrl(_) = rule { 0.0 } else { 0.01 };
        let clipping = Clipping { value: 0.9, norm: 2.0 };
        let optimizer = Optimizer { weight_decay, clipping, ..plain(rule) };
        let mut row = Row::new(&optimizer, 19);
        (1..=50).for_each(|step| row.push(&optimizer, gradient(step, 19)));
        assert!(row.weights.iter().chain(&row.state).all(|value| value.is_finite()), "{name}");
        seen.push((name, digest(&row.bits())));
    }
    assert_eq!(seen, GOLDEN);
}

const GOLDEN: [(&str, u64); 10] = [
    ("sgd", 0x3ca1_3d9c_a357_d6bb),
    ("adagrad", 0x481d_5cfe_ceeb_2ba8),
    ("adam", 0xe95b_fb91_0e6c_a395),
    ("momentum", 0x5797_8e50_e412_c05e),
    ("nesterov", 0x9995_f29e_9de9_569c),
    ("rowwise adagrad", 0x43b6_fead_2f37_9e5a),
    ("rmsprop", 0x83be_8c74_e4db_b037),
    ("centered rmsprop", 0x5576_1a8a_89b9_8bf4),
    ("adamw", 0xe909_b76c_e1dd_667a),
    ("ftrl", 0x492b_52fa_2049_f95a),
];

#[test]
fn a_restart_in_the_middle_changes_no_bit() {
    for (name, rule) in rules() {
        let optimizer = plain(rule);
        let mut whole = Row::new(&optimizer, 19);
        (1..=11).for_each(|step| whole.push(&optimizer, gradient(step, 19)));
        let mut before = Row::new(&optimizer, 19);
        (1..=10).for_each(|step| before.push(&optimizer, gradient(step, 19)));
        let floats = |values: &[f32]| -> Vec<f32> {
            let bytes: Vec<[u8; 4]> = values.iter().map(|value| value.to_le_bytes()).collect();
            bytes.into_iter().map(f32::from_le_bytes).collect()
        };
        let mut after =
            Row { weights: floats(&before.weights), state: floats(&before.state), steps: before.steps };
        after.push(&optimizer, gradient(11, 19));
        assert_eq!(after.bits(), whole.bits(), "{name}");
    }
}

#[test]
fn extreme_gradients_make_no_nan() {
    let extremes = vec![1e38, -1e38, f32::MAX, f32::MIN, f32::from_bits(1), -1e-40, -0.0, 0.0, 1.0];
    for (name, rule) in rules() {
        let optimizer = plain(rule);
        let mut row = Row::new(&optimizer, 9);
        row.push(&optimizer, extremes.clone());
        assert!(row.weights.iter().all(|weight| !weight.is_nan()), "{name}: {:?}", row.weights);
        let clipping = Clipping { value: 0.0, norm: 1.0 };
        let clipped = Optimizer { clipping, ..optimizer };
        let mut row = Row::new(&clipped, 9);
        (0..20).for_each(|_| row.push(&clipped, extremes.clone()));
        assert!(row.weights.iter().all(|weight| weight.is_finite()), "{name}: {:?}", row.weights);
    }
}

#[test]
fn a_zero_gradient_of_either_sign_moves_nothing_at_first() {
    for (name, rule) in rules().into_iter().filter(|(name, _)| *name != "ftrl") {
        for zero in [0.0, -0.0] {
            let optimizer = plain(rule);
            let mut row = Row::new(&optimizer, 3);
            let before = row.weights.clone();
            row.push(&optimizer, vec![zero; 3]);
            assert_eq!(row.weights, before, "{name}");
        }
    }
}

#[test]
fn a_schedule_is_evaluated_at_the_step_of_the_push_unless_it_names_its_rate() {
    let schedule = Schedule { warmup_steps: 4, decay: Decay::Constant };
    let optimizer = Optimizer { schedule, ..plain(Rule::Sgd(Sgd { lr: 1.0 })) };
    for (lr, step, expected) in [(None, 0, -0.25), (None, 1, -0.5), (None, 9, -1.0), (Some(3.0), 0, -3.0)] {
        let mut weights = [0.0];
        optimizer.stepper(lr, step).step(&mut weights, &mut [], &mut [1.0], 1);
        assert_eq!(weights, [expected]);
    }
}

/// Algorithm 1 of McMahan et al. 2013, in f64, written down as it is there.
#[test]
fn ftrl_follows_the_recurrence_of_its_paper() {
    let (alpha, beta, l1, l2) = (0.1f32, 1.0f32, 0.5f32, 0.01f32);
    let optimizer = plain(Rule::Ftrl(Ftrl { lr: alpha, beta, l1, l2 }));
    let (alpha, beta, l1, l2) = (f64::from(alpha), f64::from(beta), f64::from(l1), f64::from(l2));
    let dim = 17;
    let mut row = Row::new(&optimizer, dim);
    row.weights.fill(0.0);
    let (mut z, mut n) = (vec![0.0f64; dim.into()], vec![0.0f64; dim.into()]);
    let (mut worst, mut zeros) = (0.0f64, 0);
    for step in 1..=1000 {
        let gradient = gradient(step, dim);
        row.push(&optimizer, gradient.clone());
        for i in 0..usize::from(dim) {
            let weight = |z: f64, n: f64| {
                if z.abs() <= l1 { 0.0 } else { -(z - z.signum() * l1) / ((beta + n.sqrt()) / alpha + l2) }
            };
            let g = f64::from(gradient[i]);
            let w = weight(z[i], n[i]);
            let sigma = ((n[i] + g * g).sqrt() - n[i].sqrt()) / alpha;
            z[i] += g - sigma * w;
            n[i] += g * g;
            let expected = weight(z[i], n[i]);
            worst = worst.max((f64::from(row.weights[i]) - expected).abs());
            zeros += u32::from(row.weights[i] == 0.0);
        }
    }
    assert!(worst < 5e-6, "off by {worst:e}");
    assert!(zeros > 0, "l1 makes zeros");
}
