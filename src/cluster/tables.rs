//! Creating, changing and dropping tables: first the meta group, then a schema entry in every shard, then the meta group again.
//!
//! Invariants:
//! - a table is visible to clients (active) only when every shard has its schema;
//! - a change is there when every shard has it; shards take no older definition for a newer one, so several may tell them;
//! - a creation, change or drop that was cut off half-way is finished by the meta leader's agent: each step may be repeated.

use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::shard_command::ShardCommand;
use evershard_proto::v1::{
    ActivateTable, CreateTable, ErrorKind, MetaTable, RemoveTable, SetOptimizerRequest, SetTableOptimizer,
    TableDefinition, TableDescription, TableKind, meta_command::Command,
};
use futures_util::future::try_join_all;

use super::node::Node;
use crate::meta::state::{META_SHARD, find_table};
use crate::model::{TableSchema, needed_cluster_version};
use crate::service::RequestError;

const DEADLINE: Duration = Duration::from_secs(20);

impl Node {
    /// Creates a table, or finds that it exists with this definition.
    ///
    /// # Errors
    /// INVALID for a definition that makes no sense or that a node's build does not know, CONFLICT for another one under the same name.
    pub async fn create_table(
        self: &Arc<Self>,
        definition: TableDefinition,
    ) -> Result<TableDescription, RequestError> {
        self.require_cluster()?;
        let deadline = Instant::now() + DEADLINE;
        let schema =
            TableSchema::new(0, &definition).map_err(|e| RequestError::new(e.kind(), e.to_string()))?;
        let is_tensor = schema.tensor().is_some();
        if definition.kind() == TableKind::Dense && !is_tensor {
            let what = format!("tensor {}: a table of kind DENSE needs a shape", definition.name);
            return Err(RequestError::new(ErrorKind::Invalid, what));
        }
        self.require_cluster_version(needed_cluster_version(&definition), deadline).await?;
        let create = CreateTable { definition: Some(definition) };
        let create = if is_tensor { Command::CreateTensor(create) } else { Command::CreateTable(create) };
        let outcome = self.propose_meta(create, deadline).await?;
        let table = outcome
            .table
            .ok_or_else(|| RequestError::new(ErrorKind::Internal, "the meta group named no table"))?;
        let active = self.meta_state().tables.iter().any(|t| t.number == table.number && t.active);
        if !active {
            self.tell_shards(&table, false, deadline).await?;
        }
        Ok(table)
    }

    /// Gives a table other hyper-parameters; they are in force on every shard when this returns.
    ///
    /// # Errors
    /// CONFLICT for another kind of optimizer or an expected version that is not the table's, INVALID for numbers that make no
    /// sense, UNKNOWN_TABLE; passing ones: it may or may not be changed.
    pub async fn set_optimizer(
        self: &Arc<Self>,
        request: SetOptimizerRequest,
    ) -> Result<TableDescription, RequestError> {
        self.require_cluster()?;
        let deadline = Instant::now() + DEADLINE;
        let SetOptimizerRequest { name, number, optimizer, expected_version } = request;
        let set = SetTableOptimizer { name, number, optimizer, expected_version };
        let outcome = self.propose_meta(Command::SetOptimizer(set), deadline).await?;
        let table = outcome
            .table
            .ok_or_else(|| RequestError::new(ErrorKind::Internal, "the meta group named no table"))?;
        fail::fail_point!("set_optimizer::before_telling");
        // Whoever set the same before may not have come to telling the shards.
        let is_told = |t: &MetaTable| {
            t.number == table.number && t.active && t.told_version >= table.definition_version
        };
        if !self.meta_state().tables.iter().any(is_told) {
            self.tell_shards(&table, false, deadline).await?;
        }
        Ok(table)
    }

    /// Which table has this name now, through the log: its permanent number.
    ///
    /// # Errors
    /// UNKNOWN_TABLE.
    pub async fn find_table_to_drop(self: &Arc<Self>, name: &str) -> Result<u32, RequestError> {
        self.require_cluster()?;
        let find = Command::RemoveTable(RemoveTable { name: name.into(), number: 0 });
        let outcome =
            self.propose_meta(find, Instant::now() + DEADLINE).await.map_err(|e| match e.kind() {
                ErrorKind::Invalid => RequestError::new(ErrorKind::UnknownTable, e.to_string()),
                _ => e,
            })?;
        let table = outcome.table;
        table.map(|t| t.number).ok_or_else(|| RequestError::new(ErrorKind::Internal, "no table was named"))
    }

    /// Drops the table with this number, and its rows; one that is gone is dropped. By number, because a drop whose
    /// outcome is unknown is tried again, and by then the name may be another table's.
    ///
    /// # Errors
    /// Passing ones: it may or may not be dropped.
    pub async fn drop_table(self: &Arc<Self>, name: &str, number: u32) -> Result<(), RequestError> {
        self.require_cluster()?;
        let deadline = Instant::now() + DEADLINE;
        let remove = Command::RemoveTable(RemoveTable { name: name.into(), number });
        match self.propose_meta(remove, deadline).await?.table {
            Some(table) => self.tell_shards(&table, true, deadline).await,
            None => Ok(()),
        }
    }

    /// Schema entries to all shards, then the mark that they have it.
    pub(super) async fn tell_shards(
        self: &Arc<Self>,
        table: &TableDescription,
        dropped: bool,
        deadline: Instant,
    ) -> Result<(), RequestError> {
        let entry = ShardCommand::Schema { table: table.clone(), dropped };
        let state = self.meta_state();
        let shards = state.groups.iter().filter(|g| g.shard != META_SHARD);
        try_join_all(shards.map(|g| self.propose_to_shard(g.group, &entry, deadline))).await?;
        let (number, definition_version) = (table.number, table.definition_version);
        let activate = Command::ActivateTable(ActivateTable { number, dropped, definition_version });
        self.propose_meta(activate, deadline).await?;
        self.wait_for_meta(deadline, |state| {
            let told = |t: &MetaTable| t.active && !dropped && t.told_version >= definition_version;
            state.tables.iter().find(|t| t.number == number).is_none_or(told)
        })
        .await;
        Ok(())
    }

    /// What the meta leader finishes for others: tables that are neither here nor gone, and definitions that not every shard has.
    pub(super) async fn finish_tables(self: &Arc<Self>) {
        let state = self.meta_state();
        for table in
            state.tables.iter().filter(|t| t.dropped || !t.active || t.told_version < t.definition_version)
        {
            let described = crate::meta::state::description(table);
            let deadline = Instant::now() + Duration::from_secs(2);
            if let Err(error) = self.tell_shards(&described, table.dropped, deadline).await {
                tracing::warn!(table = table.number, %error, "a table is not complete on every shard yet");
            }
        }
    }

    /// The number of an active table.
    #[must_use]
    pub fn table_number(&self, name: &str) -> Option<u32> {
        find_table(&self.meta_state(), name).filter(|t| t.active).map(|t| t.number)
    }
}
