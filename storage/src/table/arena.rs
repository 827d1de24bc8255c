//! Where rows live: chunks of memory that never move, cut into rows of one size.
//!
//! Invariants:
//! - a row is `key | header | floats`, in one run of memory; rows are 8-byte aligned (24 bytes of head, 4 a float: 16-byte
//!   alignment would cost 8 bytes a row, and SIMD loads of 32 bytes cross cache lines either way);
//! - slots are handed out from 0 upwards, freed ones are used again, the last freed first: deterministic;
//! - a slot handed out is all zero floats and a zero header; a free slot carries `VACANT` and zero floats;
//! - every slot below `used` lies in an existing chunk.
//!
//! Not here: finding a slot by key (`index`), dirty bits (`dirty`).

use super::chunk::{Chunk, Pages};
use super::row::{RowHeader, RowShape};
use super::slot::Slot;

/// Chunks are about this large: big enough that the small pages behind the last whole huge page do not matter.
const CHUNK_BYTES: usize = if cfg!(miri) { 4096 } else { 16 << 20 };

/// A row's fixed part.
#[derive(Debug)]
#[repr(C)]
pub(super) struct RowHead {
    pub(super) key: u64,
    pub(super) header: RowHeader,
}

const HEAD_BYTES: usize = size_of::<RowHead>();
const CACHE_LINE: usize = 64;

/// Rows of one shape.
#[derive(Debug)]
pub(super) struct Arena {
    shape: RowShape,
    stride: usize,
    /// Rows in a chunk: `1 << chunk_shift`.
    chunk_shift: u32,
    chunks: Vec<Chunk>,
    used: u32,
    free: Vec<u32>,
}

impl Arena {
    pub(super) fn new(shape: RowShape) -> Self {
        let stride = (HEAD_BYTES + shape.floats() * size_of::<f32>()).next_multiple_of(align_of::<RowHead>());
        let rows = (CHUNK_BYTES / stride).max(1);
        Self { shape, stride, chunk_shift: rows.ilog2(), chunks: Vec::new(), used: 0, free: Vec::new() }
    }

    #[inline]
    pub(super) fn shape(&self) -> RowShape {
        self.shape
    }

    /// Slots ever used, free ones among them.
    #[inline]
    pub(super) fn used(&self) -> u32 {
        self.used
    }

    /// Bytes of memory that rows have touched.
    pub(super) fn bytes(&self) -> usize {
        self.used as usize * self.stride + self.free.capacity() * size_of::<u32>()
    }

    /// Takes a slot for `key`; its header and floats are zero.
    pub(super) fn allocate(&mut self, key: u64) -> Slot {
        let number = match self.free.pop() {
            Some(number) => number,
            None => {
                let number = self.used;
                assert!(number <= Slot::NUMBER_MAX, "a table holds at most 2^32 - 2 rows in one replica");
                if (number >> self.chunk_shift) as usize == self.chunks.len() {
                    let pages = if self.chunks.is_empty() { Pages::Small } else { Pages::Huge };
                    if let [first] = self.chunks.as_slice() {
                        // The table is not small after all.
                        first.advise(Pages::Huge);
                    }
                    self.chunks.push(Chunk::zeroed(self.stride << self.chunk_shift, pages));
                }
                self.used = number + 1;
                number
            }
        };
        let slot = Slot::from_number(number);
        *self.head_mut(slot) = RowHead { key, header: RowHeader::default() };
        slot
    }

    /// Gives a slot back.
    pub(super) fn release(&mut self, slot: Slot) {
        let (head, floats) = self.row_mut(slot);
        floats.fill(0.0);
        *head = RowHead { key: 0, header: RowHeader { flags: RowHeader::VACANT, ..RowHeader::default() } };
        self.free.push(slot.number());
    }

    #[inline]
    fn pointer(&self, slot: Slot) -> *mut u8 {
        let number = slot.number();
        assert!(number < self.used, "slot {number} of another table, or from before it was cleared");
        let chunk = &self.chunks[(number >> self.chunk_shift) as usize];
        let within = (number & ((1 << self.chunk_shift) - 1)) as usize;
        // SAFETY: the chunk has `stride << chunk_shift` bytes and `within` is below `1 << chunk_shift`.
        unsafe { chunk.start().as_ptr().add(within * self.stride) }
    }

    /// # Panics
    /// When the slot is not of this arena.
    #[inline]
    pub(super) fn head(&self, slot: Slot) -> &RowHead {
        // SAFETY: `pointer` is the start of a row: aligned to 8 (chunks are page-aligned, the stride is a multiple of 8), zeroed
        // or written as a RowHead before, and nobody changes it while `self` is borrowed.
        unsafe { &*self.pointer(slot).cast::<RowHead>() }
    }

    fn head_mut(&mut self, slot: Slot) -> &mut RowHead {
        // SAFETY: as in `head`; `self` is borrowed exclusively.
        unsafe { &mut *self.pointer(slot).cast::<RowHead>() }
    }

    /// # Panics
    /// When the slot is not of this arena.
    #[inline]
    pub(super) fn row(&self, slot: Slot) -> (&RowHead, &[f32]) {
        let start = self.pointer(slot);
        // SAFETY: a row is a RowHead followed by `floats()` f32, all inside the chunk and initialised (zeroed at least); any bits
        // are an f32; the shared borrow of `self` keeps writers away.
        unsafe {
            let floats = std::slice::from_raw_parts(start.add(HEAD_BYTES).cast::<f32>(), self.shape.floats());
            (&*start.cast::<RowHead>(), floats)
        }
    }

    /// # Panics
    /// When the slot is not of this arena.
    #[inline]
    pub(super) fn row_mut(&mut self, slot: Slot) -> (&mut RowHead, &mut [f32]) {
        let start = self.pointer(slot);
        // SAFETY: as in `row`, with `self` borrowed exclusively; head and floats do not overlap.
        unsafe {
            let floats =
                std::slice::from_raw_parts_mut(start.add(HEAD_BYTES).cast::<f32>(), self.shape.floats());
            (&mut *start.cast::<RowHead>(), floats)
        }
    }

    /// Asks for the cache line with a row's key.
    #[inline]
    pub(super) fn prefetch_head(&self, slot: Slot) {
        prefetch(self.pointer(slot));
    }

    /// Asks for the cache lines of a row's head and its first `floats`, at most 2 KiB of them (the hardware streams the rest).
    #[inline]
    pub(super) fn prefetch(&self, slot: Slot, floats: usize) {
        let start = self.pointer(slot);
        let first = start.addr() & (CACHE_LINE - 1);
        let bytes = (HEAD_BYTES + floats * size_of::<f32>()).min(2048);
        for line in 0..(first + bytes).div_ceil(CACHE_LINE) {
            prefetch(start.wrapping_add(line * CACHE_LINE));
        }
    }
}

/// Asks the processor to bring a cache line near; harmless at any address.
#[inline]
pub(super) fn prefetch(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing that the program can see and cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast::<i8>()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = address;
}
