//! How many rows a second the table finds and reads, with ids all over and with ids of Zipf; what a row costs in memory; how
//! long inserts take at worst while the table grows. In processor time of this thread: other processes disturb it less.
//!
//! `cargo run --release -p evershard-storage --example table_lookup [rows]` (default 1 000 000; 64 weights, 64 of state)

use std::hint::black_box;
use std::time::Duration;

use evershard_storage::table::{RowShape, Table};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const SHAPE: RowShape = RowShape::plain(64, 64);
const LOOKUPS: usize = 4_000_000;
/// Ids of a pull.
const REQUEST: usize = 4096;
const ZIPF: f64 = 1.05;

/// SplitMix64's finaliser, as ids become keys.
fn mix64(id: u64) -> u64 {
    let mut z = id.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists on Linux, and `time` is ours to write to.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse::<usize>().ok());
    pages.unwrap_or(0) * 4096
}

fn fill(rows: u64) -> Table {
    let before = resident_bytes();
    let mut table = Table::new(SHAPE);
    let (started, mut longest) = (processor_time(), Duration::ZERO);
    let mut last = started;
    for id in 0..rows {
        let slot = table.insert(mix64(id));
        table.row_mut(slot).weights_mut().fill(id as f32);
        if id % 64 == 63 {
            let now = processor_time();
            longest = longest.max(now - last);
            last = now;
        }
    }
    let floats = rows as usize * SHAPE.floats() * 4;
    let per_row = |bytes: usize| (bytes.saturating_sub(floats)) as f64 / rows as f64;
    println!(
        "insert     {:>6.2} M rows/s, longest 64 {longest:.1?}; beside its floats a row takes {:.1} bytes ({:.1} resident)",
        rows as f64 / (last - started).as_secs_f64() / 1e6,
        per_row(table.memory_bytes()),
        per_row(resident_bytes() - before),
    );
    table
}

fn keys(rows: u64, zipf: bool) -> Vec<u64> {
    let mut random = StdRng::seed_from_u64(7);
    if !zipf {
        return (0..LOOKUPS).map(|_| mix64(random.random_range(0..rows))).collect();
    }
    let mut sum = 0.0;
    let cumulative: Vec<f64> = (1..=rows)
        .map(|rank| {
            sum += (rank as f64).powf(-ZIPF);
            sum
        })
        .collect();
    // Ranks are spread over the rows, as popular ids are in life.
    let spread = |rank: usize| (rank as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) % rows;
    (0..LOOKUPS)
        .map(|_| {
            let at = random.random_range(0.0..sum);
            mix64(spread(cumulative.partition_point(|c| *c < at)))
        })
        .collect()
}

/// The best of five: other processes only ever add.
fn rate(mut work: impl FnMut()) -> f64 {
    let best = (0..5)
        .map(|_| {
            let started = processor_time();
            work();
            processor_time() - started
        })
        .min()
        .unwrap_or_default();
    LOOKUPS as f64 / best.as_secs_f64() / 1e6
}

fn main() {
    let rows: u64 = std::env::args().nth(1).and_then(|rows| rows.parse().ok()).unwrap_or(1_000_000);
    println!("{rows} rows of {SHAPE:?}, {LOOKUPS} lookups, one thread");
    let mut table = fill(rows);
    let dim = SHAPE.dim as usize;
    let mut out = vec![0.0_f32; REQUEST * dim];
    for (name, zipf) in [("random", false), ("zipf", true)] {
        let keys = keys(rows, zipf);
        let single = rate(|| {
            for &key in &keys {
                black_box(table.find(key).map(|row| row.weights()[0] + row.weights()[dim - 1]));
            }
        });
        let batch = rate(|| {
            let mut slots = Vec::new();
            for keys in keys.chunks(Table::BATCH) {
                table.find_batch(keys, &mut slots);
                black_box(&slots);
            }
        });
        let gather = rate(|| {
            for keys in keys.chunks(REQUEST) {
                table.visit(keys, |position, row| {
                    if let Some(row) = row {
                        out[position * dim..][..dim].copy_from_slice(row.weights());
                    }
                });
                black_box(&out);
            }
        });
        let update = rate(|| {
            let mut slots = Vec::new();
            for keys in keys.chunks(Table::BATCH) {
                table.find_batch(keys, &mut slots);
                for slot in slots.iter().flatten() {
                    let mut row = table.row_mut(*slot);
                    let (header, weights, state) = row.split_mut();
                    header.version += 1;
                    for (weight, state) in weights.iter_mut().zip(state) {
                        *state += 0.25;
                        *weight -= 0.1 * 0.5 / (state.sqrt() + 1e-8);
                    }
                }
            }
        });
        println!(
            "{name:<8} M rows/s: one by one {single:.2}, find_batch {batch:.2}, gather {gather:.2}, \
             Adagrad {update:.2}"
        );
    }
}
