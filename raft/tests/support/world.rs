//! Three simulated nodes: real log store, real log on a simulated disk, real applier, groups and transport sessions, in
//! simulated time, over whatever state machine a test brings.
//!
//! Not here: what happens to them (the tests), what the state machine is (`adder`, or the server's own).

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use evershard_raft::transport::Router;
use evershard_raft::{
    Group, GroupHost, InlineExecutor, Peer, RaftOptions, RaftTiming, Runtime, SnapshotTraffic, StateMachine,
};
use evershard_storage::log::{Driver, Log, LogOptions};
use evershard_storage::testing::{Loss, SimDisk};
use openraft_rt_sim::{SimInstant, SimRuntime};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::oracle::{Oracle, Readers, check_leases};
use super::sim_net::{Dice, SimNet, now};

pub const GROUP: u64 = 1;
pub const NODES: u64 = 3;

/// A state machine that a node loses at a power cut and opens again.
pub trait Machine: StateMachine + Sized {
    /// What the state machines of all nodes share.
    type Shared;

    /// Opens what the last process left, or begins.
    fn open(place: &Place<'_, Self::Shared>) -> Arc<Self>;

    /// The process ends here and now: nothing is written any more, and every file is closed when it returns.
    fn die(&self) {}

    /// The last entry applied; 0 before the first.
    fn applied(&self) -> u64;
}

/// Where a replica's state machine lives.
pub struct Place<'a, S> {
    pub node: u64,
    pub replica: u64,
    pub directory: PathBuf,
    pub oracle: &'a Arc<Mutex<Oracle>>,
    pub shared: &'a S,
}

pub struct Node<M> {
    pub id: u64,
    pub disk: SimDisk,
    /// Longest time between two syncs, in microseconds.
    pub sync_micros: Arc<AtomicU64>,
    pub live: Option<Live<M>>,
}

pub struct Live<M> {
    pub log: Log,
    /// Ends the pump: a dead process touches its disk no more.
    pub alive: CancellationToken,
    pub group: Group<SimRuntime>,
    pub machine: Arc<M>,
}

pub struct World<M: Machine> {
    pub folder: tempfile::TempDir,
    pub dice: Dice,
    pub net: Arc<SimNet>,
    pub oracle: Arc<Mutex<Oracle>>,
    pub readers: Readers<M>,
    pub nodes: Vec<Node<M>>,
    pub shared: M::Shared,
    pub started: SimInstant,
}

pub fn replica(node: u64) -> u64 {
    10 + node
}

pub fn peer(node: u64) -> Peer {
    Peer { node, address: format!("sim://{node}") }
}

/// In memory where the system has a file system for that: these files lose nothing, so there is no disk to wait for.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a folder")
}

impl<M: Machine> World<M> {
    pub fn over(shared: M::Shared, seed: u64) -> Self {
        let dice = Dice::new(seed);
        let node = |id| Node {
            id,
            disk: SimDisk::new(dice.next()),
            sync_micros: Arc::new(AtomicU64::new(1_500)),
            live: None,
        };
        let nodes = (1..=NODES).map(node).collect();
        Self {
            folder: folder(),
            net: SimNet::new(dice.clone()),
            dice,
            oracle: Arc::default(),
            readers: Arc::default(),
            nodes,
            shared,
            started: now(),
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
        options.clock = Arc::new(move || 1_000 + (now() - started).as_millis() as u64);

        let mut log_options = LogOptions::new("/log");
        log_options.segment_bytes = 64 << 10;
        log_options.cache_bytes = 4 << 10;
        log_options.boot_id = "sim".to_owned();
        log_options.on_fatal = Arc::new(|_, _| {});
        let (log, recovery) =
            Log::open(log_options, Arc::new(self.nodes[number].disk.clone()), Driver::Manual)
                .expect("a log that was only cut off opens");
        assert!(recovery.quarantined.is_empty(), "{:?}", recovery.quarantined);

        let machine = M::open(&Place {
            node: id,
            replica: replica(id),
            directory: data.join("state"),
            oracle: &self.oracle,
            shared: &self.shared,
        });
        let router = Arc::new(Router::default());
        let snapshots = SnapshotTraffic::new(&options.limits);
        let host = GroupHost::<SimRuntime> {
            options,
            executor: Arc::new(InlineExecutor),
            transport: self.net.transport(id),
            router: Arc::clone(&router),
            snapshots,
        };
        // The disk works while the group opens: votes and purges are durable before their calls return.
        let handle = log.group(GROUP, replica(id)).expect("log");
        let alive = CancellationToken::new();
        self.pump(log.clone(), alive.clone(), Arc::clone(&self.nodes[number].sync_micros));
        let group = host
            .open(GROUP, replica(id), Arc::clone(&machine) as _, handle)
            .await
            .expect("the replica opens");
        self.net.up(id, router);
        self.readers.lock().insert(id, (group.clone(), Arc::clone(&machine)));
        self.nodes[number].live = Some(Live { log, alive, group, machine });
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

    /// The power goes: nothing more is written or sent, and what was not synced is lost, in part. Every other time that is in
    /// the middle of writing what the log has queued.
    pub async fn crash(&mut self, number: usize) {
        let node = &mut self.nodes[number];
        let Some(live) = node.live.take() else { return };
        if self.dice.chance(2) {
            node.disk.cut_power_at(node.disk.io_count() + 1 + self.dice.below(2));
            live.log.pump();
        }
        node.disk.cut_power();
        self.net.down(node.id);
        self.readers.lock().remove(&node.id);
        live.alive.cancel();
        // Whatever waits for the disk hears that it is dead.
        live.log.pump();
        live.machine.die();
        live.group.shutdown().await;
        drop(live);
        let loss = if self.dice.chance(3) { Loss::All } else { Loss::Random };
        node.disk.power_cycle(loss);
        self.oracle.lock().restarts += 1;
    }

    pub fn live(&self) -> impl Iterator<Item = (&Node<M>, &Live<M>)> {
        self.nodes.iter().filter_map(|node| Some((node, node.live.as_ref()?)))
    }

    /// The nodes that believe they lead.
    pub fn leaders(&self) -> Vec<&Live<M>> {
        self.live().map(|(_, live)| live).filter(|live| live.group.leadership().is_self).collect()
    }

    /// A leader that only one voter still follows is cut off from it, and that voter restarts at once: were it to vote
    /// right away, there would be a second leader within the first one's lease (design 14.9). Nothing may be proposed until
    /// `work` is called for the first time: the one that is cut off must have all there is, or nobody would vote for it.
    pub async fn forget_a_lease(&mut self, work: impl Fn(&Self)) {
        let leader = self.live().find(|(_, live)| live.group.leadership().is_self).map(|(node, _)| node.id);
        let Some(leader) = leader else { return };
        let others: Vec<u64> = (1..=NODES).filter(|other| *other != leader).collect();
        let (candidate, voter) =
            if self.dice.chance(2) { (others[0], others[1]) } else { (others[1], others[0]) };
        self.net.mend();
        self.net.cut(leader, candidate, true);
        SimRuntime::sleep(Duration::from_millis(1_400)).await;
        let number = voter as usize - 1;
        self.crash(number).await;
        self.net.cut(leader, voter, true);
        self.start(number).await;
        for _ in 0..40 {
            work(self);
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

    /// Nothing is broken any more, and everyone runs.
    pub async fn mend_all(&mut self) {
        self.net.mend();
        for number in 0..self.nodes.len() {
            self.nodes[number].sync_micros.store(1_500, Ordering::Relaxed);
            if self.nodes[number].live.is_none() {
                self.start(number).await;
            }
        }
    }

    /// Ends every process.
    pub async fn stop_all(&mut self) {
        for node in &mut self.nodes {
            if let Some(live) = node.live.take() {
                live.group.shutdown().await;
                live.alive.cancel();
                live.machine.die();
            }
            node.disk.cut_power();
        }
        self.readers.lock().clear();
    }

    pub fn report(&self) -> Vec<evershard_raft::GroupStatus> {
        self.live().map(|(_, live)| live.group.status()).collect()
    }
}
