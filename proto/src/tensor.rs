//! How a dense tensor is cut into blocks: the one place that knows, for both ends of the wire.
//!
//! ```text
//! elements    row-major, one after the other
//! block b     elements [b x dim, (b + 1) x dim), dim = min(16384, all elements); its id is b
//! the last    is padded to dim with zeros that nobody sees
//! ```
//!
//! A tensor's rows are the slices along its first dimension; one of rank 0 is one row of one element.
//!
//! Invariant: a [`TensorLayout`] exists only for a shape within the limits: none of its arithmetic overflows.
//!
//! Not here: where a block lives (`key`), what it holds.

use std::ops::Range;

use crate::limits::{TENSOR_ELEMENTS_MAX, TENSOR_RANK_MAX};

/// Elements of a block, of a tensor that has as many: 64 KiB of f32. Part of the format.
pub const BLOCK_ELEMENTS: u32 = 16 * 1024;

/// Why a shape is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// Too many dimensions.
    #[error("a shape has at most {TENSOR_RANK_MAX} dimensions, not {rank}")]
    Rank {
        /// As given.
        rank: usize,
    },
    /// A dimension of size 0.
    #[error("dimension {dimension} of the shape is 0, must be at least 1")]
    Empty {
        /// Which one.
        dimension: usize,
    },
    /// Too many elements.
    #[error("a tensor has at most {TENSOR_ELEMENTS_MAX} elements, and this shape has more")]
    TooLarge,
}

/// Rows that a tensor does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("rows {start} to {end} of a tensor that has {rows}")]
pub struct RowsError {
    start: u64,
    end: u64,
    rows: u64,
}

/// A tensor's elements, blocks and rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorLayout {
    elements: u64,
    rows: u64,
    dim: u32,
}

impl TensorLayout {
    /// The layout of a shape.
    ///
    /// # Errors
    /// [`ShapeError`]: over a limit, or without elements.
    pub fn new(shape: &[u64]) -> Result<Self, ShapeError> {
        if shape.len() > TENSOR_RANK_MAX {
            return Err(ShapeError::Rank { rank: shape.len() });
        }
        if let Some(dimension) = shape.iter().position(|size| *size == 0) {
            return Err(ShapeError::Empty { dimension });
        }
        let product = shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
        let elements =
            product.filter(|elements| *elements <= TENSOR_ELEMENTS_MAX).ok_or(ShapeError::TooLarge)?;
        let dim = u32::try_from(elements).map_or(BLOCK_ELEMENTS, |elements| elements.min(BLOCK_ELEMENTS));
        Ok(TensorLayout { elements, rows: shape.first().copied().unwrap_or(1), dim })
    }

    /// All elements; at least 1.
    #[must_use]
    pub const fn elements(&self) -> u64 {
        self.elements
    }

    /// Elements a block, padding included.
    #[must_use]
    pub const fn dim(&self) -> u32 {
        self.dim
    }

    /// Blocks: their ids are those below.
    #[must_use]
    pub const fn blocks(&self) -> u64 {
        self.elements.div_ceil(self.dim as u64)
    }

    /// Elements of a block that are the tensor's: the rest is padding. None of a block beyond the end.
    #[must_use]
    pub fn valid(&self, block: u64) -> usize {
        let start = block.saturating_mul(u64::from(self.dim));
        // Fits: at most `dim`.
        self.elements.saturating_sub(start).min(u64::from(self.dim)) as usize
    }

    /// The size of the first dimension; 1 of a tensor without dimensions.
    #[must_use]
    pub const fn rows(&self) -> u64 {
        self.rows
    }

    /// Elements a row.
    #[must_use]
    pub const fn row_elements(&self) -> u64 {
        self.elements / self.rows
    }

    /// The elements of some rows.
    ///
    /// # Errors
    /// [`RowsError`]: there are fewer, or the end lies before the start.
    pub fn elements_of(&self, rows: &Range<u64>) -> Result<Range<u64>, RowsError> {
        if rows.start > rows.end || rows.end > self.rows {
            return Err(RowsError { start: rows.start, end: rows.end, rows: self.rows });
        }
        Ok(rows.start * self.row_elements()..rows.end * self.row_elements())
    }

    /// The blocks that hold some of these elements.
    #[must_use]
    pub fn blocks_of(&self, elements: &Range<u64>) -> Range<u64> {
        let dim = u64::from(self.dim);
        if elements.is_empty() {
            return 0..0;
        }
        elements.start / dim..elements.end.div_ceil(dim)
    }

    /// Whether these elements are whole blocks: nobody else's are in them.
    #[must_use]
    pub fn is_whole_blocks(&self, elements: &Range<u64>) -> bool {
        let is_border = |at: u64| at.is_multiple_of(u64::from(self.dim)) || at == self.elements;
        elements.is_empty() || is_border(elements.start) && is_border(elements.end)
    }

    /// The fewest rows that begin and end with a block, counted from any multiple of as many; all of them at the most.
    #[must_use]
    pub fn aligned_rows(&self) -> u64 {
        let (mut divisor, mut rest) = (u64::from(self.dim), self.row_elements());
        while rest > 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        (u64::from(self.dim) / divisor).min(self.rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layout(shape: &[u64]) -> TensorLayout {
        TensorLayout::new(shape).expect("a good shape")
    }

    #[test]
    fn a_small_tensor_is_one_block_without_padding() {
        let bias = layout(&[64]);
        assert_eq!((bias.dim(), bias.blocks(), bias.valid(0), bias.valid(1)), (64, 1, 64, 0));
        let scalar = layout(&[]);
        assert_eq!((scalar.elements(), scalar.rows(), scalar.row_elements(), scalar.blocks()), (1, 1, 1, 1));
        let one_block = layout(&[128, 128]);
        assert_eq!((one_block.dim(), one_block.blocks(), one_block.aligned_rows()), (BLOCK_ELEMENTS, 1, 128));
    }

    #[test]
    fn a_large_one_ends_with_padding() {
        let weight = layout(&[300, 100]);
        assert_eq!((weight.blocks(), weight.valid(0), weight.valid(1)), (2, 16_384, 30_000 - 16_384));
        assert_eq!(weight.blocks_of(&weight.elements_of(&(163..164)).expect("rows")), 0..2, "row 163 is cut");
        assert_eq!(weight.blocks_of(&weight.elements_of(&(164..300)).expect("rows")), 1..2);
        assert_eq!(weight.aligned_rows(), 300, "4096 would be");
        assert_eq!(layout(&[1000, 64]).aligned_rows(), 256);
        assert_eq!(layout(&[4, 16_384, 2]).aligned_rows(), 1);
    }

    #[test]
    fn shapes_have_limits() {
        assert_eq!(TensorLayout::new(&[1; 9]), Err(ShapeError::Rank { rank: 9 }));
        assert_eq!(TensorLayout::new(&[3, 0]), Err(ShapeError::Empty { dimension: 1 }));
        for large in [&[TENSOR_ELEMENTS_MAX, 2][..], &[u64::MAX, u64::MAX], &[u64::MAX]] {
            assert_eq!(TensorLayout::new(large), Err(ShapeError::TooLarge));
        }
        assert_eq!(layout(&[TENSOR_ELEMENTS_MAX]).blocks(), TENSOR_ELEMENTS_MAX / 16_384);
        assert_eq!(layout(&[2; 8]).elements(), 256);
    }

    proptest! {
        #[test]
        fn every_element_is_in_one_block(shape in proptest::collection::vec(1u64..90, 0..4)) {
            let layout = layout(&shape);
            let valid: u64 = (0..layout.blocks()).map(|block| layout.valid(block) as u64).sum();
            prop_assert_eq!(valid, layout.elements());
            prop_assert!(layout.valid(layout.blocks() - 1) > 0);
            prop_assert_eq!(layout.valid(layout.blocks()), 0);
            prop_assert_eq!(layout.rows() * layout.row_elements(), layout.elements());
        }

        #[test]
        fn blocks_of_rows_hold_them_and_no_block_too_many(
            rows in 1u64..500, width in 1u64..2000, a in 0u64..500, b in 0u64..500
        ) {
            let layout = layout(&[rows, width]);
            let (start, end) = (a.min(b), a.max(b));
            let Ok(elements) = layout.elements_of(&(start..end)) else {
                prop_assert!(end > rows);
                return Ok(());
            };
            let blocks = layout.blocks_of(&elements);
            let dim = u64::from(layout.dim());
            for block in blocks.clone() {
                let (first, behind) = (block * dim, block * dim + layout.valid(block) as u64);
                prop_assert!(first.max(elements.start) < behind.min(elements.end), "block {} is not needed", block);
            }
            let inside: u64 = blocks.clone().map(|block| {
                let (first, behind) = (block * dim, block * dim + layout.valid(block) as u64);
                behind.min(elements.end) - first.max(elements.start)
            }).sum();
            prop_assert_eq!(inside, elements.end - elements.start);
            let whole: u64 = blocks.map(|block| layout.valid(block) as u64).sum();
            prop_assert_eq!(layout.is_whole_blocks(&elements), whole == inside);
        }

        #[test]
        fn aligned_rows_are_whole_blocks(rows in 1u64..3000, width in 1u64..3000, at in 0u64..50) {
            let layout = layout(&[rows, width]);
            let step = layout.aligned_rows();
            let start = (at * step).min(rows);
            let end = (start + step).min(rows);
            // From any multiple on; behind the last whole one, to the end.
            prop_assert!(layout.is_whole_blocks(&layout.elements_of(&(start..end)).expect("rows")));
        }
    }
}
