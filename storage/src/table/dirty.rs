//! Which rows changed since they were last flushed: two generations of bits.
//!
//! - `current`: rows changed since their last copy for a flush.
//! - `flushing`: rows that the running flush owes; empty when none runs.
//!
//! A flush begins by moving `current` to `flushing` (a swap of two vectors). Copying a row clears its `current` bit: the
//! copy holds everything up to now. A row that changes after its copy is `current` again, and stays so when the flush
//! commits. When a flush fails, `flushing` is added back to `current`: nothing it copied counts as flushed.
//!
//! Bits are atomic only so that a copy can clear them while it holds the table's lock for reading; the lock orders
//! everything else.
//!
//! Not here: rows and keys (`flush`), the store (`rocks`).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const WORD_BITS: u32 = 64;

/// A set of slot numbers that knows its size.
#[derive(Debug, Default)]
struct Bits {
    words: Vec<AtomicU64>,
    count: AtomicU64,
}

impl Bits {
    #[inline]
    fn set(&mut self, number: u32) {
        let word = (number / WORD_BITS) as usize;
        if word >= self.words.len() {
            self.grow(word);
        }
        let bit = 1 << (number % WORD_BITS);
        let word = self.words[word].get_mut();
        *self.count.get_mut() += u64::from(*word & bit == 0);
        *word |= bit;
    }

    #[cold]
    fn grow(&mut self, word: usize) {
        self.words.resize_with((word + 1).next_multiple_of(64), AtomicU64::default);
    }

    #[inline]
    fn clear(&self, number: u32) {
        let Some(word) = self.words.get((number / WORD_BITS) as usize) else { return };
        let bit = 1 << (number % WORD_BITS);
        if word.load(Relaxed) & bit != 0 && word.fetch_and(!bit, Relaxed) & bit != 0 {
            self.count.fetch_sub(1, Relaxed);
        }
    }

    #[inline]
    fn contains(&self, number: u32) -> bool {
        self.words
            .get((number / WORD_BITS) as usize)
            .is_some_and(|word| word.load(Relaxed) & (1 << (number % WORD_BITS)) != 0)
    }

    fn len(&self) -> u64 {
        self.count.load(Relaxed)
    }

    fn add_all(&mut self, other: &mut Self) {
        if self.words.len() < other.words.len() {
            self.words.resize_with(other.words.len(), AtomicU64::default);
        }
        let mut count = 0;
        for (number, word) in self.words.iter_mut().enumerate() {
            let word = word.get_mut();
            *word |= other.words.get_mut(number).map_or(0, |other| *other.get_mut());
            count += u64::from(word.count_ones());
        }
        *self.count.get_mut() = count;
    }

    fn bytes(&self) -> usize {
        self.words.capacity() * size_of::<AtomicU64>()
    }
}

/// Slots by number, at some moment.
#[derive(Debug, Clone, Default)]
pub struct SlotSet {
    words: Vec<u64>,
}

impl SlotSet {
    /// Takes a slot out; answers whether it was in.
    #[inline]
    pub fn take(&mut self, number: u32) -> bool {
        let Some(word) = self.words.get_mut((number / WORD_BITS) as usize) else { return false };
        let bit = 1 << (number % WORD_BITS);
        let was_in = *word & bit != 0;
        *word &= !bit;
        was_in
    }

    /// Takes out the lowest slots, `slots_max` of them at the most, looking from slot `from` on. Answers them, and where to go
    /// on from; `None` when nothing is left behind.
    pub fn take_some(&mut self, from: u32, slots_max: usize) -> (Vec<u32>, Option<u32>) {
        let mut taken = Vec::new();
        let first = (from / WORD_BITS) as usize;
        for (offset, word) in self.words.iter_mut().skip(first).enumerate() {
            // Fits: slots are numbered with u32.
            let number = (first + offset) as u32 * WORD_BITS;
            if taken.len() >= slots_max {
                return (taken, Some(number));
            }
            while *word != 0 {
                taken.push(number + word.trailing_zeros());
                *word &= *word - 1;
            }
        }
        (taken, None)
    }
}

/// The two generations.
#[derive(Debug, Default)]
pub(super) struct Dirty {
    current: Bits,
    flushing: Bits,
}

impl Dirty {
    /// The row changed.
    #[inline]
    pub(super) fn mark(&mut self, number: u32) {
        self.current.set(number);
    }

    /// Whether the row is in neither generation.
    pub(super) fn is_clean(&self, number: u32) -> bool {
        !self.current.contains(number) && !self.flushing.contains(number)
    }

    /// Rows changed since their last copy.
    pub(super) fn current(&self) -> u64 {
        self.current.len()
    }

    /// Rows that the running flush owes.
    pub(super) fn flushing(&self) -> u64 {
        self.flushing.len()
    }

    /// Moves `current` to `flushing`. A flush that was begun and never ended is aborted first.
    pub(super) fn begin(&mut self) -> u64 {
        self.abort();
        std::mem::swap(&mut self.current, &mut self.flushing);
        self.flushing.len()
    }

    /// Calls `found` with each number in `flushing` from `first`, reading at most the words of `numbers_max` numbers.
    /// Answers where to go on; `None` at the end.
    pub(super) fn flushing_from(
        &self,
        first: u32,
        numbers_max: u32,
        mut found: impl FnMut(u32),
    ) -> Option<u32> {
        let first_word = (first / WORD_BITS) as usize;
        let words = (numbers_max / WORD_BITS).max(1) as usize;
        for (offset, word) in self.flushing.words.iter().skip(first_word).take(words).enumerate() {
            let mut rest = word.load(Relaxed);
            while rest != 0 {
                let bit = rest.trailing_zeros();
                rest &= rest - 1;
                // Fits: only numbers of slots, which are u32, were ever set.
                found((first_word + offset) as u32 * WORD_BITS + bit);
            }
        }
        let next = first_word + words;
        (next < self.flushing.words.len()).then(|| next as u32 * WORD_BITS)
    }

    /// Whether the running flush owes the row.
    #[inline]
    pub(super) fn is_flushing(&self, number: u32) -> bool {
        self.flushing.contains(number)
    }

    /// The row was copied as it is now.
    #[inline]
    pub(super) fn copied(&self, number: u32) {
        self.current.clear(number);
    }

    /// Both generations.
    pub(super) fn both(&self) -> SlotSet {
        let longer = self.current.words.len().max(self.flushing.words.len());
        let word = |bits: &Bits, number: usize| bits.words.get(number).map_or(0, |word| word.load(Relaxed));
        let words: Vec<u64> =
            (0..longer).map(|number| word(&self.current, number) | word(&self.flushing, number)).collect();
        SlotSet { words }
    }

    /// The flush is durable: what changed since its copy stays `current`.
    pub(super) fn commit(&mut self) {
        self.flushing = Bits::default();
    }

    /// The flush failed: all its rows are dirty again.
    pub(super) fn abort(&mut self) {
        if self.flushing.len() > 0 {
            self.current.add_all(&mut self.flushing);
        }
        self.flushing = Bits::default();
    }

    pub(super) fn bytes(&self) -> usize {
        self.current.bytes() + self.flushing.bytes()
    }
}
