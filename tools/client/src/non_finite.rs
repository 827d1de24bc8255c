//! Telling the servers what this client itself refused, left out or clipped because it was not finite: they count it with what
//! they find, so that whoever looks at a table sees who sent it what.
//!
//! Invariants:
//! - a report is no part of a push: nothing waits for it but a push that is refused, and that for [`TELL_WITHIN`] at the most;
//! - what a server finds itself is not told: it would be counted twice;
//! - at most one report is under way that nobody waits for; what comes meanwhile goes with the next one;
//! - a report that a node answered, or may have in hand, is not repeated; one on a connection that broke is, to another node.
//!
//! Not here: what is done about such values (`push`), where it is counted (the servers).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::key::key_of;
use evershard_proto::limits::NON_FINITE_REPORT_COUNT_MAX;
use evershard_proto::v1::parameter_service_client::ParameterServiceClient;
use evershard_proto::v1::{NonFiniteAction, NonFiniteReport, NonFiniteRows, WorkerIdentity};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::OnceCell;
use tokio::time::timeout_at;
use tonic::Code;
use tonic::service::interceptor::InterceptedService;

use crate::client::Shared;
use crate::session::Sessions;
use crate::unary::AskUnder;

/// How long a report may take.
const TELL_WITHIN: Duration = Duration::from_secs(1);

/// What was found in one push, or in several: by table and by what was done.
#[derive(Debug, Default)]
pub(crate) struct Found(BTreeMap<(u32, i32), NonFiniteRows>);

impl Found {
    /// Takes note of `count` rows of a table, or of a push that is refused, and of the first value.
    pub(crate) fn add(
        &mut self,
        table: u32,
        action: NonFiniteAction,
        count: u64,
        (id, column, value): (u64, usize, f32),
        of_sum: bool,
    ) {
        let column = u32::try_from(column).unwrap_or(u32::MAX);
        let action = action.into();
        self.merge_rows(NonFiniteRows { table, action, count, id, column, value, of_sum });
    }

    fn merge_rows(&mut self, rows: NonFiniteRows) {
        let known = self.0.entry((rows.table, rows.action)).or_insert(NonFiniteRows { count: 0, ..rows });
        known.count = (known.count + rows.count).min(NON_FINITE_REPORT_COUNT_MAX);
    }

    /// The push is refused: nothing of it was left out or clipped.
    pub(crate) fn only_refusals(mut self) -> Self {
        self.0.retain(|_, rows| rows.action() == NonFiniteAction::Rejected);
        self
    }

    #[cfg(test)]
    pub(crate) fn rows(&self) -> Vec<NonFiniteRows> {
        self.0.values().copied().collect()
    }
}

#[derive(Debug, Default)]
struct Pending {
    found: Found,
    is_sending: bool,
}

/// A client's reports; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Reports {
    shared: Shared,
    sessions: Arc<Sessions>,
    worker: Option<WorkerIdentity>,
    /// The session that the client is known by.
    session: Arc<OnceCell<u64>>,
    pending: Arc<Mutex<Pending>>,
    /// Pushes may be checked on any thread.
    runtime: Handle,
}

impl Reports {
    pub(crate) fn new(shared: Shared, sessions: Arc<Sessions>, worker: Option<WorkerIdentity>) -> Self {
        Reports {
            shared,
            sessions,
            worker,
            session: Arc::default(),
            pending: Arc::default(),
            runtime: Handle::current(),
        }
    }

    /// Tells it sometime.
    pub(crate) fn tell(&self, found: Found) {
        if found.0.is_empty() {
            return;
        }
        {
            let mut pending = self.pending.lock();
            found.0.into_values().for_each(|rows| pending.found.merge_rows(rows));
            if std::mem::replace(&mut pending.is_sending, true) {
                return;
            }
        }
        let reports = self.clone();
        let _entered = self.runtime.enter();
        self.shared.channels.spawn(async move {
            while let Some(found) = reports.next() {
                reports.send(found).await;
            }
        });
    }

    /// Tells it now: whoever pushed it may end with the refusal.
    pub(crate) async fn tell_refusal(&self, found: Found) {
        let found = found.only_refusals();
        if !found.0.is_empty() {
            self.send(found).await;
        }
    }

    fn next(&self) -> Option<Found> {
        let mut pending = self.pending.lock();
        pending.is_sending = !pending.found.0.is_empty();
        pending.is_sending.then(|| std::mem::take(&mut pending.found))
    }

    async fn send(&self, found: Found) {
        let deadline = Instant::now() + TELL_WITHIN;
        if timeout_at(deadline.into(), self.send_until(found, deadline)).await.is_err() {
            tracing::debug!("values that are not finite were not told in time");
        }
    }

    async fn send_until(&self, found: Found, deadline: Instant) {
        let Ok(routing) = self.shared.routing.table(deadline).await else { return };
        // The client's own session, as long as it has one: a name that its pushes have, too.
        let session = match self.worker {
            Some(_) => 0,
            None => {
                let opened = self.session.get_or_try_init(|| self.sessions.shared(deadline)).await;
                opened.copied().unwrap_or_default()
            }
        };
        let mut groups: BTreeMap<usize, Vec<NonFiniteRows>> = BTreeMap::new();
        for rows in found.0.into_values() {
            groups.entry(routing.shard_of(key_of(rows.table, rows.id))).or_default().push(rows);
        }
        for (shard, rows) in groups {
            let shard = &routing.shards[shard];
            let report = NonFiniteReport { group: shard.group, session, worker: self.worker, rows };
            let leader = self.shared.routing.leader(shard.group);
            let others = shard.replicas.iter().map(|(_, address)| address.clone());
            for address in leader.into_iter().chain(others) {
                if self.tell_node(&address, &report).await {
                    break;
                }
            }
        }
    }

    /// False when another node may be told: this one is not there, is not asked for this, or its connection broke.
    async fn tell_node(&self, address: &str, report: &NonFiniteReport) -> bool {
        let Ok(channel) = self.shared.routing.unary_channel(address) else { return false };
        let epoch = AskUnder(self.shared.routing.recovery_epoch());
        let mut client = ParameterServiceClient::new(InterceptedService::new(channel, epoch));
        match client.report_non_finite(report.clone()).await {
            Ok(_) => true,
            Err(status) => {
                tracing::debug!(address, %status, "values that are not finite were not told");
                // A node of an older build, or one that is not there.
                !matches!(status.code(), Code::Unavailable | Code::Unimplemented | Code::NotFound)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_push_did_is_added_up_by_table_and_action() {
        let mut found = Found::default();
        found.add(1, NonFiniteAction::Clipped, 2, (7, 3, f32::INFINITY), false);
        found.add(1, NonFiniteAction::Clipped, 1, (8, 0, f32::NAN), false);
        found.add(2, NonFiniteAction::Rejected, 1, (9, 0, f32::NAN), true);
        let rows = found.rows();
        assert_eq!(rows.len(), 2);
        assert_eq!((rows[0].table, rows[0].count, rows[0].id, rows[0].value), (1, 3, 7, f32::INFINITY));
        let refused = found.only_refusals().rows();
        assert_eq!(refused.len(), 1);
        assert!(refused[0].of_sum && refused[0].value.is_nan());
    }
}
