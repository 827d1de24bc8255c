//! Looking for rows that go by themselves, on the leader of each shard, once an interval.
//!
//! Invariants:
//! - one shard at a time, and one entry: rows that go do not get in the way of pushes;
//! - a shard that nobody pushes to has a clock all the same: where rows expire, a look begins with an entry that moves it on.
//!
//! Not here: looking (`crate::eviction`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use evershard_proto::limits::EVICTED_ROWS_MAX;
use evershard_proto::shard_command::ShardCommand;
use evershard_proto::v1::ErrorKind;
use tokio_util::sync::CancellationToken;

use super::node::Node;
use super::replicas::ShardReplica;
use crate::eviction::{CutOff, Found, look};
use crate::model::{CommandOutcome, TableSchema};
use crate::service::RequestError;
use crate::telemetry::metric_definitions as metric;

/// Runs until `stop`.
pub async fn run_evictions(node: Arc<Node>, stop: CancellationToken) {
    let interval = Duration::from_millis(node.config.eviction_interval_ms);
    if interval.is_zero() {
        return;
    }
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(interval) => {}
        }
        for replica in node.replicas.shards() {
            if replica.raft.leadership().is_ready {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = node.evict(&replica) => {}
                }
            }
        }
    }
}

impl Node {
    async fn evict(self: &Arc<Self>, replica: &Arc<ShardReplica>) {
        let schemas = replica.machine.rows().schemas();
        let tables: Vec<_> = schemas.values().filter(|schema| schema.rules().evicts()).cloned().collect();
        for schema in tables {
            if let Err(error) = self.evict_table(replica, &schema).await {
                // Leadership moved, or the shard has enough to do: the next look is soon.
                let passing = matches!(
                    error.kind(),
                    ErrorKind::NotLeader
                        | ErrorKind::Unavailable
                        | ErrorKind::Exhausted
                        | ErrorKind::UnknownGroup
                );
                let (shard, table) = (replica.listed.shard, schema.number());
                if passing {
                    tracing::debug!(shard, table, %error, "rows that are to go wait");
                } else {
                    tracing::error!(shard, table, %error, "rows that are to go stay");
                }
                return;
            }
        }
    }

    async fn evict_table(
        self: &Arc<Self>,
        replica: &Arc<ShardReplica>,
        schema: &Arc<TableSchema>,
    ) -> Result<(), RequestError> {
        let group = replica.listed.group;
        let table = schema.number();
        if schema.rules().expire_seconds > 0 {
            let step = replica.machine.table_step(table);
            let tick = ShardCommand::Evict { table, clock_ms: 0, step, rows: Vec::new() };
            self.propose_eviction(group, &tick).await?;
        }
        let cut_off =
            CutOff { clock_ms: replica.machine.clock_ms(), step: replica.machine.table_step(table) };
        let Some(found) = look_apart(replica, schema, cut_off).await? else { return Ok(()) };
        for rows in found.rows.chunks(EVICTED_ROWS_MAX) {
            let CutOff { clock_ms, step } = found.cut_off;
            let evict = ShardCommand::Evict { table: found.table, clock_ms, step, rows: rows.to_vec() };
            self.propose_eviction(group, &evict).await?;
            metrics::counter!(metric::EVICTIONS_TOTAL).increment(rows.len() as u64);
        }
        Ok(())
    }

    async fn propose_eviction(&self, group: u64, command: &ShardCommand) -> Result<(), RequestError> {
        let answer = self.propose_here(group, command.encode()).await?;
        match CommandOutcome::decode(&answer) {
            Ok(CommandOutcome::Done) => Ok(()),
            other => {
                let what = format!("group {group} answered an eviction with {other:?}");
                Err(RequestError::new(ErrorKind::Internal, what))
            }
        }
    }
}

/// Looks on a thread of its own; ends soon when whoever waits for it is gone.
async fn look_apart(
    replica: &Arc<ShardReplica>,
    schema: &Arc<TableSchema>,
    cut_off: CutOff,
) -> Result<Option<Found>, RequestError> {
    struct Ends(Arc<AtomicBool>);
    impl Drop for Ends {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }
    let ended = Arc::new(AtomicBool::new(false));
    let _ends = Ends(ended.clone());
    let (replica, schema) = (replica.clone(), schema.clone());
    let looked = tokio::task::spawn_blocking(move || {
        let mut go_on = || !ended.load(Ordering::Acquire) && replica.raft.leadership().is_ready;
        look(replica.machine.rows(), &schema, cut_off, &mut go_on)
    });
    let found = looked.await.map_err(|error| RequestError::new(ErrorKind::Internal, error.to_string()))?;
    found.map_err(|error| RequestError::new(ErrorKind::Internal, error.to_string()))
}
