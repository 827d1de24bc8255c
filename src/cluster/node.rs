//! One node: its data directory, its log, its groups, and what it knows of the cluster.
//!
//! A node starts in one of two ways: with an identity (it goes on with what it holds), or without (it waits for
//! `cluster init`, or joins through its peers: see `agent.rs`).
//!
//! Invariants:
//! - a data directory with an identity and without its log is refused: the node would forget acknowledged pushes;
//! - the cluster id is set once ([`Node::adopt`]) and never changes.
//!
//! Not here: making and opening replicas (`replica_start.rs`), keeping to the meta group's decisions (`agent.rs`).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use evershard_proto::v1::{DiskStatus, ErrorKind, MetaState};
use evershard_raft::{
    ApplyThreads, GroupRegistry, NotServing, RaftLimits, RaftOptions, RaftTiming, peer_service,
};
use evershard_storage::disk::RealDisk;
use evershard_storage::log::{Driver, Durability as LogDurability, GroupKey, Log, LogError, LogOptions};
use evershard_storage::rocks::{RocksOptions, RocksShared};
use parking_lot::{Mutex, RwLock};

use super::disk_watch::DiskWatch;
use super::error::NodeError;
use super::freshness::Freshness;
use super::holds::Holds;
use super::identity::Identity;
use super::jobs::WorkerLeases;
use super::peer_clients::PeerClients;
use super::push_gate::PushGate;
use super::recoveries::RecoveryEpoch;
use super::replicas::Replicas;
use super::sessions::Leases;
use crate::config::{Durability, ServerConfig};
use crate::flush::Flusher;
use crate::memory::{MemoryBudget, Sweeper};
use crate::routing::Leaders;
use crate::service::{LateRaftService, RequestError};
use crate::shard::{Prefetcher, Scrubber};
use crate::telemetry::Readiness;

/// A node not heard of for this long is shown as down.
const HEARD_WITHIN: Duration = Duration::from_millis(3500);

/// A leader stops answering from its lease this part of the lease early: far more than two clocks drift apart in it.
const LEASE_MARGIN_PART: u64 = 10;

/// Memory for the store's blocks, indexes and filters: with a budget of b the store may hold ten times as much, whose filters (10
/// bits a row) and indexes are about a hundredth of that, and they must stay in memory for an absent id to cost no more than a
/// look at them. So an eighth of the budget, and some for blocks.
fn block_cache_bytes(memory_budget: u64) -> usize {
    const LEAST: u64 = 64 << 20;
    const MOST: u64 = 4 << 30;
    let bytes = if memory_budget == 0 { 128 << 20 } else { (memory_budget / 8).clamp(LEAST, MOST) };
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// The raft crate's service, which comes when the cluster is known.
pub type LanesDoor = LateRaftService<evershard_raft::PeerService>;

/// What a node said of itself, and when.
#[derive(Debug)]
pub(super) struct Heard {
    at: Instant,
    disk: DiskStatus,
}

/// A node of a cluster, or one that waits for a cluster.
pub struct Node {
    /// Its settings.
    pub config: ServerConfig,
    /// What runs here.
    pub replicas: Arc<Replicas>,
    /// Ways to other nodes.
    pub peers: PeerClients,
    /// Whether it is ready.
    pub readiness: Readiness,
    /// When it started.
    pub started: Instant,
    /// The lanes' door, to be mounted in the server.
    pub lanes: LanesDoor,
    /// Its disk.
    pub disk: DiskWatch,
    /// Which groups take no pushes because of a full disk.
    pub push_gate: Arc<PushGate>,
    pub(super) log: Log,
    pub(super) lost_logs: HashMap<GroupKey, String>,
    pub(super) found_logs: HashSet<GroupKey>,
    /// Logs that this process made itself.
    pub(super) made_logs: Mutex<HashSet<GroupKey>>,
    pub(super) rocks: RocksShared,
    pub(super) flusher: Flusher,
    pub(super) scrubber: Scrubber,
    /// What rows may take in memory, over all replicas.
    pub budget: Arc<MemoryBudget>,
    pub(super) sweeper: Sweeper,
    pub(super) prefetcher: Prefetcher,
    pub(super) identity: Mutex<Option<Identity>>,
    pub(super) heard: Mutex<HashMap<u64, Heard>>,
    /// How fresh its replicas are.
    pub freshness: Arc<Freshness>,
    /// Of which recovery epoch it is.
    pub recovery: RecoveryEpoch,
    pub(super) registry: OnceLock<Arc<GroupRegistry>>,
    pub(super) leases: Leases,
    /// Of workers.
    pub(super) worker_leases: WorkerLeases,
    pub(super) holds: Holds,
    /// Held while the shards are told of ended sessions.
    pub(super) ending_sessions: tokio::sync::Mutex<()>,
    /// What last kept each replica from its place.
    pub(super) not_in_place: Mutex<HashMap<u64, String>>,
    /// When to try again to start replicas that could not be opened.
    pub(super) start_again_at: Mutex<HashMap<u64, Instant>>,
    /// One replica is made, opened or destroyed at a time.
    pub(super) changing: tokio::sync::Mutex<()>,
    /// The cluster as another node told it, for nodes outside the meta group.
    pub(super) mirrored: RwLock<Arc<MetaState>>,
}

impl Node {
    /// Opens the data directory: checks whose it is, recovers the log. Blocks on the disk.
    ///
    /// # Errors
    /// [`NodeError`]: the node does not start.
    pub fn open(config: ServerConfig, readiness: Readiness) -> Result<Arc<Self>, NodeError> {
        let data = &config.data;
        std::fs::create_dir_all(data).map_err(|source| NodeError::of_data(data, source))?;
        let identity = Identity::read(data, &config.cluster_id, config.node_id)?;
        let mut options = LogOptions::new(data.join("log"));
        options.segment_bytes = config.log_segment_bytes;
        options.cache_bytes = config.log_cache_bytes;
        options.durability = match config.durability {
            Durability::Fsync => LogDurability::Fsync,
            Durability::Memory => LogDurability::Memory,
        };
        // Started replicas without a log: they would forget what they acknowledged. None is created in its place.
        options.must_exist = identity.as_ref().is_some_and(|i| i.replicas.iter().any(|r| r.started));
        let (log, recovery) =
            Log::open(options, Arc::new(RealDisk), Driver::Threaded).map_err(|error| match error {
                LogError::Gone { .. } => NodeError::LogGone { path: data.clone() },
                other => NodeError::of_log(data, other),
            })?;
        if recovery.torn_bytes > 0 {
            tracing::info!(
                bytes = recovery.torn_bytes,
                "cut a torn tail off the log: nothing acknowledged was in it"
            );
        }
        if recovery.boot_changed {
            tracing::error!(
                "the system went down while this node ran with durability = memory: what it acknowledged may be gone, and \
                 its replicas are quarantined until their groups replace them"
            );
        }
        for damage in &recovery.damage {
            // Every replica that the damage may have hit is quarantined: those the log still names, and below, in
            // `start_replica`, those it does not name any more.
            tracing::error!(log = %data.join("log").display(), damage, "the log is damaged");
        }
        let disk = DiskWatch::start(
            data,
            log.clone(),
            config.disk_low_water_bytes,
            config.log_segment_bytes,
            Duration::from_millis(config.disk_stall_ms),
        )
        .map_err(|source| NodeError::Io { path: data.clone(), source })?;
        let block_cache_bytes = block_cache_bytes(config.memory_budget);
        let compaction_bytes_per_s = config.compaction_bytes_per_s;
        let rocks = RocksOptions { block_cache_bytes, compaction_bytes_per_s, ..RocksOptions::default() };
        let rocks = RocksShared::new(rocks)?;
        let flusher =
            Flusher::start(Duration::from_millis(config.flush_interval_ms), config.flush_dirty_bytes)
                .map_err(|source| NodeError::Io { path: data.clone(), source })?;
        let budget = MemoryBudget::new(config.memory_budget);
        let sweeper =
            Sweeper::start(&budget).map_err(|source| NodeError::Io { path: data.clone(), source })?;
        let prefetcher =
            Prefetcher::start().map_err(|source| NodeError::Io { path: data.clone(), source })?;
        let scrubber = Scrubber::start().map_err(|source| NodeError::Io { path: data.clone(), source })?;
        let recovery_epoch = RecoveryEpoch::default();
        let node = Arc::new(Node {
            replicas: Arc::new(Replicas::default()),
            peers: PeerClients::new(recovery_epoch.clone()),
            recovery: recovery_epoch,
            freshness: Arc::default(),
            readiness,
            started: Instant::now(),
            lanes: LanesDoor::default(),
            lost_logs: recovery.quarantined.into_iter().map(|q| (q.key, q.reason)).collect(),
            found_logs: recovery.groups.into_iter().map(|g| g.key).collect(),
            made_logs: Mutex::default(),
            disk,
            push_gate: Arc::default(),
            log,
            rocks,
            flusher,
            scrubber,
            budget,
            sweeper,
            prefetcher,
            identity: Mutex::new(None),
            heard: Mutex::default(),
            registry: OnceLock::new(),
            leases: Leases::default(),
            worker_leases: WorkerLeases::default(),
            holds: Holds::default(),
            ending_sessions: tokio::sync::Mutex::default(),
            not_in_place: Mutex::default(),
            start_again_at: Mutex::default(),
            changing: tokio::sync::Mutex::new(()),
            mirrored: RwLock::new(Arc::new(MetaState::default())),
            config,
        });
        if let Some(identity) = identity {
            node.open_registry(&identity.cluster_id)?;
            *node.identity.lock() = Some(identity);
            node.follow_recoveries();
        }
        Ok(node)
    }

    /// Makes this node one of `cluster_id`, durably; fine when it is already. Blocks on the disk.
    ///
    /// # Errors
    /// [`NodeError::WrongCluster`] when it belongs to another.
    pub fn adopt(&self, cluster_id: &str) -> Result<(), NodeError> {
        let mut identity = self.identity.lock();
        if let Some(own) = identity.as_ref() {
            if own.cluster_id == cluster_id {
                return Ok(());
            }
            return Err(NodeError::WrongCluster {
                node: self.config.node_id,
                own: own.cluster_id.clone(),
                asked: cluster_id.into(),
            });
        }
        if !self.config.cluster_id.is_empty() && self.config.cluster_id != cluster_id {
            return Err(NodeError::WrongCluster {
                node: self.config.node_id,
                own: self.config.cluster_id.clone(),
                asked: cluster_id.into(),
            });
        }
        let adopted = Identity {
            cluster_id: cluster_id.into(),
            node: self.config.node_id,
            replicas: Vec::new(),
            given_up: BTreeSet::new(),
        };
        adopted.write(&self.config.data)?;
        self.open_registry(cluster_id)?;
        *identity = Some(adopted);
        tracing::info!(cluster_id, node = self.config.node_id, "joined the cluster");
        Ok(())
    }

    fn open_registry(&self, cluster_id: &str) -> Result<(), NodeError> {
        let config = &self.config;
        let mut options = RaftOptions::new(cluster_id, config.node_id, config.data.clone());
        options.timing = RaftTiming {
            heartbeat: Duration::from_millis(config.heartbeat_ms),
            election_min: Duration::from_millis(config.election_min_ms),
            election_max: Duration::from_millis(config.election_max_ms),
            lease_margin: Duration::from_millis(config.election_max_ms / LEASE_MARGIN_PART),
            ..RaftTiming::default()
        };
        options.limits = RaftLimits {
            in_flight_bytes: config.group_in_flight_bytes,
            retain_log_bytes: config.log_retain_bytes,
            snapshot_hold_log_bytes: config.log_hold_bytes,
            snapshot_bytes_per_second: Some(config.snapshot_bytes_per_second).filter(|rate| *rate > 0),
            snapshot_busy_bytes_per_second: Some(config.snapshot_busy_bytes_per_second)
                .filter(|rate| *rate > 0),
            ..RaftLimits::default()
        };
        let threads = ApplyThreads::start(config.apply_threads)
            .map_err(|source| NodeError::Io { path: config.data.clone(), source })?;
        let registry = GroupRegistry::new(options, threads)?;
        let log = self.log.clone();
        registry.watch_log(Arc::new(move || log.stats().written_bytes));
        self.lanes.open(peer_service(&registry));
        if self.registry.set(registry).is_err() {
            tracing::error!("the node's groups were set up twice");
        }
        Ok(())
    }

    /// The cluster's id; empty before there is one.
    #[must_use]
    pub fn cluster_id(&self) -> String {
        self.identity.lock().as_ref().map_or(String::new(), |i| i.cluster_id.clone())
    }

    /// The cluster as this node knows it.
    #[must_use]
    pub fn meta_state(&self) -> Arc<MetaState> {
        match self.replicas.meta() {
            Some(meta) => meta.machine.state(),
            None => self.mirrored.read().clone(),
        }
    }

    /// Refuses what needs a cluster when there is none.
    ///
    /// # Errors
    /// NOT_INITIALIZED, saying what to do.
    pub fn require_cluster(&self) -> Result<(), RequestError> {
        if self.meta_state().cluster_id.is_empty() {
            let error = NodeError::NoCluster { node: self.config.node_id };
            return Err(RequestError::new(ErrorKind::NotInitialized, error.to_string()).retry_soon());
        }
        Ok(())
    }

    /// Waits until this node's copy of the meta state fits, or the deadline.
    pub(super) async fn wait_for_meta(&self, deadline: Instant, fits: impl Fn(&MetaState) -> bool) {
        while !fits(&self.meta_state()) && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Who leads each group, as the replicas here know. A leader that was cut off from its peers takes itself for one for
    /// ever: it names itself only while its lease holds, or clients would come back to it again and again.
    #[must_use]
    pub fn leaders(&self) -> Leaders {
        let known = |group: u64, raft: &evershard_raft::Group| {
            let leadership = raft.leadership();
            let is_cut_off = leadership.is_self
                && matches!(
                    raft.serving_lease(),
                    Err(NotServing::LeaseExpired { .. } | NotServing::Transferring)
                );
            leadership.leader.filter(|_| !is_cut_off).map(|(_, peer)| (group, peer.node))
        };
        let mut leaders: Leaders =
            self.replicas.shards().iter().filter_map(|r| known(r.listed.group, &r.raft)).collect();
        leaders.extend(self.replicas.meta().and_then(|m| known(0, &m.raft)));
        leaders
    }

    /// Whether this node hears of `node`: it is this one, or leads or was lately heard of in a group here.
    #[must_use]
    pub fn hears_of(&self, node: u64) -> bool {
        node == self.config.node_id
            || self.heard.lock().get(&node).is_some_and(|heard| heard.at.elapsed() < HEARD_WITHIN)
    }

    pub(super) fn hear(&self, node: u64, disk: Option<DiskStatus>) {
        let heard = Heard { at: Instant::now(), disk: disk.unwrap_or_default() };
        self.heard.lock().insert(node, heard);
    }

    /// Whether another node is there, and its disk is well.
    pub(super) fn has_room(&self, node: u64) -> bool {
        let is_well =
            |heard: &Heard| heard.at.elapsed() < HEARD_WITHIN && !heard.disk.low && !heard.disk.stalled;
        node != self.config.node_id && self.heard.lock().get(&node).is_some_and(is_well)
    }

    /// Whether another node's disk is full, as far as this one has heard.
    pub(super) fn hears_of_full(&self) -> bool {
        let heard = self.heard.lock();
        heard.values().any(|heard| heard.at.elapsed() < HEARD_WITHIN && heard.disk.low)
    }

    /// What another node said when its disk is full.
    pub(super) fn full_note_of(&self, node: u64) -> Option<String> {
        let heard = self.heard.lock();
        let heard = heard.get(&node).filter(|heard| heard.at.elapsed() < HEARD_WITHIN && heard.disk.low);
        heard.map(|heard| heard.disk.note.clone())
    }

    pub(super) fn registry(&self) -> Result<Arc<GroupRegistry>, NodeError> {
        self.registry.get().cloned().ok_or(NodeError::NoCluster { node: self.config.node_id })
    }

    /// Ends the node cleanly: leadership moves first, then the groups, the flusher and the log end, in this order.
    pub async fn shutdown(self: &Arc<Self>) {
        self.readiness.set(Some("shutting down".into()));
        if let Some(registry) = self.registry.get() {
            registry.shutdown().await;
        }
        let node = self.clone();
        let ended = tokio::task::spawn_blocking(move || {
            node.flusher.stop();
            node.log.close()
        });
        match ended.await {
            Ok(Ok(())) => tracing::info!("the node ended cleanly"),
            Ok(Err(error)) => tracing::error!(%error, "the log did not close cleanly"),
            Err(error) => tracing::error!(%error, "closing the node failed"),
        }
    }
}
