//! From f32 to the bytes of an encoded row.
//!
//! - bf16, f16: round to nearest, ties to even, in software, so that every machine sends the same bits.
//! - int8: scale = largest magnitude / 127, and each value the nearest whole multiple of it, ties to even.
//!
//! A finite value that rounds to infinity (f16: from 65520 on; bf16: within half a step of f32's maximum) goes by the table's
//! policy as an infinity would: `reject` is a typed error, `skip_row` sends the infinity and the servers leave the row out,
//! `clip` sends the largest value of the encoding. Nothing is made smaller unless the table says so.
//!
//! Not here: sums, residuals.

use evershard_proto::encoding::INT8_SCALE_BYTES;
use evershard_proto::push_body::Encoding;
use half::{bf16, f16};

/// Writes `values` as `encoding` lays out a row; with `clip`, what is beyond the encoding's range becomes its largest value.
pub(super) fn encode_row(encoding: Encoding, values: &[f32], clip: bool, place: &mut [u8]) {
    match encoding {
        Encoding::F32 => crate::batch::put_row(place, values),
        Encoding::Bf16 => {
            for (raw, value) in place.chunks_exact_mut(2).zip(values) {
                let mut encoded = bf16::from_f32_const(*value);
                if clip && !encoded.is_finite() {
                    encoded = if value.is_nan() { bf16::ZERO } else { bf16::MAX.copysign(encoded) };
                }
                raw.copy_from_slice(&encoded.to_le_bytes());
            }
        }
        Encoding::F16 => {
            for (raw, value) in place.chunks_exact_mut(2).zip(values) {
                let mut encoded = f16::from_f32_const(*value);
                if clip && !encoded.is_finite() {
                    encoded = if value.is_nan() { f16::ZERO } else { f16::MAX.copysign(encoded) };
                }
                raw.copy_from_slice(&encoded.to_le_bytes());
            }
        }
        Encoding::Int8 => int8_row(values, place),
    }
}

/// A row that is not finite gets a scale that is not, so that the servers see it.
fn int8_row(values: &[f32], place: &mut [u8]) {
    let largest = values.iter().fold(0, |most, value| most.max(value.to_bits() & 0x7fff_ffff));
    let largest = f32::from_bits(largest);
    let mut scale = largest / 127.0;
    if largest.is_finite() && !(scale * 127.0).is_finite() {
        // Rounded up at the end of the range: one step less keeps 127 of it finite.
        scale = f32::from_bits(scale.to_bits() - 1);
    }
    let (head, tail) = place.split_at_mut(INT8_SCALE_BYTES);
    head.copy_from_slice(&scale.to_le_bytes());
    for (raw, value) in tail.iter_mut().zip(values) {
        // `as` is exact here: what is rounded is within ±127, and NaN (0 / 0, of a scale that vanished) becomes 0.
        *raw = (value / scale).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evershard_proto::encoding::decode_row;
    use proptest::prelude::*;

    fn through(encoding: Encoding, values: &[f32], clip: bool) -> Vec<f32> {
        let mut raw = vec![0; encoding.row_bytes(values.len())];
        encode_row(encoding, values, clip, &mut raw);
        let mut out = vec![0.0; values.len()];
        decode_row(encoding, &raw, &mut out);
        out
    }

    #[test]
    fn ties_go_to_even() {
        // Steps at 1: bf16 2^-7, f16 2^-10.
        let half_step = |bits: i32| 1.0 + 2f32.powi(-bits) / 2.0;
        assert_eq!(
            through(Encoding::Bf16, &[half_step(7), 3.0 * half_step(7) - 2.0], false),
            [1.0, 1.015_625]
        );
        assert_eq!(through(Encoding::F16, &[half_step(10)], false), [1.0]);
        assert_eq!(through(Encoding::Int8, &[127.0, 0.5, 1.5, -2.5], false), [127.0, 0.0, 2.0, -2.0]);
    }

    #[test]
    fn beyond_the_range_is_infinite_or_clipped() {
        assert_eq!(
            through(Encoding::F16, &[65519.0, -65520.0, 1e-8], false),
            [65504.0, f32::NEG_INFINITY, 0.0]
        );
        assert_eq!(through(Encoding::F16, &[1e9, -1e9, f32::NAN], true), [65504.0, -65504.0, 0.0]);
        assert_eq!(through(Encoding::Bf16, &[f32::MAX], false), [f32::INFINITY]);
        assert_eq!(through(Encoding::Bf16, &[f32::MIN], true), [-bf16::MAX.to_f32_const()]);
        assert!(through(Encoding::Int8, &[1.0, f32::NAN], false).iter().all(|v| !v.is_finite()));
        assert!(through(Encoding::Int8, &[0.0, f32::INFINITY], false).iter().all(|v| !v.is_finite()));
    }

    proptest! {
        #[test]
        fn int8_is_within_half_a_step_and_finite(values in proptest::collection::vec(
            any::<f32>().prop_filter("finite", |v| v.is_finite()), 1..40)
        ) {
            let out = through(Encoding::Int8, &values, false);
            let largest = values.iter().fold(0.0f32, |most, v| most.max(v.abs()));
            let step = f64::from(largest) / 127.0;
            for (value, back) in values.iter().zip(&out) {
                prop_assert!(back.is_finite());
                let error = (f64::from(*value) - f64::from(*back)).abs();
                // f32's smallest steps allow no better scale.
                prop_assert!(error <= step * 0.5001 + 128.0 * 1.5e-45, "{} {} {}", value, back, step);
            }
        }
    }
}
