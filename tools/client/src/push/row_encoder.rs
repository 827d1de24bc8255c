//! The sum of an id's rows becomes a row of a message: with what was left out before, encoded, by the table's policy where the
//! encoding does not hold it.
//!
//! Invariants:
//! - residuals change once the whole push is packed, not here: it may still be refused;
//! - a row is counted once as clipped, also when it is clipped again to what its encoding holds.
//!
//! Not here: the sum (`row_sum`), the bytes (`encode`).

use evershard_proto::encoding::decode_row;
use evershard_proto::push_body::Encoding;
use evershard_proto::v1::{ErrorKind, NonFiniteAction, NonFinitePolicy};

use super::content::Content;
use super::encode::encode_row;
use super::residuals::Residuals;
use super::row_sum::{clipped, first_bad};
use crate::Error;
use crate::batch::get_row;
use crate::non_finite::Found;

/// Residuals to be, by table and id.
pub(super) type LeftOut = Vec<((u32, u64), Box<[f32]>)>;

/// Encodes the summed rows of one table.
#[derive(Debug)]
pub(super) struct RowEncoder<'a, 'b> {
    pub(super) content: &'a Content<'b>,
    pub(super) residuals: &'a Residuals,
    /// The residuals to be, once the whole push is packed.
    pub(super) left_out: &'a mut LeftOut,
    pub(super) found: &'a mut Found,
}

impl RowEncoder<'_, '_> {
    /// Encodes the sum of an id's rows, given as f32 in `sum`; `is_counted` when some of them were clipped.
    ///
    /// # Errors
    /// [`Error::Refused`] with NON_FINITE when the encoding does not hold it, and the table's policy is to reject.
    pub(super) fn encode(
        &mut self,
        (id, mut is_counted): (u64, bool),
        sum: &[u8],
        values: &mut [f32],
        place: &mut [u8],
    ) -> Result<(), Error> {
        let Content { table, encoding, non_finite, .. } = *self.content;
        get_row(values, sum);
        let clip = non_finite == NonFinitePolicy::Clip;
        let feedback = encoding == Encoding::Int8;
        if feedback && let Some(residual) = self.residuals.get(table, id) {
            values.iter_mut().zip(residual).for_each(|(value, more)| *value += more);
        }
        if clip {
            if let Some(column) = first_bad(values) {
                self.found.add(table, NonFiniteAction::Clipped, 1, (id, column, values[column]), true);
                is_counted = true;
            }
            values.iter_mut().for_each(|value| *value = clipped(*value));
        }
        encode_row(encoding, values, false, place);
        let decoded = &mut vec![0.0; values.len()][..];
        decode_row(encoding, place, decoded);
        if let Some(column) = decoded.iter().position(|value| !value.is_finite()) {
            let first = (id, column, values[column]);
            match non_finite {
                NonFinitePolicy::Reject => {
                    self.found.add(table, NonFiniteAction::Rejected, 1, first, false);
                    return Err(self.too_large(id, values, column));
                }
                // The servers leave the row out, and its residual stays.
                NonFinitePolicy::SkipRow => return Ok(()),
                NonFinitePolicy::Clip => {
                    if !is_counted {
                        self.found.add(table, NonFiniteAction::Clipped, 1, first, false);
                    }
                    encode_row(encoding, values, true, place);
                    return Ok(());
                }
            }
        }
        if feedback {
            let residual = values.iter().zip(&*decoded).map(|(value, sent)| value - sent).collect();
            self.left_out.push(((table, id), residual));
        }
        Ok(())
    }

    fn too_large(&self, id: u64, values: &[f32], column: usize) -> Error {
        let what = format!(
            "table {:?}: column {column} of id {id} is {}, which {} does not hold, and the table takes finite values only",
            self.content.name,
            values[column],
            self.content.encoding.name()
        );
        Error::refused(ErrorKind::NonFinite, what)
    }
}
