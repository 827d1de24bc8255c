//! Batches of Zipf ids and normal gradients, from a fixed seed.

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// Ids a batch, repetitions included.
pub(crate) const BATCH: usize = 4096;
const ZIPF: f64 = 1.05;
const SEED: u64 = 20_240_229;
const DISTINCT_BATCHES: usize = 32;

/// What one worker sends.
pub(crate) struct Workload {
    pub(crate) batches: Vec<Vec<u64>>,
    /// `BATCH x dim`.
    pub(crate) gradients: Vec<f32>,
}

impl Workload {
    pub(crate) fn new(rank: u64, rows: u64, dim: usize) -> Self {
        let mut shuffle: Vec<u64> = (0..rows).collect();
        shuffle.shuffle(&mut StdRng::seed_from_u64(SEED));
        let mut cdf: Vec<f64> = Vec::with_capacity(rows as usize);
        let mut total = 0.0;
        for rank in 1..=rows {
            total += (rank as f64).powf(-ZIPF);
            cdf.push(total);
        }
        let mut rng = StdRng::seed_from_u64(SEED ^ (rank + 1));
        let mut draw = || {
            let at = cdf.partition_point(|c| *c < rng.random::<f64>() * total);
            shuffle[at.min(shuffle.len() - 1)]
        };
        let batches = (0..DISTINCT_BATCHES).map(|_| (0..BATCH).map(|_| draw()).collect()).collect();
        let mut rng = StdRng::seed_from_u64(SEED ^ (rank + 1) ^ 1 << 32);
        let gradients = (0..BATCH * dim).map(|_| (rng.random::<f32>() - 0.5) * 0.02).collect();
        Workload { batches, gradients }
    }
}
