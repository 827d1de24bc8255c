//! What a caller wants pushed to one table, checked before anything of it is sent.
//!
//! Not here: making messages of it (`packing`).

use evershard_proto::push_body::{Encoding, Operation};
use evershard_proto::v1::{ErrorKind, NonFiniteAction, NonFinitePolicy};

use crate::Error;
use crate::non_finite::Found;

/// One table's part of a push, checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Content<'a> {
    pub(crate) table: u32,
    pub(crate) name: &'a str,
    pub(crate) dim: usize,
    pub(crate) operation: Operation,
    /// How gradients travel; everything else travels as f32.
    pub(crate) encoding: Encoding,
    pub(crate) ids: &'a [u64],
    /// `ids.len() x dim`; empty for a removal.
    pub(crate) values: &'a [f32],
    /// What the table does with values that are not finite.
    pub(crate) non_finite: NonFinitePolicy,
    /// Whether the table counts how often an id comes.
    pub(crate) counts: bool,
}

impl Content<'_> {
    /// Whether packing it asks for what earlier pushes of its ids left out, or makes that void.
    pub(crate) fn touches_residuals(&self) -> bool {
        self.encoding == Encoding::Int8 || matches!(self.operation, Operation::Set | Operation::Remove)
    }

    fn check(&self, found: &mut Found) -> Result<(), Error> {
        let expected = if self.operation.has_values() { self.ids.len() * self.dim } else { 0 };
        if self.values.len() == expected {
            return self.check_finite(found);
        }
        let what = format!(
            "table {:?}: {} ids of dim {} need {expected} values, {} were given",
            self.name,
            self.ids.len(),
            self.dim,
            self.values.len()
        );
        Err(Error::refused(ErrorKind::LengthMismatch, what))
    }

    /// Refuses the push whole, before a part of it is sent: the servers, each of which sees its shard's rows only, would
    /// refuse some messages and apply others.
    fn check_finite(&self, found: &mut Found) -> Result<(), Error> {
        if self.non_finite != NonFinitePolicy::Reject || all_finite(self.values) {
            return Ok(());
        }
        let at = self.values.iter().position(|value| !value.is_finite()).unwrap_or_default();
        let (row, column) = (at / self.dim, at % self.dim);
        let first = (self.ids[row], column, self.values[at]);
        found.add(self.table, NonFiniteAction::Rejected, 1, first, false);
        let what = format!(
            "table {:?}: column {column} of row {row} (id {}) is {}, and the table takes finite values only",
            self.name, self.ids[row], self.values[at]
        );
        Err(Error::refused(ErrorKind::NonFinite, what))
    }
}

/// Whether no value is NaN or infinite: without a branch per value, so that it costs a read of the memory.
pub(super) fn all_finite(values: &[f32]) -> bool {
    const INFINITY_BITS: u32 = f32::INFINITY.to_bits();
    let largest = |block: &[f32]| block.iter().fold(0, |most, v| most.max(v.to_bits() & 0x7fff_ffff));
    values.chunks(4096).all(|block| largest(block) < INFINITY_BITS)
}

/// Refuses what cannot be meant, before anything of it is sent. What is not finite is in `found` then.
pub(crate) fn check(contents: &[Content<'_>], found: &mut Found) -> Result<(), Error> {
    for (position, content) in contents.iter().enumerate() {
        content.check(found)?;
        if contents[..position].iter().any(|c| c.table == content.table) {
            return Err(Error::invalid(format!("table {:?} is twice in one push", content.name)));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_value_that_is_not_finite_is_found_wherever_it_is() {
        let finite = [0.0, -0.0, f32::MAX, f32::MIN, f32::MIN_POSITIVE, -1e-45];
        assert!(all_finite(&finite) && all_finite(&[]));
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 4095, 4096, 9999] {
                let mut values = vec![1.0; 10_000];
                values[at] = bad;
                assert!(!all_finite(&values), "{bad} at {at}");
            }
        }
    }
}
