//! Batches of Zipf or uniform ids and normal gradients, from a fixed seed.

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// Ids a batch, repetitions included.
pub(crate) const BATCH: usize = 4096;
const SEED: u64 = 20_240_229;

/// How ids are drawn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Draws {
    /// Ids are from 0 to this, exclusive.
    pub(crate) rows: u64,
    /// The exponent of Zipf's law; 0: all ids are equally likely.
    pub(crate) zipf: f64,
    /// Batches that differ, before they begin anew.
    pub(crate) batches: usize,
}

/// What one worker sends.
pub(crate) struct Workload {
    pub(crate) batches: Vec<Vec<u64>>,
    /// `BATCH x dim`.
    pub(crate) gradients: Vec<f32>,
}

impl Workload {
    pub(crate) fn new(rank: u64, draws: Draws, dim: usize) -> Self {
        let mut rng = StdRng::seed_from_u64(SEED ^ (rank + 1));
        let batches = if draws.zipf == 0.0 {
            (0..draws.batches)
                .map(|_| (0..BATCH).map(|_| rng.random_range(0..draws.rows)).collect())
                .collect()
        } else {
            let mut shuffle: Vec<u64> = (0..draws.rows).collect();
            shuffle.shuffle(&mut StdRng::seed_from_u64(SEED));
            let mut cdf: Vec<f64> = Vec::with_capacity(draws.rows as usize);
            let mut total = 0.0;
            for rank in 1..=draws.rows {
                total += (rank as f64).powf(-draws.zipf);
                cdf.push(total);
            }
            let mut draw = || {
                let at = cdf.partition_point(|c| *c < rng.random::<f64>() * total);
                shuffle[at.min(shuffle.len() - 1)]
            };
            (0..draws.batches).map(|_| (0..BATCH).map(|_| draw()).collect()).collect()
        };
        let mut rng = StdRng::seed_from_u64(SEED ^ (rank + 1) ^ 1 << 32);
        let gradients = (0..BATCH * dim).map(|_| (rng.random::<f32>() - 0.5) * 0.02).collect();
        Workload { batches, gradients }
    }
}
