//! Where rows live: chunks of memory that never move, cut into rows of one size.
//!
//! Invariants:
//! - a row is `head | floats`, in one run of memory; rows are 4-byte aligned (20 bytes of head, 4 a float: 8-byte alignment
//!   would cost 4 bytes a row, and SIMD loads of 32 bytes cross cache lines either way);
//! - slots are handed out from 0 upwards, freed ones are used again, the last freed first;
//! - a chunk that is to be given back takes no rows meanwhile, until the others are full;
//! - a slot handed out is all zero floats and a zero header; a free slot carries `VACANT` and zero floats;
//! - every slot below `used` lies in an existing chunk.
//!
//! Not here: finding a slot by key (`index`), dirty bits (`dirty`).

use super::chunk::{Chunk, Pages};
use super::row::{RowHead, RowShape};
use super::slot::Slot;

/// Chunks are about this large: big enough that the small pages behind the last whole huge page do not matter.
const CHUNK_BYTES: usize = if cfg!(miri) { 4096 } else { 16 << 20 };

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
    /// Slots from here on take no row any more: their chunk is to be given back.
    closed_from: u32,
}

impl Arena {
    pub(super) fn new(shape: RowShape) -> Self {
        const { assert!(align_of::<RowHead>() == align_of::<f32>()) };
        let stride = HEAD_BYTES + shape.floats() * size_of::<f32>();
        let rows = (CHUNK_BYTES / stride).max(1);
        Self {
            shape,
            stride,
            chunk_shift: rows.ilog2(),
            chunks: Vec::new(),
            used: 0,
            free: Vec::new(),
            closed_from: u32::MAX,
        }
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

    /// Slots that are free to take a row.
    pub(super) fn free(&self) -> u32 {
        // Fits: slots are numbered with u32.
        self.free.len() as u32
    }

    pub(super) fn row_bytes(&self) -> usize {
        self.stride
    }

    pub(super) fn rows_per_chunk(&self) -> u32 {
        1 << self.chunk_shift
    }

    /// The first slot of the last chunk; none when there is only one.
    pub(super) fn last_chunk(&self) -> Option<u32> {
        // Fits: every chunk but the last is full of slots, which are numbered with u32.
        let last = self.chunks.len().checked_sub(1).filter(|last| *last > 0)? as u32;
        Some(last << self.chunk_shift)
    }

    /// Slots from `first` on, the last chunk's, take no row any more.
    pub(super) fn stop_filling(&mut self, first: u32) {
        if self.closed_from != first {
            self.closed_from = first;
            self.free.retain(|number| *number < first);
        }
    }

    /// Gives the last chunk back if it takes no rows any more and has none; answers whether it did.
    pub(super) fn trim(&mut self) -> bool {
        let first = self.closed_from;
        while self.used > first && self.head(Slot::from_number(self.used - 1)).is_vacant() {
            self.used -= 1;
        }
        if self.used != first || self.last_chunk() != Some(first) {
            return false;
        }
        self.chunks.pop();
        self.closed_from = u32::MAX;
        self.free.shrink_to(2 * self.free.len());
        true
    }

    /// Fills the last chunk after all.
    #[cold]
    fn fill_again(&mut self) {
        for number in self.closed_from..self.used {
            if self.head(Slot::from_number(number)).is_vacant() {
                self.free.push(number);
            }
        }
        self.closed_from = u32::MAX;
    }

    /// Takes a slot for `key`; its header and floats are zero.
    pub(super) fn allocate(&mut self, key: u64) -> Slot {
        if self.free.is_empty() && self.closed_from != u32::MAX {
            self.fill_again();
        }
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
        *self.head_mut(slot) = RowHead::new(key);
        slot
    }

    /// Gives a slot back.
    pub(super) fn release(&mut self, slot: Slot) {
        let (head, floats) = self.row_mut(slot);
        floats.fill(0.0);
        *head = RowHead::vacant();
        if slot.number() < self.closed_from {
            self.free.push(slot.number());
        }
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
        // SAFETY: `pointer` is the start of a row: aligned to 4 (chunks are page-aligned, the stride is a multiple of 4), zeroed
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
