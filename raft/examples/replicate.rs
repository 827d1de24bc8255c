//! Throughput and latency of one group on three nodes in this process, over real sockets and one disk:
//! `cargo run --release -p evershard-raft --example replicate -- [entry bytes] [in flight] [seconds]`.
//!
//! Not here: assertions; a figure of the product (that is evershard-bench over real processes).

#[path = "../tests/support/mod.rs"]
mod support;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use support::cluster::{Cluster, GROUP, padded};

fn argument(number: usize, otherwise: usize) -> usize {
    std::env::args().nth(number).and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

#[tokio::main]
async fn main() {
    let (bytes, in_flight, seconds) = (argument(1, 64 * 1024), argument(2, 32), argument(3, 5));
    let cluster = Cluster::start(3, &[GROUP], |_| {}).await;
    let leader = cluster.wait_leader(GROUP).await;
    let group = cluster.group(leader, GROUP);
    let command = padded(1, bytes);
    let (mut waiting, mut latencies) = (VecDeque::new(), Vec::new());
    let started = Instant::now();
    let mut flushed = Instant::now();
    while started.elapsed() < Duration::from_secs(seconds as u64) {
        while waiting.len() < in_flight {
            match group.propose(command.clone()) {
                Ok(answer) => waiting.push_back((Instant::now(), answer)),
                Err(error) if error.is_retryable_here() => break,
                Err(error) => panic!("{error}"),
            }
        }
        if let Some((at, answer)) = waiting.pop_front() {
            answer.await.expect("applied");
            latencies.push(at.elapsed());
        }
        if flushed.elapsed() > Duration::from_millis(500) {
            flushed = Instant::now();
            for id in cluster.nodes.keys().copied() {
                let handle = cluster.group(id, GROUP);
                if cluster.adder(id, GROUP).flush(handle.log().durable_index()) {
                    handle.flushed();
                }
            }
        }
    }
    let passed = started.elapsed().as_secs_f64();
    latencies.sort();
    let at = |part: f64| latencies[((latencies.len() - 1) as f64 * part) as usize];
    println!(
        "{bytes} B x {in_flight}: {:.0} MB/s, {:.0} entries/s, p50 {:?}, p99 {:?}",
        (latencies.len() * bytes) as f64 / passed / 1e6,
        latencies.len() as f64 / passed,
        at(0.5),
        at(0.99)
    );
}
