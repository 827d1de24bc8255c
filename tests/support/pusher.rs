//! A client that pushes until told to stop, and remembers what was acknowledged to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::task::JoinHandle;

use super::ledger::Ledger;
use super::trainer::Trainer;

/// What a pusher does.
#[derive(Debug, Clone)]
pub(crate) struct Load {
    pub(crate) table: String,
    pub(crate) dim: usize,
    /// Ids are 0 to this, exclusive.
    pub(crate) ids: u64,
    pub(crate) rows_a_push: usize,
    /// Between two pushes.
    pub(crate) pause: Duration,
}

impl Load {
    pub(crate) fn small(table: &str, dim: usize) -> Self {
        Load { table: table.to_owned(), dim, ids: 512, rows_a_push: 24, pause: Duration::from_millis(4) }
    }
}

/// A pushing client with a session of its own.
#[derive(Debug)]
pub(crate) struct Pusher {
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    task: JoinHandle<Ledger>,
}

impl Pusher {
    pub(crate) fn start(endpoints: String, load: Load, seed: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let acknowledged = Arc::new(AtomicU64::new(0));
        let task = tokio::spawn(push_until(endpoints, load, seed, stop.clone(), acknowledged.clone()));
        Pusher { stop, acknowledged, task }
    }

    /// Pushes acknowledged so far.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// Ends after the push under way; every one must have been acknowledged.
    pub(crate) async fn finish(self) -> Ledger {
        self.stop.store(true, Ordering::SeqCst);
        self.task.await.unwrap()
    }
}

async fn push_until(
    endpoints: String,
    load: Load,
    seed: u64,
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
) -> Ledger {
    let trainer = Trainer::connect(&endpoints).await;
    let table = trainer.table(&load.table).await;
    let mut random = StdRng::seed_from_u64(seed);
    let mut ledger = Ledger::default();
    while !stop.load(Ordering::SeqCst) {
        // Ids repeat now and then: the server sums them.
        let ids: Vec<u64> = (0..load.rows_a_push).map(|_| random.random_range(0..load.ids)).collect();
        let gradients: Vec<i64> = (0..load.rows_a_push).map(|_| random.random_range(1..=3)).collect();
        let floats: Vec<f32> =
            gradients.iter().flat_map(|g| std::iter::repeat_n(*g as f32, load.dim)).collect();
        if let Err(error) = table.push(&ids, &floats).await {
            panic!("client {seed}: a push within its deadline failed: {error}");
        }
        ledger.acknowledge(&ids, &gradients);
        acknowledged.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep(load.pause).await;
    }
    ledger
}

/// Ends all; what was acknowledged to them together.
pub(crate) async fn finish_all(pushers: impl IntoIterator<Item = Pusher>) -> Ledger {
    let mut ledger = Ledger::default();
    for pusher in pushers {
        ledger.merge(&pusher.finish().await);
    }
    ledger
}

/// Waits until every pusher was acknowledged this many pushes more.
pub(crate) async fn wait_progress(pushers: &[Pusher], more: u64) {
    let targets: Vec<u64> = pushers.iter().map(|pusher| pusher.acknowledged() + more).collect();
    super::eventually("every client goes on", || async {
        for (pusher, target) in pushers.iter().zip(&targets) {
            if pusher.task.is_finished() {
                return Err("a client ended".to_owned());
            }
            if pusher.acknowledged() < *target {
                return Err(format!("{} of {target} pushes acknowledged", pusher.acknowledged()));
            }
        }
        Ok(())
    })
    .await;
}
