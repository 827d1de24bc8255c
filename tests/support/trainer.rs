//! A client as a test writes it: tables whose arithmetic is exact, deadlines longer than any failover.

use std::time::Duration;

use evershard::{
    Client, ClientOptions, DeadWorkerPolicy, Error, JobOptions, PushHandle, TableDefinition, definition,
};

/// A client with a session of its own.
#[derive(Debug, Clone)]
pub(crate) struct Trainer {
    pub(crate) client: Client,
}

/// A table of a cluster.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    pub(crate) table: evershard::Table,
}

/// Of a job whose workers go in step. Nobody is taken for dead on a busy machine: the sums would be others.
pub(crate) fn in_step(workers: u32) -> JobOptions {
    JobOptions {
        workers,
        staleness: Some(0),
        dead_worker: DeadWorkerPolicy::Wait,
        lease: Duration::from_secs(60),
        ..JobOptions::default()
    }
}

/// The widest table is far from this.
fn width(dim: usize) -> u32 {
    u32::try_from(dim).unwrap()
}

/// SGD with lr = 1, zeros.
pub(crate) fn integers(name: &str, dim: usize) -> TableDefinition {
    definition::sparse(name, width(dim), definition::sgd(1.0))
}

impl Trainer {
    pub(crate) async fn connect(endpoints: &str) -> Self {
        let options = ClientOptions { deadline: Duration::from_secs(90), ..ClientOptions::default() };
        Self::with(endpoints, options).await
    }

    pub(crate) async fn with(endpoints: &str, options: ClientOptions) -> Self {
        Trainer { client: Client::connect(endpoints, options).await.unwrap() }
    }

    /// An existing table.
    pub(crate) async fn table(&self, name: &str) -> Table {
        Table { table: self.client.table(name).await.unwrap() }
    }

    pub(crate) async fn create(&self, definition: TableDefinition) -> Table {
        Table { table: self.client.create_table(definition).await.unwrap() }
    }

    /// SGD with lr = 1, zeros: a pull shows the negated sum of all pushes.
    pub(crate) async fn integers(&self, name: &str, dim: usize) -> Table {
        self.create(integers(name, dim)).await
    }

    /// Adagrad, zeros.
    pub(crate) async fn adagrad(&self, name: &str, dim: usize) -> Table {
        self.create(definition::sparse(name, width(dim), definition::adagrad(0.5))).await
    }

    /// SGD, rows drawn from a normal distribution.
    pub(crate) async fn normal(&self, name: &str, dim: usize) -> Table {
        let initializer = definition::normal(0.0, 1.0, 7);
        self.create(TableDefinition { initializer, ..integers(name, dim) }).await
    }
}

impl Table {
    pub(crate) async fn push(&self, ids: &[u64], gradients: &[f32]) -> Result<(), Error> {
        self.table.push(ids, gradients).await.map(|_| ())
    }

    pub(crate) async fn set(&self, ids: &[u64], values: &[f32]) -> Result<(), Error> {
        self.table.assign(ids, values).await.map(|_| ())
    }

    /// Sends, and does not wait.
    pub(crate) async fn begin_set(&self, ids: &[u64], values: &[f32]) -> PushHandle {
        self.table.assign_begin(ids, values).await.unwrap()
    }

    pub(crate) async fn pull(&self, ids: &[u64]) -> Result<Vec<f32>, Error> {
        self.table.pull_vec(ids).await
    }
}
