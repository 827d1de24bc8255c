//! Looking for values that are not finite, quickly: every push is scanned twice (at the door and in apply).
//!
//! Works on the bits: without its sign, a float is not finite exactly when its bits are at least those of infinity, and
//! finite floats order as their bits do. So one integer maximum over the payload answers "is all of it finite?" and
//! "how large is the largest?" at once.
//!
//! Not here: what to do about them (`push_check`, `push`).

const MAGNITUDE: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;
const LANES: usize = 16;

/// The largest magnitude in a payload of little-endian f32, as bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Magnitude(u32);

impl Magnitude {
    /// Scans a payload.
    pub(super) fn of(payload: &[u8]) -> Self {
        let mut lanes = [0u32; LANES];
        let chunks = payload.chunks_exact(LANES * 4);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (lane, raw) in lanes.iter_mut().zip(chunk.chunks_exact(4)) {
                *lane = (*lane).max(bits(raw) & MAGNITUDE);
            }
        }
        let rest = rest.chunks_exact(4).map(|raw| bits(raw) & MAGNITUDE);
        Magnitude(lanes.into_iter().chain(rest).fold(0, u32::max))
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

/// The first value that is not finite: its position and itself.
pub(super) fn first_bad(payload: &[u8]) -> Option<(usize, f32)> {
    payload
        .chunks_exact(4)
        .map(|raw| f32::from_bits(bits(raw)))
        .enumerate()
        .find(|(_, value)| !value.is_finite())
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

/// Reads little-endian floats: as many as both have.
pub(super) fn decode(payload: &[u8], values: &mut [f32]) {
    for (value, raw) in values.iter_mut().zip(payload.chunks_exact(4)) {
        *value = f32::from_bits(bits(raw));
    }
}

/// Adds little-endian floats, one by one, clipped first when asked to.
pub(super) fn add(payload: &[u8], clip: bool, sums: &mut [f32]) {
    for (sum, raw) in sums.iter_mut().zip(payload.chunks_exact(4)) {
        let value = f32::from_bits(bits(raw));
        *sum += if clip { clipped(value) } else { value };
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
    use proptest::prelude::*;

    fn payload(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    proptest! {
        #[test]
        fn finds_what_a_plain_scan_finds(values in proptest::collection::vec(any::<f32>(), 0..100)) {
            let bytes = payload(&values);
            prop_assert_eq!(Magnitude::of(&bytes).is_finite(), values.iter().all(|v| v.is_finite()));
            let expected = values.iter().position(|v| !v.is_finite());
            prop_assert_eq!(first_bad(&bytes).map(|(at, _)| at), expected);
        }

        #[test]
        fn one_bad_value_anywhere_is_found(len in 1usize..200, at: proptest::sample::Index, bad in prop_oneof![
            Just(f32::NAN), Just(-f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY)
        ]) {
            let mut values = vec![1.0f32; len];
            let at = at.index(len);
            values[at] = bad;
            let bytes = payload(&values);
            prop_assert!(!Magnitude::of(&bytes).is_finite());
            prop_assert_eq!(first_bad(&bytes).expect("found").0, at);
            let mut clipped = values.clone();
            clip(&mut clipped);
            prop_assert!(clipped.iter().all(|v| v.is_finite()));
        }
    }

    #[test]
    fn sums_are_bounded() {
        let large = Magnitude::of(&payload(&[1.0, -3e38]));
        assert!(large.is_finite() && !large.sums_stay_finite(2));
        assert!(Magnitude::of(&payload(&[1.0, -3.0])).sums_stay_finite(1 << 20));
        assert!(Magnitude::of(&[]).sums_stay_finite(0));
    }
}
