//! What the nodes count of values that were not finite, added up for one table.
//!
//! What is in the log is counted by every replica: of a shard's replicas the one that counted most began first, and stands for
//! all. What never was in the log is counted by one replica each, and added up.

use std::collections::BTreeMap;
use std::time::Duration;

use evershard_proto::v1::{
    GetNonFiniteRequest, NonFiniteAction, NonFiniteCounts, NonFiniteLedger, NonFiniteOffence,
    NonFiniteSource, ReplicaNonFinite,
};
use futures_util::future::join_all;
use serde::Serialize;
use tokio::time::{Instant, timeout_at};

use crate::connection::Connection;

/// A node that has not answered by then is left out.
const NODE_ANSWER_MAX: Duration = Duration::from_secs(2);
/// Offences that are shown.
const LAST_SHOWN: usize = 16;

/// Counts, by what was done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(super) struct Counts {
    /// Pushes.
    pub(super) rejected: u64,
    /// Rows.
    pub(super) skipped: u64,
    pub(super) clipped: u64,
}

impl Counts {
    fn of(counts: Option<NonFiniteCounts>) -> Self {
        let NonFiniteCounts { rejected, skipped, clipped } = counts.unwrap_or_default();
        Counts { rejected, skipped, clipped }
    }

    fn add(&mut self, other: Counts) {
        // Clients tell what they want.
        self.rejected = self.rejected.saturating_add(other.rejected);
        self.skipped = self.skipped.saturating_add(other.skipped);
        self.clipped = self.clipped.saturating_add(other.clipped);
    }

    fn all(self) -> u64 {
        self.rejected.saturating_add(self.skipped).saturating_add(self.clipped)
    }
}

/// Who pushed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct Source {
    /// Null when it came with a step, or from a client without a session.
    session: Option<u64>,
    /// The number of the job, when it is a worker's.
    job: Option<u64>,
    /// Its rank in the job; null for the sum of a step that is not finite, although what its workers pushed is.
    rank: Option<u32>,
}

impl Source {
    fn of(source: &NonFiniteSource) -> Self {
        let job = Some(source.job).filter(|job| *job != 0);
        Source {
            session: Some(source.session).filter(|session| *session != 0),
            job,
            rank: job.and(Some(source.rank)).filter(|_| !source.is_step),
        }
    }

    /// For people.
    pub(super) fn plain(&self) -> String {
        match (self.session, self.job, self.rank) {
            (Some(session), Some(job), Some(rank)) => format!("job {job} rank {rank} (session {session})"),
            (Some(session), ..) => format!("session {session}"),
            (None, Some(job), Some(rank)) => format!("job {job} rank {rank}"),
            (None, Some(job), None) => format!("a step's sum, job {job}"),
            (None, None, _) => "a client without a session".to_owned(),
        }
    }
}

/// A source and its counts.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct SourceView {
    #[serde(flatten)]
    pub(super) source: Source,
    #[serde(flatten)]
    pub(super) counts: Counts,
}

/// What one push did.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct OffenceView {
    /// In unix time.
    pub(super) time_ms: u64,
    pub(super) shard: u32,
    #[serde(flatten)]
    pub(super) source: Source,
    /// "rejected" | "skipped" | "clipped".
    pub(super) action: &'static str,
    /// Rows, or pushes that were rejected.
    pub(super) count: u64,
    /// The first of them.
    pub(super) id: u64,
    pub(super) column: u32,
    /// "NaN", "inf", "-inf", or a number that the encoding does not hold.
    pub(super) value: String,
    /// Finite values added up to it.
    pub(super) of_sum: bool,
}

/// A table's.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct NonFiniteView {
    pub(super) total: Counts,
    /// Whoever did most first; bounded on every node, so that they may add up to less than the total.
    pub(super) sources: Vec<SourceView>,
    /// The newest first.
    pub(super) last: Vec<OffenceView>,
}

impl NonFiniteView {
    /// Asks every node. Says on stderr who does not answer.
    pub(super) async fn gather(connection: &Connection, table: u32) -> Self {
        let deadline = connection.deadline().min(Instant::now() + NODE_ANSWER_MAX);
        let answers = connection.nodes().map(|(id, node)| async move {
            let mut admin = node.admin();
            let answer = timeout_at(deadline, admin.get_non_finite(GetNonFiniteRequest { table })).await;
            match answer {
                Ok(Ok(reply)) => reply.into_inner().replicas,
                Ok(Err(_)) | Err(_) => {
                    eprintln!("node {id} does not tell what it counted of values that are not finite");
                    Vec::new()
                }
            }
        });
        Self::merge(&join_all(answers).await.concat())
    }

    fn merge(replicas: &[ReplicaNonFinite]) -> Self {
        let mut view = NonFiniteView::default();
        let mut sources: BTreeMap<Source, Counts> = BTreeMap::new();
        let mut logged: BTreeMap<u32, &NonFiniteLedger> = BTreeMap::new();
        for replica in replicas {
            if let Some(ledger) = &replica.heard {
                view.add(replica.shard, ledger, &mut sources);
            }
            if let Some(ledger) = &replica.logged {
                let most = logged.entry(replica.shard).or_insert(ledger);
                if Counts::of(ledger.total).all() > Counts::of(most.total).all() {
                    *most = ledger;
                }
            }
        }
        for (shard, ledger) in logged {
            view.add(shard, ledger, &mut sources);
        }
        view.sources = sources.into_iter().map(|(source, counts)| SourceView { source, counts }).collect();
        view.sources.sort_by_key(|known| std::cmp::Reverse(known.counts.all()));
        view.last.sort_by_key(|offence| std::cmp::Reverse(offence.time_ms));
        view.last.truncate(LAST_SHOWN);
        view
    }

    fn add(&mut self, shard: u32, ledger: &NonFiniteLedger, sources: &mut BTreeMap<Source, Counts>) {
        self.total.add(Counts::of(ledger.total));
        for source in &ledger.sources {
            sources.entry(Source::of(source)).or_default().add(Counts::of(source.counts));
        }
        self.last.extend(ledger.last.iter().map(|offence| OffenceView::of(shard, offence)));
    }
}

impl OffenceView {
    fn of(shard: u32, offence: &NonFiniteOffence) -> Self {
        let rows = offence.rows.unwrap_or_default();
        OffenceView {
            time_ms: offence.time_ms,
            shard,
            source: Source::of(&offence.source.unwrap_or_default()),
            action: match rows.action() {
                NonFiniteAction::Rejected => "rejected",
                NonFiniteAction::Skipped => "skipped",
                NonFiniteAction::Clipped => "clipped",
            },
            count: rows.count,
            id: rows.id,
            column: rows.column,
            value: rows.value.to_string(),
            of_sum: rows.of_sum,
        }
    }
}

#[cfg(test)]
mod tests {
    use evershard_proto::v1::NonFiniteRows;

    use super::*;

    fn ledger(session: u64, skipped: u64, rejected: u64, time_ms: u64) -> NonFiniteLedger {
        let counts = Some(NonFiniteCounts { rejected, skipped, clipped: 0 });
        let source = NonFiniteSource { session, counts, ..Default::default() };
        let rows = NonFiniteRows { id: session, value: f32::NEG_INFINITY, ..Default::default() };
        let offence = NonFiniteOffence { time_ms, rows: Some(rows), source: Some(source) };
        NonFiniteLedger { total: counts, sources: vec![source], last: vec![offence] }
    }

    #[test]
    fn replicas_stand_for_each_other_in_what_is_logged_and_for_nobody_in_what_they_heard() {
        let replica = |shard, logged, heard| ReplicaNonFinite { shard, logged, heard };
        let replicas = [
            // Restarted: it missed some.
            replica(0, Some(ledger(7, 2, 0, 20)), Some(ledger(7, 0, 1, 30))),
            replica(0, Some(ledger(7, 5, 0, 10)), Some(ledger(8, 0, 2, 40))),
            replica(0, Some(ledger(7, 5, 0, 10)), None),
            replica(1, Some(ledger(8, 4, 0, 50)), None),
        ];
        let view = NonFiniteView::merge(&replicas);
        assert_eq!(view.total, Counts { rejected: 3, skipped: 9, clipped: 0 });
        let of = |at: usize| (view.sources[at].source.session, view.sources[at].counts);
        assert_eq!(of(0), (Some(7), Counts { rejected: 1, skipped: 5, clipped: 0 }));
        assert_eq!(of(1), (Some(8), Counts { rejected: 2, skipped: 4, clipped: 0 }));
        assert_eq!(view.last.iter().map(|last| last.time_ms).collect::<Vec<_>>(), [50, 40, 30, 10]);
        assert_eq!((view.last[0].value.as_str(), view.last[0].shard), ("-inf", 1));
    }

    #[test]
    fn sources_read_well() {
        let plain = |session, job, rank, is_step| {
            Source::of(&NonFiniteSource { session, job, rank, is_step, counts: None }).plain()
        };
        assert_eq!(plain(7, 0, 0, false), "session 7");
        assert_eq!(plain(7, 3, 0, false), "job 3 rank 0 (session 7)");
        assert_eq!(plain(0, 3, 1, false), "job 3 rank 1");
        assert_eq!(plain(0, 3, 0, true), "a step's sum, job 3");
        assert_eq!(plain(0, 0, 0, false), "a client without a session");
    }
}
