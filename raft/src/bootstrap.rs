//! Bringing a replica to life: from a state machine and a log to a running [`Group`].
//!
//! Order: clear leftover links of snapshots → ask the state machine what recovery found → openraft replays the log from there
//! → shut the vote door for one leader lease, unless the replica is new → receive frames → start the tasks.
//!
//! Invariants:
//! - a replica that may have promised something before a restart stands for no election and grants no vote until one
//!   leader lease has passed;
//! - it receives frames only once openraft runs.
//!
//! Not here: which replicas a node holds (`src`), many groups (`group_registry`).

use std::path::PathBuf;
use std::sync::Arc;

use evershard_storage::log::GroupLog;
use openraft::Raft;
use openraft::async_runtime::watch::WatchReceiver as _;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use crate::applier::{Applier, ApplierState};
use crate::budget::Budget;
use crate::endpoint::Endpoint;
use crate::error::GroupError;
use crate::executor::{self, ApplyExecutor};
use crate::group::{Group, GroupInner, LeaderClock, run_proposer};
use crate::leadership::LeaderWatch;
use crate::log_store::LogStore;
use crate::options::RaftOptions;
use crate::purge::run_purger;
use crate::snapshot::builder::{LinkSource, make_folder, remove_folder};
use crate::snapshot::installer::Installer;
use crate::snapshot::keeper::run_keeper;
use crate::snapshot::traffic::SnapshotTraffic;
use crate::state_machine::StateMachine;
use crate::transport::network::NetworkFactory;
use crate::transport::{Router, Transport};
use crate::type_config::{Runtime, Tokio};

/// What the groups of one node share. Production has it inside the registry; a simulation makes its own.
pub struct GroupHost<RT: Runtime = Tokio> {
    /// Settings.
    pub options: RaftOptions,
    /// Where blocking work runs.
    pub executor: Arc<dyn ApplyExecutor>,
    /// The way to other nodes.
    pub transport: Arc<dyn Transport>,
    /// The way in.
    pub router: Arc<Router<RT>>,
    /// What is sent and received of snapshots.
    pub snapshots: Arc<SnapshotTraffic<RT>>,
}

impl<RT: Runtime> GroupHost<RT> {
    /// Opens a replica and starts it.
    ///
    /// # Errors
    /// [`GroupError::Config`], [`GroupError::Folder`], or [`GroupError::Halted`] when log and state do not fit together
    /// or replaying failed.
    pub async fn open(
        &self,
        group: u64,
        replica: u64,
        state_machine: Arc<dyn StateMachine>,
        log: GroupLog,
    ) -> Result<Group<RT>, GroupError> {
        self.options.validate()?;
        let config = Arc::new(self.options.openraft_config(group)?);
        let name = format!("{group}-{replica}");
        let outgoing = self.clean_folder("outgoing", &name).await?;
        // What an earlier process received of a snapshot stays: the transfer may go on.
        let incoming = self.options.data.join("incoming").join(&name);

        let halted = |reason: String| GroupError::Halted { group, replica, reason };
        let limits = self.options.limits.clone();
        let state = Arc::new(ApplierState::default());
        let store =
            LogStore::<RT>::new(log.clone(), Arc::clone(&self.executor), Arc::clone(&state_machine), &limits);
        let is_new = store.is_pristine();
        let links = LinkSource {
            state_machine: Arc::clone(&state_machine),
            executor: Arc::clone(&self.executor),
            lane: group,
            outgoing,
            log: log.clone(),
            hold_bytes: limits.snapshot_hold_log_bytes,
            shelf: Arc::default(),
        };
        let applier = Applier::<RT>::open(
            Arc::clone(&state_machine),
            Arc::clone(&self.executor),
            group,
            links.clone(),
            limits.clone(),
            Arc::clone(&state),
        )
        .await
        .map_err(|error| halted(error.to_string()))?;
        let network = NetworkFactory::<RT> {
            transport: Arc::clone(&self.transport),
            group,
            replica,
            timing: self.options.timing.clone(),
            limits: limits.clone(),
            snapshots: Arc::clone(&self.snapshots),
        };
        let raft = Raft::new(replica, config, network, store, applier)
            .await
            .map_err(|error| halted(state.halted().unwrap_or_else(|| error.to_string())))?;

        // Before its first report openraft shows a group without members, in term 0.
        if raft.metrics().changed().await.is_err() {
            return Err(halted(state.halted().unwrap_or_else(|| "openraft ended at once".to_owned())));
        }

        let counters = Arc::clone(self.snapshots.counters());
        let installer = Arc::new(Installer::new(incoming, Arc::clone(&self.executor), counters));
        let endpoint = Arc::new(Endpoint::new(
            group,
            replica,
            raft.clone(),
            Arc::clone(&state),
            Arc::clone(&installer),
            Arc::clone(&self.executor),
            log.clone(),
        ));
        if is_new {
            endpoint.open_door();
        }
        let leader = Arc::new(LeaderWatch::new(replica, &raft, Arc::clone(&state), &self.options.timing));
        let capacity = usize::try_from(limits.in_flight_entries).unwrap_or(usize::MAX);
        let (proposals, queue) = mpsc::channel(capacity);
        let inner = Arc::new(GroupInner {
            group,
            replica,
            raft,
            log,
            state_machine,
            state,
            endpoint,
            links,
            router: Arc::clone(&self.router),
            leader,
            options: self.options.clone(),
            executor: Arc::clone(&self.executor),
            flushed: Notify::new(),
            stop: CancellationToken::new(),
            tasks: Mutex::new(Vec::new()),
            budget: Budget::new(limits.in_flight_bytes, limits.in_flight_entries),
            proposals,
        });
        self.router.add(Arc::clone(&inner.endpoint));
        self.start_tasks(&inner, queue, installer);
        Ok(Group { inner })
    }

    fn start_tasks(
        &self,
        inner: &Arc<GroupInner<RT>>,
        queue: mpsc::Receiver<crate::group::Proposal<RT>>,
        installer: Arc<Installer>,
    ) {
        let timing = &self.options.timing;
        let clock = LeaderClock::new(Arc::clone(&self.options.clock));
        let time = (clock, Arc::clone(&inner.leader), Arc::clone(&inner.state_machine));
        let mut tasks = vec![
            RT::spawn(run_proposer(inner.raft.clone(), queue, time, inner.stop.clone())),
            RT::spawn(Arc::clone(&inner.leader).follow(
                inner.raft.clone(),
                timing.heartbeat,
                inner.stop.clone(),
            )),
            RT::spawn(run_purger(Arc::downgrade(inner), Arc::clone(&self.executor))),
            RT::spawn(run_keeper::<RT>(
                inner.links.clone(),
                installer,
                Arc::clone(&self.executor),
                self.options.limits.clone(),
                inner.stop.clone(),
            )),
        ];
        if !inner.endpoint.is_door_open() {
            let endpoint = Arc::clone(&inner.endpoint);
            let (stop, lease) = (inner.stop.clone(), timing.election_max);
            tasks.push(RT::spawn(async move {
                let stopped = std::pin::pin!(stop.cancelled());
                let waited = std::pin::pin!(RT::sleep(lease));
                if let futures_util::future::Either::Right(_) =
                    futures_util::future::select(stopped, waited).await
                {
                    endpoint.open_door();
                }
            }));
        }
        *inner.tasks.lock() = tasks;
    }

    /// An empty place for snapshots; what an earlier process left there goes.
    async fn clean_folder(&self, kind: &'static str, name: &str) -> Result<PathBuf, GroupError> {
        let path = self.options.data.join(kind).join(name);
        let made = path.clone();
        let outcome = executor::read(&*self.executor, move || {
            remove_folder(&made);
            make_folder(&made).map_err(|error| error.to_string())
        })
        .await
        .map_err(|error| error.to_string())
        .and_then(|made| made);
        match outcome {
            Ok(()) => Ok(path),
            Err(reason) => Err(GroupError::Folder { path, reason }),
        }
    }
}
