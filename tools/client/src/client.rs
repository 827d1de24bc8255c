//! The client: connects, makes and finds tables, owns what runs in the background.
//!
//! Invariant: every task this client starts ends when its last handle is dropped or [`Client::close`] is called.

use std::sync::Arc;
use std::time::Instant;

use evershard_proto::limits::TABLE_NAME_BYTES_MAX;
use evershard_proto::v1::{ErrorKind, Routing, TableDefinition, TableDescription};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admin::Admin;
use crate::node_channel::NodeChannels;
use crate::push::Residuals;
use crate::push_lane::PushLanes;
use crate::routing_cache::RoutingCache;
use crate::session::Sessions;
use crate::stats::{Stats, StatsSnapshot};
use crate::{ClientOptions, Error, Table, endpoints};

/// A connection to a cluster; cheap to clone.
#[derive(Debug, Clone)]
pub struct Client {
    pub(crate) inner: Arc<Inner>,
}

/// What all handles share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) options: ClientOptions,
    pub(crate) routing: Arc<RoutingCache>,
    pub(crate) channels: Arc<NodeChannels>,
    pub(crate) lanes: PushLanes,
    pub(crate) admin: Admin,
    pub(crate) stats: Arc<Stats>,
    pub(crate) push_bytes: Arc<Semaphore>,
    pub(crate) residuals: Mutex<Residuals>,
    tasks: TaskTracker,
    stop: CancellationToken,
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
        let sessions = Sessions::new(admin.clone());
        let stats = Arc::new(Stats::default());
        let lanes = PushLanes::new(
            options.clone(),
            routing.clone(),
            channels.clone(),
            sessions.clone(),
            stats.clone(),
            tasks.clone(),
            stop.clone(),
        );
        routing.refresh_until(Instant::now() + options.deadline).await?;
        tasks.spawn(sessions.renew(stop.clone()));
        let push_bytes = Arc::new(Semaphore::new(options.push_bytes_in_flight));
        let residuals = Mutex::new(Residuals::new(options.residual_bytes));
        Ok(Client {
            inner: Arc::new(Inner {
                options,
                routing,
                channels,
                lanes,
                admin,
                stats,
                push_bytes,
                residuals,
                tasks,
                stop,
            }),
        })
    }

    /// Creates a table, or finds it as defined.
    ///
    /// # Errors
    /// [`Error::Refused`]: CONFLICT when it exists with another definition, INVALID for one that makes no sense.
    pub async fn create_table(&self, definition: TableDefinition) -> Result<Table, Error> {
        if definition.name.len() > TABLE_NAME_BYTES_MAX {
            return Err(Error::invalid(format!("a table's name has at most {TABLE_NAME_BYTES_MAX} bytes")));
        }
        let description = self.inner.admin.create_table(definition).await?;
        Ok(self.handle(&description))
    }

    /// An existing table.
    ///
    /// # Errors
    /// [`Error::Refused`] with UNKNOWN_TABLE.
    pub async fn table(&self, name: &str) -> Result<Table, Error> {
        let find = |routing: &Routing| {
            let named = |t: &&TableDescription| t.definition.as_ref().is_some_and(|d| d.name == name);
            routing.tables.iter().find(named).cloned()
        };
        let routing = self.inner.admin.routing().await?;
        match find(&routing) {
            Some(description) => Ok(self.handle(&description)),
            None => Err(Error::refused(ErrorKind::UnknownTable, format!("there is no table {name:?}"))),
        }
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
