//! All groups of a node: opens them, finds them, closes them, and ends them in good order.
//!
//! Invariants:
//! - a group is open at most once on a node;
//! - a clean shutdown hands over every led group first, for about a second at most, then ends every task it started.
//!   The server that mounts [`peer_service`] must go on serving until then.
//!
//! Not here: which replicas the node should hold (`src`), what a group does (`group`).

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use evershard_proto::v1::raft_service_server::RaftServiceServer;
use evershard_storage::log::GroupLog;
use futures_util::future::join_all;
use parking_lot::RwLock;

use crate::bootstrap::GroupHost;
use crate::error::GroupError;
use crate::executor::ApplyExecutor;
use crate::group::Group;
use crate::options::RaftOptions;
use crate::snapshot::builder::remove_folder;
use crate::snapshot::traffic::{LogWritten, SnapshotFigures, SnapshotTraffic};
use crate::state_machine::StateMachine;
use crate::transport::Router;
use crate::transport::peer_client::PeerPool;
use crate::transport::peer_service::PeerService;

/// How long a clean shutdown waits for leadership to move.
const HAND_OVER_WITHIN: Duration = Duration::from_secs(1);

/// See the module.
pub struct GroupRegistry {
    host: GroupHost,
    peers: Arc<PeerPool>,
    groups: RwLock<BTreeMap<u64, Slot>>,
}

enum Slot {
    Opening { replica: u64 },
    Open(Group),
}

/// A place held while its group opens; given up on drop when it did not.
struct Reserved<'a> {
    registry: &'a GroupRegistry,
    group: u64,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        if let Entry::Occupied(held) = self.registry.groups.write().entry(self.group)
            && let Slot::Opening { .. } = held.get()
        {
            held.remove();
        }
    }
}

impl GroupRegistry {
    /// A registry without groups. `executor` runs the groups' blocking work ([`crate::ApplyThreads`]).
    ///
    /// # Errors
    /// [`GroupError::Config`] naming the setting that is wrong.
    pub fn new(options: RaftOptions, executor: Arc<dyn ApplyExecutor>) -> Result<Arc<Self>, GroupError> {
        options.validate()?;
        let router = Arc::new(Router::default());
        let peers = PeerPool::new(&options, Arc::clone(router.recovery()));
        let snapshots = SnapshotTraffic::new(&options.limits);
        let host = GroupHost { options, executor, transport: Arc::clone(&peers) as _, router, snapshots };
        Ok(Arc::new(Self { host, peers, groups: RwLock::new(BTreeMap::new()) }))
    }

    /// Has snapshots give way to pushes: `written` tells how many bytes the node's log has taken in since it was opened.
    pub fn watch_log(&self, written: LogWritten) {
        self.host.snapshots.watch_log(written);
    }

    /// The settings.
    #[must_use]
    pub fn options(&self) -> &RaftOptions {
        &self.host.options
    }

    /// Opens a replica: replays its log from where its state machine recovered, and starts it. A new replica waits
    /// until it is initialised or a leader finds it.
    ///
    /// # Errors
    /// [`GroupError::AlreadyOpen`], [`GroupError::Folder`], [`GroupError::Halted`].
    pub async fn open(
        &self,
        group: u64,
        replica: u64,
        state_machine: Arc<dyn StateMachine>,
        log: GroupLog,
    ) -> Result<Group, GroupError> {
        match self.groups.write().entry(group) {
            Entry::Vacant(vacant) => vacant.insert(Slot::Opening { replica }),
            Entry::Occupied(held) => {
                let replica = match held.get() {
                    Slot::Opening { replica } => *replica,
                    Slot::Open(open) => open.replica(),
                };
                return Err(GroupError::AlreadyOpen { group, replica });
            }
        };
        let reserved = Reserved { registry: self, group };
        let opened = self.host.open(group, replica, state_machine, log).await?;
        self.groups.write().insert(group, Slot::Open(opened.clone()));
        drop(reserved);
        Ok(opened)
    }

    /// Where a node is reached from now on. Memberships say it too, but openraft goes on with the address it knew when it
    /// began to lead.
    pub fn learn_address(&self, node: u64, address: &str) {
        self.peers.learn_address(node, address);
    }

    /// From now on this node is of recovery epoch `epoch`: lanes of nodes of another one are refused, and those that were
    /// opened before take no further frame.
    pub fn set_recovery_epoch(&self, epoch: u64) {
        self.host.router.recovery().store(epoch, Ordering::SeqCst);
    }

    /// What this node sent and received of snapshots since it started.
    #[must_use]
    pub fn snapshot_figures(&self) -> SnapshotFigures {
        self.host.snapshots.figures()
    }

    /// Removes what transfers of snapshots left of a replica that is closed and will not be opened again. Blocks.
    pub fn forget_snapshots(&self, group: u64, replica: u64) {
        for kind in ["outgoing", "incoming"] {
            remove_folder(&self.host.options.data.join(kind).join(format!("{group}-{replica}")));
        }
    }

    /// The open group with this id.
    #[must_use]
    pub fn group(&self, group: u64) -> Option<Group> {
        match self.groups.read().get(&group) {
            Some(Slot::Open(open)) => Some(open.clone()),
            _ => None,
        }
    }

    /// All open groups, by id.
    #[must_use]
    pub fn groups(&self) -> Vec<Group> {
        let groups = self.groups.read();
        groups
            .values()
            .filter_map(|slot| match slot {
                Slot::Open(open) => Some(open.clone()),
                Slot::Opening { .. } => None,
            })
            .collect()
    }

    /// Stops a group on this node, without handing over. Its log and state stay; destroying them is the caller's.
    ///
    /// # Errors
    /// [`GroupError::Absent`].
    pub async fn close(&self, group: u64) -> Result<(), GroupError> {
        let open = self.group(group).ok_or(GroupError::Absent { group })?;
        open.shutdown().await;
        self.groups.write().remove(&group);
        Ok(())
    }

    /// Hands over every led group to the voter that has most of its log, waiting for about a second at most.
    pub async fn hand_over(&self) {
        let transfers = self.groups().into_iter().filter_map(|group| {
            group.inner.leader.term_led_now()?;
            let to = group.inner.leader.best_successor()?;
            Some(async move {
                if let Err(error) = group.transfer_leader(to, HAND_OVER_WITHIN).await {
                    tracing::warn!(group = group.group(), to, %error, "leadership was not handed over");
                }
            })
        });
        join_all(transfers).await;
    }

    /// Ends everything: hands over, stops all groups, closes all connections, waits for all tasks.
    pub async fn shutdown(&self) {
        self.hand_over().await;
        self.stop().await;
    }

    /// The same without handing over: for tests of crashes, and when time is out.
    pub async fn stop(&self) {
        let groups = self.groups();
        join_all(groups.iter().map(Group::shutdown)).await;
        self.groups.write().clear();
        self.host.router.close();
        self.peers.close().await;
    }
}

/// The gRPC service through which peers reach the groups of `registry`; mount it in the node's server. Build that server
/// with [`crate::tuned`] for large payloads.
#[must_use]
pub fn peer_service(registry: &Arc<GroupRegistry>) -> RaftServiceServer<PeerService> {
    PeerService::new(&registry.host.options, Arc::clone(&registry.host.router)).into_server()
}
