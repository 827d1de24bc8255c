//! The agent of a node: keeps what runs here to what the meta group decided.
//!
//! Two loops, so that a slow remote call never delays what is local: `run_local` (join, make and start replicas,
//! quarantine, the meta group's flush, readiness) and `run_cluster` (memberships of led groups; on the meta leader
//! unfinished tables and ended sessions).
//!
//! Invariants:
//! - every step may be repeated, by this node or another;
//! - a replica takes part only after the meta group knows that it was created: an empty disk is then a lost replica and
//!   never a new one under an old id.
//!
//! Not here: the steps of memberships, tables and sessions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::v1::{
    ErrorKind, GetNodeStatusRequest, GroupPlacement, HeldReplica, JoinRequest, MarkReplicaCreated, MetaState,
    ReplicaPlacement, meta_command::Command,
};
use prost::Message;
use tokio_util::sync::CancellationToken;

use super::identity::ListedReplica;
use super::node::Node;
use super::steps::forget_steps;
use crate::meta::state::{META_GROUP, gave_away};
use crate::model::Action;
use crate::service::RequestError;
use crate::telemetry::metric_definitions as metric;

const LOCAL_PAUSE: Duration = Duration::from_millis(50);
const CLUSTER_PAUSE: Duration = Duration::from_millis(200);
/// After a replica could not be opened, for a reason that may pass.
const START_AGAIN_PAUSE: Duration = Duration::from_secs(2);
const JOIN_PAUSE: Duration = Duration::from_millis(500);
const HEARING_PAUSE: Duration = Duration::from_secs(1);
const META_FLUSH_PAUSE: Duration = Duration::from_secs(1);
const SESSIONS_PAUSE: Duration = Duration::from_secs(5);
/// A table that is incomplete for this long is finished by the meta leader: whoever created it is gone.
const TABLES_PAUSE: Duration = Duration::from_secs(3);

/// Runs until `stop`: what is local to the node.
pub async fn run_local(node: Arc<Node>, stop: CancellationToken) {
    let mut join_at = Instant::now();
    let mut flush_at = Instant::now();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOCAL_PAUSE) => {}
        }
        if Instant::now() >= join_at && node.needs_join() {
            node.join().await;
            join_at = Instant::now() + JOIN_PAUSE;
        }
        node.learn_addresses();
        node.place_replicas().await;
        node.initialize_groups().await;
        node.quarantine_halted().await;
        if Instant::now() >= flush_at {
            node.flush_meta().await;
            node.count_replicas();
            node.count_snapshots();
            forget_steps(&node.replicas);
            flush_at = Instant::now() + META_FLUSH_PAUSE;
        }
        node.readiness.set(node.not_ready());
    }
}

/// Runs until `stop`: what this node does for the cluster.
pub async fn run_cluster(node: Arc<Node>, stop: CancellationToken) {
    let mut tables_at = Instant::now() + TABLES_PAUSE;
    let mut sessions_at = Instant::now() + SESSIONS_PAUSE;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(CLUSTER_PAUSE) => {}
        }
        node.reconcile_memberships().await;
        let leadership = node.replicas.meta().map(|m| m.raft.leadership()).unwrap_or_default();
        if !leadership.is_self || !leadership.is_ready {
            continue;
        }
        if Instant::now() >= tables_at {
            node.finish_tables().await;
            tables_at = Instant::now() + TABLES_PAUSE;
        }
        node.end_dead_workers(leadership.term).await;
        if Instant::now() >= sessions_at {
            node.expire_sessions(leadership.term).await;
            sessions_at = Instant::now() + SESSIONS_PAUSE;
        }
    }
}

/// Runs until `stop`: asks the other nodes whether they are there, for the routing table.
pub async fn run_hearing(node: Arc<Node>, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(HEARING_PAUSE) => {}
        }
        let state = node.meta_state();
        let mut others: Vec<String> =
            state.nodes.iter().filter(|n| n.id != node.config.node_id).map(|n| n.address.clone()).collect();
        if others.is_empty() {
            // Its copy of the meta state is empty yet, and may be so for want of what a peer knows of recoveries.
            others.extend(node.config.peers.iter().filter(|peer| **peer != node.config.advertise).cloned());
        }
        let asked = others.into_iter().map(|address| {
            let node = node.clone();
            async move {
                let Ok(mut client) = node.peers.admin(&address) else { return };
                let mut request = tonic::Request::new(GetNodeStatusRequest::default());
                request.set_timeout(HEARING_PAUSE);
                match client.get_node_status(request).await {
                    Ok(status) => {
                        let status = status.into_inner();
                        node.heed(&status).await;
                        node.hear(status.node, status.disk);
                    }
                    Err(status) => tracing::trace!(address, %status, "not heard of"),
                }
            }
        });
        futures_util::future::join_all(asked).await;
    }
}

impl Node {
    /// A node asks to join while it has no cluster, has no copy of the meta state of its own, holds lost replicas, misses one
    /// that it once made, or moved to another address.
    fn needs_join(&self) -> bool {
        if self.identity.lock().is_none() || self.replicas.meta().is_none() {
            return true;
        }
        if self.replicas.quarantined().iter().any(|q| q.is_lost) {
            return true;
        }
        let state = self.meta_state();
        let own = self.config.node_id;
        let moved = state.nodes.iter().any(|n| n.id == own && n.address != self.config.advertise);
        let listed = self.listed();
        let mut placed = state.groups.iter().flat_map(|g| &g.replicas).filter(|r| r.node == own);
        moved || placed.any(|r| r.created && !listed.iter().any(|held| held.replica == r.replica))
    }

    /// Tells the lanes where the nodes are: one may have moved since a leader began to replicate to it.
    fn learn_addresses(&self) {
        let Ok(registry) = self.registry() else { return };
        for other in self.meta_state().nodes.iter().filter(|n| n.id != self.config.node_id) {
            registry.learn_address(other.id, &other.address);
        }
    }

    async fn join(self: &Arc<Self>) {
        let quarantined = self.replicas.quarantined();
        let held = self.listed().into_iter().map(|r| HeldReplica {
            group: r.group,
            replica: r.replica,
            quarantined: quarantined.iter().any(|q| q.is_lost && q.listed.replica == r.replica),
        });
        let request = JoinRequest {
            cluster_id: self.cluster_id(),
            node: self.config.node_id,
            address: self.config.advertise.clone(),
            held: held.collect(),
        };
        let mut through = self.config.peers.clone();
        through.extend(self.meta_state().nodes.iter().map(|n| n.address.clone()));
        through.retain(|address| *address != self.config.advertise);
        through.dedup();
        for address in through {
            let Ok(mut client) = self.peers.node(&address) else { continue };
            let reply = match client.join(request.clone()).await {
                Ok(reply) => reply.into_inner(),
                Err(status) => {
                    let error = RequestError::from_status(&status);
                    if error.kind() == ErrorKind::Conflict {
                        // Nothing that passes by itself: an operator has to know.
                        tracing::error!(address, %error, "this server is not let into the cluster");
                    } else {
                        tracing::debug!(address, %error, "not joined through this node");
                    }
                    continue;
                }
            };
            if reply.cluster_id.is_empty() {
                continue;
            }
            let node = self.clone();
            let cluster_id = reply.cluster_id.clone();
            match tokio::task::spawn_blocking(move || node.adopt(&cluster_id)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::error!(address, %error, "cannot join the cluster of this node");
                    continue;
                }
                Err(_) => continue,
            }
            // First: what is told below holds after the recoveries that the teller knows of, and its peers refuse who does not.
            self.ask_for_recoveries_at(&address).await;
            match MetaState::decode(reply.meta_state) {
                Ok(state) => *self.mirrored.write() = Arc::new(state),
                Err(error) => tracing::error!(address, %error, "the meta state of this node does not decode"),
            }
            return;
        }
    }

    /// Makes and starts the replicas that the meta group placed here, and deletes what it gave to others.
    async fn place_replicas(self: &Arc<Self>) {
        let state = self.meta_state();
        if state.cluster_id.is_empty() || state.cluster_id != self.cluster_id() {
            return;
        }
        let listed = self.listed();
        let is_placed =
            |replica: &u64| state.groups.iter().flat_map(|g| &g.replicas).any(|r| r.replica == *replica);
        self.not_in_place.lock().retain(|replica, _| is_placed(replica));
        for group in &state.groups {
            for placed in group.replicas.iter().filter(|r| r.node == self.config.node_id) {
                let known = listed.iter().find(|r| r.replica == placed.replica).copied();
                let problem =
                    self.place_replica(group, placed, known).await.err().map(|error| error.to_string());
                self.say_once(group.group, placed.replica, problem);
            }
        }
        for held in listed.into_iter().filter(|r| self.is_replaced(&state, r)) {
            if let Err(error) = self.destroy_replica(held).await {
                tracing::error!(group = held.group, replica = held.replica, %error, "a replaced replica is not deleted");
            }
        }
    }

    /// What keeps a replica from its place is looked at many times a second, and said when it changes.
    fn say_once(&self, group: u64, replica: u64, problem: Option<String>) {
        let mut said = self.not_in_place.lock();
        let Some(problem) = problem else {
            said.remove(&replica);
            return;
        };
        if said.get(&replica) != Some(&problem) {
            tracing::warn!(group, replica, error = problem, "a replica is not in place yet");
            said.insert(replica, problem);
        }
    }

    async fn place_replica(
        self: &Arc<Self>,
        group: &GroupPlacement,
        placed: &ReplicaPlacement,
        known: Option<ListedReplica>,
    ) -> Result<(), super::error::NodeError> {
        match known {
            // Made here from an old copy of the placement, after it was made and lost: not the replica that the group knows.
            Some(known) if placed.created && placed.making != known.making && !known.started => {
                self.destroy_replica(known).await?;
            }
            Some(known) if placed.created => {
                let quarantined =
                    self.replicas.quarantined().iter().any(|q| q.listed.replica == known.replica);
                let rests =
                    self.start_again_at.lock().get(&known.replica).is_some_and(|at| *at > Instant::now());
                if !quarantined && !rests && self.replicas.raft(known.group).is_none() {
                    let started = self.start_replica(known).await;
                    if started.is_err() {
                        self.start_again_at.lock().insert(known.replica, Instant::now() + START_AGAIN_PAUSE);
                    }
                    started?;
                }
            }
            Some(known) => self.mark_created(known).await,
            // Created, and not here: the disk was wiped. Join gives it a successor.
            None if placed.created => {}
            None => {
                let new = ListedReplica {
                    group: group.group,
                    shard: group.shard,
                    replica: placed.replica,
                    range_start: group.range_start,
                    range_end: group.range_end,
                    started: false,
                    making: uuid::Uuid::new_v4().as_u64_pair().0 | 1,
                    damaged: false,
                };
                self.create_replica(new).await?;
                self.mark_created(new).await;
            }
        }
        Ok(())
    }

    async fn mark_created(self: &Arc<Self>, replica: ListedReplica) {
        let mark = Command::MarkReplicaCreated(MarkReplicaCreated {
            group: replica.group,
            replica: replica.replica,
            making: replica.making,
        });
        let deadline = Instant::now() + Duration::from_secs(2);
        if let Err(error) = self.propose_meta(mark, deadline).await {
            tracing::debug!(group = replica.group, replica = replica.replica, %error, "not marked as created yet");
        }
    }

    /// A replica here whose place the meta group gave away for good. A stale copy of the meta state must not delete a
    /// living replica: so its own group must have let it go too, or it must be quarantined.
    fn is_replaced(&self, state: &MetaState, held: &ListedReplica) -> bool {
        if !gave_away(state, held.group, held.replica) {
            return false;
        }
        if self.replicas.quarantined().iter().any(|q| q.listed.replica == held.replica) {
            return true;
        }
        let raft = self.replicas.raft(held.group).filter(|raft| raft.replica() == held.replica);
        raft.is_some_and(|raft| {
            let members = raft.members();
            !members.voters.is_empty() && members.peer(held.replica).is_none()
        })
    }

    async fn flush_meta(self: &Arc<Self>) {
        let Some(meta) = self.replicas.meta() else { return };
        let flushed = tokio::task::spawn_blocking({
            let meta = meta.clone();
            move || {
                meta.machine.flush(|index| {
                    matches!(meta.raft.log().wait_durable(index, Duration::from_secs(1)), Ok(true))
                })
            }
        })
        .await;
        match flushed {
            Ok(Ok(true)) => meta.raft.flushed(),
            Ok(Ok(false)) => {}
            Ok(Err(error)) => {
                tracing::error!(%error, "the meta group's state is not flushed; its log is kept")
            }
            Err(error) => tracing::error!(%error, "the meta group's flush panicked"),
        }
    }

    fn not_ready(&self) -> Option<String> {
        let state = self.meta_state();
        if state.cluster_id.is_empty() {
            return Some("no cluster yet".into());
        }
        if let Some(found) = self.replicas.quarantined().first() {
            return Some(format!(
                "the replica of group {} is quarantined: {}",
                found.listed.group, found.reason
            ));
        }
        for group in &state.groups {
            if group.replicas.iter().all(|r| r.node != self.config.node_id) {
                continue;
            }
            let Some(raft) = self.replicas.raft(group.group) else {
                return Some(format!("the replica of group {} is not started", group.group));
            };
            if raft.leadership().leader.is_none() {
                return Some(format!("group {} has no leader", group.group));
            }
            if group.group != META_GROUP && self.replicas.shard(group.group).is_ok_and(|r| !r.machine.ready())
            {
                return Some(format!("the replica of group {} is replaying its log", group.group));
            }
        }
        None
    }

    fn count_snapshots(&self) {
        let Ok(registry) = self.registry() else { return };
        let figures = registry.snapshot_figures();
        for (outcome, count) in
            [("sent", figures.sent), ("received", figures.received), ("failed", figures.failed)]
        {
            metrics::counter!(metric::SNAPSHOTS_TOTAL, "outcome" => outcome).absolute(count);
        }
        for (kind, bytes) in [
            ("sent", figures.bytes_sent),
            ("received", figures.bytes_received),
            ("skipped", figures.bytes_skipped),
        ] {
            metrics::counter!(metric::SNAPSHOT_BYTES_TOTAL, "kind" => kind).absolute(bytes);
        }
        metrics::counter!(metric::SNAPSHOTS_RESUMED_TOTAL).absolute(figures.resumed);
        metrics::counter!(metric::SNAPSHOT_CHUNKS_REPEATED_TOTAL).absolute(figures.chunks_repeated);
        metrics::gauge!(metric::SNAPSHOT_BYTES_PER_SECOND).set(figures.bytes_per_second as f64);
    }

    fn count_replicas(&self) {
        metrics::gauge!(metric::MEMORY_USED_BYTES).set(self.budget.used() as f64);
        metrics::gauge!(metric::MEMORY_BUDGET_BYTES).set(self.budget.limit().unwrap_or(0) as f64);
        let written =
            |part: &'static str| metrics::counter!(metric::DISK_WRITTEN_BYTES_TOTAL, "part" => part);
        written("log").absolute(self.log.stats().written_bytes);
        // What grew, and not the sum of what there is: a replica that goes takes nothing away.
        let compacted = self.replicas.shards().iter().map(|replica| replica.take_compacted_bytes()).sum();
        written("compaction").increment(compacted);
        for replica in self.replicas.shards() {
            let shard = replica.listed.shard.to_string();
            let raft = replica.raft.status();
            metrics::gauge!(metric::REPLICA_IN_FLIGHT_BYTES, "shard" => shard.clone())
                .set(raft.in_flight_bytes as f64);
            let role = format!("{:?}", raft.role).to_lowercase();
            for known in ["leader", "follower", "learner", "candidate", "stopped"] {
                let value = if role == known { 1.0 } else { 0.0 };
                metrics::gauge!(metric::REPLICA_ROLE, "shard" => shard.clone(), "role" => known).set(value);
            }
            let status = replica.machine.status();
            metrics::gauge!(metric::REPLICA_APPLIED_INDEX, "shard" => shard.clone())
                .set(status.applied as f64);
            metrics::gauge!(metric::REPLICA_FLUSHED_INDEX, "shard" => shard.clone())
                .set(status.flushed as f64);
            let rows: u64 = status.tables.iter().map(|t| t.rows).sum();
            metrics::gauge!(metric::REPLICA_ROWS, "shard" => shard.clone()).set(rows as f64);
            for (table, counts) in replica.machine.offences().totals() {
                let Some(schema) = replica.reader.schema(table) else {
                    // Told while the table was dropped, or it was not in a snapshot any more.
                    replica.machine.offences().forget(table);
                    continue;
                };
                for action in Action::ALL.into_iter().filter(|action| counts.of(*action) > 0) {
                    let table = schema.name().to_owned();
                    metrics::counter!(metric::NON_FINITE_TOTAL, "shard" => shard.clone(), "table" => table, "action" => action.name())
                        .absolute(counts.of(action));
                }
            }
        }
    }
}
