//! A piece of zeroed memory that never moves: what arenas and indexes are made of.
//!
//! - Starts on a 2 MiB boundary when it asks for huge pages, so that the kernel can back whole 2 MiB pages; the tail behind the
//!   last whole one is backed by small pages. Memory is taken from the kernel on first touch only.
//! - Comes from `mmap`, past the allocator: growing never copies, and freeing gives back to the kernel.
//! - Under Miri it comes from the allocator, so that the code on top can be checked.
//!
//! Not here: what is stored in it.

use std::ptr::NonNull;

#[cfg(not(miri))]
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// How the kernel should back a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pages {
    /// 4 KiB pages: for tables that may stay small, of which a node has many.
    Small,
    /// 2 MiB pages where the kernel has them: 10-30 % on random row reads.
    Huge,
}

/// Zeroed memory, aligned to at least 64 bytes, freed on drop.
#[derive(Debug)]
pub(super) struct Chunk {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a chunk owns its memory and hands out only the pointer; who dereferences it answers for aliasing.
unsafe impl Send for Chunk {}
// SAFETY: as above; `&Chunk` gives no access to the memory by itself.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Memory of at least `bytes` (not 0), all zero. Out of memory is answered as the allocator would: the process ends.
    pub(super) fn zeroed(bytes: usize, pages: Pages) -> Self {
        debug_assert!(bytes > 0);
        Self::map(bytes.max(1), pages)
    }

    /// The first byte; valid for as long as the chunk lives, also when the chunk itself moves.
    #[inline]
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    #[cfg(not(miri))]
    fn map(bytes: usize, pages: Pages) -> Self {
        let page = 4096;
        let bytes = bytes.next_multiple_of(page);
        let slack = if pages == Pages::Huge { HUGE_PAGE_BYTES } else { 0 };
        // SAFETY: an anonymous private mapping at an address of the kernel's choice; nothing of ours is there.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes + slack,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        let start = match NonNull::new(mapped.cast::<u8>()) {
            Some(start) if mapped != libc::MAP_FAILED => start,
            _ => out_of_memory(bytes),
        };
        let skip = if slack == 0 { 0 } else { start.as_ptr().align_offset(HUGE_PAGE_BYTES) };
        debug_assert!(skip <= slack);
        // SAFETY: `skip` is at most `slack`, and the mapping has `bytes + slack`.
        let aligned = unsafe { start.add(skip) };
        let tail = slack - skip;
        // SAFETY: both ranges lie in the mapping made above, outside what the chunk keeps; page-aligned because the mapping,
        // `skip` (distance of two page-aligned addresses) and `bytes` are.
        unsafe {
            if skip > 0 {
                libc::munmap(start.as_ptr().cast(), skip);
            }
            if tail > 0 {
                libc::munmap(aligned.add(bytes).as_ptr().cast(), tail);
            }
        }
        let chunk = Self { start: aligned, bytes };
        chunk.advise(pages);
        chunk
    }

    /// Tells the kernel which pages the chunk wants from here on. It may not listen.
    pub(super) fn advise(&self, pages: Pages) {
        // SAFETY: the chunk owns this range, which is page-aligned; the advice changes how it is backed, never what it holds.
        #[cfg(not(miri))]
        unsafe {
            let advice = if pages == Pages::Huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
            libc::madvise(self.start.as_ptr().cast(), self.bytes, advice);
        }
        #[cfg(miri)]
        let _ = pages;
    }

    #[cfg(miri)]
    fn map(bytes: usize, _pages: Pages) -> Self {
        let layout = Self::layout(bytes);
        // SAFETY: the layout is not empty.
        match NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }) {
            Some(start) => Self { start, bytes },
            None => out_of_memory(bytes),
        }
    }

    #[cfg(miri)]
    fn layout(bytes: usize) -> std::alloc::Layout {
        match std::alloc::Layout::from_size_align(bytes, 64) {
            Ok(layout) => layout,
            Err(_) => out_of_memory(bytes),
        }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: the chunk owns exactly this mapping, and no reference into it outlives the chunk's owner.
        #[cfg(not(miri))]
        unsafe {
            libc::munmap(self.start.as_ptr().cast(), self.bytes);
        }
        // SAFETY: allocated in `map` with the same layout.
        #[cfg(miri)]
        unsafe {
            std::alloc::dealloc(self.start.as_ptr(), Self::layout(self.bytes));
        }
    }
}

fn out_of_memory(bytes: usize) -> ! {
    match std::alloc::Layout::from_size_align(bytes, 64) {
        Ok(layout) => std::alloc::handle_alloc_error(layout),
        Err(_) => std::process::abort(),
    }
}
