//! The order of a session's pushes at the leader's door: what was proposed in this term and is not yet applied.
//!
//! Apply decides for good (session table); the door keeps what must be refused anyway out of the log, and keeps a
//! pipelining client from overtaking itself.
//!
//! Invariants:
//! - within a term, a session's sequence number is let in only when all before it were let in or are applied;
//! - a number let in before may come again (its reply was lost): apply answers it from the session table;
//! - what is remembered here dies with the term, and is bounded: beyond `SESSIONS_MAX` all of it is forgotten, and the
//!   session table is asked again. A client whose numbers are under way then hears OUT_OF_ORDER, and sends them again.

use std::collections::HashMap;

use parking_lot::Mutex;

/// More sessions than push to one shard in a lease, by far.
const SESSIONS_MAX: usize = if cfg!(test) { 4 } else { 1 << 16 };

/// The door of one group on this node.
#[derive(Debug, Default)]
pub struct SequenceDoor {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    term: u64,
    highest: HashMap<u64, u64>,
}

/// The message came before those that must come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("sequence number {seq} of session {session} is out of order: {expected} is next")]
pub struct OutOfOrder {
    /// The session.
    pub session: u64,
    /// What came.
    pub seq: u64,
    /// What must come next.
    pub expected: u64,
}

impl SequenceDoor {
    /// Lets `seq` in, in the leader's term `term`. `applied` gives the session's last applied number on this shard; it is
    /// only asked when what is remembered does not settle it.
    ///
    /// # Errors
    /// [`OutOfOrder`]: nothing is remembered of it.
    pub fn admit(
        &self,
        term: u64,
        session: u64,
        seq: u64,
        applied: impl FnOnce() -> u64,
    ) -> Result<(), OutOfOrder> {
        let mut state = self.state.lock();
        if state.term != term {
            state.term = term;
            state.highest.clear();
        }
        let known = state.highest.get(&session).copied();
        let highest = match known {
            Some(highest) if seq <= highest.saturating_add(1) => highest,
            _ => applied().max(known.unwrap_or(0)),
        };
        if seq > highest.saturating_add(1) {
            return Err(OutOfOrder { session, seq, expected: highest + 1 });
        }
        if known.is_none() && state.highest.len() >= SESSIONS_MAX {
            state.highest.clear();
        }
        state.highest.insert(session, highest.max(seq));
        Ok(())
    }

    /// A message that was let in did not get into the log: those after it must not overtake it.
    pub fn retract(&self, term: u64, session: u64) {
        let mut state = self.state.lock();
        if state.term == term {
            state.highest.remove(&session);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipelined_numbers_pass_in_order_and_gaps_do_not() {
        let door = SequenceDoor::default();
        assert_eq!(door.admit(1, 7, 1, || 0), Ok(()));
        assert_eq!(door.admit(1, 7, 2, || 0), Ok(()));
        assert_eq!(door.admit(1, 7, 4, || 0), Err(OutOfOrder { session: 7, seq: 4, expected: 3 }));
        assert_eq!(door.admit(1, 7, 1, || 0), Ok(()), "a repetition passes: apply answers it");
        assert_eq!(door.admit(1, 7, 3, || 2), Ok(()));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let door = SequenceDoor::default();
        for session in 0..100 {
            assert_eq!(door.admit(1, session, 1, || 0), Ok(()));
            assert!(door.state.lock().highest.len() <= SESSIONS_MAX);
        }
        assert_eq!(door.admit(1, 0, 2, || 1), Ok(()), "what is forgotten is asked for");
    }

    #[test]
    fn a_retracted_number_and_a_new_term_start_from_what_is_applied() {
        let door = SequenceDoor::default();
        assert_eq!(door.admit(1, 7, 1, || 0), Ok(()));
        assert_eq!(door.admit(1, 7, 2, || 0), Ok(()));
        door.retract(1, 7);
        assert_eq!(door.admit(1, 7, 3, || 1), Err(OutOfOrder { session: 7, seq: 3, expected: 2 }));
        assert_eq!(door.admit(2, 7, 2, || 0), Err(OutOfOrder { session: 7, seq: 2, expected: 1 }));
    }
}
