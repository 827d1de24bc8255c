//! Dense tensors on real clusters: shape and dtype stay, sums are exact through killed leaders, slices take what they need, what
//! did not change does not travel, and tensors go with tables in one push and in one step.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use evershard::{
    ErrorKind, PullPart, PushOptions, PushPart, TableDefinition, Tensor, TensorDtype, definition,
};
use evershard_proto::key::key_of;
use evershard_proto::push_body::{Encoding, Operation, PushBodyBuilder};
use support::raw::{self, RawSession};
use support::trainer::{Trainer, in_step};
use support::{Cluster, Options, eventually, setting};

const BLOCK: u64 = 16_384;

/// SGD with lr = 1, zeros: what is pushed is taken away, exactly.
fn integers(name: &str, shape: &[u64]) -> TableDefinition {
    definition::dense(name, shape, definition::sgd(1.0))
}

async fn tensor(trainer: &Trainer, definition: TableDefinition) -> Tensor {
    trainer.client.create_tensor(definition).await.unwrap()
}

/// Integers that tell every element from its neighbours.
fn gradient(elements: usize, times: f32) -> Vec<f32> {
    (0..elements).map(|element| (element % 1000) as f32 * times).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shape_dtype_and_values_are_the_same_after_a_restart() {
    let mut cluster = Cluster::start(Options::default().arg("--flush-interval-ms", 100)).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let mut definition = integers("net.weight", &[300, 10, 10]);
    definition.tensor.as_mut().unwrap().dtype = TensorDtype::Bf16.into();
    let weight = tensor(&trainer, definition.clone()).await;
    let scalar = tensor(&trainer, integers("net.scale", &[])).await;
    let bias = tensor(&trainer, integers("net.bias", &[64])).await;
    assert_eq!((bias.layout().dim(), bias.layout().blocks()), (64, 1), "a bias takes no block of 64 KiB");
    let pushed = gradient(30_000, -1.0);
    weight.push(&pushed).await.unwrap();
    scalar.push(&[-7.0]).await.unwrap();
    bias.assign(&gradient(64, 2.0)).await.unwrap();

    cluster.kill_all();
    cluster.start_all();
    cluster.wait_ready().await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let weight = trainer.client.tensor("net.weight").await.unwrap();
    assert_eq!((weight.shape(), weight.dtype()), (&[300, 10, 10][..], TensorDtype::Bf16));
    let scalar = trainer.client.tensor("net.scale").await.unwrap();
    assert_eq!((scalar.shape(), scalar.elements()), (&[][..], 1));
    assert_eq!(weight.pull_vec().await.unwrap(), gradient(30_000, 1.0));
    assert_eq!(scalar.pull_vec().await.unwrap(), [7.0]);
    assert_eq!(trainer.client.tensor("net.bias").await.unwrap().pull_vec().await.unwrap(), gradient(64, 2.0));
    cluster.assert_replicas_equal().await;

    // Found again as defined; anything else is a conflict, and a tensor is no table.
    tensor(&trainer, definition.clone()).await;
    definition.tensor.as_mut().unwrap().dtype = TensorDtype::F32.into();
    let conflict = trainer.client.create_tensor(definition).await.unwrap_err();
    assert_eq!(conflict.kind(), ErrorKind::Conflict);
    assert!(conflict.to_string().contains("bf16 of shape [300, 10, 10]"), "{conflict}");
    let other_shape = trainer.client.create_tensor(integers("net.weight", &[3000, 10])).await.unwrap_err();
    assert_eq!(other_shape.kind(), ErrorKind::Conflict);
    assert_eq!(trainer.client.table("net.weight").await.unwrap_err().kind(), ErrorKind::Invalid);
    trainer.integers("rows", 4).await;
    assert_eq!(trainer.client.tensor("rows").await.unwrap_err().kind(), ErrorKind::Invalid);
    for shape in [&[3, 0][..], &[1; 9], &[1 << 40]] {
        let refused = trainer.client.create_tensor(integers("none", shape)).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pushes_through_killed_leaders_add_up_and_copies_follow() {
    const PUSHERS: usize = 2;
    const SHAPE: [u64; 2] = [250, 200];
    let elements = 50_000;
    let kills = setting("EVERSHARD_KILLS", 4);
    let mut cluster = Cluster::start(Options { shards: 3, ..Options::default() }).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let weight = tensor(&trainer, integers("weight", &SHAPE)).await;
    let stop = Arc::new(AtomicBool::new(false));
    let acknowledged = Arc::new(AtomicU64::new(0));
    let pushers: Vec<_> = (0..PUSHERS)
        .map(|_| {
            let (endpoints, stop) = (cluster.endpoints(), stop.clone());
            let acknowledged = acknowledged.clone();
            tokio::spawn(async move {
                let trainer = Trainer::connect(&endpoints).await;
                let weight = trainer.client.tensor("weight").await.unwrap();
                let gradient = gradient(elements, -1.0);
                while !stop.load(Ordering::SeqCst) {
                    weight.push(&gradient).await.unwrap();
                    acknowledged.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            })
        })
        .collect();
    // A copy that is brought up to date all the while: of every block, never an older value after a newer one.
    let reader = {
        let (endpoints, stop) = (cluster.endpoints(), stop.clone());
        tokio::spawn(async move {
            let trainer = Trainer::connect(&endpoints).await;
            let weight = trainer.client.tensor("weight").await.unwrap();
            let (mut copy, mut version) = (vec![0.0; elements], None);
            loop {
                let is_last = stop.load(Ordering::SeqCst);
                let before = copy.clone();
                version = Some(weight.pull_if_newer(version.as_ref(), &mut copy).await.unwrap());
                assert!(copy.iter().zip(&before).all(|(now, before)| now >= before), "an older block");
                if is_last {
                    return (weight, copy, version);
                }
            }
        })
    };
    for kill in 0..kills {
        let target = acknowledged.load(Ordering::SeqCst) + 10;
        eventually("pushes go on", || async {
            assert!(pushers.iter().all(|pusher| !pusher.is_finished()), "a push failed");
            let now = acknowledged.load(Ordering::SeqCst);
            if now >= target { Ok(()) } else { Err(format!("{now} of {target}")) }
        })
        .await;
        let leader = cluster.leader_of(u32::try_from(kill).unwrap() % 3).await;
        cluster.kill(leader);
        cluster.restart(leader);
        cluster.wait_ready().await;
    }
    stop.store(true, Ordering::SeqCst);
    for pusher in pushers {
        pusher.await.unwrap();
    }
    let (reading, mut copy, version) = reader.await.unwrap();
    let pushes = acknowledged.load(Ordering::SeqCst) as f32;
    assert!(pushes * 999.0 < 16_777_216.0, "the test pushes more than f32 can count");
    let expected = gradient(elements, pushes);
    assert_eq!(weight.pull_vec().await.unwrap(), expected);
    reading.pull_if_newer(version.as_ref(), &mut copy).await.unwrap();
    assert_eq!(copy, expected);
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_changed_blocks_travel_whoever_leads() {
    let mut cluster = Cluster::start(Options { shards: 3, ..Options::default() }).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    // A row is a block; the last one of another tensor is padded.
    let weight = tensor(&trainer, integers("weight", &[12, BLOCK])).await;
    let mut copy = vec![f32::NAN; weight.elements()];
    let first = weight.pull_if_newer(None, &mut copy).await.unwrap();
    assert_eq!(first.changed_blocks(), 12);
    assert!(copy.iter().all(|value| *value == 0.0));
    let second = weight.pull_if_newer(Some(&first), &mut copy).await.unwrap();
    assert_eq!(second.changed_blocks(), 0, "nothing was pushed");

    let row = vec![-1.0; BLOCK as usize];
    weight.push_rows(3..4, &row).await.unwrap();
    // Only what travels is written: the rest of the copy is left as it is.
    copy[0] = 77.0;
    let third = weight.pull_if_newer(Some(&second), &mut copy).await.unwrap();
    assert_eq!(third.changed_blocks(), 1);
    assert_eq!(copy[0], 77.0);
    let pulled = weight.pull_vec().await.unwrap();
    copy[0] = 0.0;
    assert_eq!(copy, pulled);

    for shard in cluster.shards() {
        let leader = cluster.leader_of(shard).await;
        cluster.kill(leader);
        // From a replica that led nothing when the version was given.
        weight.push_rows(5..7, &[-1.0; 2 * BLOCK as usize]).await.unwrap();
        let mut copy = pulled.clone();
        let behind = weight.pull_if_newer(Some(&third), &mut copy).await.unwrap();
        assert_eq!(behind.changed_blocks(), 2, "shard {shard}");
        assert_eq!(copy, weight.pull_vec().await.unwrap());
        let now = weight.pull_if_newer(Some(&behind), &mut copy).await.unwrap();
        assert_eq!(now.changed_blocks(), 0);
        cluster.restart(leader);
        cluster.wait_ready().await;
    }
    cluster.kill_all();
    cluster.start_all();
    cluster.wait_ready().await;
    let mut copy = pulled.clone();
    let after = weight.pull_if_newer(Some(&third), &mut copy).await.unwrap();
    assert_eq!(after.changed_blocks(), 2, "versions are on disk too");
    assert_eq!(copy, weight.pull_vec().await.unwrap());

    // A version of another tensor means nothing.
    let other = tensor(&trainer, integers("other", &[2, 100, 100])).await;
    let mut copy = vec![f32::NAN; other.elements()];
    let version = other.pull_if_newer(Some(&after), &mut copy).await.unwrap();
    assert_eq!(version.changed_blocks(), 2);
    assert!(copy.iter().all(|value| *value == 0.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slices_take_and_change_what_they_name() {
    let cluster = Cluster::start(Options { nodes: 1, replicas: 1, shards: 3, ..Options::default() }).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    // Row 163 lies in two blocks.
    let weight = tensor(&trainer, integers("weight", &[500, 100])).await;
    weight.push(&gradient(50_000, -1.0)).await.unwrap();
    let mut expected = gradient(50_000, 1.0);
    let before = trainer.client.stats(false).rows_pulled;
    for rows in [0..1, 163..164, 160..170, 499..500, 0..500, 200..200] {
        let elements = rows.start as usize * 100..rows.end as usize * 100;
        let mut out = vec![f32::NAN; elements.len()];
        weight.pull_rows(rows.clone(), &mut out).await.unwrap();
        assert_eq!(out, expected[elements], "{rows:?}");
    }
    let pulled = trainer.client.stats(false).rows_pulled - before;
    assert_eq!(pulled, 1 + 2 + 2 + 1 + 4, "blocks that hold something of it");

    // SGD has no memory: a slice may share blocks.
    let slice = vec![-5.0; 1000];
    weight.push_rows(160..170, &slice).await.unwrap();
    weight.add_rows(165..175, &slice).await.unwrap();
    expected[16_000..17_000].iter_mut().for_each(|value| *value += 5.0);
    expected[16_500..17_500].iter_mut().for_each(|value| *value -= 5.0);
    assert_eq!(weight.pull_vec().await.unwrap(), expected);
    let unaligned = weight.assign_rows(160..170, &slice).await.unwrap_err();
    assert_eq!(unaligned.kind(), ErrorKind::Invalid);
    assert!(unaligned.to_string().contains("500 rows at a time"), "{unaligned}");

    // Momentum would go on moving what shares the block.
    let adam = tensor(&trainer, definition::dense("adam", &[1000, 64], definition::adam(0.1))).await;
    assert_eq!(adam.layout().aligned_rows(), 256);
    let refused = adam.push_rows(0..100, &[1.0; 6400]).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert!(refused.to_string().contains("256 rows at a time"), "{refused}");
    adam.push_rows(256..512, &vec![1.0; 256 * 64]).await.unwrap();
    adam.push_rows(768..1000, &vec![1.0; 232 * 64]).await.unwrap();
    adam.assign_rows(0..256, &vec![4.0; 256 * 64]).await.unwrap();
    let rows = adam.pull_vec().await.unwrap();
    let of = |row: usize| rows[row * 64];
    assert_eq!((of(0), of(255), of(512), of(767)), (4.0, 4.0, 0.0, 0.0));
    assert!(of(256) < 0.0 && of(511) < 0.0 && of(999) < 0.0);

    let backwards = std::ops::Range { start: 7, end: 6 };
    for rows in [499..501, backwards, u64::MAX - 1..u64::MAX] {
        let out_of_range = weight.pull_rows(rows.clone(), &mut []).await.unwrap_err();
        assert_eq!(out_of_range.kind(), ErrorKind::OutOfRange, "{rows:?}: {out_of_range}");
        assert_eq!(weight.push_rows(rows, &[]).await.unwrap_err().kind(), ErrorKind::OutOfRange);
    }
    assert_eq!(weight.push(&[1.0; 3]).await.unwrap_err().kind(), ErrorKind::LengthMismatch);
    assert_eq!(weight.pull(&mut [1.0; 3]).await.unwrap_err().kind(), ErrorKind::LengthMismatch);
    assert_eq!(weight.pull_vec().await.unwrap(), expected);
}

/// What no client of ours sends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_refuses_what_a_tensor_does_not_have() {
    let cluster = Cluster::start(Options { nodes: 1, replicas: 1, shards: 1, ..Options::default() }).await;
    let number = raw::create_table(&cluster, integers("weight", &[BLOCK + 10])).await.unwrap();
    let group = raw::shard_of(&cluster, number, 0).await.group;
    let mut session = RawSession::open(&cluster).await;
    let dim = u32::try_from(BLOCK).unwrap();
    let mut push = async |operation: Operation, block: u64, values: &[f32]| {
        let mut builder = PushBodyBuilder::new(0);
        let keys = [key_of(number, block)];
        let payload = builder.section(number, operation, Encoding::F32, dim, None, &keys);
        for (bytes, value) in payload.chunks_exact_mut(4).zip(values) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
        // Refused at the door, nothing of it has used up its number.
        let body = builder.finish(session.number, session.seqs.get(&group).copied().unwrap_or(0) + 1, 0);
        let answer = raw::push(&cluster, 1, group, body).await;
        if answer.is_ok() {
            session.next(group);
        }
        answer.map_err(|status| raw::kind(&status))
    };
    assert_eq!(push(Operation::Gradient, 2, &[1.0]).await, Err(ErrorKind::OutOfRange));
    assert_eq!(push(Operation::Set, u64::MAX, &[1.0]).await, Err(ErrorKind::OutOfRange));
    assert_eq!(push(Operation::Remove, 0, &[]).await, Err(ErrorKind::Invalid));
    assert_eq!(push(Operation::Add, 1, &[1.0; 11]).await, Err(ErrorKind::Invalid), "beyond the end");
    assert!(push(Operation::Gradient, 1, &[-1.0; 10]).await.is_ok());
    let pulled = raw::pull(&cluster, 1, group, number, &[0, 2]).await.unwrap_err();
    assert_eq!(raw::kind(&pulled), ErrorKind::OutOfRange);
    let row = raw::pull(&cluster, 1, group, number, &[1]).await.unwrap();
    let ones = row.rows.chunks_exact(4).filter(|raw| *raw == 1.0f32.to_le_bytes()).count();
    assert_eq!((ones, row.rows.len()), (10, BLOCK as usize * 4));
    // A table of kind DENSE without a shape, and what is about rows.
    let shapeless = TableDefinition { tensor: None, ..integers("none", &[4]) };
    let kind = async |definition| raw::kind(&raw::create_table(&cluster, definition).await.unwrap_err());
    assert_eq!(kind(shapeless).await, ErrorKind::Invalid);
    let mut clipped = integers("none", &[4]);
    clipped.optimizer.as_mut().unwrap().clip_norm = 1.0;
    assert_eq!(kind(clipped).await, ErrorKind::Invalid);
    let other_dim = TableDefinition { dim: 64, ..integers("none", &[BLOCK]) };
    assert_eq!(kind(other_dim).await, ErrorKind::Invalid);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensors_and_tables_go_together() {
    let cluster = Cluster::start(Options { shards: 2, ..Options::default() }).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let client = &trainer.client;
    let weight = tensor(&trainer, integers("weight", &[300, 100])).await;
    let bias = tensor(&trainer, integers("bias", &[100])).await;
    let items = trainer.integers("items", 4).await.table;
    let (of_weight, of_bias) = (gradient(30_000, -1.0), gradient(100, -3.0));
    let parts = [
        PushPart::Tensor { tensor: &weight, gradient: &of_weight },
        PushPart::Rows { table: &items, ids: &[5, u64::MAX], gradients: &[-2.0; 8] },
        PushPart::Tensor { tensor: &bias, gradient: &of_bias },
    ];
    let receipt = client.push_parts(&parts).await.unwrap();
    assert_eq!(receipt.rows, 2 + 2 + 1, "blocks and rows");
    assert!(receipt.messages <= 2, "one message a shard: {receipt:?}");
    let (mut all, mut some, mut rows) = (vec![0.0; 30_000], vec![0.0; 200], vec![0.0; 8]);
    let (mut copy, mut version) = (vec![0.0; 100], None);
    client
        .pull_parts(&mut [
            PullPart::Tensor { tensor: &weight, out: &mut all },
            PullPart::TensorRows { tensor: &weight, rows: 7..9, out: &mut some },
            PullPart::Rows { table: &items, ids: &[u64::MAX, 5], out: &mut rows },
            PullPart::TensorIfNewer { tensor: &bias, version: &mut version, out: &mut copy },
        ])
        .await
        .unwrap();
    assert_eq!(all, gradient(30_000, 1.0));
    assert_eq!(some, all[700..900]);
    assert_eq!(rows, [2.0; 8]);
    assert_eq!((copy, version.unwrap().changed_blocks()), (gradient(100, 3.0), 1));
    // Checked together: the good part of a push is not applied without the bad one.
    let bad = [
        PushPart::Tensor { tensor: &bias, gradient: &of_bias },
        PushPart::TensorRows { tensor: &weight, rows: 299..301, gradient: &[0.0; 200] },
    ];
    assert_eq!(client.push_parts(&bad).await.unwrap_err().kind(), ErrorKind::OutOfRange);
    let twice = [bad[0].clone(), bad[0].clone()];
    assert_eq!(client.push_parts(&twice).await.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(bias.pull_vec().await.unwrap(), gradient(100, 3.0));
    // Two bytes an element, and integers up to 256 are exact.
    let small: Vec<f32> = (0..30_000).map(|element| (element % 200) as f32).collect();
    let bf16 = PushOptions { encoding: Some(Encoding::Bf16), ..PushOptions::default() };
    weight.push_begin(&small, bf16).await.unwrap().wait().await.unwrap();
    let expected: Vec<f32> =
        gradient(30_000, 1.0).iter().zip(&small).map(|(one, other)| one - other).collect();
    assert_eq!(weight.pull_vec().await.unwrap(), expected);
}

/// A step sums what all workers push of tensors and tables, also through the death of a leader, and applies it once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_sums_tensors_and_tables() {
    let mut cluster = Cluster::start(Options { shards: 2, ..Options::default() }).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let weight = tensor(&trainer, integers("weight", &[300, 100])).await;
    let items = trainer.integers("items", 4).await.table;
    let options = in_step(2);
    let job = trainer.client.job("ml", options).await.unwrap();
    let mut workers = [job.worker(0).await.unwrap(), job.worker(1).await.unwrap()];
    for step in 1..=4u64 {
        let of_weight = [gradient(30_000, -1.0), gradient(10_000, -2.0)];
        let whole = [
            PushPart::Tensor { tensor: &weight, gradient: &of_weight[0] },
            PushPart::Rows { table: &items, ids: &[1, 2], gradients: &[-1.0; 8] },
        ];
        let part = [
            // Rows 100 to 200 share both blocks with others.
            PushPart::TensorRows { tensor: &weight, rows: 100..200, gradient: &of_weight[1] },
            PushPart::Rows { table: &items, ids: &[2], gradients: &[-1.0; 4] },
        ];
        workers[0].push_parts(&whole).await.unwrap();
        workers[1].push_parts_begin(&part).await.unwrap();
        let mut before = vec![0.0; 30_000];
        workers[0].pull_parts(&mut [PullPart::Tensor { tensor: &weight, out: &mut before }]).await.unwrap();
        assert_eq!(before[20_001], (step - 1) as f32, "nothing of the step is applied before its end");
        let [one, other] = &mut workers;
        let kill = async {
            if step % 2 == 0 {
                let leader = cluster.leader_of(u32::from(step == 4)).await;
                cluster.kill(leader);
                cluster.restart(leader);
            }
        };
        let (one, other, ()) = tokio::join!(one.tick(b""), other.tick(b""), kill);
        one.unwrap();
        other.unwrap();
        let mut expected = gradient(30_000, step as f32);
        for (value, more) in expected[10_000..20_000].iter_mut().zip(gradient(10_000, 2.0 * step as f32)) {
            *value += more;
        }
        assert_eq!(weight.pull_vec().await.unwrap(), expected, "after step {step}");
        let rows = items.pull_vec(&[1, 2]).await.unwrap();
        assert_eq!((rows[0], rows[4]), (step as f32, 2.0 * step as f32));
    }
    cluster.wait_ready().await;
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
}

/// Blocks are the widest rows there are in daily use: tensors of many times the memory budget come and go by the block.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensors_of_many_times_the_memory_budget_are_exact() {
    const BUDGET: u64 = 16 << 20;
    // 64 blocks of 192 KiB each, with Adam's moments: 12 MiB a tensor.
    const SHAPE: [u64; 2] = [64, BLOCK];
    let options = Options { shards: 2, ..Options::default() };
    let options = options.arg("--memory-budget", BUDGET).arg("--flush-interval-ms", 200);
    let mut cluster = Cluster::start(options).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let mut tensors = Vec::new();
    for number in 0..4 {
        let name = format!("layer{number}");
        tensors.push(tensor(&trainer, definition::dense(&name, &SHAPE, definition::adam(0.25))).await);
    }
    let elements = tensors[0].elements();
    for step in 1..=3 {
        for tensor in &tensors {
            tensor.push(&vec![1.0; elements]).await.unwrap();
        }
        for tensor in &tensors {
            // Adam with a gradient that stays the same: a step of lr each time, of every element alike.
            let weights = tensor.pull_vec().await.unwrap();
            assert!(weights.iter().all(|weight| weight.to_bits() == weights[0].to_bits()), "step {step}");
            assert!((weights[0] + 0.25 * step as f32).abs() < 1e-3, "step {step}: {}", weights[0]);
        }
    }
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
    cluster.kill_all();
    cluster.start_all();
    cluster.wait_ready().await;
    for tensor in &tensors {
        let weights = tensor.pull_vec().await.unwrap();
        assert!(weights.iter().all(|weight| weight.to_bits() == weights[0].to_bits()));
        assert!((weights[0] + 0.75).abs() < 1e-3, "{}", weights[0]);
    }
    cluster.assert_replicas_equal().await;
}
