//! Applying a part of a job's step: the summed gradients of its contributors, for one key range.
//!
//! Invariants:
//! - a part is applied once, in order, whoever proposed it and whatever it was summed of (`StepTable`);
//! - nobody can take a step back: a section that cannot be used (its table was dropped meanwhile) is left out, and so is a row
//!   whose sum is not finite, unless the table clips;
//! - the answer depends on the steps before it alone.
//!
//! Not here: sums (`step_sum`), rows (`row_update`).

use std::sync::Arc;

use bytes::Bytes;
use evershard_proto::push_body::{Operation, PushBody};
use evershard_raft::state_machine::Halt;

use super::Target;
use super::push::{PushScratch, change_section};
use super::push_check::check_section;
use crate::model::{CommandOutcome, NonFinite, Source, StepAdmission};

/// One part of a step.
#[derive(Debug)]
pub(super) struct StepPart {
    pub(super) job: u64,
    pub(super) step: u64,
    pub(super) part: u32,
    pub(super) of: u32,
    pub(super) body: Bytes,
}

/// Applies one part.
///
/// # Errors
/// [`Halt`] when a row cannot be read from the store. Rows that have the part already are skipped when it is applied again.
pub(super) fn apply(
    target: &Target<'_>,
    scratch: &mut PushScratch,
    entry: &StepPart,
) -> Result<CommandOutcome, Halt> {
    let StepPart { job, step, part, of, ref body } = *entry;
    let schemas = {
        let state = target.small.lock();
        match state.small.steps.admit(job, step, part, of) {
            StepAdmission::Next => {}
            StepAdmission::Before => return Ok(CommandOutcome::Done),
            StepAdmission::OutOfOrder => return Ok(CommandOutcome::OutOfOrder),
        }
        Arc::clone(&state.small.schemas)
    };
    scratch.offences.begin();
    let Ok(body) = PushBody::parse_step(body) else { return Ok(CommandOutcome::Malformed) };
    let scope = target.rows.scope();
    for section in body.sections().filter(|section| section.operation == Operation::Gradient) {
        let Some(schema) = schemas.get(&section.table) else { continue };
        if check_section(body.version, &section, schema, &scope).is_err() {
            continue;
        }
        // Each gradient was finite, or the table would have refused it: their sum may not be.
        let policy = match schema.non_finite() {
            NonFinite::Reject => NonFinite::SkipRow,
            policy => policy,
        };
        change_section(target, scratch, &section, (schema, policy), step)?;
    }
    target.note_clock(&schemas, body.sections().map(|section| section.table), step);
    target.small.lock().small.steps.record(job, step, part, of, target.index);
    scratch.offences.count(target, Source::Step { job });
    Ok(CommandOutcome::Done)
}
