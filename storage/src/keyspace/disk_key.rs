//! Keys in a replica's RocksDB.
//!
//! Big-endian, so that bytewise order is (table, key) order: a shard's rows of a table are one contiguous scan, and any
//! range of keys is one range of bytes. There is one kind of key so far, told by its length of 12; another kind gets
//! another length or a column family of its own.

/// A key in RocksDB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DiskKey {
    /// A row: `table u32 | key u64`.
    Row {
        /// The table's permanent number.
        table: u32,
        /// The mixed id.
        key: u64,
    },
}

/// Bytes that are no key of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a key of {length} bytes is of no known kind")]
pub struct DiskKeyError {
    /// How long it is.
    pub length: usize,
}

impl DiskKey {
    /// Bytes of a row's key.
    pub const ROW_BYTES: usize = 12;

    /// The key's bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::ROW_BYTES] {
        let Self::Row { table, key } = self;
        let mut bytes = [0; Self::ROW_BYTES];
        bytes[..4].copy_from_slice(&table.to_be_bytes());
        bytes[4..].copy_from_slice(&key.to_be_bytes());
        bytes
    }

    /// Reads a key.
    ///
    /// # Errors
    /// [`DiskKeyError`] when the bytes are of no known kind.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DiskKeyError> {
        match *bytes {
            [a, b, c, d, e, f, g, h, i, j, k, l] => Ok(Self::Row {
                table: u32::from_be_bytes([a, b, c, d]),
                key: u64::from_be_bytes([e, f, g, h, i, j, k, l]),
            }),
            _ => Err(DiskKeyError { length: bytes.len() }),
        }
    }

    /// The range of bytes that holds exactly a table's rows: from the first, up to and without the second.
    #[must_use]
    pub fn table_range(table: u32) -> (Vec<u8>, Vec<u8>) {
        let first = Self::Row { table, key: 0 }.to_bytes().to_vec();
        let end = match table.checked_add(1) {
            Some(next) => Self::Row { table: next, key: 0 }.to_bytes().to_vec(),
            // One byte longer than the last key of the last table: the next byte string after it.
            None => [Self::Row { table, key: u64::MAX }.to_bytes().as_slice(), &[0]].concat(),
        };
        (first, end)
    }
}

#[cfg(test)]
mod tests {
    use evershard_formats::golden::golden;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn keys_round_trip(table: u32, key: u64) {
            let row = DiskKey::Row { table, key };
            prop_assert_eq!(DiskKey::from_bytes(&row.to_bytes()), Ok(row));
        }

        #[test]
        fn bytes_are_ordered_like_keys(a: (u32, u64), b: (u32, u64)) {
            let [a, b] = [a, b].map(|(table, key)| DiskKey::Row { table, key });
            prop_assert_eq!(a.to_bytes().cmp(&b.to_bytes()), a.cmp(&b));
        }

        #[test]
        fn a_tables_range_holds_its_keys_and_no_other(table: u32, other: u32, key: u64) {
            let (first, end) = DiskKey::table_range(table);
            let bytes = DiskKey::Row { table: other, key }.to_bytes().to_vec();
            prop_assert_eq!(first <= bytes && bytes < end, other == table);
        }

        #[test]
        fn fuzz_disk_key(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let read = DiskKey::from_bytes(&bytes);
            prop_assert_eq!(read.is_ok(), bytes.len() == DiskKey::ROW_BYTES);
            prop_assert!(read.is_err() || read.map(DiskKey::to_bytes).is_ok_and(|again| again == *bytes));
        }
    }

    #[test]
    fn row_keys_stay_as_they_are() {
        let row = DiskKey::Row { table: 0x0102, key: 0x0304_0506_0708_090a };
        let bytes = golden(env!("CARGO_MANIFEST_DIR"), "disk-key-1.bin", &row.to_bytes());
        assert_eq!(DiskKey::from_bytes(&bytes), Ok(row));
    }

    #[test]
    fn ends_are_ordinary_keys() {
        for table in [0, 1, u32::MAX] {
            let (first, end) = DiskKey::table_range(table);
            for key in [0, u64::MAX] {
                let bytes = DiskKey::Row { table, key }.to_bytes().to_vec();
                assert!(first <= bytes && bytes < end);
            }
        }
    }
}
