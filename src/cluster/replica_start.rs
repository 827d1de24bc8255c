//! Making, opening and destroying the replicas of a node.
//!
//! Invariants:
//! - a replica is made in this order: its log, its store, its line in the identity; then it may start;
//! - it is `started` in the identity before it takes part; a started replica whose log or store is gone or damaged is
//!   quarantined, never started empty;
//! - that a replica is lost is written down before anything else happens to it: it never starts again;
//! - a lost replica is destroyed only when its successor votes in its place (then the placement does not name it any more):
//!   until then its data may be all that is left. An error that passes (no descriptors, a full disk) loses nothing.

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use evershard_raft::Group;
use evershard_storage::log::GroupKey;
use evershard_storage::rocks::{ReplicaIdentity, ReplicaStore};

use super::error::NodeError;
use super::identity::{Identity, ListedReplica};
use super::node::Node;
use super::recoveries::GIVEN_UP;
use super::replicas::{MetaReplica, Quarantined, ShardReplica};
use crate::ingest::{SequenceDoor, StepBuffer};
use crate::meta::MetaMachine;
use crate::meta::state::META_GROUP;
use crate::model::KeyRange;
use crate::shard::{ShardMachine, ShardOptions};

/// Before a replica that halted is opened again.
const STOPPED_PAUSE: Duration = Duration::from_secs(3);

/// A replica that is flushed and whose group is not open: dropping this ends that.
struct Unopened<'a> {
    node: &'a Node,
    listed: ListedReplica,
}

impl Drop for Unopened<'_> {
    fn drop(&mut self) {
        self.node.flusher.forget(self.listed.group, self.listed.replica);
    }
}

impl Node {
    /// The replicas on this node's list.
    #[must_use]
    pub fn listed(&self) -> Vec<ListedReplica> {
        self.identity.lock().as_ref().map_or(Vec::new(), |i| i.replicas.clone())
    }

    /// Makes an empty replica on disk, without starting it. Fine when it is there already. A lost replica of the same group
    /// stays beside it.
    ///
    /// # Errors
    /// [`NodeError::AlreadyHeld`] when the group is here under another id that is not lost.
    pub async fn create_replica(self: &Arc<Self>, new: ListedReplica) -> Result<(), NodeError> {
        let _one_at_a_time = self.changing.lock().await;
        let of_group: Vec<ListedReplica> =
            self.listed().into_iter().filter(|r| r.group == new.group).collect();
        if of_group.iter().any(|r| r.replica == new.replica) {
            return Ok(());
        }
        if let Some(held) = of_group.iter().find(|r| !r.damaged) {
            return Err(NodeError::AlreadyHeld {
                node: self.config.node_id,
                group: new.group,
                held: held.replica,
                asked: new.replica,
            });
        }
        let node = self.clone();
        blocking("making a replica", move || {
            let directory = node.directory_of(new);
            // What an earlier attempt left before it was listed.
            match std::fs::remove_dir_all(&directory) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(source) => return Err(NodeError::Io { path: directory, source }),
            }
            node.log.group(new.group, new.replica)?;
            node.made_logs.lock().insert(GroupKey { group: new.group, replica: new.replica });
            if new.group == META_GROUP {
                MetaMachine::open(&directory)?;
            } else {
                ReplicaStore::create(&directory, &node.store_identity(new), &node.rocks)?;
            }
            node.change_identity(|identity| identity.with(ListedReplica { started: false, ..new }))
        })
        .await
    }

    /// Starts a replica that is on the list: quarantines it when it is lost or damaged. Fine when it runs already.
    ///
    /// # Errors
    /// [`NodeError`] when it cannot be opened now and may be later (no descriptors, no space); damage is not an error here
    /// but a quarantine.
    pub async fn start_replica(self: &Arc<Self>, listed: ListedReplica) -> Result<(), NodeError> {
        let _one_at_a_time = self.changing.lock().await;
        if self.replicas.raft(listed.group).is_some() {
            return Ok(());
        }
        let key = GroupKey { group: listed.group, replica: listed.replica };
        // Opened again after it halted, or could not be opened at first: this process made its log.
        let has_log = self.found_logs.contains(&key) || self.made_logs.lock().contains(&key);
        let lost = match self.lost_logs.get(&key) {
            _ if self.is_given_up(listed.replica) => Some(GIVEN_UP.to_owned()),
            _ if listed.damaged => Some("it was found damaged before".to_string()),
            Some(reason) => Some(format!("its log is damaged: {reason}")),
            None if listed.started && !has_log => Some("its log is gone".to_string()),
            None => None,
        };
        if let Some(reason) = lost {
            return self.lose(listed, reason).await;
        }
        if !listed.started {
            let node = self.clone();
            blocking("starting a replica", move || {
                node.change_identity(|identity| identity.with(ListedReplica { started: true, ..listed }))
            })
            .await?;
        }
        let listed = ListedReplica { started: true, ..listed };
        let opened = if listed.group == META_GROUP {
            self.open_meta(listed).await
        } else {
            self.open_shard(listed).await
        };
        match opened {
            Ok(()) => Ok(()),
            Err(error) if error.is_damage() => self.lose(listed, error.to_string()).await,
            Err(error) => Err(error),
        }
    }

    /// As [`Node::lose`], for a replica that may be starting just now.
    pub(super) async fn lose_for(
        self: &Arc<Self>,
        listed: ListedReplica,
        reason: String,
    ) -> Result<(), NodeError> {
        let _one_at_a_time = self.changing.lock().await;
        self.lose(listed, reason).await
    }

    /// Quarantines a replica whose data is lost or damaged, durably: it never starts again.
    async fn lose(self: &Arc<Self>, listed: ListedReplica, reason: String) -> Result<(), NodeError> {
        let listed = ListedReplica { damaged: true, ..listed };
        self.replicas.quarantine(Quarantined { listed, reason, is_lost: true });
        let node = self.clone();
        blocking("quarantining a replica", move || {
            node.change_identity(|identity| {
                let known = identity.replicas.iter().find(|r| r.replica == listed.replica);
                known.map_or_else(
                    || identity.clone(),
                    |known| identity.with(ListedReplica { damaged: true, ..*known }),
                )
            })
        })
        .await
    }

    async fn open_meta(self: &Arc<Self>, listed: ListedReplica) -> Result<(), NodeError> {
        let node = self.clone();
        let (machine, log) = blocking("opening the meta group", move || {
            let machine = MetaMachine::open(&node.directory_of(listed))?;
            Ok((Arc::new(machine), node.log.group(listed.group, listed.replica)?))
        })
        .await?;
        let raft = self.registry()?.open(listed.group, listed.replica, machine.clone(), log).await?;
        self.replicas.set_meta(MetaReplica { listed, raft, machine });
        Ok(())
    }

    async fn open_shard(self: &Arc<Self>, listed: ListedReplica) -> Result<(), NodeError> {
        let node = self.clone();
        let failing = self.clone();
        // The agent writes down that it is lost, and closes its group.
        let damage: Arc<OnceLock<String>> = Arc::default();
        let found = damage.clone();
        let on_damage = Arc::new(move |reason: String| {
            found.get_or_init(|| reason.clone());
            failing.replicas.quarantine(Quarantined { listed, reason, is_lost: true });
        });
        let on_failed = on_damage.clone();
        let (machine, log) = blocking("opening a shard", move || {
            let options = ShardOptions {
                range: KeyRange { start: listed.range_start, end: listed.range_end },
                scrub_waker: Some(node.scrubber.waker()),
                budget: node.budget.clone(),
                prefetches: node.prefetcher.prefetches(),
                on_damage: Some(on_damage),
            };
            let (store, _) =
                ReplicaStore::open(&node.directory_of(listed), &node.store_identity(listed), &node.rocks)?;
            let machine = ShardMachine::open(options, store)?;
            Ok((Arc::new(machine), node.log.group(listed.group, listed.replica)?))
        })
        .await?;
        // Before its group opens: replay may bring more rows to memory than there is room for, and then it waits until they are
        // flushed and leave.
        let opened: Arc<OnceLock<Group>> = Arc::default();
        let purge = opened.clone();
        let on_flushed = move || {
            if let Some(raft) = purge.get() {
                raft.flushed();
            }
        };
        self.flusher.add(machine.clone(), log.clone(), Arc::new(on_flushed), on_failed);
        self.sweeper.add(&machine);
        // Also when nobody waits for the end of this any more.
        let unopened = Unopened { node: self, listed };
        let registry = self.registry()?;
        let raft = registry.open(listed.group, listed.replica, machine.clone(), log).await?;
        fail::fail_point!("replica_start::before_it_counts");
        if let Some(reason) = damage.get() {
            // Its flush found it meanwhile. It must neither vote nor serve.
            registry.close(listed.group).await?;
            return Err(NodeError::Damaged { replica: listed.replica, reason: reason.clone() });
        }
        std::mem::forget(unopened);
        opened.get_or_init(|| raft.clone());
        // What was flushed meanwhile.
        raft.flushed();
        self.scrubber.add(&machine);
        let reader = machine.reader();
        self.replicas.add_shard(ShardReplica {
            listed,
            raft,
            machine,
            reader,
            door: SequenceDoor::default(),
            steps: StepBuffer::default(),
            counted_compaction: AtomicU64::default(),
        });
        Ok(())
    }

    /// Ends a replica that was replaced, and deletes its data.
    ///
    /// # Errors
    /// What the disk said.
    pub async fn destroy_replica(self: &Arc<Self>, listed: ListedReplica) -> Result<(), NodeError> {
        let _one_at_a_time = self.changing.lock().await;
        self.destroy(listed).await
    }

    async fn destroy(self: &Arc<Self>, listed: ListedReplica) -> Result<(), NodeError> {
        tracing::info!(group = listed.group, replica = listed.replica, "a replaced replica is deleted");
        self.flusher.remove(listed.group, listed.replica).await;
        self.replicas.remove(listed);
        let registry = self.registry()?;
        if registry.group(listed.group).is_some_and(|g| g.replica() == listed.replica) {
            registry.close(listed.group).await?;
        }
        let node = self.clone();
        blocking("deleting a replica", move || {
            // Off the list first: what is left after a crash is a directory nobody asks for.
            node.change_identity(|identity| identity.without(listed.replica))?;
            let key = GroupKey { group: listed.group, replica: listed.replica };
            let directory = node.directory_of(listed);
            node.log.forget(key).map_err(|source| NodeError::Io { path: directory.clone(), source })?;
            registry.forget_snapshots(listed.group, listed.replica);
            match std::fs::remove_dir_all(&directory) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    Err(NodeError::Io { path: directory, source: error })
                }
                _ => Ok(()),
            }
        })
        .await
    }

    /// A replica that halted or whose flush found damage: ends its group, so that it neither votes nor serves. One that only
    /// halted (an entry of a newer version, a full disk in the middle of an install) has lost nothing: it is not replaced,
    /// and opened again after a pause, as at the start of the node.
    pub(super) async fn quarantine_halted(self: &Arc<Self>) {
        self.lose_damaged_logs();
        let shards = self.replicas.shards();
        let meta = self.replicas.meta();
        let all = shards
            .iter()
            .map(|r| (r.listed, r.raft.clone()))
            .chain(meta.iter().map(|m| (m.listed, m.raft.clone())));
        for (listed, raft) in all {
            let Some(reason) = raft.halted() else { continue };
            self.flusher.remove(listed.group, listed.replica).await;
            self.replicas.quarantine(Quarantined { listed, reason, is_lost: false });
        }
        self.write_down_lost().await;
        // A quarantined replica's group must not go on voting.
        let Ok(registry) = self.registry() else { return };
        for found in self.replicas.quarantined() {
            let open = registry.group(found.listed.group).filter(|g| g.replica() == found.listed.replica);
            if open.is_some() {
                self.flusher.remove(found.listed.group, found.listed.replica).await;
                let closed = tokio::time::timeout(Duration::from_secs(5), registry.close(found.listed.group));
                if let Ok(Err(error)) = closed.await {
                    tracing::error!(group = found.listed.group, %error, "a quarantined replica did not end");
                }
            } else if !found.is_lost && self.has_rested(found.listed.replica) {
                // From here on it is one of those that are still to be started.
                self.replicas.remove(found.listed);
            }
        }
    }

    /// That a replica is lost must outlive this process, and its successor waits for that: tried until the disk takes it.
    async fn write_down_lost(self: &Arc<Self>) {
        let unwritten = self.listed().into_iter().filter(|r| !r.damaged).map(|r| r.replica);
        let unwritten: Vec<u64> = unwritten.collect();
        for found in self.replicas.quarantined() {
            let replica = found.listed.replica;
            let rests = self.start_again_at.lock().get(&replica).is_some_and(|at| *at > Instant::now());
            if !found.is_lost || !unwritten.contains(&replica) || rests {
                continue;
            }
            if let Err(error) = self.lose_for(found.listed, found.reason).await {
                tracing::error!(group = found.listed.group, replica, %error, "a lost replica is not written down as lost; tried again");
                self.start_again_at.lock().insert(replica, Instant::now() + STOPPED_PAUSE);
            } else {
                self.start_again_at.lock().remove(&replica);
            }
        }
    }

    /// Replicas whose logs were found damaged while they ran. Before they are looked at as halted, which they soon are: for
    /// a log with a hole there is no opening again.
    fn lose_damaged_logs(&self) {
        for (key, reason) in self.log.damaged() {
            let listed = self.listed().into_iter().find(|r| r.replica == key.replica && !r.damaged);
            let is_known =
                self.replicas.quarantined().iter().any(|q| q.is_lost && q.listed.replica == key.replica);
            if let Some(listed) = listed.filter(|_| !is_known) {
                let reason = format!("its log is damaged: {reason}");
                self.replicas.quarantine(Quarantined { listed, reason, is_lost: true });
            }
        }
    }

    /// Whether a stopped replica has been so for a while; begins to count when first asked.
    fn has_rested(&self, replica: u64) -> bool {
        let mut start_again_at = self.start_again_at.lock();
        let at = *start_again_at.entry(replica).or_insert_with(|| Instant::now() + STOPPED_PAUSE);
        let is_over = at <= Instant::now();
        if is_over {
            start_again_at.remove(&replica);
        }
        is_over
    }

    pub(super) fn change_identity(
        &self,
        change: impl FnOnce(&Identity) -> Identity,
    ) -> Result<(), NodeError> {
        let mut identity = self.identity.lock();
        let known = identity.as_ref().ok_or(NodeError::NoCluster { node: self.config.node_id })?;
        let changed = change(known);
        changed.write(&self.config.data)?;
        *identity = Some(changed);
        Ok(())
    }

    pub(super) fn directory_of(&self, listed: ListedReplica) -> PathBuf {
        self.config.data.join("replicas").join(format!("{}-{}", listed.group, listed.replica))
    }

    fn store_identity(&self, listed: ListedReplica) -> ReplicaIdentity {
        ReplicaIdentity {
            cluster: self.cluster_id(),
            node: self.config.node_id,
            group: listed.group,
            shard: listed.shard,
            replica: listed.replica,
        }
    }
}

pub(super) async fn blocking<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> Result<T, NodeError> + Send + 'static,
) -> Result<T, NodeError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| NodeError::Unfinished { what })?
}
