//! Integer powers by repeated multiplication: the same bits on every platform, which `powf` and `powi` do not promise.

/// `base^exponent`, by squaring, lowest bit first.
pub(super) fn power(base: f64, exponent: u32) -> f64 {
    let mut result = 1.0;
    let mut square = base;
    let mut rest = exponent;
    while rest > 0 {
        if rest & 1 == 1 {
            result *= square;
        }
        square *= square;
        rest >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::power;

    #[test]
    fn small_powers_are_products() {
        assert_eq!(power(0.9, 0), 1.0);
        assert_eq!(power(0.9, 1), 0.9);
        assert_eq!(power(0.9, 2), 0.9 * 0.9);
        assert_eq!(power(2.0, 10), 1024.0);
    }

    #[test]
    fn golden_bits() {
        assert_eq!(power(f64::from(0.9_f32), 1000).to_bits(), 0x366f_ee3c_a448_6bc3);
    }

    #[test]
    fn the_largest_exponent_vanishes_without_harm() {
        assert_eq!(power(0.999, u32::MAX), 0.0);
        assert_eq!(power(0.0, u32::MAX), 0.0);
    }
}
