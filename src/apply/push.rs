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

/// Buffers that grow to the size of a message and stay.
#[derive(Debug, Default)]
pub(super) struct PushScratch {
    distinct: Distinct,
    cold: ColdRows,
    update: RowUpdateScratch,
    pub(super) offences: Offences,
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
    let refusal = match check(target, &schemas, bytes) {
        Ok(body) => {
            for section in body.sections() {
                if section.operation == Operation::Clear {
                    clear::apply(target, section.table);
                } else if let Some(schema) = schemas.get(&section.table) {
                    change_section(target, scratch, &section, (schema, schema.non_finite()), body.clock)?;
                }
            }
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
) -> Result<PushBody<'a>, Refusal> {
    let scope = target.rows.scope();
    // The log checked its record's checksum: the bytes are those that were proposed.
    let body = PushBody::parse_without_checksum(bytes)
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
    scratch.distinct.collect(section, clip, |row| skip_rows && !Magnitude::of_row(section, row).is_finite());
    scratch.cold.clear();
    loop {
        {
            let mut set = target.rows.write();
            let Some(mut table) = set.table_mut(section.table) else {
                // Schemas and tables change together; validation found the schema.
                return Ok(());
            };
            if scratch.cold.settle(scratch.distinct.keys(), &mut table) {
                let update = RowUpdate::new(section, (schema, policy), target.index, clock);
                let bad_sums = update.run(&scratch.distinct, &mut scratch.update, table);
                set.account();
                scratch.offences.add(section.table, policy, bad_sums);
                return Ok(());
            }
        }
        let read = scratch.cold.read(target.rows, section.table, schema.shape());
        read.map_err(|error| Halt { index: target.index, reason: error.to_string() })?;
    }
}

/// Session and sequence number, from the header alone.
fn session_of(bytes: &[u8]) -> Option<(u64, u64)> {
    let head = bytes.get(..HEADER_BYTES)?;
    let word = |at: usize| head.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
    Some((word(8)?, word(16)?))
}
