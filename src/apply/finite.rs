//! Looking for values that are not finite, quickly: every push is scanned twice (at the door and in apply).
//!
//! Works on the bits: without its sign, a float is not finite exactly when its bits are at least those of infinity, and
//! finite floats order as their bits do. So one integer maximum over the payload answers "is all of it finite?" and
//! "how large is the largest?" at once.
//!
//! Finite means: after decoding and scaling.
//!
//! Not here: what to do about them (`push_check`, `push`).

use evershard_proto::encoding::{INT8_SCALE_BYTES, bf16_to_f32, decode_row, f16_to_f32, int8_scale, zip_row};
use evershard_proto::key::id_of;
use evershard_proto::push_body::{Encoding, Section};

use crate::model::{BadRows, BadValue};

const MAGNITUDE: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;
const LANES: usize = 16;

/// The largest magnitude among decoded values, as bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Magnitude(u32);

impl Magnitude {
    /// Of all values of a section.
    pub(super) fn of(section: &Section<'_>) -> Self {
        Self::scan(section, section.payload())
    }

    /// Of one row of a section.
    pub(super) fn of_row(section: &Section<'_>, row: usize) -> Self {
        Self::scan(section, section.row(row))
    }

    fn scan(section: &Section<'_>, payload: &[u8]) -> Self {
        match section.encoding {
            Encoding::F32 => Magnitude(largest_f32(payload)),
            // Both widen without changing the order of magnitudes, so that the largest is widened alone.
            Encoding::Bf16 => Magnitude(bf16_to_f32(largest_u16(payload)).to_bits()),
            Encoding::F16 => Magnitude(f16_to_f32(largest_u16(payload)).to_bits()),
            Encoding::Int8 => {
                let width = section.encoding.row_bytes(section.dim as usize);
                Magnitude(payload.chunks_exact(width).map(largest_int8).fold(0, u32::max))
            }
        }
    }

    /// True when every value is finite.
    pub(super) fn is_finite(self) -> bool {
        self.0 < INFINITY
    }

    /// True when no sum of up to `count` of the values can leave the finite range, in whatever order.
    pub(super) fn sums_stay_finite(self, count: usize) -> bool {
        // Rounding adds a factor below (1 + 2^-24)^count; half the range is ample for any message.
        self.is_finite() && f64::from(f32::from_bits(self.0)) * (count as f64) < f64::from(f32::MAX) / 2.0
    }
}

fn largest_f32(payload: &[u8]) -> u32 {
    let mut lanes = [0u32; LANES];
    let chunks = payload.chunks_exact(LANES * 4);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, raw) in lanes.iter_mut().zip(chunk.chunks_exact(4)) {
            *lane = (*lane).max(bits(raw) & MAGNITUDE);
        }
    }
    let rest = rest.chunks_exact(4).map(|raw| bits(raw) & MAGNITUDE);
    lanes.into_iter().chain(rest).fold(0, u32::max)
}

fn largest_u16(payload: &[u8]) -> u16 {
    payload.chunks_exact(2).fold(0, |most, raw| most.max(u16::from_le_bytes([raw[0], raw[1]]) & 0x7fff))
}

/// Multiplying by one scale keeps the order of magnitudes; a scale that is not finite makes every value so, zeros too.
fn largest_int8(row: &[u8]) -> u32 {
    let Some(values) = row.get(INT8_SCALE_BYTES..).filter(|values| !values.is_empty()) else { return 0 };
    let scale = int8_scale(row);
    if !scale.is_finite() {
        return INFINITY;
    }
    let largest = values.iter().fold(0, |most, raw| most.max((*raw as i8).unsigned_abs()));
    (f32::from(largest) * scale).to_bits() & MAGNITUDE
}

/// The first value that is not finite: its row, its column and itself.
pub(super) fn first_bad(section: &Section<'_>) -> Option<(usize, usize, f32)> {
    let row = (0..section.count()).find(|row| !Magnitude::of_row(section, *row).is_finite())?;
    let mut values = vec![0.0; section.dim as usize];
    decode_row(section.encoding, section.row(row), &mut values);
    let column = values.iter().position(|value| !value.is_finite())?;
    Some((row, column, values[column]))
}

/// The rows of a section that are not finite.
pub(super) fn bad_rows(section: &Section<'_>) -> Option<BadRows> {
    let (row, column, value) = first_bad(section)?;
    let bad = (row..section.count()).filter(|row| !Magnitude::of_row(section, *row).is_finite());
    let id = id_of(section.table, section.keys().nth(row)?);
    let first = BadValue { id, column: column as u32, value, of_sum: false };
    Some(BadRows { count: bad.count() as u64, first })
}

/// Whether all values of a row are finite. It looks at each of them, without a branch: that is quicker than to stop at the first
/// one that is not, since hardly ever there is one.
pub(super) fn are_finite(values: &[f32]) -> bool {
    values.iter().fold(0, |largest, value| largest.max(value.to_bits() & MAGNITUDE)) < INFINITY
}

/// The first value of a row that is not finite.
pub(super) fn bad_value(id: u64, values: &[f32], of_sum: bool) -> Option<BadValue> {
    let column = values.iter().position(|value| !value.is_finite())?;
    Some(BadValue { id, column: column as u32, value: values[column], of_sum })
}

/// NaN becomes 0, an infinity the largest finite value of its sign.
pub(super) fn clip(values: &mut [f32]) {
    for value in values {
        *value = clipped(*value);
    }
}

fn clipped(value: f32) -> f32 {
    if value.is_nan() { 0.0 } else { value.clamp(-f32::MAX, f32::MAX) }
}

/// Adds a row's values, one by one, clipped first when asked to.
pub(super) fn add(section: &Section<'_>, row: usize, clip: bool, sums: &mut [f32]) {
    let row = section.row(row);
    if clip {
        zip_row(section.encoding, row, sums, |sum, value| *sum += clipped(value));
    } else {
        zip_row(section.encoding, row, sums, |sum, value| *sum += value);
    }
}

fn bits(raw: &[u8]) -> u32 {
    match *raw {
        [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evershard_proto::push_body::{Operation, PushBody, PushBodyBuilder};
    use proptest::prelude::*;

    /// Runs `look` on one section of one row.
    fn with<T>(encoding: Encoding, dim: usize, payload: &[u8], look: impl Fn(&Section<'_>) -> T) -> T {
        let rows = payload.len() / encoding.row_bytes(dim).max(1);
        let keys: Vec<u64> = (0..rows as u64).collect();
        let mut builder = PushBodyBuilder::new(0);
        builder
            .section(1, Operation::Gradient, encoding, dim as u32, None, &keys)
            .copy_from_slice(&payload[..rows * encoding.row_bytes(dim)]);
        let bytes = builder.finish(1, 1, 0);
        look(&PushBody::parse(&bytes).expect("our own").sections().next().expect("one"))
    }

    fn with_f32<T>(values: &[f32], look: impl Fn(&Section<'_>) -> T) -> T {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        with(Encoding::F32, values.len(), &bytes, look)
    }

    proptest! {
        #[test]
        fn finds_what_a_plain_scan_finds(values in proptest::collection::vec(any::<f32>(), 1..100)) {
            prop_assert_eq!(with_f32(&values, |s| Magnitude::of(s).is_finite()), values.iter().all(|v| v.is_finite()));
            let expected = values.iter().position(|v| !v.is_finite());
            prop_assert_eq!(with_f32(&values, first_bad).map(|(_, at, _)| at), expected);
        }

        #[test]
        fn every_encoding_is_scanned_as_it_decodes(
            raw in proptest::collection::vec(prop_oneof![any::<u8>(), Just(0x7f), Just(0xff), Just(0)], 600),
            dim in 1usize..70,
        ) {
            for encoding in Encoding::ALL {
                let width = encoding.row_bytes(dim);
                let rows: Vec<Vec<f32>> = raw
                    .chunks_exact(width)
                    .map(|row| {
                        let mut values = vec![0.0; dim];
                        decode_row(encoding, row, &mut values);
                        values
                    })
                    .collect();
                let bad = rows
                    .iter()
                    .enumerate()
                    .find_map(|(row, values)| values.iter().position(|v| !v.is_finite()).map(|column| (row, column)));
                with(encoding, dim, &raw, |section| {
                    assert_eq!(Magnitude::of(section).is_finite(), bad.is_none(), "{encoding:?}");
                    assert_eq!(first_bad(section).map(|(row, column, _)| (row, column)), bad, "{encoding:?}");
                    if bad.is_none() {
                        let most = rows.iter().flatten().fold(0, |most, v| most.max(v.to_bits() & MAGNITUDE));
                        assert_eq!(Magnitude::of(section), Magnitude(most), "{encoding:?}");
                    }
                });
            }
        }

        #[test]
        fn one_bad_value_anywhere_is_found(len in 1usize..200, at: proptest::sample::Index, bad in prop_oneof![
            Just(f32::NAN), Just(-f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY)
        ]) {
            let mut values = vec![1.0f32; len];
            let at = at.index(len);
            values[at] = bad;
            prop_assert!(are_finite(&vec![f32::MAX; len]) && are_finite(&vec![f32::MIN; len]));
            prop_assert!(!with_f32(&values, |s| Magnitude::of(s).is_finite()));
            prop_assert!(!are_finite(&values));
            prop_assert_eq!(with_f32(&values, first_bad).expect("found").1, at);
            let mut clipped = values.clone();
            clip(&mut clipped);
            prop_assert!(clipped.iter().all(|v| v.is_finite()));
        }
    }

    #[test]
    fn a_bad_scale_is_not_finite_even_over_zeros() {
        let row = |scale: f32, values: [i8; 2]| {
            let mut row = scale.to_le_bytes().to_vec();
            row.extend(values.map(|v| v as u8));
            with(Encoding::Int8, 2, &row, |section| first_bad(section).map(|(_, column, _)| column))
        };
        assert_eq!(row(f32::NAN, [0, 0]), Some(0));
        assert_eq!(row(f32::INFINITY, [0, 0]), Some(0));
        assert_eq!(row(f32::MAX, [1, 127]), Some(1), "scaled, it leaves the range");
        assert_eq!(row(f32::MAX, [1, -1]), None);
        assert_eq!(row(1.0, [127, -128]), None);
    }

    #[test]
    fn sums_are_bounded() {
        let of = |values: &[f32]| with_f32(values, Magnitude::of);
        let large = of(&[1.0, -3e38]);
        assert!(large.is_finite() && !large.sums_stay_finite(2));
        assert!(of(&[1.0, -3.0]).sums_stay_finite(1 << 20));
        assert!(Magnitude(0).sums_stay_finite(0));
    }
}
