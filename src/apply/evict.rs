//! Applying an eviction: rows go that nothing changed since their leader looked.
//!
//! Invariants:
//! - the entry decides, by key and version; no rule is looked at, no clock, no other row;
//! - a row that goes leaves a tombstone with the entry's version, as a removal does: replay must not bring it back;
//! - the answer does not depend on rows.
//!
//! Not here: which rows are to go (`crate::eviction`).

use std::sync::Arc;

use evershard_proto::shard_command::EvictedRow;
use evershard_raft::state_machine::Halt;
use evershard_storage::table::Slot;

use super::Target;
use super::push::PushScratch;
use crate::model::CommandOutcome;
use crate::shard::TableEntry;

/// Applies one eviction.
///
/// # Errors
/// [`Halt`] when a row cannot be read from the store. Rows that went already are skipped when it is applied again.
pub(super) fn apply(
    target: &Target<'_>,
    scratch: &mut PushScratch,
    number: u32,
    rows: &[EvictedRow],
) -> Result<CommandOutcome, Halt> {
    let schema = target.small.lock().small.schemas.get(&number).map(Arc::clone);
    let Some(schema) = schema else {
        // Dropped since, and its rows with it.
        return Ok(CommandOutcome::Done);
    };
    let keys: Vec<u64> = rows.iter().map(|row| row.key).collect();
    let mut slots = Vec::new();
    scratch.with_settled_rows(target, (number, schema.shape()), &keys, |_, mut entry| {
        entry.table.find_batch(&keys, &mut slots);
        for (row, slot) in rows.iter().zip(&slots) {
            if let Some(slot) = slot {
                evict(target.index, number, row, *slot, &mut entry);
            }
        }
    })?;
    Ok(CommandOutcome::Done)
}

fn evict(index: u64, number: u32, listed: &EvictedRow, slot: Slot, entry: &mut TableEntry<'_>) {
    let header = entry.table.row(slot).header();
    // One that has this entry already has its version; whatever is listed.
    if header.version == listed.version && header.version < index && !header.is_tombstone() {
        entry.bury(number, slot, listed.key, index);
    }
}
