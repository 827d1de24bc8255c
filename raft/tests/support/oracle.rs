//! What the outside world of a simulation knows, and the promises it holds the replicas to.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use evershard_raft::{Group, LogPosition};
use openraft_rt_sim::SimRuntime;
use parking_lot::Mutex;

use super::world::Machine;

/// The replicas that run, for whoever wants to read from them.
pub type Readers<M> = Arc<Mutex<BTreeMap<u64, (Group<SimRuntime>, Arc<M>)>>>;

#[derive(Default)]
pub struct Oracle {
    /// Term and digest of the state after each index, by whoever applied it first.
    digests: BTreeMap<u64, (u64, u64)>,
    /// Numbers whose proposal was answered.
    pub acknowledged: BTreeSet<u64>,
    /// The highest index of one of them.
    pub acknowledged_index: u64,
    pub restarts: u64,
    pub snapshots_installed: u64,
    pub lease_reads: u64,
    /// Promises that were broken.
    violations: Vec<String>,
}

impl Oracle {
    /// Every replica applies the same entry at the same index.
    pub fn applied(&mut self, at: LogPosition, digest: u64) {
        let known = *self.digests.entry(at.index).or_insert((at.term, digest));
        if known != (at.term, digest) {
            self.violated(format!("replicas applied different entries at {}", at.index));
        }
    }

    /// A promise was broken. It is remembered, because a simulated task and an applier swallow panics.
    pub fn violated(&mut self, what: String) -> ! {
        self.violations.push(what.clone());
        panic!("{what}");
    }

    /// No promise was broken so far.
    pub fn check(&self) {
        assert!(self.violations.is_empty(), "broken: {:#?}", self.violations);
    }

    pub fn acknowledge(&mut self, number: u64, index: u64) {
        self.acknowledged.insert(number);
        self.acknowledged_index = self.acknowledged_index.max(index);
    }
}

/// Leader-consistent reads: whoever says it may serve knows all that was acknowledged.
pub fn check_leases<M: Machine>(readers: &Readers<M>, oracle: &Mutex<Oracle>) {
    for (id, (group, machine)) in &*readers.lock() {
        if group.serving_lease().is_ok() {
            let mut oracle = oracle.lock();
            oracle.lease_reads += 1;
            let (applied, acknowledged) = (machine.applied(), oracle.acknowledged_index);
            if applied < acknowledged {
                oracle
                    .violated(format!("node {id} serves at {applied}, but {acknowledged} was acknowledged"));
            }
        }
    }
}
