//! Three nodes in simulated time: real log store, real log on a simulated disk, real applier, groups and transport
//! sessions; delays, broken connections, cuts, power cuts, flushes, purges, snapshots and transfers drawn from a seed.
//!
//! What must hold, whatever happens:
//! - every replica applies the same entry at the same index, also after restarts (digests by index);
//! - what was acknowledged is in every state that comes after it;
//! - a replica whose lease says it may serve has everything that was acknowledged before;
//! - the same seed gives the same run.
//!
//! `EVERSHARD_SIM_SEEDS=100..200` runs other seeds.

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use evershard_raft::Runtime;
use openraft_rt_sim::SimRuntime;
use support::adder_world::World;
use support::oracle::check_leases;
use support::world::{NODES, replica};

/// Something goes wrong, or housekeeping happens.
async fn trouble(world: &mut World) {
    let number = world.dice.below(NODES) as usize;
    let id = world.nodes[number].id;
    match world.dice.below(100) {
        0..=7 => {
            world.crash(number).await;
        }
        8..=12 => {
            // All at once.
            for number in 0..world.nodes.len() {
                world.crash(number).await;
            }
        }
        13..=20 => {
            let to = 1 + world.dice.below(NODES);
            world.net.cut(id, to, true);
        }
        21..=32 => {
            // Leaders are the ones worth cutting off.
            let leader =
                world.live().find(|(_, live)| live.group.leadership().is_self).map(|(node, _)| node.id);
            let alone = leader.filter(|_| world.dice.chance(2)).unwrap_or(id);
            for other in (1..=NODES).filter(|other| *other != alone) {
                world.net.cut(alone, other, true);
            }
        }
        33..=50 => world.net.mend(),
        51..=58 => {
            let slowest = [1_500, 1_500, 20_000, 150_000][world.dice.below(4) as usize];
            world.nodes[number].sync_micros.store(slowest, Ordering::Relaxed);
        }
        59..=62 => world.forget_a_lease(World::propose_anything).await,
        63..=70 => {
            if let Some(live) = &world.nodes[number].live {
                let to = replica(1 + world.dice.below(NODES));
                let group = live.group.clone();
                drop(SimRuntime::spawn(async move {
                    let _ = group.transfer_leader(to, Duration::from_secs(1)).await;
                }));
            }
        }
        _ => {
            if let Some(live) = &world.nodes[number].live
                && live.machine.flush(live.group.log().durable_index())
            {
                live.group.flushed();
            }
        }
    }
}

async fn live_through(world: &mut World, steps: u64) {
    world.start_all().await;
    for step in 0..steps {
        for _ in 0..world.dice.below(6) {
            world.propose(step * 10 + world.dice.below(10) + 1);
        }
        SimRuntime::sleep(world.dice.micros(500, 30_000)).await;
        check_leases(&world.readers, &world.oracle);
        world.oracle.lock().check();
        if world.dice.chance(12) {
            trouble(world).await;
        }
        for number in 0..world.nodes.len() {
            if world.nodes[number].live.is_none() && world.dice.chance(40) {
                world.start(number).await;
            }
        }
    }
    world.settle().await;
}

struct Run {
    trace: u32,
    events: usize,
    acknowledged: usize,
    restarts: u64,
    snapshots: u64,
    lease_reads: u64,
}

fn run(seed: u64, steps: u64) -> Run {
    let mut runtime = SimRuntime::with_seed(seed);
    runtime.record_trace(true);
    let oracle = runtime.block_on(async {
        let mut world = World::new(seed);
        live_through(&mut world, steps).await;
        Arc::clone(&world.oracle)
    });
    let trace = runtime.take_trace();
    let mut hash = crc32fast::Hasher::new();
    for event in &trace {
        hash.update(event.as_bytes());
    }
    let oracle = oracle.lock();
    Run {
        trace: hash.finalize(),
        events: trace.len(),
        acknowledged: oracle.acknowledged.len(),
        restarts: oracle.restarts,
        snapshots: oracle.snapshots_installed,
        lease_reads: oracle.lease_reads,
    }
}

fn seeds() -> std::ops::Range<u64> {
    let parse = |text: String| {
        let (from, to) = text.split_once("..")?;
        Some(from.parse().ok()?..to.parse().ok()?)
    };
    std::env::var("EVERSHARD_SIM_SEEDS").ok().and_then(parse).unwrap_or(1..5)
}

#[test]
fn nothing_acknowledged_is_lost_and_logs_agree() {
    let mut total = (0, 0, 0, 0);
    for seed in seeds() {
        let run = run(seed, 400);
        println!(
            "seed {seed}: {} acknowledged, {} restarts, {} snapshots, {} lease reads, {} events, trace {:08x}",
            run.acknowledged, run.restarts, run.snapshots, run.lease_reads, run.events, run.trace
        );
        total.0 += run.acknowledged;
        total.1 += run.restarts;
        total.2 += run.snapshots;
        total.3 += run.lease_reads;
    }
    assert!(total.0 > 100, "something was acknowledged: {total:?}");
    assert!(total.1 > 3, "the power was cut: {total:?}");
    assert!(total.3 > 100, "leases were used: {total:?}");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let (first, second) = (run(42, 120), run(42, 120));
    assert_eq!((first.events, first.trace), (second.events, second.trace));
    let other = run(43, 120);
    assert_ne!(first.trace, other.trace, "the seed matters");
}
