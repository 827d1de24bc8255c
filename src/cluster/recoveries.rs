//! What a node knows of unsafe recoveries: the replicas that were given up, and the epoch that this makes.
//!
//! The lost nodes' old disks are a majority of the groups as they were. So whoever recovers writes down, before anything
//! else, which replicas are given up for ever; nodes tell each other, and nothing passes between a node that has heard and
//! one that has not. The epoch is the number of replicas given up: the set only grows, so of two epochs the greater is newer.
//!
//! ```text
//! survivor: given up 12, 13 -> its identity -> lanes of epoch 0 end -> the groups are recovered
//! node 2, with its old disk: asks its peers before it starts a replica -> 12 is given up -> quarantined, gets a successor
//! client: sees epoch 2 in a routing table -> takes no table of a lower one, and old nodes refuse what it sends
//! ```
//!
//! Invariants:
//! - a replica that was given up neither votes nor serves from the moment its node hears of it, and never starts again;
//! - a given up replica stays given up: the set is in the identity, and only grows;
//! - what a node knew of the cluster before it heard is never shown as of the new epoch;
//! - lanes connect nodes of one epoch only (`evershard_raft`), a client's stream asks under the node's own epoch.
//!
//! What this cannot do: old nodes that reach nobody who has heard, and clients that reach only them, go on with the old
//! history until they hear. Nobody can tell them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use evershard_proto::RECOVERY_METADATA;
use evershard_proto::v1::{ErrorDetail, ErrorKind, GetNodeStatusRequest, MetaState, NodeStatus};
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

use super::error::NodeError;
use super::node::Node;
use super::replica_start::blocking;
use crate::meta::MetaMachine;
use crate::meta::state::META_GROUP;
use crate::service::RequestError;

/// For a peer that is asked before replicas start. One that is up answers in milliseconds.
const ASK_WITHIN: Duration = Duration::from_secs(1);

/// Why a replica that was given up is quarantined.
pub(super) const GIVEN_UP: &str =
    "it was given up by an unsafe recovery: its group went on without what it holds";

/// The epoch of a node, shared by all that asks and is asked in its name. As an interceptor it says the epoch in each call.
#[derive(Debug, Clone, Default)]
pub struct RecoveryEpoch(Arc<AtomicU64>);

impl RecoveryEpoch {
    /// As of now.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    pub(super) fn set(&self, epoch: u64) {
        self.0.store(epoch, Ordering::SeqCst);
    }

    /// Refuses what is asked under any other epoch: one of both has not heard of a recovery.
    ///
    /// # Errors
    /// OTHER_RECOVERY, with this node's epoch.
    pub fn expect(&self, asked: u64) -> Result<(), RequestError> {
        let own = self.get();
        if asked == own {
            return Ok(());
        }
        let message = format!(
            "this node knows of recovery epoch {own}, the request is of {asked}: one of them has not heard of an unsafe recovery"
        );
        Err(RequestError::from(ErrorDetail {
            kind: ErrorKind::OtherRecovery as i32,
            message,
            recovery_epoch: own,
            ..Default::default()
        })
        .retry_soon())
    }

    /// Refuses what is asked in the name of a recovery that this node has not heard of. Who asks under a lower epoch, or
    /// none, may be a wiped node or an operator's tool: it learns by the answer.
    ///
    /// # Errors
    /// OTHER_RECOVERY.
    pub fn admit(&self, metadata: &MetadataMap) -> Result<(), RequestError> {
        Self::named_in(metadata)
            .filter(|asked| *asked > self.get())
            .map_or(Ok(()), |asked| self.expect(asked))
    }

    /// Refuses what another node asks under any other epoch.
    ///
    /// # Errors
    /// OTHER_RECOVERY.
    pub fn expect_same(&self, metadata: &MetadataMap) -> Result<(), RequestError> {
        self.expect(Self::named_in(metadata).unwrap_or(0))
    }

    fn named_in(metadata: &MetadataMap) -> Option<u64> {
        metadata.get(RECOVERY_METADATA).and_then(|value| value.to_str().ok()?.parse().ok())
    }
}

impl Interceptor for RecoveryEpoch {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert(RECOVERY_METADATA, MetadataValue::from(self.get()));
        Ok(request)
    }
}

impl Node {
    /// The replicas of this cluster that were given up, as far as this node has heard; ascending.
    #[must_use]
    pub fn given_up(&self) -> Vec<u64> {
        self.identity
            .lock()
            .as_ref()
            .map_or(Vec::new(), |identity| identity.given_up.iter().copied().collect())
    }

    pub(super) fn is_given_up(&self, replica: u64) -> bool {
        self.identity.lock().as_ref().is_some_and(|identity| identity.given_up.contains(&replica))
    }

    /// Takes in that `replicas` are given up: those that run here end, then all are written down, then the lanes and the
    /// doors are told.
    pub(super) async fn give_up(self: &Arc<Self>, replicas: &[u64]) -> Result<(), NodeError> {
        let known = self.given_up();
        let new: BTreeSet<u64> =
            replicas.iter().copied().filter(|r| known.binary_search(r).is_err()).collect();
        if new.is_empty() {
            return Ok(());
        }
        let ends_meta = self.replicas.meta().is_none_or(|meta| new.contains(&meta.listed.replica));
        if ends_meta {
            // It may be of the history that ends here. Where the others are is needed to ask them what holds now.
            let nodes = self.meta_state().nodes.clone();
            *self.mirrored.write() = Arc::new(MetaState { nodes, ..MetaState::default() });
        }
        for listed in self.listed().into_iter().filter(|r| !r.damaged && new.contains(&r.replica)) {
            self.lose_for(listed, GIVEN_UP.to_owned()).await?;
        }
        let node = self.clone();
        blocking("writing down an unsafe recovery", move || {
            tracing::warn!("UNSAFE RECOVERY: replicas of this cluster are given up: {new:?}");
            node.change_identity(|identity| {
                let mut changed = identity.clone();
                changed.given_up.extend(&new);
                changed
            })
        })
        .await?;
        self.follow_recoveries();
        Ok(())
    }

    /// Lets the lanes and the doors know the epoch that the identity says.
    pub(super) fn follow_recoveries(&self) {
        let epoch = self.given_up().len() as u64;
        self.recovery.set(epoch);
        if let Some(registry) = self.registry.get() {
            registry.set_recovery_epoch(epoch);
        }
    }

    /// Takes in what another node has heard of recoveries.
    pub(super) async fn heed(self: &Arc<Self>, status: &NodeStatus) {
        if status.given_up.is_empty() || status.cluster_id != self.cluster_id() {
            return;
        }
        if let Err(error) = self.give_up(&status.given_up).await {
            tracing::error!(%error, "an unsafe recovery that node {} tells of is not taken in; tried again", status.node);
        }
    }

    /// Asks the peers for recoveries, before any replica starts: this node may have been given up while it was away. One
    /// that does not answer cannot be waited for: perhaps the whole cluster is starting.
    pub async fn ask_for_recoveries(self: &Arc<Self>) {
        self.follow_recoveries();
        let mut addresses = self.config.peers.clone();
        addresses.extend(self.remembered_addresses().await);
        addresses.retain(|address| *address != self.config.advertise);
        addresses.sort();
        addresses.dedup();
        let asked = addresses.iter().map(|address| self.ask_for_recoveries_at(address));
        futures_util::future::join_all(asked).await;
    }

    /// Asks one node for recoveries, and takes in what it tells.
    pub(super) async fn ask_for_recoveries_at(self: &Arc<Self>, address: &str) {
        let Ok(mut client) = self.peers.admin(address) else { return };
        let request = client.get_node_status(GetNodeStatusRequest::default());
        match tokio::time::timeout(ASK_WITHIN, request).await {
            Ok(Ok(status)) => self.heed(status.get_ref()).await,
            Ok(Err(status)) => tracing::debug!(address, %status, "not asked for recoveries"),
            Err(_) => tracing::debug!(address, "not asked for recoveries: no answer in time"),
        }
    }

    /// The nodes as the meta group's replica here last wrote them down.
    async fn remembered_addresses(self: &Arc<Self>) -> Vec<String> {
        let Some(listed) =
            self.listed().into_iter().find(|r| r.group == META_GROUP && r.started && !r.damaged)
        else {
            return Vec::new();
        };
        let node = self.clone();
        let read = blocking("reading where the nodes are", move || {
            Ok(MetaMachine::open(&node.directory_of(listed))?.state())
        });
        match read.await {
            Ok(state) => state.nodes.iter().map(|n| n.address.clone()).collect(),
            // It is found again, and treated, when the replica starts.
            Err(error) => {
                tracing::warn!(%error, "the nodes of the cluster are not known before the meta group starts");
                Vec::new()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(epoch: Option<u64>) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        if let Some(epoch) = epoch {
            metadata.insert(RECOVERY_METADATA, MetadataValue::from(epoch));
        }
        metadata
    }

    #[test]
    fn streams_ask_under_the_same_epoch_and_calls_under_none_that_is_unheard_of() {
        let own = RecoveryEpoch::default();
        own.set(6);
        assert!(own.expect(6).is_ok());
        for other in [0, 5, 7] {
            let refused = own.expect(other).expect_err("another epoch");
            assert_eq!((refused.kind(), refused.0.recovery_epoch), (ErrorKind::OtherRecovery, 6));
        }
        for known in [None, Some(0), Some(6)] {
            assert!(own.admit(&asked(known)).is_ok(), "{known:?}");
        }
        assert_eq!(own.admit(&asked(Some(7))).expect_err("unheard of").kind(), ErrorKind::OtherRecovery);
    }
}
