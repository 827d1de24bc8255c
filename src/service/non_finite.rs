//! Values that are not finite, as the doors count and tell them.
//!
//! Invariants:
//! - what a client tells is checked whole before any of it is counted;
//! - it is believed as its pushes are: a client that lies spoils counts, and nothing else depends on them.
//!
//! Not here: what is remembered of them (`shard::offence_journal`), what apply counts (`apply`).

use std::time::{SystemTime, UNIX_EPOCH};

use evershard_proto::limits::{NON_FINITE_REPORT_COUNT_MAX, NON_FINITE_REPORT_ROWS_MAX};
use evershard_proto::v1::{
    ErrorKind, NonFiniteAction, NonFiniteCounts, NonFiniteLedger, NonFiniteOffence, NonFiniteReport,
    NonFiniteReportReply, NonFiniteRows, NonFiniteSource, ReplicaNonFinite, StepContributor, WorkerIdentity,
};

use super::RequestError;
use super::parameter::ParameterDoor;
use crate::apply::{PushRefusal, StepOffence};
use crate::cluster::replicas::ShardReplica;
use crate::model::{Action, BadRows, BadValue, Offence, OffenceCounts, Source};
use crate::shard::{OffenceLedger, Side};

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// Who pushes.
pub(super) fn source_of(session: u64, worker: Option<&WorkerIdentity>) -> Source {
    match worker {
        Some(worker) => Source::Worker { job: worker.job, rank: worker.rank },
        None => Source::Session(session),
    }
}

/// Counts a push that a door refuses, if that is for a value that is not finite.
pub(super) fn note_refusal(replica: &ShardReplica, source: Source, refusal: &PushRefusal) {
    if let Some((table, value)) = refusal.bad_value() {
        let (action, rows, time_ms) = (Action::Rejected, BadRows::one(value), now_ms());
        replica.machine.offences().note(Side::Heard, table, Offence { source, action, rows, time_ms });
    }
}

/// Counts what was taken out of the contributions to a step that is applied.
pub(super) fn note_step(
    replica: &ShardReplica,
    job: u64,
    contributors: &[StepContributor],
    offences: &[StepOffence],
) {
    let time_ms = now_ms();
    for offence in offences {
        let Some(contributor) = contributors.get(offence.contributor) else { continue };
        let source = Source::Worker { job, rank: contributor.rank };
        let (action, rows) = (offence.action, offence.rows);
        replica.machine.offences().note(
            Side::Heard,
            offence.table,
            Offence { source, action, rows, time_ms },
        );
    }
}

impl ParameterDoor {
    /// Counts what a client found itself.
    pub(super) fn report_non_finite(
        &self,
        report: &NonFiniteReport,
    ) -> Result<NonFiniteReportReply, RequestError> {
        let group = report.group;
        let replica = self.replicas.shard(group)?;
        let invalid = |what: String| RequestError::new(ErrorKind::Invalid, what).in_group(group);
        if report.rows.len() > NON_FINITE_REPORT_ROWS_MAX {
            return Err(invalid(format!("a report has at most {NON_FINITE_REPORT_ROWS_MAX} entries")));
        }
        // A table without a schema was dropped meanwhile, or is not here yet.
        let known = report.rows.iter().filter_map(|told| Some((told, replica.reader.schema(told.table)?)));
        let told = known.map(|(told, schema)| checked_rows(told, schema.dim()));
        let told = told.collect::<Result<Vec<_>, _>>().map_err(invalid)?;
        let source = source_of(report.session, report.worker.as_ref());
        let time_ms = now_ms();
        for (table, action, rows) in told {
            replica.machine.offences().note(Side::Heard, table, Offence { source, action, rows, time_ms });
        }
        Ok(NonFiniteReportReply {})
    }
}

/// An entry of a report: its table, what was done, and to what.
fn checked_rows(told: &NonFiniteRows, dim: u32) -> Result<(u32, Action, BadRows), String> {
    let &NonFiniteRows { table, action, count, id, column, value, of_sum } = told;
    let action = match NonFiniteAction::try_from(action) {
        Ok(NonFiniteAction::Rejected) => Action::Rejected,
        Ok(NonFiniteAction::Skipped) => Action::Skipped,
        Ok(NonFiniteAction::Clipped) => Action::Clipped,
        Err(_) => return Err(format!("table {table}: {action} is nothing that is done about values")),
    };
    if !(1..=NON_FINITE_REPORT_COUNT_MAX).contains(&count) {
        let what =
            format!("table {table}: a report counts 1 to {NON_FINITE_REPORT_COUNT_MAX} at once, not {count}");
        return Err(what);
    }
    if column >= dim {
        return Err(format!("table {table}: column {column} of {dim}"));
    }
    Ok((table, action, BadRows { count, first: BadValue { id, column, value, of_sum } }))
}

/// What a replica counts of a table; `worker_of` knows whose a session is.
pub(super) fn of_replica(
    replica: &ShardReplica,
    table: u32,
    worker_of: impl Fn(u64) -> Option<WorkerIdentity>,
) -> ReplicaNonFinite {
    let known = replica.machine.offences().of(table);
    let ledger = |ledger: &OffenceLedger| NonFiniteLedger {
        total: Some(counts(ledger.total)),
        sources: ledger
            .sources
            .iter()
            .map(|(source, of)| NonFiniteSource { counts: Some(counts(*of)), ..told(*source, &worker_of) })
            .collect(),
        last: ledger.last.iter().map(|offence| offence_of(table, offence, &worker_of)).collect(),
    };
    ReplicaNonFinite {
        shard: replica.listed.shard,
        logged: Some(ledger(&known.logged)),
        heard: Some(ledger(&known.heard)),
    }
}

fn counts(of: OffenceCounts) -> NonFiniteCounts {
    NonFiniteCounts {
        rejected: of.of(Action::Rejected),
        skipped: of.of(Action::Skipped),
        clipped: of.of(Action::Clipped),
    }
}

fn told(source: Source, worker_of: impl Fn(u64) -> Option<WorkerIdentity>) -> NonFiniteSource {
    match source {
        Source::Session(session) => {
            let worker = worker_of(session).unwrap_or_default();
            NonFiniteSource { session, job: worker.job, rank: worker.rank, ..Default::default() }
        }
        Source::Worker { job, rank } => NonFiniteSource { job, rank, ..Default::default() },
        Source::Step { job } => NonFiniteSource { job, is_step: true, ..Default::default() },
    }
}

fn offence_of(
    table: u32,
    offence: &Offence,
    worker_of: impl Fn(u64) -> Option<WorkerIdentity>,
) -> NonFiniteOffence {
    let action = match offence.action {
        Action::Rejected => NonFiniteAction::Rejected,
        Action::Skipped => NonFiniteAction::Skipped,
        Action::Clipped => NonFiniteAction::Clipped,
    };
    let BadRows { count, first: BadValue { id, column, value, of_sum } } = offence.rows;
    let rows = NonFiniteRows { table, action: action.into(), count, id, column, value, of_sum };
    NonFiniteOffence {
        time_ms: offence.time_ms,
        rows: Some(rows),
        source: Some(told(offence.source, worker_of)),
    }
}
