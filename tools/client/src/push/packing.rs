//! Packing: a checked push becomes messages, at most as large as a server takes.
//!
//! Invariants:
//! - a message has one section a table, at most [`PUSH_TABLES_MAX`] of them;
//! - a message has at most [`PUSH_BODY_BYTES_MAX`], unless a single row is longer;
//! - every distinct id is in exactly one message;
//! - nothing is packed of a push with a sum that its table refuses: each shard sees its own rows only, and the others would
//!   apply theirs.

use evershard_proto::limits::{PUSH_BODY_BYTES_MAX, PUSH_TABLES_MAX};
use evershard_proto::push_body::{Encoding, HEADER_BYTES, Operation, PushBodyBuilder, SECTION_BYTES};
use evershard_proto::v1::{ErrorKind, NonFinitePolicy};

use super::content::Content;
use crate::Error;
use crate::batch::{Batch, add_row, put_row};
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
/// a message while they fit.
///
/// # Errors
/// [`Error::Refused`] with NON_FINITE when finite rows of an id add up to more than a float holds, and the table's policy is to
/// reject.
pub(super) fn pack(
    contents: &[Content<'_>],
    routing: &RoutingTable,
    lr: Option<f32>,
) -> Result<(Vec<Packed>, usize), Error> {
    let mut messages: Vec<Packed> = Vec::new();
    let mut rows = 0;
    for content in contents.iter().filter(|c| !c.ids.is_empty()) {
        let row_bytes = if content.operation == Operation::Remove { 0 } else { content.dim * 4 };
        let batch = Batch::new(content.table, content.ids);
        rows += batch.len();
        let room = PUSH_BODY_BYTES_MAX - HEADER_BYTES - SECTION_BYTES;
        for part in batch.split(routing, row_bytes + 8, room) {
            let bytes = SECTION_BYTES + part.distinct.len() * (row_bytes + 8);
            let open = messages.iter().position(|m| m.takes(part.group, content.table, bytes));
            let at = open.unwrap_or_else(|| {
                messages.push(Packed::new(part.group, bytes));
                messages.len() - 1
            });
            let message = &mut messages[at];
            message.sections += 1;
            fill(&mut message.builder, content, &batch, &part.distinct, lr)?;
            let first_row = |distinct: &u32| batch.rows(*distinct).next();
            message.ids.extend(part.distinct.iter().filter_map(first_row).map(|row| content.ids[row]));
        }
    }
    Ok((messages, rows))
}

fn fill(
    builder: &mut PushBodyBuilder,
    content: &Content<'_>,
    batch: &Batch,
    distinct: &[u32],
    lr: Option<f32>,
) -> Result<(), Error> {
    let keys: Vec<u64> = distinct.iter().map(|d| batch.key(*d)).collect();
    let dim = content.dim;
    let payload = builder.section(content.table, content.operation, Encoding::F32, dim as u32, lr, &keys);
    if content.operation == Operation::Remove {
        return Ok(());
    }
    let row = |at: usize| &content.values[at * dim..(at + 1) * dim];
    for (d, place) in distinct.iter().zip(payload.chunks_exact_mut(dim * 4)) {
        if content.operation == Operation::Set {
            put_row(place, row(batch.last_row(*d)));
            continue;
        }
        if content.non_finite != NonFinitePolicy::Reject {
            sum_by_policy(place, batch.rows(*d).map(row), content.non_finite);
            continue;
        }
        let mut rows = batch.rows(*d);
        if let Some(first) = rows.next() {
            put_row(place, row(first));
        }
        let mut is_sum = false;
        for again in rows {
            add_row(place, row(again));
            is_sum = true;
        }
        // A row that stands alone was checked with the push.
        if is_sum && let Some(column) = first_not_finite(place) {
            return Err(sum_refused(content, batch.rows(*d).next().unwrap_or_default(), column));
        }
    }
    Ok(())
}

fn first_not_finite(row: &[u8]) -> Option<usize> {
    let mut values = row.chunks_exact(4).map(|raw| f32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]));
    values.position(|value| !value.is_finite())
}

fn sum_refused(content: &Content<'_>, row: usize, column: usize) -> Error {
    let what = format!(
        "table {:?}: the rows of id {} are finite, their sum in column {column} is not, and the table takes finite values only",
        content.name, content.ids[row]
    );
    Error::refused(ErrorKind::NonFinite, what)
}

/// A table's policy for values that are not finite comes before the sum, as on the servers: one bad row must not take the
/// good rows of its id with it. A sum that is not finite, or rows of which none is good, are left to the servers.
fn sum_by_policy<'a>(place: &mut [u8], rows: impl Iterator<Item = &'a [f32]>, policy: NonFinitePolicy) {
    let clipped = |value: f32| if value.is_nan() { 0.0 } else { value.clamp(f32::MIN, f32::MAX) };
    let is_good = |row: &&[f32]| row.iter().all(|value| value.is_finite());
    let (mut first, mut sum) = (None, None::<Vec<f32>>);
    for row in rows {
        first.get_or_insert(row);
        if policy == NonFinitePolicy::SkipRow && !is_good(&row) {
            continue;
        }
        match &mut sum {
            None => sum = Some(row.iter().map(|value| clipped(*value)).collect()),
            Some(sum) => sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += clipped(*value)),
        }
    }
    if let Some(row) = sum.as_deref().or(first) {
        put_row(place, row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evershard_proto::push_body::PushBody;

    #[test]
    fn more_tables_than_a_message_takes_go_in_several() {
        let tables = PUSH_TABLES_MAX as u32 + 1;
        let content = |table| Content {
            table,
            name: "t",
            dim: 1,
            operation: Operation::Gradient,
            ids: &[7, 7],
            values: &[1.0, 2.0],
            non_finite: NonFinitePolicy::Reject,
        };
        let contents: Vec<_> = (1..=tables).map(content).collect();
        let (messages, rows) =
            pack(&contents, &crate::routing_cache::table_for_tests(1), None).expect("all finite");
        assert_eq!(rows, tables as usize);
        let mut seen = Vec::new();
        for message in messages {
            let bytes = message.builder.finish(1, 1, 0);
            let body = PushBody::parse(&bytes).expect("a server can read it");
            assert_eq!(body.sections().count(), message.ids.len());
            seen.extend(body.sections().map(|section| section.table));
        }
        assert_eq!(seen, (1..=tables).collect::<Vec<_>>());
    }

    #[test]
    fn a_push_with_a_sum_beyond_the_range_is_refused_whole() {
        let pack_as = |operation, non_finite, values: &[f32]| {
            let ids = &[7, 8, 7];
            let content = Content { table: 1, name: "t", dim: 1, operation, ids, values, non_finite };
            super::super::check(&[content]).expect("each row is finite");
            pack(&[content], &crate::routing_cache::table_for_tests(64), None)
                .map(|(messages, _)| messages.len())
        };
        let large = [3e38, 1.0, 3e38];
        for operation in [Operation::Gradient, Operation::Add] {
            let refused =
                pack_as(operation, NonFinitePolicy::Reject, &large).expect_err("the sum is infinite");
            assert_eq!(refused.kind(), ErrorKind::NonFinite);
            assert!(refused.to_string().contains("id 7"), "{refused}");
            assert!(pack_as(operation, NonFinitePolicy::Reject, &[3e38, 1.0, -3e38]).is_ok());
        }
        assert!(pack_as(Operation::Set, NonFinitePolicy::Reject, &large).is_ok(), "the last one counts");
        assert!(pack_as(Operation::Gradient, NonFinitePolicy::Clip, &large).is_ok());
    }

    #[test]
    fn a_bad_row_does_not_take_the_good_ones_of_its_id_with_it() {
        let sum = |rows: &[[f32; 2]], policy| {
            let mut place = [0; 8];
            sum_by_policy(&mut place, rows.iter().map(|row| &row[..]), policy);
            [0, 4].map(|at| f32::from_le_bytes([place[at], place[at + 1], place[at + 2], place[at + 3]]))
        };
        let rows = [[f32::NAN, 1.0], [2.0, 3.0], [4.0, f32::INFINITY]];
        assert_eq!(sum(&rows, NonFinitePolicy::SkipRow), [2.0, 3.0]);
        assert_eq!(sum(&rows[..2], NonFinitePolicy::Clip), [2.0, 4.0]);
        assert_eq!(sum(&rows[1..], NonFinitePolicy::Clip), [6.0, f32::MAX]);
        // None is good: the server skips it.
        assert!(sum(&rows[..1], NonFinitePolicy::SkipRow)[0].is_nan());
    }
}
