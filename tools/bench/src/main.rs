//! `evershard-bench`: measures a running cluster over its real sockets.
//!
//! The workload is that of the peers' scripts: a table of 1 M rows x 64 floats, batches of 4096 ids drawn from Zipf 1.05,
//! popularity shuffled over the ids, Adagrad at the servers. Figures are medians over runs; durability and replicas are
//! those of the cluster it is pointed at, and belong to every figure quoted.

mod workload;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use evershard::{Client, ClientOptions, Error, Table, definition};
use hdrhistogram::Histogram;
use tokio::sync::Barrier;
use workload::{Draws, Workload};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measure pulls, pushes and steps of a running cluster.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Example: start `evershard dev --dir /tmp/es`, then
  evershard-bench --endpoints http://127.0.0.1:7400 --workers 1,4 --cases pull,push,step"
)]
struct Args {
    /// Addresses of the cluster, comma-separated.
    #[arg(long, env = "EVERSHARD_ENDPOINTS", default_value = "http://127.0.0.1:7400")]
    endpoints: String,
    /// Concurrent workers, each with a client of its own; several numbers measure each.
    #[arg(long, value_delimiter = ',', default_value = "1,4")]
    workers: Vec<usize>,
    /// What to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "pull,push,step")]
    cases: Vec<Case>,
    /// Seconds a run.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Runs of each; the median is shown.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Rows of the table.
    #[arg(long, default_value_t = 1_000_000)]
    rows: u64,
    /// Exponent of Zipf's law, by which ids are drawn; 0: all are equally likely.
    #[arg(long, default_value_t = 1.05)]
    zipf: f64,
    /// Batches of 4096 ids that differ, before a worker begins anew: enough of them touch every row.
    #[arg(long, default_value_t = 32)]
    batches: usize,
    /// One JSON line a figure instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Case {
    Pull,
    Push,
    Step,
}

const DIM: usize = 64;

#[tokio::main]
async fn main() -> ExitCode {
    match run(Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("evershard-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<(), Error> {
    let client = Client::connect(&args.endpoints, ClientOptions::default()).await?;
    let start = Instant::now();
    let name = "bench-adagrad";
    let table = client.create_table(definition::sparse(name, DIM as u32, definition::adagrad(0.01))).await?;
    fill(&table, args.rows).await?;
    eprintln!("table of {} rows x {DIM} filled in {:.1?}", args.rows, start.elapsed());
    if !args.json {
        println!("{:>6} {:>8} {:>14} {:>10} {:>10}", "case", "workers", "rows/s", "p50 ms", "p99 ms");
    }
    for workers in &args.workers {
        for case in &args.cases {
            let mut rates = Vec::new();
            let mut latencies = histogram()?;
            for _ in 0..args.repeats {
                let (rate, spent) = measure(&args, name, *case, *workers).await?;
                rates.push(rate);
                for micros in spent {
                    latencies.saturating_record(micros);
                }
            }
            rates.sort_by(f64::total_cmp);
            let rate = rates[rates.len() / 2];
            let (p50, p99) = (latencies.value_at_quantile(0.5), latencies.value_at_quantile(0.99));
            let label = format!("{case:?}").to_lowercase();
            if args.json {
                let line = serde_json::json!({"case": label, "workers": workers, "rows_per_s": rate.round(),
                    "p50_ms": p50 as f64 / 1e3, "p99_ms": p99 as f64 / 1e3, "range": [rates.first(), rates.last()]});
                println!("{line}");
            } else {
                let (p50, p99) = (p50 as f64 / 1e3, p99 as f64 / 1e3);
                println!("{label:>6} {workers:>8} {rate:>14.0} {p50:>10.2} {p99:>10.2}");
            }
        }
    }
    client.close().await;
    Ok(())
}

/// Microseconds, up to a minute.
fn histogram() -> Result<Histogram<u64>, Error> {
    Histogram::new_with_max(60_000_000, 3).map_err(|_| Error::Closed)
}

/// Makes every row exist, as training long before would have.
async fn fill(table: &Table, rows: u64) -> Result<(), Error> {
    let mut probe = vec![0.0; DIM];
    table.pull(&[rows - 1], &mut probe).await?;
    if probe.iter().any(|v| *v != 0.0) {
        return Ok(());
    }
    // Trained weights do not compress, and these must not: 24 bits of each differ (SplitMix64's increments, cut).
    let draw = |n: usize| ((n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f32;
    let values: Vec<f32> = (1..=16_384 * DIM).map(|n| 0.02 * (draw(n) / 16_777_216.0 - 0.5)).collect();
    let mut first = 0;
    while first < rows {
        let ids: Vec<u64> = (first..rows.min(first + 16_384)).collect();
        table.assign(&ids, &values[..ids.len() * DIM]).await?;
        first += 16_384;
    }
    Ok(())
}

async fn measure(args: &Args, name: &str, case: Case, workers: usize) -> Result<(f64, Vec<u64>), Error> {
    let gate = Arc::new(Barrier::new(workers));
    let mut running = Vec::new();
    for rank in 0..workers {
        let (endpoints, name, gate) = (args.endpoints.clone(), name.to_string(), gate.clone());
        let seconds = args.seconds;
        let draws = Draws { rows: args.rows, zipf: args.zipf, batches: args.batches };
        running.push(tokio::spawn(async move {
            let client = Client::connect(&endpoints, ClientOptions::default()).await?;
            let table = client.table(&name).await?;
            let workload = Workload::new(rank as u64, draws, DIM);
            let mut out = vec![0.0; workload::BATCH * DIM];
            for batch in workload.batches.iter().take(3) {
                once(&table, case, batch, &workload.gradients, &mut out).await?;
            }
            gate.wait().await;
            let begin = Instant::now();
            let mut spent = Vec::new();
            for batch in workload.batches.iter().cycle() {
                let since = Instant::now();
                if begin.elapsed() >= Duration::from_secs_f64(seconds) {
                    break;
                }
                once(&table, case, batch, &workload.gradients, &mut out).await?;
                spent.push(since.elapsed().as_micros() as u64);
            }
            let rate = spent.len() as f64 * workload::BATCH as f64 / begin.elapsed().as_secs_f64();
            gate.wait().await;
            client.close().await;
            Ok::<_, Error>((rate, spent))
        }));
    }
    let mut total = 0.0;
    let mut all = Vec::new();
    for worker in running {
        let (rate, spent) = worker.await.map_err(|_| Error::Closed)??;
        total += rate;
        all.extend(spent);
    }
    Ok((total, all))
}

async fn once(
    table: &Table,
    case: Case,
    ids: &[u64],
    gradients: &[f32],
    out: &mut [f32],
) -> Result<(), Error> {
    if case != Case::Push {
        table.pull(ids, out).await?;
    }
    if case != Case::Pull {
        table.push(ids, gradients).await?;
    }
    Ok(())
}
