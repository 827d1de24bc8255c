//! The rows of an id become one, by the table's policy for values that are not finite.
//!
//! Invariants:
//! - rows are summed as f32, in order of appearance, as the servers would sum them;
//! - a value that is finite keeps its bits where it stands alone: denormals and the sign of zero included;
//! - `found` has what no server sees: what is sent as it is, they count themselves.
//!
//! Not here: which rows are of an id (`batch`), encodings that hold less than f32 (`row_encoder`).

use evershard_proto::push_body::Operation;
use evershard_proto::v1::{ErrorKind, NonFiniteAction, NonFinitePolicy};

use super::content::{Content, all_finite};
use crate::Error;
use crate::batch::{Batch, add_row, put_row};
use crate::non_finite::Found;

/// Sums the rows of a distinct id as f32, in order of appearance; of values, the last one counts. True when some of them were
/// left out or clipped, and are in `found`.
///
/// # Errors
/// [`Error::Refused`] with NON_FINITE when rows that are finite have a sum that is not, and the table's policy is to reject.
pub(super) fn sum_rows(
    content: &Content<'_>,
    batch: &Batch,
    d: u32,
    place: &mut [u8],
    found: &mut Found,
) -> Result<bool, Error> {
    let dim = content.dim;
    let row = |at: usize| &content.values[at * dim..(at + 1) * dim];
    if content.operation == Operation::Set {
        put_row(place, row(batch.last_row(d)));
        return Ok(false);
    }
    if content.non_finite != NonFinitePolicy::Reject {
        let unseen = sum_by_policy(place, batch.rows(d).map(row), content.non_finite);
        let Some((count, column, value)) = unseen else { return Ok(false) };
        let id = content.ids[batch.first_row(d)];
        let action = match content.non_finite {
            NonFinitePolicy::Clip => NonFiniteAction::Clipped,
            NonFinitePolicy::SkipRow | NonFinitePolicy::Reject => NonFiniteAction::Skipped,
        };
        found.add(content.table, action, count, (id, column, value), false);
        return Ok(true);
    }
    let mut rows = batch.rows(d);
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
        let first = batch.first_row(d);
        let value = get_value(place, column);
        found.add(content.table, NonFiniteAction::Rejected, 1, (content.ids[first], column, value), true);
        return Err(sum_refused(content, first, column));
    }
    Ok(false)
}

fn first_not_finite(row: &[u8]) -> Option<usize> {
    (0..row.len() / 4).find(|column| !get_value(row, *column).is_finite())
}

fn get_value(row: &[u8], column: usize) -> f32 {
    let raw = &row[column * 4..][..4];
    f32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]])
}

/// The first column that is not finite.
pub(super) fn first_bad(row: &[f32]) -> Option<usize> {
    // Hardly ever there is one: it is looked for once it is known to be there.
    if all_finite(row) { None } else { row.iter().position(|value| !value.is_finite()) }
}

fn sum_refused(content: &Content<'_>, row: usize, column: usize) -> Error {
    let what = format!(
        "table {:?}: the rows of id {} are finite, their sum in column {column} is not, and the table takes finite values only",
        content.name, content.ids[row]
    );
    Error::refused(ErrorKind::NonFinite, what)
}

/// A table's policy for values that are not finite comes before the sum, as on the servers: one bad row must not take the
/// good rows of its id with it. A sum that is not finite, or rows of which none is good, are left to the servers: the first of
/// those is sent as it is. Answers how many rows are left out or clipped that the servers do not see, and the first value.
fn sum_by_policy<'a>(
    place: &mut [u8],
    rows: impl Iterator<Item = &'a [f32]>,
    policy: NonFinitePolicy,
) -> Option<(u64, usize, f32)> {
    let (mut first, mut sum) = (None, None::<Vec<f32>>);
    let mut unseen = None;
    for row in rows {
        first.get_or_insert(row);
        if let Some(column) = first_bad(row) {
            unseen.get_or_insert((0, column, row[column])).0 += 1;
            if policy == NonFinitePolicy::SkipRow {
                continue;
            }
        }
        match &mut sum {
            None => sum = Some(row.iter().map(|value| clipped(*value)).collect()),
            Some(sum) => sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += clipped(*value)),
        }
    }
    if let Some(row) = sum.as_deref().or(first) {
        put_row(place, row);
    }
    if sum.is_none()
        && let Some((count, ..)) = &mut unseen
    {
        *count -= 1;
    }
    unseen.filter(|(count, ..)| *count > 0)
}

/// NaN becomes 0, an infinity the largest finite value of its sign.
pub(super) fn clipped(value: f32) -> f32 {
    if value.is_nan() { 0.0 } else { value.clamp(f32::MIN, f32::MAX) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summed(rows: &[[f32; 2]], policy: NonFinitePolicy) -> [f32; 2] {
        let mut place = [0; 8];
        sum_by_policy(&mut place, rows.iter().map(|row| &row[..]), policy);
        [0, 1].map(|column| get_value(&place, column))
    }

    #[test]
    fn a_bad_row_does_not_take_the_good_ones_of_its_id_with_it() {
        let rows = [[f32::NAN, 1.0], [2.0, 3.0], [4.0, f32::INFINITY]];
        assert_eq!(summed(&rows, NonFinitePolicy::SkipRow), [2.0, 3.0]);
        assert_eq!(summed(&rows[..2], NonFinitePolicy::Clip), [2.0, 4.0]);
        assert_eq!(summed(&rows[1..], NonFinitePolicy::Clip), [6.0, f32::MAX]);
        // None is good: the server skips it.
        assert!(summed(&rows[..1], NonFinitePolicy::SkipRow)[0].is_nan());
    }

    #[test]
    fn large_and_tiny_values_and_both_zeros_keep_their_bits_under_every_policy() {
        let tiny = f32::from_bits(1);
        let rows = [[1e38, -1e38], [tiny, -tiny], [-0.0, 0.0], [f32::MAX, f32::MIN]];
        for non_finite in [NonFinitePolicy::Reject, NonFinitePolicy::SkipRow, NonFinitePolicy::Clip] {
            for row in rows {
                let mut found = Found::default();
                let content = Content {
                    table: 1,
                    name: "t",
                    dim: 2,
                    operation: Operation::Gradient,
                    encoding: evershard_proto::push_body::Encoding::F32,
                    ids: &[7],
                    values: &row,
                    non_finite,
                    counts: false,
                };
                let mut place = [0; 8];
                let is_counted = sum_rows(&content, &Batch::new(1, &[7]), 0, &mut place, &mut found);
                assert!(!is_counted.expect("all finite"));
                assert_eq!([0, 1].map(|column| get_value(&place, column).to_bits()), row.map(f32::to_bits));
                assert!(found.rows().is_empty());
            }
        }
        let policy = NonFinitePolicy::Clip;
        assert_eq!(summed(&[[-0.0; 2], [-0.0; 2]], policy).map(f32::to_bits), [(-0.0f32).to_bits(); 2]);
        assert_eq!(summed(&[[tiny, 1e38], [tiny, 1e38]], policy), [f32::from_bits(2), 1e38 + 1e38]);
        // Their sum is left to the servers.
        assert_eq!(summed(&[[1e38, 1.0]; 4], policy), [f32::INFINITY, 4.0]);
    }
}
