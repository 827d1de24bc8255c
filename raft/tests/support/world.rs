//! Three simulated nodes: real log store, real log on a simulated disk, real applier, groups and transport sessions, in
//! simulated time.
//!
//! Not here: what happens to them (the tests).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use evershard_raft::transport::Router;
use evershard_raft::{Group, GroupHost, InlineExecutor, LogPosition, Peer, RaftOptions, RaftTiming, Runtime};
use evershard_storage::log::{Driver, Log, LogOptions};
use evershard_storage::testing::{Loss, SimDisk};
use openraft::Instant as _;
use openraft_rt_sim::{SimInstant, SimRuntime};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::adder::Adder;
use super::oracle::{Oracle, Readers, check_leases};
use super::sim_net::{Dice, SimNet};

pub const GROUP: u64 = 1;
pub const NODES: u64 = 3;

pub struct Node {
    pub id: u64,
    pub disk: SimDisk,
    /// Longest time between two syncs, in microseconds.
    pub sync_micros: Arc<AtomicU64>,
    pub live: Option<Live>,
}

pub struct Live {
    pub log: Log,
    /// Ends the pump: a dead process touches its disk no more.
    pub alive: CancellationToken,
    pub group: Group<SimRuntime>,
    pub adder: Arc<Adder>,
}

pub struct World {
    pub folder: tempfile::TempDir,
    pub dice: Dice,
    pub net: Arc<SimNet>,
    pub oracle: Arc<Mutex<Oracle>>,
    pub readers: Readers,
    pub nodes: Vec<Node>,
    pub started: SimInstant,
}

pub fn replica(node: u64) -> u64 {
    10 + node
}

pub fn peer(node: u64) -> Peer {
    Peer { node, address: format!("sim://{node}") }
}

impl World {
    pub fn new(seed: u64) -> Self {
        let dice = Dice::new(seed);
        let node = |id| Node {
            id,
            disk: SimDisk::new(dice.next()),
            sync_micros: Arc::new(AtomicU64::new(1_500)),
            live: None,
        };
        let nodes = (1..=NODES).map(node).collect();
        Self {
            folder: tempfile::tempdir().expect("tempdir"),
            net: SimNet::new(dice.clone()),
            dice,
            oracle: Arc::default(),
            readers: Arc::default(),
            nodes,
            started: SimInstant::now(),
        }
    }

    pub async fn start(&mut self, number: usize) {
        let id = self.nodes[number].id;
        let data = self.folder.path().join(format!("node-{id}"));
        let mut options = RaftOptions::new("sim", id, &data);
        options.timing = RaftTiming::default();
        options.limits.retain_log_bytes = 2_000;
        options.limits.append_bytes = 2_000;
        options.limits.apply_entries = 7;
        let started = self.started;
        options.clock = Arc::new(move || 1_000 + (SimInstant::now() - started).as_millis() as u64);

        let mut log_options = LogOptions::new("/log");
        log_options.segment_bytes = 64 << 10;
        log_options.cache_bytes = 4 << 10;
        log_options.boot_id = "sim".to_owned();
        log_options.on_fatal = Arc::new(|_, _| {});
        let (log, recovery) =
            Log::open(log_options, Arc::new(self.nodes[number].disk.clone()), Driver::Manual)
                .expect("a log that was only cut off opens");
        assert!(recovery.quarantined.is_empty(), "{:?}", recovery.quarantined);

        let oracle = Arc::clone(&self.oracle);
        let witness = move |at: LogPosition, digest: u64| {
            oracle.lock().applied(at, digest);
        };
        let adder = Adder::open(&data.join("state"), false, Some(Arc::new(witness)));
        let router = Arc::new(Router::default());
        let host = GroupHost::<SimRuntime> {
            options,
            executor: Arc::new(InlineExecutor),
            transport: self.net.transport(id),
            router: Arc::clone(&router),
        };
        // The disk works while the group opens: votes and purges are durable before their calls return.
        let handle = log.group(GROUP, replica(id)).expect("log");
        let alive = CancellationToken::new();
        self.pump(log.clone(), alive.clone(), Arc::clone(&self.nodes[number].sync_micros));
        let group =
            host.open(GROUP, replica(id), Arc::clone(&adder) as _, handle).await.expect("the replica opens");
        self.net.up(id, router);
        self.readers.lock().insert(id, (group.clone(), Arc::clone(&adder)));
        self.nodes[number].live = Some(Live { log, alive, group, adder });
    }

    /// Commits the log's queue after a random time, until the process dies.
    fn pump(&self, log: Log, alive: CancellationToken, sync_micros: Arc<AtomicU64>) {
        let dice = self.dice.clone();
        drop(SimRuntime::spawn(async move {
            while !alive.is_cancelled() {
                log.pump();
                if dice.chance(64) {
                    log.housekeep();
                }
                SimRuntime::sleep(dice.micros(50, sync_micros.load(Ordering::Relaxed))).await;
            }
        }));
    }

    /// The power goes: nothing more is written or sent, and what was not synced is lost, in part.
    pub async fn crash(&mut self, number: usize) {
        let node = &mut self.nodes[number];
        let Some(live) = node.live.take() else { return };
        node.disk.cut_power();
        self.net.down(node.id);
        self.readers.lock().remove(&node.id);
        live.alive.cancel();
        // Whatever waits for the disk hears that it is dead.
        live.log.pump();
        live.group.shutdown().await;
        drop(live);
        let loss = if self.dice.chance(3) { Loss::All } else { Loss::Random };
        node.disk.power_cycle(loss);
        self.oracle.lock().restarts += 1;
    }

    pub fn live(&self) -> impl Iterator<Item = (&Node, &Live)> {
        self.nodes.iter().filter_map(|node| Some((node, node.live.as_ref()?)))
    }

    pub fn propose(&self, number: u64) {
        let leaders: Vec<_> = self.live().filter(|(_, live)| live.group.leadership().is_self).collect();
        if leaders.is_empty() {
            return;
        }
        let (_, live) = leaders[self.dice.below(leaders.len() as u64) as usize];
        let mut command = vec![0u8; 8 + self.dice.below(400) as usize];
        command[..8].copy_from_slice(&number.to_le_bytes());
        let Ok(answer) = live.group.propose(Bytes::from(command)) else { return };
        let (oracle, adder) = (Arc::clone(&self.oracle), Arc::clone(&live.adder));
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

    /// A leader that only one voter still follows is cut off from it, and that voter restarts at once: were it to vote
    /// right away, there would be a second leader within the first one's lease (design 14.9).
    pub async fn forget_a_lease(&mut self) {
        let leader = self.live().find(|(_, live)| live.group.leadership().is_self).map(|(node, _)| node.id);
        let Some(leader) = leader else { return };
        let others: Vec<u64> = (1..=NODES).filter(|other| *other != leader).collect();
        let (candidate, voter) =
            if self.dice.chance(2) { (others[0], others[1]) } else { (others[1], others[0]) };
        self.net.mend();
        self.net.cut(leader, candidate, true);
        for step in 0..70 {
            self.propose(10_000_000 + self.dice.below(1 << 40) * 100 + step);
            SimRuntime::sleep(Duration::from_millis(20)).await;
        }
        let number = voter as usize - 1;
        self.crash(number).await;
        self.net.cut(leader, voter, true);
        self.start(number).await;
        for step in 0..40 {
            self.propose(10_000_000 + self.dice.below(1 << 40) * 100 + step);
            SimRuntime::sleep(Duration::from_millis(10)).await;
            check_leases(&self.readers, &self.oracle);
        }
        self.net.mend();
    }

    /// Starts all nodes and makes them a group.
    pub async fn start_all(&mut self) {
        for number in 0..self.nodes.len() {
            self.start(number).await;
        }
        let members = (1..=NODES).map(|id| (replica(id), peer(id))).collect();
        let first = self.nodes[0].live.as_ref().expect("started").group.clone();
        first.initialize(members).await.expect("initialised once");
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
        self.net.mend();
        for number in 0..self.nodes.len() {
            self.nodes[number].sync_micros.store(1_500, Ordering::Relaxed);
            if self.nodes[number].live.is_none() {
                self.start(number).await;
            }
        }
        let deadline = SimInstant::now() + Duration::from_secs(60);
        loop {
            self.propose(u64::MAX);
            SimRuntime::sleep(Duration::from_millis(500)).await;
            let states: Vec<_> = self.live().map(|(_, live)| live.adder.state()).collect();
            let agree = states.iter().all(|state| *state == states[0]);
            let ended = self.oracle.lock().acknowledged.contains(&u64::MAX);
            if agree && ended {
                break;
            }
            assert!(SimInstant::now() < deadline, "no agreement: {:?}", self.report());
        }
        let acknowledged = self.oracle.lock().acknowledged.clone();
        for (node, live) in self.live() {
            for number in &acknowledged {
                assert!(live.adder.index_of(*number).is_some(), "node {} lost {number}", node.id);
            }
        }
        for number in 0..self.nodes.len() {
            if let Some(live) = self.nodes[number].live.take() {
                let purged = live.group.status().purged;
                if purged.is_some() {
                    self.oracle.lock().snapshots_installed += live.adder.installs();
                }
                live.group.shutdown().await;
                live.alive.cancel();
            }
            self.nodes[number].disk.cut_power();
        }
    }

    pub fn report(&self) -> Vec<evershard_raft::GroupStatus> {
        self.live().map(|(_, live)| live.group.status()).collect()
    }
}
