//! Exactly once: per session, the last sequence number applied on this shard and the results of the last ones.
//!
//! Invariants:
//! - a session's sequence numbers are applied in order without gaps, each at most once;
//! - a number below `floor` that is not in `live` has expired for ever: it can never read as a new session (design
//!   14.5), whatever entries come later;
//! - the results of the last [`PUSHES_IN_FLIGHT_MAX`] numbers are kept: as many as a client may have unanswered.

use std::collections::{BTreeSet, HashMap, VecDeque};

use evershard_proto::limits::PUSHES_IN_FLIGHT_MAX;

use super::{PushOutcome, Refusal};

/// One session on this shard.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Session {
    /// The last sequence number applied or refused; 0 before the first.
    pub last: u64,
    /// What became of the last ones, the newest at the back; `None` for applied.
    pub results: VecDeque<Option<Refusal>>,
}

/// What to do with a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It is the next one: apply it, then [`SessionTable::record`].
    Next,
    /// Answer this; change nothing.
    Answer(PushOutcome),
}

/// The sessions of a shard: replicated state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SessionTable {
    sessions: HashMap<u64, Session>,
    floor: u64,
    live: BTreeSet<u64>,
}

impl SessionTable {
    /// Decides what (session, seq) is, without changing anything.
    #[must_use]
    pub fn admit(&self, number: u64, seq: u64) -> Admission {
        if self.expired(number) {
            return Admission::Answer(PushOutcome::SessionExpired);
        }
        let session = self.sessions.get(&number);
        let last = session.map_or(0, |session| session.last);
        if seq > last {
            return match seq - last {
                1 => Admission::Next,
                _ => Admission::Answer(PushOutcome::OutOfOrder { expected: last.saturating_add(1) }),
            };
        }
        let age = usize::try_from(last - seq).unwrap_or(usize::MAX);
        let result = session.and_then(|session| {
            session.results.len().checked_sub(age + 1).and_then(|at| session.results.get(at))
        });
        Admission::Answer(match result {
            Some(None) => PushOutcome::Applied { index: 0 },
            Some(Some(refusal)) => PushOutcome::Refused(*refusal),
            None => PushOutcome::Forgotten { last },
        })
    }

    /// Remembers what became of `seq`, which [`SessionTable::admit`] found to be next.
    pub fn record(&mut self, number: u64, seq: u64, refusal: Option<Refusal>) {
        let session = self.sessions.entry(number).or_default();
        debug_assert_eq!(session.last + 1, seq, "recorded out of order");
        session.last = seq;
        if session.results.len() == PUSHES_IN_FLIGHT_MAX {
            session.results.pop_front();
        }
        session.results.push_back(refusal);
    }

    /// Ends every session below `floor` that is not in `live`. A floor never goes back, and what has expired stays so.
    pub fn expire(&mut self, floor: u64, live: &[u64]) {
        let given: BTreeSet<u64> = live.iter().copied().filter(|number| *number < floor).collect();
        let old_floor = self.floor;
        let mut kept: BTreeSet<u64> =
            self.live.iter().copied().filter(|number| *number >= floor || given.contains(number)).collect();
        kept.extend(given.range(old_floor..));
        self.live = kept;
        self.floor = old_floor.max(floor);
        let SessionTable { sessions, floor, live } = self;
        sessions.retain(|number, _| *number >= *floor || live.contains(number));
    }

    /// True when the number has expired.
    #[must_use]
    pub fn expired(&self, number: u64) -> bool {
        number < self.floor && !self.live.contains(&number)
    }

    /// The last sequence number of a session; 0 before the first.
    #[must_use]
    pub fn last(&self, number: u64) -> u64 {
        self.sessions.get(&number).map_or(0, |session| session.last)
    }

    /// Sessions that have pushed here and live.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sessions.len()
    }

    /// True when there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    /// Numbers at or above were never expired.
    #[must_use]
    pub fn floor(&self) -> u64 {
        self.floor
    }

    /// The numbers below the floor that live, ascending.
    pub fn live(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        self.live.iter().copied()
    }

    /// The sessions in ascending order of their numbers.
    #[must_use]
    pub fn sorted(&self) -> Vec<(u64, &Session)> {
        let mut sorted: Vec<_> = self.sessions.iter().map(|(number, session)| (*number, session)).collect();
        sorted.sort_unstable_by_key(|(number, _)| *number);
        sorted
    }

    /// Builds the table that `sorted`, `floor` and `live` came from.
    #[must_use]
    pub fn restore(
        floor: u64,
        live: impl IntoIterator<Item = u64>,
        sessions: impl IntoIterator<Item = (u64, Session)>,
    ) -> Self {
        SessionTable { sessions: sessions.into_iter().collect(), floor, live: live.into_iter().collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::RefusalKind;
    use proptest::prelude::*;

    const REFUSAL: Refusal = Refusal { kind: RefusalKind::NonFinite, table: 3 };

    #[test]
    fn in_order_once_each() {
        let mut table = SessionTable::default();
        assert_eq!(table.admit(7, 2), Admission::Answer(PushOutcome::OutOfOrder { expected: 1 }));
        assert_eq!(table.admit(7, 1), Admission::Next);
        table.record(7, 1, None);
        assert_eq!(table.admit(7, 1), Admission::Answer(PushOutcome::Applied { index: 0 }));
        assert_eq!(table.admit(7, 2), Admission::Next);
        table.record(7, 2, Some(REFUSAL));
        assert_eq!(table.admit(7, 1), Admission::Answer(PushOutcome::Applied { index: 0 }));
        assert_eq!(table.admit(7, 2), Admission::Answer(PushOutcome::Refused(REFUSAL)));
        assert_eq!(table.admit(7, 4), Admission::Answer(PushOutcome::OutOfOrder { expected: 3 }));
        assert_eq!(table.admit(8, 1), Admission::Next);
    }

    #[test]
    fn results_are_kept_for_as_many_as_may_be_in_flight() {
        let mut table = SessionTable::default();
        let last = PUSHES_IN_FLIGHT_MAX as u64 + 10;
        for seq in 1..=last {
            table.record(1, seq, (seq % 2 == 0).then_some(REFUSAL));
        }
        assert_eq!(table.admit(1, 10), Admission::Answer(PushOutcome::Forgotten { last }));
        assert_eq!(table.admit(1, 11), Admission::Answer(PushOutcome::Applied { index: 0 }));
        assert_eq!(table.admit(1, 12), Admission::Answer(PushOutcome::Refused(REFUSAL)));
        assert_eq!(table.admit(1, last + 1), Admission::Next);
        assert_eq!(table.admit(1, 0), Admission::Answer(PushOutcome::Forgotten { last }));
    }

    #[test]
    fn an_expired_number_never_reads_as_new() {
        let mut table = SessionTable::default();
        table.record(3, 1, None);
        table.record(4, 1, None);
        table.expire(5, &[4]);
        for number in [0, 1, 2, 3] {
            assert_eq!(table.admit(number, 1), Admission::Answer(PushOutcome::SessionExpired));
        }
        assert_eq!(table.admit(4, 2), Admission::Next);
        assert_eq!(table.admit(5, 1), Admission::Next);
        // Neither an older entry, nor one that names it as live, revives it.
        table.expire(2, &[1]);
        table.expire(5, &[3, 4]);
        assert_eq!(table.admit(3, 1), Admission::Answer(PushOutcome::SessionExpired));
        assert_eq!(table.admit(4, 2), Admission::Next);
        table.expire(5, &[]);
        assert_eq!(table.admit(4, 2), Admission::Answer(PushOutcome::SessionExpired));
    }

    proptest! {
        #[test]
        fn expiry_is_for_ever(entries in proptest::collection::vec((0u64..20, proptest::collection::vec(0u64..25, 0..6)), 1..12)) {
            let mut table = SessionTable::default();
            let mut expired = [false; 25];
            for (floor, live) in entries {
                table.expire(floor, &live);
                for number in 0..25u64 {
                    if number < floor && !live.contains(&number) {
                        expired[number as usize] = true;
                    }
                    prop_assert_eq!(table.expired(number), expired[number as usize], "number {}", number);
                }
            }
        }
    }
}
