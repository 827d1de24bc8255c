//! The simulated nodes with the state machine for tests: proposing to it, and what it must hold in the end.
//!
//! Not here: the nodes themselves (`world`), what happens to them (the tests).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use evershard_raft::{LogPosition, Runtime};
use openraft_rt_sim::SimRuntime;

use super::adder::Adder;
use super::oracle::check_leases;
use super::sim_net::now;
use super::world::{Machine, Place};

/// The nodes with adders.
pub type World = super::world::World<Adder>;

impl Machine for Adder {
    type Shared = ();

    fn open(place: &Place<'_, ()>) -> Arc<Self> {
        let oracle = Arc::clone(place.oracle);
        let witness = move |at: LogPosition, digest: u64| {
            oracle.lock().applied(at, digest);
        };
        Adder::open(&place.directory, false, Some(Arc::new(witness)))
    }

    fn applied(&self) -> u64 {
        self.state().position.map_or(0, |at| at.index)
    }
}

impl World {
    pub fn new(seed: u64) -> Self {
        Self::over((), seed)
    }

    pub fn propose(&self, number: u64) {
        let leaders = self.leaders();
        if leaders.is_empty() {
            return;
        }
        let live = leaders[self.dice.below(leaders.len() as u64) as usize];
        let mut command = vec![0u8; 8 + self.dice.below(400) as usize];
        command[..8].copy_from_slice(&number.to_le_bytes());
        let Ok(answer) = live.group.propose(Bytes::from(command)) else { return };
        let (oracle, adder) = (Arc::clone(&self.oracle), Arc::clone(&live.machine));
        let readers = Arc::clone(&self.readers);
        drop(SimRuntime::spawn(async move {
            if answer.await.is_ok() {
                // It was applied here before it was answered.
                let applied = adder.index_of(number).expect("an acknowledged command was applied");
                oracle.lock().acknowledge(number, applied);
                // The moment at which a leader that was deposed unawares would be caught.
                check_leases(&readers, &oracle);
            }
        }));
    }

    /// Proposes something that was never proposed before.
    pub fn propose_anything(&self) {
        self.propose(10_000_000 + self.dice.below(1 << 47));
    }

    /// Proposes until the leader has acknowledged some of it; the number of its node.
    pub async fn settled_leader(&self, first: u64) -> usize {
        for number in first..first + 10_000 {
            self.propose(number);
            SimRuntime::sleep(Duration::from_millis(5)).await;
            let leader = self.live().find(|(_, live)| live.group.serving_lease().is_ok());
            if let Some((node, _)) = leader
                && self.oracle.lock().acknowledged.len() > 20
            {
                return node.id as usize - 1;
            }
        }
        panic!("nobody leads");
    }

    /// Mends everything and waits until all agree.
    pub async fn settle(&mut self) {
        self.mend_all().await;
        let deadline = now() + Duration::from_secs(60);
        loop {
            self.propose(u64::MAX);
            SimRuntime::sleep(Duration::from_millis(500)).await;
            let states: Vec<_> = self.live().map(|(_, live)| live.machine.state()).collect();
            let agree = states.iter().all(|state| *state == states[0]);
            let ended = self.oracle.lock().acknowledged.contains(&u64::MAX);
            if agree && ended {
                break;
            }
            self.oracle.lock().check();
            assert!(now() < deadline, "no agreement: {:?}", self.report());
        }
        let acknowledged = self.oracle.lock().acknowledged.clone();
        for (node, live) in self.live() {
            for number in &acknowledged {
                assert!(live.machine.index_of(*number).is_some(), "node {} lost {number}", node.id);
            }
            if live.group.status().purged.is_some() {
                self.oracle.lock().snapshots_installed += live.machine.installs();
            }
        }
        self.stop_all().await;
        self.oracle.lock().check();
    }
}
