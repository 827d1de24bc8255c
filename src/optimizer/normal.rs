//! Two normal values from 64 random bits: Box and Muller (1958) with the pinned `libm` crate, whose logarithm, sine and
//! cosine are the same code, and so the same bits, on every platform.

use super::initializer::unit;

/// Two independent values of mean 0 and standard deviation 1.
pub(super) fn pair(bits: u64) -> [f32; 2] {
    // Half a step off zero, so that the logarithm is finite: (0, 1).
    let radius_unit = ((bits as u32) as f64 + 0.5) * (1.0 / 4_294_967_296.0);
    let radius = (-2.0 * libm::logf(radius_unit as f32)).max(0.0).sqrt();
    let angle = unit(bits) * (2.0 * std::f32::consts::PI);
    [radius * libm::cosf(angle), radius * libm::sinf(angle)]
}

#[cfg(test)]
mod tests {
    use super::pair;

    #[test]
    fn the_extremes_are_finite() {
        for bits in [0, 1, u64::MAX, u64::MAX >> 1, 1 << 63, u64::from(u32::MAX), u64::MAX << 32] {
            assert!(pair(bits).iter().all(|v| v.is_finite() && v.abs() < 6.8), "{bits:x}");
        }
    }
}
