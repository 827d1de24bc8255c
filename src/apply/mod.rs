//! What committed entries do to a shard: one file per command kind, and the only door to its state.
//!
//! An entry passes: kind and version (unknown: [`Halt`]) -> decode -> the command's file -> answer. A push passes: header
//! -> session -> parse -> validation of everything -> only then rows, table by table -> session record.
//!
//! Invariants (design 4):
//! - **total**: a decodable kind and version never panics, and halts only when this replica's disk does not give a row; what
//!   cannot be used is a refusal, the same on every replica;
//! - **whole or nothing**: everything is validated before the first row changes;
//! - **deterministic**: no clock, no randomness, no order of hashing; time enters with the entry;
//! - results do not depend on rows, so replay over a fuzzy flush gives the same results;
//! - a row whose version is not below the entry's index is skipped: it holds the entry already.
//!
//! Not here: order and durability (the raft crate), when rows reach the disk (`flush`).

mod clear;
mod cold_rows;
mod cut;
mod duplicates;
mod evict;
mod finite;
mod offences;
mod push;
mod push_check;
mod push_refusal;
mod row_update;
mod schema;
mod scrub;
mod sessions;
mod step;
mod step_sum;

use bytes::Bytes;
use evershard_proto::push_body::{
    KIND_PUSH, PUSH_VERSION, PUSH_VERSION_CLEAR, PUSH_VERSION_COUNTED, PUSH_VERSION_ENCODED, PUSH_VERSION_IDS,
};
use evershard_proto::shard_command::{ShardCommand, ShardCommandError};
use evershard_raft::state_machine::Halt;
use parking_lot::Mutex;

pub use push_check::{ShardScope, validate_push};
pub use push_refusal::PushRefusal;
pub(crate) use step_sum::{StepOffence, StepSum};

use crate::model::CommandOutcome;
use crate::shard::{AppliedState, AwaitedCuts, OffenceJournal, Rows, Schemas};

/// Applies one shard's commands; keeps the buffers that pushes need.
#[derive(Debug, Default)]
pub(crate) struct Applier {
    push: push::PushScratch,
}

/// What an entry may change.
#[derive(Debug)]
pub(crate) struct Target<'a> {
    /// Sessions, schemas, clock. Locked briefly, not while rows change: the doors look at it too.
    pub(crate) small: &'a Mutex<AppliedState>,
    /// The rows.
    pub(crate) rows: &'a Rows,
    /// What is counted of values that are not finite: no state, and nothing depends on it.
    pub(crate) offences: &'a OffenceJournal,
    /// Who waits for cuts: no state, and nothing depends on it.
    pub(crate) cuts: &'a AwaitedCuts,
    /// The entry's index.
    pub(crate) index: u64,
    /// The entry's term.
    pub(crate) term: u64,
    /// The leader's time as it proposed the entry.
    pub(crate) time_ms: u64,
    /// The replicated clock as of the entry, in milliseconds.
    pub(crate) clock_ms: u64,
}

impl Target<'_> {
    /// The replicated clock in seconds, as rows note it: until 2106.
    fn seconds(&self) -> u32 {
        u32::try_from(self.clock_ms / 1000).unwrap_or(u32::MAX)
    }

    /// A push with a clock changed these tables, of which `schemas` are the definitions.
    fn note_clock(&self, schemas: &Schemas, tables: impl Iterator<Item = u32>, clock: u64) {
        let asks = |table: &u32| schemas.get(table).is_some_and(|schema| schema.rules().steps_to_live > 0);
        for table in tables.filter(asks) {
            let mut state = self.small.lock();
            let known = state.small.clocks.entry(table).or_default();
            *known = clock.max(*known);
        }
    }
}

impl Applier {
    /// Applies one command and answers its proposer.
    ///
    /// # Errors
    /// [`Halt`] when the command's kind or version is of another build, or the store cannot be read: the entry is not applied.
    pub(crate) fn command(&mut self, target: &Target<'_>, command: &[u8]) -> Result<Bytes, Halt> {
        match command {
            [
                KIND_PUSH,
                PUSH_VERSION | PUSH_VERSION_ENCODED | PUSH_VERSION_CLEAR | PUSH_VERSION_COUNTED
                | PUSH_VERSION_IDS,
                ..,
            ] => Ok(push::apply(target, &mut self.push, command)?.encode()),
            _ => match ShardCommand::decode(command) {
                Ok(ShardCommand::Schema { table, dropped }) => {
                    Ok(schema::apply(target, &table, dropped).encode())
                }
                Ok(ShardCommand::Scrub { scrub_id }) => Ok(scrub::apply(target, scrub_id).encode()),
                Ok(ShardCommand::Step { job, step, part, of, body }) => {
                    let part = step::StepPart { job, step, part, of, body };
                    Ok(step::apply(target, &mut self.push, &part)?.encode())
                }
                Ok(ShardCommand::Evict { table, rows, .. }) => {
                    Ok(evict::apply(target, &mut self.push, table, &rows)?.encode())
                }
                Ok(ShardCommand::Cut { checkpoint, above }) => {
                    Ok(cut::apply(target, cut::Cut { checkpoint, above }).encode())
                }
                Ok(ShardCommand::Sessions { floor, live }) => {
                    Ok(sessions::apply(target, floor, &live).encode())
                }
                Err(ShardCommandError::Malformed { kind, .. }) if kind != 0 => {
                    Ok(CommandOutcome::Malformed.encode())
                }
                Err(error) => Err(Halt { index: target.index, reason: error.to_string() }),
            },
        }
    }
}
