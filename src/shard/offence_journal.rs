//! What a replica remembers of values that were not finite: counts by table and by who sent them, and the last of each table.
//!
//! An offence comes from one of two sides:
//! - **logged**: apply skipped or clipped it. Every replica counts it, each entry once, so that whoever leads next has counted
//!   what its predecessor counted;
//! - **heard**: it never was in the log: a door refused it, a leader took it out of what a worker contributed to a step, or a
//!   client tells what it took out before it sent anything. Only the replica that heard of it counts it.
//!
//! Invariants:
//! - it is in memory alone: it begins with the replica's start, and is neither replicated state nor on disk. A replica that is
//!   started again counts what it replays;
//! - it is bounded, whoever pushes: so many sources a table, so many last offences; below 8 KiB a table that was offended. Who
//!   is pushed out keeps counting in the table's total, and begins at zero when it comes back;
//! - a table that is dropped is forgotten, at the latest when its node measures itself the next time;
//! - the logged side follows from the entries alone.
//!
//! Not here: what is done about values that are not finite (`apply`), adding up over replicas (the admin tool).

use std::collections::{BTreeMap, VecDeque};

use parking_lot::Mutex;

use crate::model::{Offence, OffenceCounts, Source};

/// Sources that are told apart, of a table and a side.
pub(super) const SOURCES_MAX: usize = 64;
/// Offences that are remembered one by one, of a table and a side.
pub(super) const LAST_MAX: usize = 16;

/// Where an offence was counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// In apply: every replica counts it.
    Logged,
    /// Before the log: whoever heard of it.
    Heard,
}

/// One side of a table.
#[derive(Debug, Clone, Default)]
pub struct OffenceLedger {
    /// All there were.
    pub total: OffenceCounts,
    /// By source, whoever offended last at the end.
    pub sources: VecDeque<(Source, OffenceCounts)>,
    /// The last ones, the newest at the end.
    pub last: VecDeque<Offence>,
}

impl OffenceLedger {
    fn note(&mut self, offence: Offence) {
        let Offence { source, action, rows, .. } = offence;
        self.total.add(action, rows.count);
        let known = self.sources.iter().position(|(other, _)| *other == source);
        let mut counts = known.and_then(|at| self.sources.remove(at)).map_or_else(Default::default, |s| s.1);
        counts.add(action, rows.count);
        // Room first: one more would double what a full one takes.
        if self.sources.len() >= SOURCES_MAX {
            self.sources.pop_front();
        }
        self.sources.push_back((source, counts));
        if self.last.len() >= LAST_MAX {
            self.last.pop_front();
        }
        self.last.push_back(offence);
    }
}

/// Both sides of a table.
#[derive(Debug, Clone, Default)]
pub struct TableOffences {
    /// What apply counted.
    pub logged: OffenceLedger,
    /// What was heard.
    pub heard: OffenceLedger,
}

/// See the module. One a replica; its lock is held for moments, and none is taken under it.
#[derive(Debug, Default)]
pub struct OffenceJournal {
    tables: Mutex<BTreeMap<u32, TableOffences>>,
}

impl OffenceJournal {
    /// Counts an offence of a table that exists.
    pub fn note(&self, side: Side, table: u32, offence: Offence) {
        let mut tables = self.tables.lock();
        let known = tables.entry(table).or_default();
        match side {
            Side::Logged => known.logged.note(offence),
            Side::Heard => known.heard.note(offence),
        }
    }

    /// What is known of a table.
    #[must_use]
    pub fn of(&self, table: u32) -> TableOffences {
        self.tables.lock().get(&table).cloned().unwrap_or_default()
    }

    /// Tables that were offended, with both sides added up.
    #[must_use]
    pub fn totals(&self) -> Vec<(u32, OffenceCounts)> {
        let tables = self.tables.lock();
        let total = |known: &TableOffences| {
            let mut total = known.logged.total;
            total.merge(known.heard.total);
            total
        };
        tables.iter().map(|(table, known)| (*table, total(known))).collect()
    }

    /// A table was dropped: its number never comes back.
    pub(crate) fn forget(&self, table: u32) {
        self.tables.lock().remove(&table);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Action, BadRows, BadValue};

    fn offence(session: u64, action: Action, count: u64) -> Offence {
        let first = BadValue { id: session, column: 0, value: f32::NAN, of_sum: false };
        Offence { source: Source::Session(session), action, rows: BadRows { count, first }, time_ms: session }
    }

    #[test]
    fn counts_by_table_side_source_and_action() {
        let journal = OffenceJournal::default();
        journal.note(Side::Logged, 1, offence(7, Action::Skipped, 3));
        journal.note(Side::Logged, 1, offence(8, Action::Skipped, 1));
        journal.note(Side::Logged, 1, offence(7, Action::Clipped, 2));
        journal.note(Side::Heard, 1, offence(7, Action::Rejected, 1));
        journal.note(Side::Heard, 2, offence(7, Action::Rejected, 1));
        let known = journal.of(1);
        let (last, counts) = known.logged.sources.back().unwrap();
        assert_eq!(*last, Source::Session(7));
        assert_eq!(Action::ALL.map(|action| counts.of(action)), [0, 3, 2]);
        assert_eq!(Action::ALL.map(|action| known.logged.total.of(action)), [0, 4, 2]);
        assert_eq!(Action::ALL.map(|action| known.heard.total.of(action)), [1, 0, 0]);
        let totals = journal.totals();
        assert_eq!(totals.iter().map(|(table, _)| *table).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(Action::ALL.map(|action| totals[0].1.of(action)), [1, 4, 2]);
        journal.forget(1);
        assert_eq!(journal.totals().len(), 1);
        assert!(journal.of(1).logged.last.is_empty());
    }

    #[test]
    fn it_stays_small_and_loses_no_count() {
        let journal = OffenceJournal::default();
        let sessions = 10 * SOURCES_MAX as u64;
        for session in 0..sessions {
            journal.note(Side::Logged, 1, offence(session, Action::Skipped, 2));
            // One that goes on offending is not pushed out by many that do it once.
            journal.note(Side::Logged, 1, offence(u64::MAX, Action::Skipped, 1));
        }
        let known = journal.of(1).logged;
        assert_eq!(known.total.of(Action::Skipped), 3 * sessions);
        assert_eq!((known.sources.len(), known.last.len()), (SOURCES_MAX, LAST_MAX));
        let bytes = {
            let tables = journal.tables.lock();
            let OffenceLedger { sources, last, .. } = &tables[&1].logged;
            sources.capacity() * size_of::<(Source, OffenceCounts)>() + last.capacity() * size_of::<Offence>()
        };
        assert!(bytes <= 4096, "{bytes} a side");
        let (source, counts) = known.sources.back().unwrap();
        assert_eq!((*source, counts.of(Action::Skipped)), (Source::Session(u64::MAX), sessions));
        assert_eq!(known.last.back().map(|last| last.source), Some(Source::Session(u64::MAX)));
    }
}
