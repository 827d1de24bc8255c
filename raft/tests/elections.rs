//! Elections, in simulated time: who does not start one.
//!
//! Not here: what a leader may answer (`leases.rs`), everything at random (`simulation.rs`).

mod support;

use std::time::Duration;

use evershard_raft::Runtime;
use openraft_rt_sim::SimRuntime;
use support::adder_world::World;
use support::world::NODES;

/// Pre-vote: a follower that heard nothing for long asks whether it would be elected before it raises its term, so its
/// return ends nobody's leadership.
#[test]
fn a_follower_that_was_cut_off_returns_without_a_new_term() {
    for seed in 1..7 {
        SimRuntime::with_seed(seed).block_on(async {
            let mut world = World::new(seed);
            world.start_all().await;
            let leader = world.settled_leader(1).await;
            let lonely = (leader + 1) % world.nodes.len();
            let id = world.nodes[lonely].id;
            let term = |world: &World, number: usize| {
                world.nodes[number].live.as_ref().expect("it runs").group.leadership().term
            };
            let before = term(&world, leader);
            for other in (1..=NODES).filter(|other| *other != id) {
                world.net.cut(id, other, true);
                world.net.cut(other, id, true);
            }
            // Many election timeouts.
            SimRuntime::sleep(Duration::from_secs(5)).await;
            world.net.mend();
            SimRuntime::sleep(Duration::from_secs(2)).await;
            assert_eq!(term(&world, leader), before, "seed {seed}: the leader lost its term");
            assert_eq!(term(&world, lonely), before, "seed {seed}: the lonely one raised its term");
            world.settle().await;
        });
    }
}
