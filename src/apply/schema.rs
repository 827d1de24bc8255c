//! Applying a schema entry: a table is created on this shard, gets other hyper-parameters, or is dropped.
//!
//! Invariants:
//! - creating a table again is no error when the definition is the same, and a conflict otherwise: a row's shape never
//!   changes under it;
//! - a definition is replaced by one of a higher version only, and in numbers of its optimizer only: entries may come in any
//!   order and any number of times, and every shard ends with the highest version. No row is touched;
//! - a dropped table's number never comes back, and its rows are gone from memory at once; from the disk with the next
//!   flush cycle.

use std::sync::Arc;

use evershard_proto::v1;

use super::Target;
use crate::model::{CommandOutcome, TableSchema};

/// Applies one schema entry.
pub(super) fn apply(target: &Target<'_>, table: &v1::TableDescription, dropped: bool) -> CommandOutcome {
    if dropped { drop_table(target, table.number) } else { create_or_change(target, table) }
}

fn create_or_change(target: &Target<'_>, table: &v1::TableDescription) -> CommandOutcome {
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
        let same = known.same_definition(&schema);
        if !same && (known.version() == schema.version() || !known.differs_in_hyper_parameters_only(&schema))
        {
            return CommandOutcome::Conflict { table: number };
        }
        // Also when it says the same: one that lies between the two may still come.
        if schema.version() > known.version() {
            Arc::make_mut(&mut small.schemas).insert(number, Arc::new(schema));
            target.rows.set_schemas(&small.schemas);
        }
        return CommandOutcome::Done;
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
    small.floors.remove(&number);
    small.clocks.remove(&number);
    if Arc::make_mut(&mut small.schemas).remove(&number).is_some() {
        target.rows.drop_table(number, &small.schemas);
        target.offences.forget(number);
    }
    CommandOutcome::Done
}
