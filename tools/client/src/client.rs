//! The client: connects, makes and finds tables, owns what runs in the background.
//!
//! Invariant: every task this client starts ends when its last handle is dropped or [`Client::close`] is called.

use std::sync::Arc;
use std::time::Instant;

use evershard_proto::limits::TABLE_NAME_BYTES_MAX;
use evershard_proto::v1::{ErrorKind, Optimizer, Routing, TableDefinition, TableDescription, WorkerIdentity};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admin::Admin;
use crate::node_channel::NodeChannels;
use crate::non_finite::Reports;
use crate::push::Residuals;
use crate::push_lane::PushLanes;
use crate::routing_cache::RoutingCache;
use crate::session::Sessions;
use crate::stats::{Stats, StatsSnapshot};
use crate::unary::Asker;
use crate::{ClientOptions, Error, Table, Tensor, endpoints};

/// A connection to a cluster; cheap to clone.
#[derive(Debug, Clone)]
pub struct Client {
    pub(crate) inner: Arc<Inner>,
}

/// What all handles of a client share.
#[derive(Debug)]
pub(crate) struct Inner {
    shared: Shared,
    pub(crate) lanes: PushLanes,
    /// What encodings left out of gradients.
    pub(crate) residuals: Mutex<Residuals>,
    /// Tells of values that are not finite.
    pub(crate) reports: Reports,
    pub(crate) tasks: TaskTracker,
    pub(crate) stop: CancellationToken,
    /// The client whose connections these are.
    of: Option<Arc<Inner>>,
}

/// What a client shares with those of its workers.
#[derive(Debug, Clone)]
pub(crate) struct Shared {
    pub(crate) options: ClientOptions,
    pub(crate) routing: Arc<RoutingCache>,
    pub(crate) channels: Arc<NodeChannels>,
    pub(crate) admin: Admin,
    pub(crate) jobs: Asker,
    pub(crate) stats: Arc<Stats>,
    pub(crate) push_bytes: Arc<Semaphore>,
}

impl std::ops::Deref for Inner {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

impl Inner {
    /// Lanes and sessions of their own, a worker's if one is given.
    fn new(
        shared: Shared,
        worker: Option<WorkerIdentity>,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let sessions = Sessions::new(shared.admin.clone(), worker);
        let lanes = PushLanes::new(
            shared.options.clone(),
            shared.routing.clone(),
            shared.channels.clone(),
            sessions.clone(),
            shared.stats.clone(),
            tasks.clone(),
            stop.clone(),
        );
        let reports = Reports::new(shared.clone(), sessions.clone(), worker);
        tasks.spawn(sessions.renew(stop.clone()));
        let residuals = Mutex::new(Residuals::new(shared.options.residual_bytes));
        Inner { shared, lanes, residuals, reports, tasks, stop, of: None }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Client {
    /// Connects to a cluster through any of its nodes: `http://a:7400,http://b:7400`. Must be called on a tokio runtime,
    /// which this client's tasks then run on.
    ///
    /// # Errors
    /// [`Error::Refused`] for an address that is none; [`Error::Unavailable`], naming the addresses, when no node answers
    /// within the deadline.
    pub async fn connect(addresses: &str, options: ClientOptions) -> Result<Self, Error> {
        options.validate()?;
        let seeds = endpoints::parse(addresses)?;
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let channels = NodeChannels::new(options.connect_timeout, tasks.clone(), stop.clone());
        let routing = Arc::new(RoutingCache::new(seeds, channels.clone()));
        let admin = Admin::new(routing.clone(), options.deadline);
        routing.refresh_until(Instant::now() + options.deadline).await?;
        let jobs = Asker::new(routing.clone());
        let push_bytes = Arc::new(Semaphore::new(options.push_bytes_in_flight));
        let shared = Shared { options, routing, channels, admin, jobs, stats: Arc::default(), push_bytes };
        Ok(Client { inner: Arc::new(Inner::new(shared, None, tasks, stop)) })
    }

    /// A client over the same connections whose pushes are a worker's: they end when it is fenced.
    pub(crate) fn for_worker(&self, worker: WorkerIdentity) -> Self {
        let inner = &self.inner;
        let (tasks, stop) = (TaskTracker::new(), inner.stop.child_token());
        let mut shared = inner.shared.clone();
        shared.stats = Arc::default();
        let mut own = Inner::new(shared, Some(worker), tasks, stop);
        // The connections are those of the client it was made from, which live as long as it does.
        own.of = Some(inner.clone());
        Client { inner: Arc::new(own) }
    }

    /// Creates a table, or finds it as defined.
    ///
    /// # Errors
    /// [`Error::Refused`]: CONFLICT when it exists with another definition, INVALID for one that makes no sense.
    pub async fn create_table(&self, definition: TableDefinition) -> Result<Table, Error> {
        if definition.tensor.is_some() {
            return Err(is_tensor(&definition.name));
        }
        self.create(definition).await
    }

    /// Creates a dense tensor, or finds it as defined.
    ///
    /// # Errors
    /// As [`Client::create_table`].
    pub async fn create_tensor(&self, definition: TableDefinition) -> Result<Tensor, Error> {
        if definition.tensor.is_none() {
            return Err(Error::invalid(format!("{:?} is a sparse table, and no tensor", definition.name)));
        }
        Tensor::new(self.create(definition).await?)
    }

    /// Creates several tensors, those of a model, at the same time.
    ///
    /// # Errors
    /// As [`Client::create_tensor`]: some may be there then.
    pub async fn create_tensors(&self, definitions: Vec<TableDefinition>) -> Result<Vec<Tensor>, Error> {
        let all = definitions.into_iter().map(|definition| self.create_tensor(definition));
        futures_util::future::try_join_all(all).await
    }

    async fn create(&self, definition: TableDefinition) -> Result<Table, Error> {
        if definition.name.len() > TABLE_NAME_BYTES_MAX {
            return Err(Error::invalid(format!("a table's name has at most {TABLE_NAME_BYTES_MAX} bytes")));
        }
        let rules = (definition.admission, definition.eviction);
        let description = self.inner.admin.create_table(definition).await?;
        let created = description.definition.as_ref();
        if created.is_none_or(|created| (created.admission, created.eviction) != rules) {
            // A build that knows no such rules has read over them.
            let what = "the table was created without its admission and eviction: the node that did so is of an older build";
            return Err(Error::invalid(what));
        }
        Ok(self.handle(&description))
    }

    /// An existing table.
    ///
    /// # Errors
    /// [`Error::Refused`] with UNKNOWN_TABLE; INVALID when it is a dense tensor.
    pub async fn table(&self, name: &str) -> Result<Table, Error> {
        let table = self.find(name).await?;
        if table.definition().tensor.is_some() {
            return Err(is_tensor(name));
        }
        Ok(table)
    }

    /// An existing dense tensor.
    ///
    /// # Errors
    /// [`Error::Refused`] with UNKNOWN_TABLE; INVALID when it is a sparse table.
    pub async fn tensor(&self, name: &str) -> Result<Tensor, Error> {
        Tensor::new(self.find(name).await?)
    }

    async fn find(&self, name: &str) -> Result<Table, Error> {
        let find = |routing: &Routing| {
            let named = |t: &&TableDescription| t.definition.as_ref().is_some_and(|d| d.name == name);
            routing.tables.iter().find(named).cloned()
        };
        let described = match find(&self.inner.admin.routing().await?) {
            Some(description) => Some(description),
            // A node that was started a moment ago may not have heard of it yet. Whether there is one, the meta group says.
            None => find(&self.inner.admin.confirmed_routing().await?),
        };
        let unknown = || Error::refused(ErrorKind::UnknownTable, format!("there is no table {name:?}"));
        Ok(self.handle(&described.ok_or_else(unknown)?))
    }

    /// Gives a table other hyper-parameters: [`Table::set_optimizer`] of the table that has the name now.
    ///
    /// # Errors
    /// As [`Table::set_optimizer`].
    pub async fn set_optimizer(&self, name: &str, optimizer: Optimizer) -> Result<Table, Error> {
        self.find(name).await?.set_optimizer(optimizer).await
    }

    /// Drops a table and its rows.
    ///
    /// # Errors
    /// [`Error::Refused`] with UNKNOWN_TABLE.
    pub async fn drop_table(&self, name: &str) -> Result<(), Error> {
        self.inner.admin.drop_table(name).await
    }

    /// Nodes, shards, tables and leaders, fresh.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn routing(&self) -> Result<Routing, Error> {
        self.inner.admin.routing().await
    }

    /// Admin calls.
    #[must_use]
    pub fn admin(&self) -> &Admin {
        &self.inner.admin
    }

    /// Counters of this client; `reset_gap` starts the longest gap anew.
    #[must_use]
    pub fn stats(&self, reset_gap: bool) -> StatsSnapshot {
        self.inner.stats.snapshot(reset_gap)
    }

    /// Ends the client's tasks and waits for them. Pushes begun and not awaited may stay unsent.
    pub async fn close(&self) {
        self.inner.stop.cancel();
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }

    fn handle(&self, description: &TableDescription) -> Table {
        Table::new(self.inner.clone(), description.number, description.definition.clone().unwrap_or_default())
    }

    pub(crate) fn deadline(inner: &Inner) -> Instant {
        Instant::now() + inner.options.deadline
    }
}

fn is_tensor(name: &str) -> Error {
    Error::invalid(format!("{name:?} is a dense tensor, and no sparse table"))
}
