//! What RocksDB's options cost and bring, on the load that a replica gives them: sorted runs of the rows that changed, one flush after
//! the other, then reads of rows by key. One line for each change of one option against what is set.
//!
//! `cargo run --release -p evershard-storage --example rocks_options -- FOLDER [ROWS [PART OF A LINE'S NAME]]`: the folder must be on the disk that is
//! asked about, and is left empty.

use std::path::Path;
use std::time::{Duration, Instant};

use evershard_storage::rocks::{
    FlushedState, Position, ReplicaIdentity, ReplicaStore, RocksOptions, RocksShared,
};
use evershard_storage::table::RowHeader;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

type Error = Box<dyn std::error::Error>;
type Change = (&'static str, fn(&mut RocksOptions));

/// Weights and accumulators of a row of 64 columns under Adagrad.
const FLOATS: usize = 128;
/// Rows pushed between two flushes; the hot ones many times.
const PUSHED_A_CYCLE: usize = 200_000;
const CYCLES: u64 = 60;
const READ_AT_ONCE: usize = 256;
const READS: usize = 2_000;
/// Small against the table: reads are those of a cold tier.
const CACHE_BYTES: usize = 32 << 20;

const CHANGES: &[Change] = &[
    ("as set", |_| ()),
    ("blocks of 4 KiB", |options| options.block_bytes = 4 << 10),
    ("blocks of 64 KiB", |options| options.block_bytes = 64 << 10),
    ("no compression", |options| options.compression = false),
    ("filters of 6 bits", |options| options.filter_bits_per_row = 6.0),
    ("compaction at 8 runs", |options| options.level_0_files = 8),
    ("compaction at 2 runs", |options| options.level_0_files = 2),
    ("files of 16 MiB", |options| options.file_bytes = 16 << 20),
    ("files of 32 MiB", |options| options.file_bytes = 32 << 20),
    ("first level 256 MiB", |options| options.first_level_bytes = 256 << 20),
    ("first level 32 MiB", |options| options.first_level_bytes = 32 << 20),
    ("compaction 64 MiB/s", |options| options.compaction_bytes_per_s = 64 << 20),
    ("compaction unlimited", |options| options.compaction_bytes_per_s = 1 << 40),
];

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("say in which folder")?;
    let rows: u64 = arguments.next().map_or(Ok(1_000_000), |rows| rows.parse())?;
    let only = arguments.next().unwrap_or_default();
    println!(
        "{rows} rows of {FLOATS} floats, {CYCLES} flushes of what {PUSHED_A_CYCLE} pushes of Zipf 1.05 changed, a cache of {} MiB",
        CACHE_BYTES >> 20
    );
    println!("reads: {READ_AT_ONCE} rows at once, uniform, present or absent; thousand rows/s");
    println!(
        "{:<22} {:>8} {:>9} {:>8} {:>8} {:>6} {:>9} {:>9}",
        "option", "flush s", "settle s", "written", "space", "runs", "present", "absent"
    );
    for (name, change) in CHANGES.iter().filter(|(name, _)| name.contains(&only)) {
        let folder = Path::new(&folder).join("rocks-options");
        let result = measure(name, *change, rows, &folder);
        std::fs::remove_dir_all(&folder)?;
        result?;
    }
    Ok(())
}

fn measure(name: &str, change: fn(&mut RocksOptions), rows: u64, folder: &Path) -> Result<(), Error> {
    let mut options = RocksOptions { block_cache_bytes: CACHE_BYTES, ..RocksOptions::default() };
    change(&mut options);
    let shared = RocksShared::new(options)?;
    let identity = ReplicaIdentity { cluster: "bench".into(), node: 1, group: 1, shard: 0, replica: 1 };
    std::fs::create_dir_all(folder)?;
    let store = ReplicaStore::create(&folder.join("replica"), &identity, &shared)?;
    let mut random = StdRng::seed_from_u64(7);
    flush(&store, 1, (0..rows).map(scatter).collect(), &mut random)?;
    let zipf = Zipf::new(rows, 1.05);
    let (mut flushing, mut flushed) = (Duration::ZERO, 0);
    for cycle in 2..=CYCLES {
        let keys = (0..PUSHED_A_CYCLE).map(|_| scatter(zipf.rank(&mut random))).collect();
        let began = Instant::now();
        flushed += flush(&store, cycle, keys, &mut random)?;
        flushing += began.elapsed();
    }
    let began = Instant::now();
    let settled = settle(&store);
    let settling = began.elapsed();
    let present = read_rate(&store, &mut random, |random| scatter(random.random_range(0..rows)))?;
    let absent = read_rate(&store, &mut random, |random| scatter(random.random_range(rows..2 * rows)))?;
    println!(
        "{name:<22} {:>8.2} {:>9.2} {:>8.2} {:>8.2} {:>6} {:>9.0} {:>9.0}",
        flushing.as_secs_f64(),
        settling.as_secs_f64(),
        settled.compacted_bytes as f64 / flushed as f64,
        settled.disk_bytes as f64 / (rows as f64 * FLOATS as f64 * 4.0),
        settled.level_0_files,
        present / 1e3,
        absent / 1e3,
    );
    Ok(())
}

/// Ranks are spread over the keys, as the hash of ids does.
fn scatter(rank: u64) -> u64 {
    rank.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Ranks from 0 on, the first the likeliest.
struct Zipf {
    /// The sum of the weights up to each rank.
    sums: Vec<f64>,
}

impl Zipf {
    fn new(ranks: u64, exponent: f64) -> Self {
        let mut sum = 0.0;
        let weight = |rank| {
            sum += (rank as f64).powf(-exponent);
            sum
        };
        Zipf { sums: (1..=ranks).map(weight).collect() }
    }

    fn rank(&self, random: &mut StdRng) -> u64 {
        let sum = self.sums.last().copied().unwrap_or_default();
        let drawn = random.random_range(0.0..sum);
        self.sums.partition_point(|upto| *upto <= drawn) as u64
    }
}

/// One flush of these keys; answers its bytes.
fn flush(store: &ReplicaStore, index: u64, mut keys: Vec<u64>, random: &mut StdRng) -> Result<u64, Error> {
    keys.sort_unstable();
    keys.dedup();
    let mut run = store.begin_run()?;
    let mut floats = vec![0.0f32; FLOATS];
    for key in keys {
        floats.fill_with(|| random.random_range(-1.0..1.0));
        run.put(1, key, RowHeader { version: index, ..RowHeader::default() }, &floats)?;
    }
    let bytes = run.bytes();
    let replay_from = Some(Position { term: 1, leader: 1, index });
    let state = FlushedState { replay_from, complete_at: index, ..FlushedState::default() };
    store.commit(run, index, state)?;
    Ok(bytes)
}

/// Waits until compaction has nothing to do.
fn settle(store: &ReplicaStore) -> evershard_storage::rocks::StoreMetrics {
    const QUIET: Duration = Duration::from_millis(600);
    let (mut last, mut since) = (store.metrics(), Instant::now());
    while since.elapsed() < QUIET {
        std::thread::sleep(Duration::from_millis(50));
        let metrics = store.metrics();
        if metrics.compacted_bytes != last.compacted_bytes || metrics.level_0_files != last.level_0_files {
            (last, since) = (metrics, Instant::now());
        }
    }
    last
}

/// Rows a second.
fn read_rate(
    store: &ReplicaStore,
    random: &mut StdRng,
    mut key: impl FnMut(&mut StdRng) -> u64,
) -> Result<f64, Error> {
    let began = Instant::now();
    for _ in 0..READS {
        let mut keys: Vec<u64> = (0..READ_AT_ONCE).map(|_| key(random)).collect();
        keys.sort_unstable();
        store.get_many(1, &keys, |_, row| {
            std::hint::black_box(row);
        })?;
    }
    Ok((READS * READ_AT_ONCE) as f64 / began.elapsed().as_secs_f64())
}
