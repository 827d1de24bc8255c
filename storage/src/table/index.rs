//! From key to slot: extendible hashing over segments of cache-line buckets.
//!
//! The first bits of a key's hash choose a segment through the directory, the last bits a bucket in it. A crowded segment is
//! split in two, about a millisecond's work, whatever the size of the table: growing never stops a shard for long, and
//! never holds two copies of the index. A small table has one small segment that doubles.
//!
//! Keys are not kept here but in the rows, where the reader of a row needs them near anyway: 6.4 bytes an entry when crowded,
//! 12.8 after a split. Whoever changes the index gives a way to read the key in a slot.
//!
//! Invariants:
//! - `directory` has `1 << depth` numbers of segments; a segment of depth d is named by `1 << (depth - d)` neighbours;
//! - every entry is in the segment that its hash's first bits name.
//!
//! Not here: rows (`arena`), comparing keys in a batch (`lookup`).

use super::arena::Arena;
use super::bucket::Bucket;
use super::chunk::{Chunk, Pages};
use super::hash::{KeyHash, KeyHasher};
use super::segment::Segment;
use super::slot::Slot;

const SMALL_BUCKETS: u32 = if cfg!(miri) { 1 } else { 64 };
/// 64 KiB of buckets, 10 240 entries when crowded.
const SEGMENT_BUCKETS: u32 = if cfg!(miri) { 4 } else { 1024 };
const SEGMENT_BYTES: usize = SEGMENT_BUCKETS as usize * size_of::<Bucket>();
/// Segments are cut from pieces of 2 MiB, a huge page each.
const SEGMENTS_PER_SLAB: usize = 32;
/// Rows number fewer than 2^32, so a depth like this only comes from hashes that do not tell keys apart.
const DEPTH_MAX: u32 = 32;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Index {
    hasher: KeyHasher,
    directory: Vec<u32>,
    depth: u32,
    segments: Vec<Segment>,
    /// Memory of the first segment, while it grows and after.
    first: Option<Chunk>,
    /// Memory of all others.
    slabs: Vec<Chunk>,
}

impl Index {
    #[inline]
    pub(super) fn hash(&self, key: u64) -> KeyHash {
        self.hasher.hash(key)
    }

    /// The segment that a key with this hash is in, if anything is in the index.
    #[inline]
    pub(super) fn segment(&self, hash: KeyHash) -> Option<&Segment> {
        let number = *self.directory.get(hash.directory(self.depth))?;
        self.segments.get(number as usize)
    }

    #[inline]
    pub(super) fn find(&self, key: u64, arena: &Arena) -> Option<Slot> {
        let hash = self.hash(key);
        self.segment(hash)?.find(hash, |slot| arena.head(slot).key() == key)
    }

    /// Adds a key that is not there.
    pub(super) fn insert(&mut self, key: u64, slot: Slot, arena: &Arena) {
        let hash = self.hash(key);
        loop {
            let number = match self.directory.get(hash.directory(self.depth)) {
                Some(&number) => number as usize,
                None => self.begin(),
            };
            let segment = &mut self.segments[number];
            if !segment.is_crowded() {
                return segment.insert(hash, slot);
            }
            if segment.bucket_count() < SEGMENT_BUCKETS {
                self.enlarge(arena);
            } else {
                self.split(number, arena);
            }
        }
    }

    /// Removes a key with its slot; answers whether it was there.
    pub(super) fn remove(&mut self, key: u64, slot: Slot) -> bool {
        let hash = self.hash(key);
        let Some(&number) = self.directory.get(hash.directory(self.depth)) else { return false };
        self.segments[number as usize].remove(hash, slot)
    }

    pub(super) fn bytes(&self) -> usize {
        // All but the first have one size.
        let first = self.segments.first().map_or(0, |segment| segment.bucket_count() as usize);
        let others = self.segments.len().saturating_sub(1) * SEGMENT_BUCKETS as usize;
        (first + others) * size_of::<Bucket>()
            + self.directory.capacity() * size_of::<u32>()
            + self.segments.capacity() * size_of::<Segment>()
    }

    /// The first segment, small.
    fn begin(&mut self) -> usize {
        let memory = Chunk::zeroed(SMALL_BUCKETS as usize * size_of::<Bucket>(), Pages::Small);
        // SAFETY: the chunk has exactly these buckets, zeroed, aligned to 64 bytes, and is kept in `first` for as long as the
        // segment is; no other segment lies in it.
        self.segments.push(unsafe { Segment::new(memory.start(), SMALL_BUCKETS, 0) });
        self.first = Some(memory);
        self.directory.push(0);
        0
    }

    /// Doubles the first segment, which is the only one as long as it is smaller than the others.
    fn enlarge(&mut self, arena: &Arena) {
        let slots = self.segments[0].drain();
        let count = self.segments[0].bucket_count() * 2;
        let memory = Chunk::zeroed(count as usize * size_of::<Bucket>(), Pages::Small);
        // SAFETY: as in `begin`; the old segment is replaced before its memory goes.
        self.segments[0] = unsafe { Segment::new(memory.start(), count, 0) };
        self.first = Some(memory);
        self.distribute(&slots, arena);
    }

    /// Splits a segment in two by the next bit of its keys' hashes.
    fn split(&mut self, number: usize, arena: &Arena) {
        let depth = self.segments[number].depth;
        assert!(depth < DEPTH_MAX, "keys that no hash tells apart");
        if depth == self.depth {
            self.directory = self.directory.iter().flat_map(|&number| [number, number]).collect();
            self.depth += 1;
        }
        let slots = self.segments[number].drain();
        self.segments[number].depth = depth + 1;
        let added = self.segments.len();
        let segment = self.segment_in_slab(added, depth + 1);
        self.segments.push(segment);

        // The segment's neighbours in the directory: the second half of them goes to the new one.
        let Some(hash) = slots.first().map(|&slot| self.hash(arena.head(slot).key())) else { return };
        let neighbours = 1 << (self.depth - depth);
        let first = hash.directory(self.depth) & !(neighbours - 1);
        // Fits: rows number fewer than 2^32, and so do segments.
        self.directory[first + neighbours / 2..first + neighbours].fill(added as u32);
        self.distribute(&slots, arena);
    }

    fn segment_in_slab(&mut self, number: usize, depth: u32) -> Segment {
        // The first segment has memory of its own.
        let (slab, place) = ((number - 1) / SEGMENTS_PER_SLAB, (number - 1) % SEGMENTS_PER_SLAB);
        if slab == self.slabs.len() {
            let pages = if slab == 0 { Pages::Small } else { Pages::Huge };
            self.slabs.push(Chunk::zeroed(SEGMENTS_PER_SLAB * SEGMENT_BYTES, pages));
        }
        // SAFETY: place is below the number of segments in a slab, so this stays inside it; segments are numbered
        // upwards and never removed, so no two share a place; the slab stays as long as the index.
        unsafe {
            let memory = self.slabs[slab].start().add(place * SEGMENT_BYTES);
            Segment::new(memory, SEGMENT_BUCKETS, depth)
        }
    }

    /// Puts entries back where they belong now.
    fn distribute(&mut self, slots: &[Slot], arena: &Arena) {
        const AHEAD: usize = 24;
        for (position, &slot) in slots.iter().enumerate() {
            if let Some(&ahead) = slots.get(position + AHEAD) {
                arena.prefetch_head(ahead);
            }
            let hash = self.hash(arena.head(slot).key());
            let number = self.directory[hash.directory(self.depth)] as usize;
            self.segments[number].insert(hash, slot);
        }
    }
}
