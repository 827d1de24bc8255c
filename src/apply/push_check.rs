//! Is this push applicable, all of it? The same function answers at the door (so that nothing bad is logged) and in apply
//! (because it must hold whatever was logged).
//!
//! Invariant: the answer depends on the body, the schemas and the shard's range only, never on rows.
//!
//! Not here: sessions and sequence numbers.

use std::collections::BTreeMap;
use std::sync::Arc;

use evershard_proto::key::id_of;
use evershard_proto::push_body::{Encoding, Operation, PUSH_VERSION_ENCODED, PushBody, Section};

use super::duplicates::Distinct;
use super::finite::{self, Magnitude};
use super::push_refusal::PushRefusal;
use crate::model::{BadValue, KeyRange, NonFinite, TableSchema};

/// The shard that checks: its number, for messages, and what it owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardScope {
    /// The shard's number.
    pub shard: u32,
    /// The keys it owns.
    pub range: KeyRange,
}

/// Checks every section of a push: tables, dims, encodings, keys, learning rates and, by each table's policy, values.
///
/// # Errors
/// [`PushRefusal`], naming the first thing found.
pub fn validate_push(
    body: &PushBody<'_>,
    schemas: &BTreeMap<u32, Arc<TableSchema>>,
    scope: &ShardScope,
) -> Result<(), PushRefusal> {
    if body.seq == 0 {
        return Err(PushRefusal::SeqZero { shard: scope.shard });
    }
    for (position, section) in body.sections().enumerate() {
        if body.sections().take(position).any(|other| other.table == section.table) {
            return Err(PushRefusal::RepeatedTable { shard: scope.shard, table: section.table });
        }
        let schema = schemas
            .get(&section.table)
            .ok_or(PushRefusal::UnknownTable { shard: scope.shard, table: section.table })?;
        check_section(body.version, &section, schema, scope)?;
        if schema.non_finite() == NonFinite::Reject && section.operation.has_values() {
            check_finite(&section, schema, scope)?;
        }
    }
    Ok(())
}

/// Checks everything of a section but its values.
pub(super) fn check_section(
    version: u8,
    section: &Section<'_>,
    schema: &TableSchema,
    scope: &ShardScope,
) -> Result<(), PushRefusal> {
    let (shard, table) = (scope.shard, section.table);
    let name = || schema.name().to_owned();
    if section.operation.has_values() {
        if section.dim != schema.dim() {
            return Err(PushRefusal::WrongDim {
                shard,
                table,
                name: name(),
                expected: schema.dim(),
                actual: section.dim,
            });
        }
        // Version 1 was refused by builds that are in the log's past: it must be for ever.
        let encoded = version >= PUSH_VERSION_ENCODED && section.operation != Operation::Set;
        if section.encoding != Encoding::F32 && !encoded {
            let encoding = section.encoding.name();
            return Err(PushRefusal::Encoding { shard, table, encoding });
        }
    }
    // Builds that know no such rules halt at a body with occurrences: it must not be logged for a table that such builds know.
    if section.is_counted() && !schema.rules().counts() {
        return Err(PushRefusal::Uncounted { shard, table, name: name() });
    }
    if section.operation == Operation::Gradient {
        if schema.optimizer().is_none() {
            return Err(PushRefusal::NoOptimizer { shard, table, name: name() });
        }
        if let Some(lr) = section.lr
            && !(lr.is_finite() && lr >= 0.0)
        {
            return Err(PushRefusal::LearningRate { shard, table, lr });
        }
    }
    if scope.range != KeyRange::ALL
        && let Some(key) = section.keys().find(|key| !scope.range.contains(*key))
    {
        return Err(PushRefusal::wrong_range(shard, table, key, scope.range));
    }
    Ok(())
}

fn check_finite(section: &Section<'_>, schema: &TableSchema, scope: &ShardScope) -> Result<(), PushRefusal> {
    let (shard, table) = (scope.shard, section.table);
    let magnitude = Magnitude::of(section);
    if !magnitude.is_finite()
        && let Some((row, column, value)) = finite::first_bad(section)
    {
        let id = id_of(table, section.key(row));
        return Err(PushRefusal::NonFinite {
            shard,
            table,
            name: schema.name().to_owned(),
            id,
            column,
            value,
        });
    }
    if section.operation != Operation::Set && !magnitude.sums_stay_finite(section.count()) {
        // Values near the end of the range: rare, so it may take memory.
        let mut distinct = Distinct::default();
        distinct.collect(section, (false, false), |_| false);
        if let Some((key, sum)) = distinct.first_bad_sum()
            && let Some(BadValue { id, column, value, .. }) = finite::bad_value(id_of(table, key), sum, true)
        {
            let (name, column) = (schema.name().to_owned(), column as usize);
            return Err(PushRefusal::NonFiniteSum { shard, table, name, id, column, value });
        }
    }
    Ok(())
}
