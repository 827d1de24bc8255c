//! What the bytes of an encoded row mean as f32: the one decoding that the client and every replica share.
//!
//! ```text
//! f32    dim x f32
//! bf16   dim x u16: the upper half of an f32
//! f16    dim x u16: IEEE 754 binary16
//! int8   scale f32 | dim x i8: a value is i8 as f32 x scale
//! ```
//!
//! All little-endian. Invariant: decoding is part of the format. It is integer arithmetic, exact conversions and one
//! multiplication, without instructions that only some processors have, so each platform gives the same bits.
//!
//! Not here: encoding (the client's), whether values are finite (the server's).

use crate::push_body::Encoding;

/// Bytes of an int8 row's scale.
pub const INT8_SCALE_BYTES: usize = 4;

/// bf16 is the upper half of an f32.
#[inline]
#[must_use]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Exact, subnormals included; a NaN keeps its sign and payload and is made quiet, as processors do.
#[inline]
#[must_use]
pub fn f16_to_f32(bits: u16) -> f32 {
    const EXPONENT: u32 = 0x7c00;
    const REBIAS: u32 = (127 - 15) << 23;
    /// 2^-24, the unit of subnormals.
    const SUBNORMAL_UNIT: f32 = f32::from_bits((127 - 24) << 23);
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff);
    // All three are computed and one is taken, so that loops over this have no branches.
    let normal = (magnitude << 13).wrapping_add(REBIAS);
    let subnormal = ((magnitude as i32) as f32 * SUBNORMAL_UNIT).to_bits();
    let quiet = if magnitude > EXPONENT { 0x0040_0000 } else { 0 };
    let special = 0x7f80_0000 | quiet | ((magnitude & 0x03ff) << 13);
    let finite = if magnitude < 0x0400 { subnormal } else { normal };
    f32::from_bits(sign | if magnitude >= EXPONENT { special } else { finite })
}

/// The scale of an int8 row; 0 of a row cut short.
#[inline]
#[must_use]
pub fn int8_scale(row: &[u8]) -> f32 {
    match row {
        [a, b, c, d, ..] => f32::from_le_bytes([*a, *b, *c, *d]),
        _ => 0.0,
    }
}

/// Runs `step` over the places of `out` with the decoded values of a row: as many as both have.
#[inline]
pub fn zip_row(encoding: Encoding, row: &[u8], out: &mut [f32], step: impl Fn(&mut f32, f32)) {
    match encoding {
        Encoding::F32 => {
            for (place, raw) in out.iter_mut().zip(row.chunks_exact(4)) {
                step(place, f32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]));
            }
        }
        Encoding::Bf16 => {
            for (place, raw) in out.iter_mut().zip(row.chunks_exact(2)) {
                step(place, bf16_to_f32(u16::from_le_bytes([raw[0], raw[1]])));
            }
        }
        Encoding::F16 => {
            for (place, raw) in out.iter_mut().zip(row.chunks_exact(2)) {
                step(place, f16_to_f32(u16::from_le_bytes([raw[0], raw[1]])));
            }
        }
        Encoding::Int8 => {
            let scale = int8_scale(row);
            for (place, raw) in out.iter_mut().zip(row.iter().skip(INT8_SCALE_BYTES)) {
                step(place, f32::from(*raw as i8) * scale);
            }
        }
    }
}

/// Decodes a row.
#[inline]
pub fn decode_row(encoding: Encoding, row: &[u8], out: &mut [f32]) {
    zip_row(encoding, row, out, |place, value| *place = value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    #[test]
    fn every_f16_is_as_software_and_this_processor_convert_it() {
        for bits in 0..=u16::MAX {
            let ours = f16_to_f32(bits).to_bits();
            assert_eq!(ours, f16::from_bits(bits).to_f32_const().to_bits(), "software, {bits:04x}");
            // Uses F16C where there is one.
            assert_eq!(ours, f16::from_bits(bits).to_f32().to_bits(), "hardware, {bits:04x}");
        }
    }

    #[test]
    fn every_bf16_is_as_half_converts_it() {
        for bits in 0..=u16::MAX {
            let theirs = bf16::from_bits(bits).to_f32_const();
            if theirs.is_nan() {
                assert!(bf16_to_f32(bits).is_nan());
            } else {
                assert_eq!(bf16_to_f32(bits).to_bits(), theirs.to_bits(), "{bits:04x}");
            }
        }
    }

    proptest! {
        /// Rows long enough for vector code and its remainder give the bits of one value at a time.
        #[test]
        fn rows_decode_as_single_values_do(raw in proptest::collection::vec(any::<u8>(), 4 + 2 * 131), dim in 0usize..131) {
            let single = |encoding, at: usize| match encoding {
                Encoding::F32 => unreachable!("not in this test"),
                Encoding::Bf16 => f32::from_bits(u32::from(raw[at * 2]) << 16 | u32::from(raw[at * 2 + 1]) << 24),
                Encoding::F16 => f16::from_le_bytes([raw[at * 2], raw[at * 2 + 1]]).to_f32_const(),
                Encoding::Int8 => {
                    std::hint::black_box(f32::from(raw[4 + at] as i8))
                        * std::hint::black_box(f32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]))
                }
            };
            for encoding in [Encoding::Bf16, Encoding::F16, Encoding::Int8] {
                let mut out = vec![0.0; dim];
                decode_row(encoding, &raw[..encoding.row_bytes(dim)], &mut out);
                for (at, value) in out.iter().enumerate() {
                    let expected: f32 = single(encoding, at);
                    let same = value.to_bits() == expected.to_bits() || (value.is_nan() && expected.is_nan());
                    prop_assert!(same, "{:?} {}: {} {}", encoding, at, value, expected);
                }
            }
        }
    }
}
