//! A table: the handle that a worker holds.

use std::sync::Arc;

use evershard_proto::push_body::{Encoding, Operation, counts_occurrences};
use evershard_proto::v1::{Optimizer, SetOptimizerRequest, TableDefinition};

use crate::Error;
use crate::client::{Client, Inner};
use crate::non_finite::Found;
use crate::pull::{self, PullInfo, PullOptions, Wanted};
use crate::push::{self, Content, PushHandle, PushOptions, PushReceipt};
use crate::scan::{self, ScanOptions, TableScan};

/// A table of a cluster; cheap to clone.
#[derive(Debug, Clone)]
pub struct Table {
    pub(crate) inner: Arc<Inner>,
    number: u32,
    definition: Arc<TableDefinition>,
    encoding: Encoding,
}

impl Table {
    pub(crate) fn new(inner: Arc<Inner>, number: u32, definition: TableDefinition) -> Self {
        Table { inner, number, definition: Arc::new(definition), encoding: Encoding::F32 }
    }

    /// The same table; gradients pushed through this handle travel as `encoding`, unless a push says otherwise.
    #[must_use]
    pub fn with_encoding(mut self, encoding: Encoding) -> Self {
        self.encoding = encoding;
        self
    }

    /// How gradients that are pushed through this handle travel.
    #[must_use]
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// The table's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.definition.name
    }

    /// Floats a row.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.definition.dim as usize
    }

    /// The table's permanent number.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// How it was defined when this handle was made. See [`Table::set_optimizer`].
    #[must_use]
    pub fn definition(&self) -> &TableDefinition {
        &self.definition
    }

    /// Gives the table other hyper-parameters (learning rate, schedule, weight decay, clipping, ...): all of them as `optimizer`
    /// says. When this returns they are in force on every shard, for every client's pushes that begin afterwards; a push under
    /// way may be applied with the ones or the others on each shard. Optimizer state and weights stay as they are. Setting what is
    /// set already is fine. When several callers race, one of the values is what every shard has in the end.
    ///
    /// Answers the table with its new definition; other handles keep the definition that they were made with, which pushes and
    /// pulls have no use for.
    ///
    /// # Errors
    /// [`Error::Refused`]: CONFLICT for another kind of optimizer, which would need other state; INVALID for numbers that make no
    /// sense; UNKNOWN_TABLE. [`Error::Unavailable`]: it may be changed or not, on some shards already; the servers finish
    /// what they began, and the call may be made again.
    pub async fn set_optimizer(&self, optimizer: Optimizer) -> Result<Table, Error> {
        let request = SetOptimizerRequest {
            name: self.name().to_owned(),
            number: self.number,
            optimizer: Some(optimizer),
            expected_version: None,
        };
        let description = self.inner.admin.set_optimizer(request).await?;
        let definition = description.definition.map_or_else(|| self.definition.clone(), Arc::new);
        Ok(Table { definition, ..self.clone() })
    }

    /// The client that this handle belongs to.
    #[must_use]
    pub fn client(&self) -> Client {
        Client { inner: self.inner.clone() }
    }

    /// Pulls the rows of `ids` into `out` (`ids.len() x dim`, row by row). Never writes at the server.
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::Unavailable`].
    pub async fn pull(&self, ids: &[u64], out: &mut [f32]) -> Result<(), Error> {
        self.pull_with(ids, PullOptions::default(), out).await.map(|_| ())
    }

    /// The same, into a new vector.
    ///
    /// # Errors
    /// As [`Table::pull`].
    pub async fn pull_vec(&self, ids: &[u64]) -> Result<Vec<f32>, Error> {
        let mut out = vec![0.0; ids.len() * self.dim()];
        self.pull(ids, &mut out).await?;
        Ok(out)
    }

    /// The same, with options.
    ///
    /// # Errors
    /// As [`Table::pull`].
    pub async fn pull_with(
        &self,
        ids: &[u64],
        options: PullOptions,
        out: &mut [f32],
    ) -> Result<PullInfo, Error> {
        let wanted = Wanted { table: self.number, dim: self.dim(), ids, newer_than: None };
        pull::pull(&self.inner, wanted, options, out).await
    }

    /// Begins to read the whole table, in pieces of bounded size, in no particular order: the rows that exist. While pushes go
    /// on the pieces are of different moments, each whole in itself.
    #[must_use]
    pub fn scan(&self, options: ScanOptions) -> TableScan {
        TableScan::new(self.inner.clone(), self.number, self.dim(), options)
    }

    /// How many rows exist: pushed or assigned, and not removed.
    ///
    /// # Errors
    /// As [`Table::pull`]; [`Error::Unavailable`] when a replica that was just started has not counted within the deadline.
    pub async fn size(&self, options: ScanOptions) -> Result<u64, Error> {
        scan::size(&self.inner, self.number, options).await
    }

    /// Pushes gradients (`ids.len() x dim`); returns when a quorum has them and they are applied, each exactly once.
    ///
    /// # Errors
    /// [`Error::Refused`] (nothing changed), [`Error::PartialPush`] (says what is known of each id).
    pub async fn push(&self, ids: &[u64], gradients: &[f32]) -> Result<PushReceipt, Error> {
        self.push_with(ids, gradients, PushOptions::default()).await
    }

    /// The same, with options.
    ///
    /// # Errors
    /// As [`Table::push`].
    pub async fn push_with(
        &self,
        ids: &[u64],
        gradients: &[f32],
        options: PushOptions,
    ) -> Result<PushReceipt, Error> {
        self.push_begin(ids, gradients, options).await?.wait().await
    }

    /// Begins a push and does not wait: pushes begun one after the other are applied in that order on each shard.
    ///
    /// # Errors
    /// [`Error::Refused`] when lengths do not fit; what the servers say comes with [`PushHandle::wait`].
    pub async fn push_begin(
        &self,
        ids: &[u64],
        gradients: &[f32],
        options: PushOptions,
    ) -> Result<PushHandle, Error> {
        self.begin(Operation::Gradient, ids, gradients, options).await
    }

    /// Sets rows to values. Of an id given twice the last one counts.
    ///
    /// # Errors
    /// As [`Table::push`].
    pub async fn assign(&self, ids: &[u64], values: &[f32]) -> Result<PushReceipt, Error> {
        self.assign_begin(ids, values).await?.wait().await
    }

    /// Begins to set rows, and does not wait.
    ///
    /// # Errors
    /// As [`Table::push_begin`].
    pub async fn assign_begin(&self, ids: &[u64], values: &[f32]) -> Result<PushHandle, Error> {
        self.begin(Operation::Set, ids, values, PushOptions::default()).await
    }

    /// Adds values to rows.
    ///
    /// # Errors
    /// As [`Table::push`].
    pub async fn add(&self, ids: &[u64], values: &[f32]) -> Result<PushReceipt, Error> {
        self.begin(Operation::Add, ids, values, PushOptions::default()).await?.wait().await
    }

    /// Removes rows: pulled again, they are as the initialiser makes them.
    ///
    /// # Errors
    /// As [`Table::push`].
    pub async fn remove(&self, ids: &[u64]) -> Result<PushReceipt, Error> {
        self.begin(Operation::Remove, ids, &[], PushOptions::default()).await?.wait().await
    }

    /// Removes all rows, on each shard at once: pulled again, they are as the initialiser makes them. Exactly once, and in order
    /// with this client's pushes: those begun before it are cleared, those begun after it stay. Other clients' pushes that
    /// are under way meanwhile come before it on some shards, and after it on others.
    ///
    /// # Errors
    /// As [`Table::push`]; a [`Error::PartialPush`] names no ids, and its retry clears the shards that have not answered.
    pub async fn clear(&self) -> Result<PushReceipt, Error> {
        push::clear(&self.inner, self.number).await?.wait().await
    }

    /// Pulls the rows, then pushes to them: the rows are those before the push.
    ///
    /// # Errors
    /// As [`Table::pull`] and [`Table::push`].
    pub async fn push_pull(
        &self,
        ids: &[u64],
        gradients: &[f32],
        out: &mut [f32],
    ) -> Result<PushReceipt, Error> {
        self.pull(ids, out).await?;
        self.push(ids, gradients).await
    }

    async fn begin(
        &self,
        operation: Operation,
        ids: &[u64],
        values: &[f32],
        options: PushOptions,
    ) -> Result<PushHandle, Error> {
        push::begin(&self.inner, &[self.content(operation, ids, values, options)], options).await
    }

    pub(crate) fn content<'a>(
        &'a self,
        operation: Operation,
        ids: &'a [u64],
        values: &'a [f32],
        options: PushOptions,
    ) -> Content<'a> {
        let non_finite = self.definition.non_finite();
        let encoding = match operation {
            Operation::Gradient => options.encoding.unwrap_or(self.encoding),
            Operation::Set | Operation::Add | Operation::Remove | Operation::Clear => Encoding::F32,
        };
        let (name, dim) = (self.name(), self.dim());
        let counts = counts_occurrences(&self.definition);
        Content { table: self.number, name, dim, operation, encoding, ids, values, non_finite, counts }
    }
}

impl Client {
    /// Begins a push to several tables at once: one message a shard where they fit.
    ///
    /// # Errors
    /// [`Error::Refused`] when lengths do not fit or a table is given twice.
    pub async fn push_many_begin(
        &self,
        pushes: &[(&Table, &[u64], &[f32])],
        options: PushOptions,
    ) -> Result<PushHandle, Error> {
        let contents: Vec<Content<'_>> = pushes
            .iter()
            .map(|(t, ids, values)| t.content(Operation::Gradient, ids, values, options))
            .collect();
        push::begin(&self.inner, &contents, options).await
    }

    /// Checks, without sending anything, what [`Client::push_many_begin`] would refuse.
    ///
    /// # Errors
    /// [`Error::Refused`] when lengths do not fit, a value is not finite, or a table is given twice.
    pub fn check_push_many(&self, pushes: &[(&Table, &[u64], &[f32])]) -> Result<(), Error> {
        let contents: Vec<Content<'_>> = pushes
            .iter()
            .map(|(t, ids, values)| t.content(Operation::Gradient, ids, values, PushOptions::default()))
            .collect();
        let mut found = Found::default();
        push::check(&contents, &mut found).inspect_err(|_| self.inner.reports.tell(found))
    }

    /// Pushes to several tables at once.
    ///
    /// # Errors
    /// As [`Table::push`].
    pub async fn push_many(&self, pushes: &[(&Table, &[u64], &[f32])]) -> Result<PushReceipt, Error> {
        self.push_many_begin(pushes, PushOptions::default()).await?.wait().await
    }

    /// Pulls from several tables at once.
    ///
    /// # Errors
    /// As [`Table::pull`].
    pub async fn pull_many(&self, pulls: &mut [(&Table, &[u64], &mut [f32])]) -> Result<(), Error> {
        let all = pulls.iter_mut().map(|(table, ids, out)| table.pull(ids, out));
        futures_util::future::try_join_all(all).await.map(|_| ())
    }
}
