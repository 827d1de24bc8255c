//! Is this push applicable, all of it? The same function answers at the door (so that nothing bad is logged) and in apply
//! (because it must hold whatever was logged).
//!
//! Invariant: the answer depends on the body, the schemas and the shard's range only, never on rows.
//!
//! Not here: sessions and sequence numbers.

use std::collections::BTreeMap;
use std::sync::Arc;

use evershard_proto::encoding::decode_row;
use evershard_proto::key::{id_of, key_of};
use evershard_proto::push_body::{Encoding, Operation, PUSH_VERSION_ENCODED, PushBody, Section};
use evershard_proto::tensor::TensorLayout;

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
        if let Some(layout) = schema.tensor() {
            check_padding(&section, schema, layout, scope)?;
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
    match schema.tensor() {
        Some(layout) => check_blocks(section, schema, layout, scope),
        None => Ok(()),
    }
}

/// A dense tensor has the blocks that its shape says, for ever.
fn check_blocks(
    section: &Section<'_>,
    schema: &TableSchema,
    layout: &TensorLayout,
    scope: &ShardScope,
) -> Result<(), PushRefusal> {
    let (shard, table) = (scope.shard, section.table);
    if !section.operation.has_values() {
        let name = schema.name().to_owned();
        return Err(PushRefusal::NotOfTensor { shard, table, name, what: "blocks cannot be removed" });
    }
    let blocks = layout.blocks();
    match section.keys().map(|key| id_of(table, key)).find(|block| *block >= blocks) {
        Some(block) => {
            Err(PushRefusal::OutOfRange { shard, table, name: schema.name().to_owned(), block, blocks })
        }
        None => Ok(()),
    }
}

/// What lies beyond a tensor's end stays zero: whoever sends anything else means another shape.
fn check_padding(
    section: &Section<'_>,
    schema: &TableSchema,
    layout: &TensorLayout,
    scope: &ShardScope,
) -> Result<(), PushRefusal> {
    let last = layout.blocks() - 1;
    let (valid, dim) = (layout.valid(last), section.dim as usize);
    if valid == dim {
        return Ok(());
    }
    let key = key_of(section.table, last);
    for (row, _) in section.keys().enumerate().filter(|(_, of)| *of == key) {
        let mut values = vec![0.0; dim];
        decode_row(section.encoding, section.row(row), &mut values);
        if values[valid..].iter().any(|value| *value != 0.0) {
            let (shard, table, name) = (scope.shard, section.table, schema.name().to_owned());
            return Err(PushRefusal::NotOfTensor { shard, table, name, what: "values beyond the end" });
        }
    }
    Ok(())
}

fn check_finite(section: &Section<'_>, schema: &TableSchema, scope: &ShardScope) -> Result<(), PushRefusal> {
    let (shard, table) = (scope.shard, section.table);
    let magnitude = Magnitude::of(section);
    if !magnitude.is_finite()
        && let Some((row, column, value)) = finite::first_bad(section)
        && let Some(key) = section.keys().nth(row)
    {
        let id = id_of(table, key);
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
