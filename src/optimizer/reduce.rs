//! Reductions over a row: eight strided lanes, then a fixed tree (design 14.14), so that the bits do not depend on how
//! many lanes a processor has.

const LANES: usize = 8;

/// The sum of the squares of `value / scale`: value `i` goes to lane `i % 8`, in order; the lanes are added in pairs at
/// distance 4, then 2, then 1.
pub(super) fn sum_of_squares(values: &[f32], scale: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for chunk in values.chunks(LANES) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            let scaled = *value / scale;
            *lane += scaled * scaled;
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

#[cfg(test)]
mod tests {
    use super::sum_of_squares;

    #[test]
    fn golden_bits() {
        let values: Vec<f32> = (1..=21u16).map(|i| 1.0 / f32::from(i)).collect();
        assert_eq!(sum_of_squares(&values, 1.0).to_bits(), 0x3fcc_9962);
        assert_eq!(sum_of_squares(&values, 3.0).to_bits(), 0x3e35_ddac);
    }

    #[test]
    fn small_rows_are_plain_sums() {
        assert_eq!(sum_of_squares(&[], 1.0), 0.0);
        assert_eq!(sum_of_squares(&[3.0, 4.0], 1.0), 25.0);
        assert_eq!(sum_of_squares(&[1.0; 17], 1.0), 17.0);
    }
}
