//! How fast the node log takes appends: a few groups, one append in flight each or several, on the real disk.
//!
//! `log_throughput DIRECTORY [BYTES] [GROUPS] [IN_FLIGHT] [SECONDS] [fsync|memory]`
//!
//! Not here: replication; this is one node's disk and writer alone.

use bytes::Bytes;
use evershard_storage::disk::RealDisk;
use evershard_storage::log::{Driver, Durability, Entry, Log, LogOptions};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let directory =
        arguments.get(1).ok_or("usage: log_throughput DIRECTORY [BYTES] [GROUPS] [IN_FLIGHT] [SECONDS]")?;
    let number = |at: usize, default: u64| arguments.get(at).map_or(Ok(default), |text| text.parse());
    let (bytes, groups) = (number(2, 65_536)?, number(3, 8)?);
    let (in_flight, seconds) = (number(4, 4)?, number(5, 5)?);
    let durability = match arguments.get(6).map(String::as_str) {
        Some("memory") => Durability::Memory,
        _ => Durability::Fsync,
    };
    let options = LogOptions { durability, ..LogOptions::new(directory) };
    let (log, _) = Log::open(options, Arc::new(RealDisk), Driver::Threaded)?;
    let started = Instant::now();
    let end = started + Duration::from_secs(seconds);
    let workers: Vec<_> = (1..=groups)
        .map(|number| {
            let log = log.clone();
            thread::spawn(move || append(&log, number, bytes as usize, in_flight, end))
        })
        .collect();
    let mut latencies = Vec::new();
    for worker in workers {
        latencies.extend(worker.join().map_err(|_| "a worker panicked")?);
    }
    let elapsed = started.elapsed().as_secs_f64();
    latencies.sort();
    let quantile = |part: f64| latencies[((latencies.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e3;
    let stats = log.stats();
    println!(
        "{durability:?} {bytes} B x {groups} groups x {in_flight}: {:.0} MB/s, {:.0} appends/s, p50 {:.2} ms, p99 {:.2} ms, {:.1} appends a batch",
        latencies.len() as f64 * bytes as f64 / elapsed / 1e6,
        latencies.len() as f64 / elapsed,
        quantile(0.5),
        quantile(0.99),
        latencies.len() as f64 / stats.batches.max(1) as f64,
    );
    log.close()?;
    Ok(())
}

/// Appends to one group with this many in flight, purging what is a thousand entries back.
fn append(log: &Log, number: u64, bytes: usize, in_flight: u64, end: Instant) -> Vec<Duration> {
    let group = log.group(number, number).expect("a group");
    let payload = Bytes::from(vec![number as u8; bytes]);
    let (sender, receiver) = mpsc::channel();
    let mut latencies = Vec::new();
    let first = group.state().last.map_or(0, |last| last.index + 1);
    for index in first.. {
        let entry = Entry { index, term: 1, leader: 1, kind: 0, time_ms: 0, payload: payload.clone() };
        let (sender, begun) = (sender.clone(), Instant::now());
        group.append(
            vec![entry],
            Box::new(move |result| {
                let _gone = sender.send(result.map(|()| begun.elapsed()));
            }),
        );
        if index >= first + in_flight {
            latencies.push(receiver.recv().expect("an answer").expect("durable"));
        }
        if index % 256 == 255
            && let Some(id) = index.checked_sub(1000).and_then(|index| group.entry_id(index))
        {
            group.purge_through(id, Box::new(|_| ()));
        }
        if Instant::now() > end {
            break;
        }
    }
    latencies
}
