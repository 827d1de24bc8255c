//! What a pull tells of each of its rows beside the weights.

use bytes::{BufMut, BytesMut};
use evershard_storage::table::RowRef;

/// A byte a key: 1 when the row is one of those asked about, else 0.
#[derive(Debug)]
pub struct Marks {
    newer_than: Option<u64>,
    bytes: BytesMut,
}

impl Marks {
    /// Marks rows that were ever pushed and not removed.
    #[must_use]
    pub fn exists() -> Self {
        Marks { newer_than: None, bytes: BytesMut::new() }
    }

    /// Marks rows that an entry behind this log index changed. A row that does not exist is as the initialiser makes it, at every
    /// index.
    #[must_use]
    pub fn newer_than(index: u64) -> Self {
        Marks { newer_than: Some(index), bytes: BytesMut::new() }
    }

    /// The marks, in the order of the keys.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The marks, in the order of the keys.
    #[must_use]
    pub fn into_bytes(self) -> BytesMut {
        self.bytes
    }

    /// The rows that are marked, of `rows` that have `row_bytes` each, one for each mark.
    #[must_use]
    pub fn marked(&self, rows: &[u8], row_bytes: usize) -> BytesMut {
        let all = rows.chunks_exact(row_bytes.max(1)).zip(&self.bytes);
        let marked = || all.clone().filter(|(_, mark)| **mark != 0).map(|(row, _)| row);
        let mut kept = BytesMut::with_capacity(marked().count() * row_bytes);
        marked().for_each(|row| kept.extend_from_slice(row));
        kept
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn truncate(&mut self, length: usize) {
        self.bytes.truncate(length);
    }

    /// Adds the mark of the next row, if there is one: a tombstone is none.
    pub(super) fn push(&mut self, row: Option<RowRef<'_>>) {
        let mark = row.is_some_and(|row| self.is_marked(row.header().version));
        self.bytes.put_u8(u8::from(mark));
    }

    /// Marks a row that was found later.
    pub(super) fn found(&mut self, place: usize, version: u64) {
        let mark = self.is_marked(version);
        if let Some(place) = self.bytes.get_mut(place) {
            *place = u8::from(mark);
        }
    }

    fn is_marked(&self, version: u64) -> bool {
        self.newer_than.is_none_or(|index| version > index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_marked_rows_are_kept() {
        let mut marks = Marks::newer_than(5);
        (0..3).for_each(|_| marks.push(None));
        marks.found(0, 5);
        marks.found(2, 6);
        assert_eq!(marks.bytes(), [0, 0, 1]);
        assert_eq!(&marks.marked(&[1, 1, 2, 2, 3, 3], 2)[..], [3, 3]);
        let mut exists = Marks::exists();
        exists.push(None);
        exists.found(0, 0);
        assert_eq!(exists.bytes(), [1]);
    }
}
