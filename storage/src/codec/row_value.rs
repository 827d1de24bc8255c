//! The value of a row in RocksDB.
//!
//! ```text
//! u8   format, 1
//! u32  flags, below 2^7
//! u64  version, below 2^56
//! u32  steps
//! f32* weights, state, notes; the notes alone of a counting record; none for a tombstone
//! ```
//!
//! The number of floats is not written: it follows from the length, and the table's schema says what it must be.
//! Not here: checksums (RocksDB keeps one a block), the key (`keyspace`).

use super::reader::{DecodeError, Reader};
use crate::table::RowHeader;

const FORMAT: u8 = 1;
const HEAD_BYTES: usize = 1 + 4 + 8 + 4;

/// A row's value cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RowValueError {
    /// Of another version of Evershard.
    #[error("row format {found}, this build reads {FORMAT}")]
    Format {
        /// What the value says.
        found: u8,
    },
    /// Not a row.
    #[error("row value: {0}")]
    Malformed(#[from] DecodeError),
}

/// Bytes of a row's value.
#[must_use]
pub const fn row_value_bytes(floats: usize) -> usize {
    HEAD_BYTES + floats * 4
}

/// Writes a row's value over `value`. A tombstone's floats are left out.
pub fn encode_row(header: RowHeader, floats: &[f32], value: &mut Vec<u8>) {
    let floats = if header.is_tombstone() { &[] } else { floats };
    value.clear();
    value.reserve(row_value_bytes(floats.len()));
    value.push(FORMAT);
    value.extend_from_slice(&header.flags.to_le_bytes());
    value.extend_from_slice(&header.version.to_le_bytes());
    value.extend_from_slice(&header.steps.to_le_bytes());
    let start = value.len();
    value.resize(start + floats.len() * 4, 0);
    for (bytes, float) in value[start..].chunks_exact_mut(4).zip(floats) {
        bytes.copy_from_slice(&float.to_le_bytes());
    }
}

/// Reads a row's value; its floats are written over `floats`. NaN payloads are kept bit by bit.
///
/// # Errors
/// [`RowValueError`] when the bytes are not a row of this format.
pub fn decode_row(value: &[u8], floats: &mut Vec<f32>) -> Result<RowHeader, RowValueError> {
    let mut reader = Reader::new(value);
    let found = reader.u8("format")?;
    if found != FORMAT {
        return Err(RowValueError::Format { found });
    }
    let flags = reader.u32("flags")?;
    let version = reader.u64("version")?;
    let steps = reader.u32("steps")?;
    if flags > RowHeader::FLAGS_MAX {
        return Err(DecodeError::Invalid { field: "flags" }.into());
    }
    if version > RowHeader::VERSION_MAX {
        return Err(DecodeError::Invalid { field: "version" }.into());
    }
    let header = RowHeader { version, steps, flags };
    let rest = reader.rest();
    if !rest.len().is_multiple_of(4) || (header.is_tombstone() && !rest.is_empty()) {
        return Err(DecodeError::Invalid { field: "floats" }.into());
    }
    floats.clear();
    floats.extend(
        rest.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
    );
    Ok(header)
}

/// The version of a row's or tombstone's value; `None` for what is no row of this format.
#[must_use]
pub fn row_version(value: &[u8]) -> Option<u64> {
    let mut reader = Reader::new(value);
    let (format, _flags) = (reader.u8("format").ok()?, reader.u32("flags").ok()?);
    let version = reader.u64("version").ok()?;
    (format == FORMAT).then_some(version)
}

/// The version of a tombstone's value; `None` for a live row's, and for what is no row of this format.
#[must_use]
pub fn tombstone_version(value: &[u8]) -> Option<u64> {
    if value.len() != HEAD_BYTES {
        return None;
    }
    let mut reader = Reader::new(value);
    let (format, flags) = (reader.u8("format").ok()?, reader.u32("flags").ok()?);
    let is_tombstone = RowHeader { flags, ..RowHeader::default() }.is_tombstone();
    let version = reader.u64("version").ok()?;
    (format == FORMAT && is_tombstone).then_some(version)
}

#[cfg(test)]
mod tests {
    use evershard_formats::golden::golden;
    use evershard_formats::{bytes_or_damaged, frugal};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_row_comes_back_bit_by_bit(version in 0..=RowHeader::VERSION_MAX, steps: u32, flags in 0..=RowHeader::FLAGS_MAX, bits in prop::collection::vec(any::<u32>(), 0..70)) {
            let header = RowHeader { version, steps, flags };
            let floats: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
            let (mut value, mut back) = (Vec::new(), vec![1.0]);
            encode_row(header, &floats, &mut value);
            prop_assert_eq!(decode_row(&value, &mut back), Ok(header));
            let back: Vec<u32> = back.iter().map(|float| float.to_bits()).collect();
            prop_assert_eq!(back, if header.is_tombstone() { vec![] } else { bits });
            prop_assert_eq!(tombstone_version(&value), header.is_tombstone().then_some(version));
            prop_assert_eq!(row_version(&value), Some(version));
        }

        #[test]
        fn fuzz_row_value(bytes in bytes_or_damaged(row())) {
            let mut floats = Vec::new();
            let _ = (tombstone_version(&bytes), row_version(&bytes));
            if let Ok(header) = frugal(bytes.len(), || decode_row(&bytes, &mut floats)) {
                // What is read as a row is that row: writing it gives the same bytes.
                let mut again = Vec::new();
                encode_row(header, &floats, &mut again);
                prop_assert_eq!(again, bytes);
            }
        }
    }

    fn row() -> impl Strategy<Value = Vec<u8>> {
        let heads = (0..=RowHeader::VERSION_MAX, any::<u32>(), 0..=RowHeader::FLAGS_MAX);
        (heads, prop::collection::vec(any::<f32>(), 0..20)).prop_map(|((version, steps, flags), floats)| {
            let mut value = Vec::new();
            encode_row(RowHeader { version, steps, flags }, &floats, &mut value);
            value
        })
    }

    #[test]
    fn format_1_stays_as_it_is() {
        let header = RowHeader { version: 0x0102, steps: 3, flags: 4 };
        let (mut value, mut floats) = (Vec::new(), Vec::new());
        encode_row(header, &[1.0, -2.0], &mut value);
        let value = golden(env!("CARGO_MANIFEST_DIR"), "row-value-1.bin", &value);
        assert_eq!(decode_row(&value, &mut floats), Ok(header));
        assert_eq!(floats, [1.0, -2.0]);
    }

    #[test]
    fn the_format_is_as_documented() {
        let mut value = Vec::new();
        encode_row(RowHeader { version: 0x0102, steps: 3, flags: 4 }, &[1.0, -2.0], &mut value);
        let expected = [
            1, 4, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0x00, 0x00, 0x80, 0x3f, 0x00, 0x00, 0x00, 0xc0,
        ];
        assert_eq!(value, expected);
    }

    #[test]
    fn other_formats_and_cut_values_are_refused() {
        let mut value = Vec::new();
        encode_row(RowHeader { version: 1, steps: 0, flags: 0 }, &[1.0], &mut value);
        let mut floats = Vec::new();
        for cut in 0..value.len() {
            // A cut at a float's boundary is a shorter row: the schema finds that, not the codec.
            if cut != HEAD_BYTES {
                assert!(decode_row(&value[..cut], &mut floats).is_err(), "cut at {cut}");
            }
        }
        value[0] = 2;
        assert_eq!(decode_row(&value, &mut floats), Err(RowValueError::Format { found: 2 }));
    }
}
