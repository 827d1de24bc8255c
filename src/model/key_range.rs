//! The keys a shard owns.

/// A contiguous range of keys, both ends inclusive, so that the whole space fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyRange {
    /// The first key.
    pub start: u64,
    /// The last key.
    pub end: u64,
}

impl KeyRange {
    /// Every key there is.
    pub const ALL: KeyRange = KeyRange { start: 0, end: u64::MAX };

    /// True when `key` is in the range.
    #[must_use]
    pub const fn contains(&self, key: u64) -> bool {
        self.start <= key && key <= self.end
    }
}

impl std::fmt::Display for KeyRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}..={:016x}", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::KeyRange;

    #[test]
    fn both_ends_belong() {
        let range = KeyRange { start: 5, end: 9 };
        assert_eq!([4, 5, 7, 9, 10].map(|k| range.contains(k)), [false, true, true, true, false]);
        assert!(KeyRange::ALL.contains(0) && KeyRange::ALL.contains(u64::MAX));
    }
}
