//! Purging a group's log behind the flush, by bytes.
//!
//! Invariants:
//! - nothing is purged beyond the state machine's durable mark;
//! - what follows a snapshot that is being sent, or was a moment ago, stays, up to `snapshot_hold_log_bytes`: else its
//!   receiver would need another snapshot at once, and never catch up;
//! - at least `retain_log_bytes` of log stay for followers that lag (when there is so much), so that a short absence
//!   costs no snapshot.
//!
//! Not here: flushing (the state machine), removing segments (`evershard_storage::log`).

use std::sync::Weak;
use std::time::Duration;

use evershard_storage::log::GroupLog;

use crate::executor::{self, ApplyExecutor};
use crate::group::GroupInner;
use crate::type_config::Runtime;

/// How long openraft is given to take note of a new virtual snapshot.
const NOTED_WITHIN: Duration = Duration::from_secs(10);

/// Purges after every flush, until the group stops.
pub(crate) async fn run_purger<RT: Runtime>(
    group: Weak<GroupInner<RT>>,
    executor: std::sync::Arc<dyn ApplyExecutor>,
) {
    loop {
        let Some(inner) = group.upgrade() else { return };
        let stop = inner.stop.clone();
        let work = async {
            inner.flushed.notified().await;
            purge_once(&inner, &*executor).await;
        };
        let work = std::pin::pin!(work);
        let stopped = std::pin::pin!(stop.cancelled());
        if let futures_util::future::Either::Left(_) = futures_util::future::select(stopped, work).await {
            return;
        }
    }
}

async fn purge_once<RT: Runtime>(inner: &GroupInner<RT>, executor: &dyn ApplyExecutor) {
    let state_machine = std::sync::Arc::clone(&inner.state_machine);
    let Ok(mark) = executor::run(executor, inner.group, move || state_machine.snapshot_mark()).await else {
        return;
    };
    let Some(mark) = mark.position else { return };
    // openraft purges up to its snapshot at most, so it has to hear of the mark first.
    if inner.raft.trigger().snapshot().await.is_err() {
        return;
    }
    let wait = inner.raft.wait(Some(NOTED_WITHIN));
    let noted = wait.metrics(|m| m.snapshot.is_some_and(|at| at.index() >= mark.index), "the mark is known");
    if noted.await.is_err() {
        tracing::debug!(group = inner.group, index = mark.index, "the mark was not noted in time");
        return;
    }
    let log = inner.log.clone();
    let retain = inner.options.limits.retain_log_bytes;
    let links = inner.links.clone();
    let chosen = executor::read(executor, move || {
        let upto = links.held_index().map_or(mark.index, |held| held.min(mark.index));
        purge_point(&log, upto, retain)
    })
    .await;
    if let Ok(Some(upto)) = chosen {
        tracing::debug!(group = inner.group, upto, mark = mark.index, "purging the log");
        // An error says that the group stopped meanwhile.
        let _ = inner.raft.trigger().purge_log(upto).await;
    }
}

/// The last index at or below `mark` with at least `retain` bytes of log after it; `None` when nothing can go.
fn purge_point(log: &GroupLog, mark: u64, retain: u64) -> Option<u64> {
    let state = log.state();
    let last = state.last?.index.min(mark);
    bisect(state.first, last, |index| log.bytes_since(index) >= retain)
}

/// The last of `first..=last` for which `holds` is true, when it is true up to some point and false after.
fn bisect(first: u64, last: u64, holds: impl Fn(u64) -> bool) -> Option<u64> {
    if first > last || !holds(first) {
        return None;
    }
    let (mut low, mut high) = (first, last);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if holds(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    Some(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_last_index_that_leaves_enough() {
        // 10 bytes an entry, entries 5..=20.
        let bytes_since = |index: u64| (20 - index) * 10;
        assert_eq!(bisect(5, 20, |index| bytes_since(index) >= 45), Some(15));
        assert_eq!(bisect(5, 12, |index| bytes_since(index) >= 45), Some(12), "never past the mark");
        assert_eq!(bisect(5, 20, |index| bytes_since(index) >= 1000), None, "all of it is kept");
        assert_eq!(bisect(5, 20, |_| true), Some(20), "nothing has to be kept");
        assert_eq!(bisect(5, 4, |_| true), None, "an empty log");
    }
}
