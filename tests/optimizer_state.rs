//! Every rule, initialiser and encoding through failover, flush and restart: a run that was disturbed ends with the bits of one
//! that was not, on every replica.

mod support;

use evershard::{Encoding, PushOptions, TableDefinition};
use evershard_proto::v1::{self, initializer, optimizer};
use support::trainer::{Table, Trainer};
use support::{Cluster, Options};

const DIM: usize = 24;
const ROWS: u64 = 40;
const STEPS: u64 = 24;
const ENCODINGS: [Encoding; 4] = [Encoding::F32, Encoding::Bf16, Encoding::F16, Encoding::Int8];

fn rules() -> Vec<(&'static str, optimizer::Kind)> {
    use optimizer::Kind;
    let (lr, eps, initial_accumulator) = (0.05, 1e-8, 0.1);
    let (beta1, beta2) = (0.9, 0.999);
    vec![
        ("sgd", Kind::Sgd(v1::Sgd { lr })),
        ("adagrad", Kind::Adagrad(v1::Adagrad { lr, eps, initial_accumulator })),
        ("adam", Kind::Adam(v1::Adam { lr, beta1, beta2, eps })),
        ("momentum", Kind::Momentum(v1::Momentum { lr, momentum: 0.9, dampening: 0.1, nesterov: false })),
        ("nesterov", Kind::Momentum(v1::Momentum { lr, momentum: 0.9, dampening: 0.0, nesterov: true })),
        ("rowwise", Kind::RowwiseAdagrad(v1::RowwiseAdagrad { lr, eps, initial_accumulator })),
        ("rmsprop", Kind::RmsProp(v1::RmsProp { lr, alpha: 0.9, eps, momentum: 0.5, centered: true })),
        ("adamw", Kind::AdamW(v1::AdamW { lr, beta1, beta2, eps })),
        ("ftrl", Kind::Ftrl(v1::Ftrl { lr, beta: 1.0, l1: 0.001, l2: 0.01 })),
    ]
}

fn initializers() -> Vec<initializer::Kind> {
    use initializer::Kind;
    vec![
        Kind::Zeros(v1::Zeros {}),
        Kind::Constant(v1::Constant { value: 0.25 }),
        Kind::Uniform(v1::Uniform { low: -0.5, high: 0.5 }),
        Kind::Normal(v1::Normal { mean: 0.0, std: 0.1 }),
        Kind::TruncatedNormal(v1::TruncatedNormal { mean: 0.0, std: 0.1, low: -2.0, high: 2.0 }),
        Kind::Glorot(v1::Glorot { normal: true, fan_in: 1000, fan_out: 0, gain: 1.0 }),
    ]
}

fn definition(name: &str, number: usize, kind: optimizer::Kind) -> TableDefinition {
    let initializers = initializers();
    let is_ftrl = matches!(kind, optimizer::Kind::Ftrl(_));
    let schedule = v1::Schedule {
        warmup_steps: 4,
        decay: Some(v1::schedule::Decay::Cosine(v1::CosineDecay { steps: 30, floor: 0.1 })),
    };
    TableDefinition {
        name: name.into(),
        dim: u32::try_from(DIM).unwrap(),
        optimizer: Some(v1::Optimizer {
            kind: Some(kind),
            // Its own penalties are in the rule.
            weight_decay: if is_ftrl { 0.0 } else { 0.01 },
            clip_value: 1.5,
            clip_norm: 4.0,
            schedule: Some(schedule),
        }),
        initializer: Some(v1::Initializer {
            kind: Some(initializers[number % initializers.len()]),
            seed: 11,
        }),
        ..Default::default()
    }
}

/// The gradient of a value at a step: any, and the same in both runs.
fn gradients(ids: &[u64], step: u64) -> Vec<f32> {
    let draw = |at: u64| {
        let bits = at.wrapping_add(step << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (bits >> 40) as f32 / 8_388_608.0 - 1.0
    };
    ids.iter().flat_map(|id| (0..DIM as u64).map(move |column| 2.0 * draw(id * 1000 + column))).collect()
}

async fn steps(tables: &[Table], steps: std::ops::Range<u64>) {
    for step in steps {
        for (number, table) in tables.iter().enumerate() {
            // Not every row at every step; the first id twice.
            let mut ids: Vec<u64> = (0..ROWS).filter(|id| (id + step) % 3 != 0).collect();
            ids.push(ids[0]);
            let encoding = Some(ENCODINGS[(number + usize::try_from(step).unwrap()) % ENCODINGS.len()]);
            let options = PushOptions { clock: step, encoding, ..PushOptions::default() };
            table.table.push_with(&ids, &gradients(&ids, step), options).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disturbed_run_ends_with_the_bits_of_an_undisturbed_one() {
    let options = Options { shards: 2, ..Options::default() }.arg("--flush-interval-ms", 100);
    let mut cluster = Cluster::start(options).await;
    let mut runs = Vec::new();
    for run in ["calm", "rough"] {
        // Residuals of int8 live with their client: each run has its own.
        let trainer = Trainer::connect(&cluster.endpoints()).await;
        let mut tables = Vec::new();
        for (number, (rule, kind)) in rules().into_iter().enumerate() {
            tables.push(trainer.create(definition(&format!("{run}-{rule}"), number, kind)).await);
        }
        runs.push((trainer, tables));
    }
    let (_calm_trainer, calm) = &runs[0];
    let (_rough_trainer, rough) = &runs[1];
    steps(calm, 0..STEPS).await;

    steps(rough, 0..8).await;
    let victim = cluster.leader_of(0).await;
    cluster.kill(victim);
    steps(rough, 8..14).await;
    cluster.restart(victim);
    cluster.wait_ready().await;
    cluster.wait_caught_up().await;
    steps(rough, 14..18).await;
    cluster.kill_all();
    cluster.start_all();
    cluster.wait_ready().await;
    steps(rough, 18..STEPS).await;

    let ids: Vec<u64> = (0..ROWS + 5).collect();
    for ((rule, _), (calm, rough)) in rules().into_iter().zip(calm.iter().zip(rough)) {
        let (calm, rough) = (calm.pull(&ids).await.unwrap(), rough.pull(&ids).await.unwrap());
        let bits = |rows: &[f32]| rows.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert!(bits(&calm) == bits(&rough), "{rule}: a disturbed run differs");
        assert!(calm.iter().all(|value| value.is_finite()), "{rule}");
        let trained = &calm[..usize::try_from(ROWS).unwrap() * DIM];
        assert!(
            trained.iter().filter(|value| **value != 0.0).count() > trained.len() / 2,
            "{rule} did nothing"
        );
    }
    cluster.assert_replicas_equal().await;
}
