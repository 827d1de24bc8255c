//! What an entry does about values that are not finite, gathered while it is applied and counted when it is.
//!
//! Invariants:
//! - an entry is counted once: one that halts half-way counts nothing, and everything when it is applied again;
//! - it depends on the entry and the schemas alone, also where rows hold the entry already: replay counts what was counted.
//!
//! Not here: what is done about them (`push`, `row_update`), what is remembered (`shard::offence_journal`).

use super::Target;
use crate::model::{Action, BadRows, BadValue, NonFinite, Offence, Source};
use crate::shard::Side;

/// Of the entry that is being applied.
#[derive(Debug, Default)]
pub(super) struct Offences {
    /// By table.
    found: Vec<(u32, Action, BadRows)>,
}

impl Offences {
    /// Another entry begins.
    pub(super) fn begin(&mut self) {
        self.found.clear();
    }

    /// Takes note of what a policy did to rows of a table.
    pub(super) fn add(&mut self, table: u32, policy: NonFinite, rows: Option<BadRows>) {
        let action = action_of(policy);
        self.found.extend(rows.map(|rows| (table, action, rows)));
    }

    /// The entry is applied.
    pub(super) fn count(&mut self, target: &Target<'_>, source: Source) {
        let time_ms = target.time_ms;
        for (table, action, mut rows) in self.found.drain(..) {
            // All that a step brings are sums.
            rows.first.of_sum |= matches!(source, Source::Step { .. });
            target.offences.note(Side::Logged, table, Offence { source, action, rows, time_ms });
        }
    }
}

/// What a policy does.
pub(super) fn action_of(policy: NonFinite) -> Action {
    match policy {
        NonFinite::Reject => Action::Rejected,
        NonFinite::SkipRow => Action::Skipped,
        NonFinite::Clip => Action::Clipped,
    }
}

/// One more row among some.
pub(super) fn add_row(rows: &mut Option<BadRows>, first: impl FnOnce() -> Option<BadValue>) {
    match rows {
        Some(rows) => rows.count += 1,
        None => *rows = first().map(BadRows::one),
    }
}
