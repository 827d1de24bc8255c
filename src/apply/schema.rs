//! Applying a schema entry: a table is created on this shard, or dropped.
//!
//! Invariants:
//! - creating a table again is no error when the definition is the same, and a conflict otherwise: a row's shape never
//!   changes under it;
//! - a dropped table's number never comes back, and its rows are gone from memory at once; from the disk with the next
//!   flush cycle.

use std::sync::Arc;

use evershard_proto::v1;

use super::Target;
use crate::model::{CommandOutcome, TableSchema};

/// Applies one schema entry.
pub(super) fn apply(target: &Target<'_>, table: &v1::TableDescription, dropped: bool) -> CommandOutcome {
    if dropped { drop_table(target, table.number) } else { create(target, table) }
}

fn create(target: &Target<'_>, table: &v1::TableDescription) -> CommandOutcome {
    let number = table.number;
    let mut state = target.small.lock();
    let small = &mut state.small;
    if small.dropped.contains_key(&number) {
        return CommandOutcome::Dropped { table: number };
    }
    let Ok(schema) = TableSchema::from_description(table) else {
        return CommandOutcome::Invalid { table: number };
    };
    if let Some(known) = small.schemas.get(&number) {
        return if known.same_definition(&schema) {
            CommandOutcome::Done
        } else {
            CommandOutcome::Conflict { table: number }
        };
    }
    let schema = Arc::new(schema);
    Arc::make_mut(&mut small.schemas).insert(number, Arc::clone(&schema));
    target.rows.create_table(&schema, &small.schemas);
    CommandOutcome::Done
}

fn drop_table(target: &Target<'_>, number: u32) -> CommandOutcome {
    let mut state = target.small.lock();
    let small = &mut state.small;
    // Also a number never seen here: it must not appear later.
    small.dropped.entry(number).or_insert(target.index);
    if Arc::make_mut(&mut small.schemas).remove(&number).is_some() {
        target.rows.drop_table(number, &small.schemas);
    }
    CommandOutcome::Done
}
