//! Applying a push: session, validation of everything, then rows, then the session's record.
//!
//! Invariants:
//! - a sequence number changes rows at most once, and is recorded if and only if it was the next one;
//! - nothing is changed by a push that is refused, but its session's record;
//! - rows change under the lock for writing, section by section: a reader never sees half a row;
//! - rows that are on disk only are read before the lock is taken (`cold_rows`).
//!
//! Not here: what changes in one row (`row_update`), what is checked (`push_check`).

use std::collections::BTreeMap;
use std::sync::Arc;

use evershard_proto::push_body::{HEADER_BYTES, Operation, PushBody, Section};

use evershard_raft::state_machine::Halt;

use super::Target;
use super::clear;
use super::cold_rows::ColdRows;
use super::duplicates::Distinct;
use super::finite::{self, Magnitude};
use super::offences::Offences;
use super::push_check::validate_push;
use super::push_refusal::PushRefusal;
use super::row_update::{RowUpdate, RowUpdateScratch};
use crate::model::{Admission, NonFinite, PushOutcome, Refusal, RefusalKind, Source, TableSchema};
use crate::shard::TableEntry;
use evershard_storage::table::RowShape;

/// Buffers that grow to the size of a message and stay.
#[derive(Debug, Default)]
pub(super) struct PushScratch {
    distinct: Distinct,
    cold: ColdRows,
    update: RowUpdateScratch,
    pub(super) offences: Offences,
    /// Keys of a body that has ids: computed once, looked at several times.
    keys: Vec<u64>,
}

/// Applies one push.
///
/// # Errors
/// [`Halt`] when a row cannot be read from the store. Rows of earlier sections may have the push already, at its index: when it
/// is applied again, they are skipped.
pub(super) fn apply(
    target: &Target<'_>,
    scratch: &mut PushScratch,
    bytes: &[u8],
) -> Result<PushOutcome, Halt> {
    // Taken out: sections borrow from it while the other buffers change.
    let mut keys = std::mem::take(&mut scratch.keys);
    let outcome = apply_with(target, scratch, &mut keys, bytes);
    scratch.keys = keys;
    outcome
}

fn apply_with(
    target: &Target<'_>,
    scratch: &mut PushScratch,
    keys: &mut Vec<u64>,
    bytes: &[u8],
) -> Result<PushOutcome, Halt> {
    let Some((session, seq)) = session_of(bytes) else {
        // Without a whole header there is nobody to remember it for.
        return Ok(PushOutcome::Refused(Refusal { kind: RefusalKind::Malformed, table: 0 }));
    };
    if seq == 0 {
        return Ok(PushOutcome::Refused(Refusal { kind: RefusalKind::SeqZero, table: 0 }));
    }
    let schemas = {
        let state = target.small.lock();
        if let Admission::Answer(outcome) = state.small.sessions.admit(session, seq) {
            return Ok(outcome);
        }
        Arc::clone(&state.small.schemas)
    };
    scratch.offences.begin();
    let refusal = match check(target, &schemas, bytes, keys) {
        Ok(body) => {
            for section in body.sections() {
                if section.operation == Operation::Clear {
                    clear::apply(target, section.table);
                } else if let Some(schema) = schemas.get(&section.table) {
                    change_section(target, scratch, &section, (schema, schema.non_finite()), body.clock)?;
                }
            }
            target.note_clock(&schemas, body.sections().map(|section| section.table), body.clock);
            None
        }
        Err(refusal) => Some(refusal),
    };
    target.small.lock().small.sessions.record(session, seq, refusal);
    scratch.offences.count(target, Source::Session(session));
    Ok(match refusal {
        None => PushOutcome::Applied { index: target.index },
        Some(refusal) => PushOutcome::Refused(refusal),
    })
}

/// Everything that is checked before the first row changes.
fn check<'a>(
    target: &Target<'_>,
    schemas: &BTreeMap<u32, Arc<TableSchema>>,
    bytes: &'a [u8],
    keys: &'a mut Vec<u64>,
) -> Result<PushBody<'a>, Refusal> {
    let scope = target.rows.scope();
    // The log checked its record's checksum: the bytes are those that were proposed.
    let body = PushBody::parse_with_keys(bytes, keys)
        .map_err(|source| PushRefusal::Malformed { shard: scope.shard, source }.refusal())?;
    validate_push(&body, schemas, &scope).map_err(|refusal| refusal.refusal())?;
    if body.sections().next().is_none() {
        return Err(Refusal { kind: RefusalKind::Withdrawn, table: 0 });
    }
    Ok(body)
}

/// Changes the rows of a section that was checked; `policy` is what becomes of values that are not finite.
pub(super) fn change_section(
    target: &Target<'_>,
    scratch: &mut PushScratch,
    section: &Section<'_>,
    (schema, policy): (&TableSchema, NonFinite),
    clock: u64,
) -> Result<(), Halt> {
    let dirty = policy != NonFinite::Reject && !Magnitude::of(section).is_finite();
    let skip_rows = dirty && policy == NonFinite::SkipRow;
    let clip = dirty && policy == NonFinite::Clip;
    if dirty {
        scratch.offences.add(section.table, policy, finite::bad_rows(section));
    }
    let mut distinct = std::mem::take(&mut scratch.distinct);
    let counts = schema.rules().counts();
    let is_skipped = |row| skip_rows && !Magnitude::of_row(section, row).is_finite();
    distinct.collect(section, (clip, counts), is_skipped);
    let mut bad_sums = None;
    let changed = scratch.with_settled_rows(
        target,
        (section.table, schema.shape()),
        distinct.keys(),
        |update, table| {
            bad_sums = RowUpdate::new(section, (schema, policy), target, clock).run(&distinct, update, table);
        },
    );
    scratch.distinct = distinct;
    scratch.offences.add(section.table, policy, bad_sums);
    changed
}

impl PushScratch {
    /// Runs `change` under the lock for writing, with these keys' rows in memory or known to be nowhere, and room for those.
    /// Not at all when there is no such table.
    ///
    /// # Errors
    /// [`Halt`] when a row cannot be read from the store.
    pub(super) fn with_settled_rows(
        &mut self,
        target: &Target<'_>,
        (number, shape): (u32, RowShape),
        keys: &[u64],
        change: impl FnOnce(&mut RowUpdateScratch, TableEntry<'_>),
    ) -> Result<(), Halt> {
        self.cold.clear();
        loop {
            {
                let mut set = target.rows.write();
                // Schemas and tables change together; the caller found the schema.
                let Some(mut table) = set.table_mut(number) else { return Ok(()) };
                if self.cold.settle(keys, &mut table) {
                    change(&mut self.update, table);
                    set.account();
                    return Ok(());
                }
            }
            let read = self.cold.read(target.rows, number, shape);
            read.map_err(|error| Halt { index: target.index, reason: error.to_string() })?;
        }
    }
}

/// Session and sequence number, from the header alone.
fn session_of(bytes: &[u8]) -> Option<(u64, u64)> {
    let head = bytes.get(..HEADER_BYTES)?;
    let word = |at: usize| head.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
    Some((word(8)?, word(16)?))
}
