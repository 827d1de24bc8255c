//! How much memory a decoder took: an allocator that counts, a thread at a time.
//!
//! Not here: memory that is given back; a decoder that takes a gigabyte for a moment has taken it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static TAKEN: Cell<usize> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, counting. A test binary that asks [`frugal`] has it as its global allocator.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counting;

fn note(bytes: usize) {
    // While a thread ends its counters are gone; nobody asks any more.
    let _ = TAKEN.try_with(|taken| taken.set(taken.get().saturating_add(bytes)));
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(bytes)));
}

// SAFETY: every call goes to the system's allocator as it came; counting touches no memory of the caller's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: as the caller promised.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        note(bytes);
        // SAFETY: as the caller promised.
        unsafe { System.realloc(block, layout, bytes) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(block, layout) }
    }
}

/// What decoding may take beside a multiple of its input: error texts, the first blocks of maps.
const SLACK_BYTES: usize = 32 << 10;
/// The costliest honest decoding: an empty message inside a message takes two bytes and becomes a struct.
const BYTES_A_BYTE: usize = 512;

/// Runs a decoder over `input_bytes` bytes.
///
/// # Panics
/// When one allocation is out of proportion to the input: the decoder took memory by a length that it had only read.
pub fn frugal<T>(input_bytes: usize, decode: impl FnOnce() -> T) -> T {
    LARGEST.with(|largest| largest.set(0));
    TAKEN.with(|taken| taken.set(0));
    let decoded = decode();
    let (largest, taken) = (LARGEST.with(Cell::get), TAKEN.with(Cell::get));
    let limit = SLACK_BYTES + input_bytes * BYTES_A_BYTE;
    assert!(
        largest <= limit && taken <= 4 * limit,
        "decoding {input_bytes} bytes took {taken} bytes, {largest} of them at once"
    );
    decoded
}

/// For a test of each crate: that its allocator counts.
#[must_use]
pub fn is_counting() -> bool {
    TAKEN.with(|taken| taken.set(0));
    std::hint::black_box(vec![0_u8; 100]);
    TAKEN.with(Cell::get) >= 100
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static ALLOCATOR: Counting = Counting;

    #[test]
    fn what_is_taken_by_a_declared_length_shows() {
        assert!(is_counting());
        assert_eq!(frugal(10, || vec![1_u8; 100].len()), 100);
        let greedy = std::panic::catch_unwind(|| frugal(10, || Vec::<u8>::with_capacity(1 << 20)));
        assert!(greedy.is_err());
    }
}
