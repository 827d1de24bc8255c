//! Packing: a checked push becomes messages, at most as large as a server takes.
//!
//! Invariants:
//! - a message has one section a table, at most [`PUSH_TABLES_MAX`] of them;
//! - a message has at most [`PUSH_BODY_BYTES_MAX`], unless a single row is longer;
//! - every distinct id is in exactly one message; with how often it came, where its table counts that: rows that the policy
//!   leaves out did not come;
//! - a message is cut as if all its rows had keys, whether or not a section of it then has ids, which are shorter: no server sees
//!   ids before its cluster is of the version that knows them;
//! - nothing is packed of a push with a sum that its table refuses: each shard sees its own rows only, and the others would
//!   apply theirs.
//!
//! Not here: the sum of an id's rows (`row_sum`), its encoding (`row_encoder`).

use evershard_proto::limits::{PUSH_BODY_BYTES_MAX, PUSH_TABLES_MAX};
use evershard_proto::push_body::{
    CLUSTER_VERSION_IDS, Encoding, HEADER_BYTES, KEY_BYTES, Operation, PushBodyBuilder, SECTION_BYTES,
};
use evershard_proto::v1::NonFinitePolicy;

use super::content::Content;
use super::id_order;
use super::residuals::Residuals;
use super::row_encoder::RowEncoder;
use super::row_sum::sum_rows;
use crate::Error;
use crate::batch::Batch;
use crate::non_finite::Found;
use crate::routing_cache::RoutingTable;

/// A message to be, and the ids in it.
#[derive(Debug)]
pub(super) struct Packed {
    pub(super) group: u64,
    pub(super) builder: PushBodyBuilder,
    pub(super) ids: Vec<u64>,
    sections: usize,
}

impl Packed {
    fn new(group: u64, bytes: usize) -> Self {
        Packed { group, builder: PushBodyBuilder::new(HEADER_BYTES + bytes), ids: Vec::new(), sections: 0 }
    }

    fn takes(&self, group: u64, table: u32, bytes: usize) -> bool {
        self.group == group
            && self.sections < PUSH_TABLES_MAX
            && self.builder.len() + bytes <= PUSH_BODY_BYTES_MAX
            && !self.builder.has_table(table)
    }
}

/// Lays out the messages of a push, in the order to send them, and counts its distinct rows. Sections of several tables share
/// a message while they fit. `found` is what is not finite and reaches no server: what is refused, left out or clipped here.
///
/// # Errors
/// [`Error::Refused`] with NON_FINITE when finite rows of an id add up to more than a float holds, and the table's policy is to
/// reject.
pub(super) fn pack(
    contents: &[Content<'_>],
    routing: &RoutingTable,
    lr: Option<f32>,
    residuals: &mut Residuals,
    found: &mut Found,
) -> Result<(Vec<Packed>, usize), Error> {
    let has_ids = routing.routing.cluster_version >= CLUSTER_VERSION_IDS;
    let mut left_out = Vec::new();
    let mut messages: Vec<Packed> = Vec::new();
    let mut rows = 0;
    for content in contents.iter().filter(|c| !c.ids.is_empty()) {
        let row_bytes =
            if content.operation.has_values() { content.encoding.row_bytes(content.dim) } else { 0 };
        let row_bytes = row_bytes + if is_counted(content) { 4 } else { 0 };
        let batch = Batch::new(content.table, content.ids);
        rows += batch.len();
        let room = PUSH_BODY_BYTES_MAX - HEADER_BYTES - SECTION_BYTES;
        for mut part in batch.split(routing, row_bytes + KEY_BYTES, room) {
            let bytes = SECTION_BYTES + part.distinct.len() * (row_bytes + KEY_BYTES);
            let open = messages.iter().position(|m| m.takes(part.group, content.table, bytes));
            let at = open.unwrap_or_else(|| {
                messages.push(Packed::new(part.group, bytes));
                messages.len() - 1
            });
            let message = &mut messages[at];
            message.sections += 1;
            let id_of = |d: u32| content.ids[batch.first_row(d)];
            let ids = if has_ids { id_order::in_order(&mut part.distinct, id_of) } else { None };
            let mut encoder = RowEncoder { content, residuals, left_out: &mut left_out, found: &mut *found };
            fill(&mut message.builder, &mut encoder, &batch, (&part.distinct, ids.as_deref()), lr)?;
            message.ids.extend(part.distinct.iter().map(|d| id_of(*d)));
        }
    }
    // Nothing can be refused here any more.
    for content in contents.iter().filter(|c| matches!(c.operation, Operation::Set | Operation::Remove)) {
        content.ids.iter().for_each(|id| residuals.forget(content.table, *id));
    }
    for ((table, id), values) in left_out {
        residuals.put(table, id, values);
    }
    Ok((messages, rows))
}

fn fill(
    builder: &mut PushBodyBuilder,
    encoder: &mut RowEncoder<'_, '_>,
    batch: &Batch,
    (distinct, ids): (&[u32], Option<&[u64]>),
    lr: Option<f32>,
) -> Result<(), Error> {
    let content = encoder.content;
    let (table, operation, dim, encoding) = (content.table, content.operation, content.dim, content.encoding);
    let mut came: Vec<u32> = Vec::new();
    if is_counted(content) {
        came.extend(distinct.iter().map(|d| occurrences(content, batch, *d)));
    }
    let payload = if let Some(ids) = ids {
        builder.id_section(table, (operation, encoding), (dim as u32, lr), ids, &came)
    } else {
        let keys: Vec<u64> = distinct.iter().map(|d| batch.key(*d)).collect();
        if is_counted(content) {
            builder.counted_section(table, encoding, dim as u32, lr, &keys, &came)
        } else {
            builder.section(table, operation, encoding, dim as u32, lr, &keys)
        }
    };
    if !content.operation.has_values() {
        return Ok(());
    }
    if encoding == Encoding::F32 {
        let places = payload.chunks_exact_mut(dim * 4);
        return distinct
            .iter()
            .zip(places)
            .try_for_each(|(d, place)| sum_rows(content, batch, *d, place, encoder.found).map(drop));
    }
    let (mut sum, mut values) = (vec![0; dim * 4], vec![0.0; dim]);
    for (d, place) in distinct.iter().zip(payload.chunks_exact_mut(encoding.row_bytes(dim))) {
        let is_counted = sum_rows(content, batch, *d, &mut sum, encoder.found)?;
        let id = content.ids[batch.first_row(*d)];
        encoder.encode((id, is_counted), &sum, &mut values, place)?;
    }
    Ok(())
}

fn is_counted(content: &Content<'_>) -> bool {
    content.counts && content.operation == Operation::Gradient
}

/// How many rows of a distinct id are in its sum. Of one that the servers leave out whole it does not matter.
fn occurrences(content: &Content<'_>, batch: &Batch, d: u32) -> u32 {
    let dim = content.dim;
    let is_left_out = |row: &usize| {
        content.non_finite == NonFinitePolicy::SkipRow
            && content.values[row * dim..(row + 1) * dim].iter().any(|value| !value.is_finite())
    };
    let rows = batch.rows(d).filter(|row| !is_left_out(row)).count();
    u32::try_from(rows).unwrap_or(u32::MAX).max(1)
}

#[cfg(test)]
mod tests;
