//! Leader-consistent reads, in simulated time: whoever says it may serve knows all that was acknowledged (design 7, 14.9).
//!
//! Each test steers three nodes into the moment where one of the lease's conditions is all that stands between a reader
//! and stale rows, and shows that the moment was reached.
//!
//! Not here: everything at random (`simulation.rs`).

mod support;

use std::sync::atomic::Ordering;
use std::time::Duration;

use evershard_raft::{GroupError, NotServing, Runtime};
use openraft_rt_sim::SimRuntime;
use support::adder_world::World;
use support::oracle::check_leases;
use support::world::NODES;

const SEEDS: std::ops::Range<u64> = 1..13;

/// Runs a scenario once per seed and counts in how many of them the moment came.
fn reached(scenario: impl AsyncFn(&mut World) -> bool) -> usize {
    SEEDS
        .filter(|seed| {
            SimRuntime::with_seed(*seed).block_on(async {
                let mut world = World::new(*seed);
                world.start_all().await;
                let reached = scenario(&mut world).await;
                world.settle().await;
                reached
            })
        })
        .count()
}

fn acknowledged(world: &World) -> u64 {
    world.oracle.lock().acknowledged_index
}

#[test]
fn a_leader_that_is_cut_off_does_not_serve_past_its_lease() {
    let moments = reached(async |world| {
        let old = world.settled_leader(1).await;
        let id = world.nodes[old].id;
        let before = acknowledged(world);
        for other in (1..=NODES).filter(|other| *other != id) {
            world.net.cut(id, other, true);
            world.net.cut(other, id, true);
        }
        let mut is_reached = false;
        for step in 0..1_500 {
            if step % 5 == 0 {
                world.propose(1_000_000 + step);
            }
            SimRuntime::sleep(Duration::from_millis(1)).await;
            check_leases(&world.readers, &world.oracle);
            let group = &world.nodes[old].live.as_ref().expect("it runs").group;
            // Others lead and acknowledge, and this one still takes itself for the leader.
            is_reached |= acknowledged(world) > before
                && group.leadership().is_self
                && matches!(group.serving_lease(), Err(NotServing::LeaseExpired { .. }));
        }
        is_reached
    });
    assert!(moments > SEEDS.count() / 2, "an old leader met a new one in {moments} runs");
}

#[test]
fn a_new_leader_does_not_serve_before_it_has_applied_what_was_acknowledged() {
    let moments = reached(async |world| {
        let mut is_reached = false;
        for round in 0..6 {
            let old = world.settled_leader(1 + round * 100_000).await;
            // From here on a follower takes long to make an entry durable, so to commit in a new term.
            let others: Vec<usize> = (0..world.nodes.len()).filter(|number| *number != old).collect();
            let before = acknowledged(world);
            for number in 0..8 {
                world.propose(50_000 + round * 100_000 + number);
            }
            for _ in 0..2_000 {
                if acknowledged(world) > before {
                    break;
                }
                SimRuntime::sleep(Duration::from_micros(50)).await;
            }
            // Acknowledged this instant: the followers have the entries, and do not know yet that they count.
            for number in &others {
                world.nodes[*number].sync_micros.store(60_000, Ordering::Relaxed);
            }
            world.crash(old).await;
            for _ in 0..1_500 {
                SimRuntime::sleep(Duration::from_millis(1)).await;
                check_leases(&world.readers, &world.oracle);
                for number in &others {
                    let live = world.nodes[*number].live.as_ref().expect("it runs");
                    let applied = live.machine.state().position.map_or(0, |at| at.index);
                    is_reached |= applied < acknowledged(world)
                        && matches!(live.group.serving_lease(), Err(NotServing::Recovering));
                }
            }
            for node in &world.nodes {
                node.sync_micros.store(1_500, Ordering::Relaxed);
            }
            world.start(old).await;
        }
        is_reached
    });
    assert!(moments > SEEDS.count() / 2, "a leader had to wait for itself in {moments} runs");
}

#[test]
fn a_leader_that_is_asked_to_hand_over_to_itself_goes_on_serving() {
    let moments = reached(async |world| {
        let leader = world.settled_leader(1).await;
        let group = world.nodes[leader].live.as_ref().expect("it runs").group.clone();
        let refused = group.transfer_leader(group.replica(), Duration::from_secs(1)).await;
        assert!(matches!(refused, Err(GroupError::Membership { .. })), "{refused:?}");
        assert_eq!(group.serving_lease(), Ok(()));
        true
    });
    assert!(moments > 0);
}
