//! Digests of rows as they lie in memory. What a digest is: [`evershard_proto::digest`].

pub use evershard_proto::digest::Digest;
use evershard_storage::table::RowRef;

/// Adding rows to a digest.
pub(crate) trait AddRow {
    /// Adds a live row or a counting record. Adding is commutative.
    fn add_row(&mut self, table: u32, key: u64, row: &RowRef<'_>);
}

impl AddRow for Digest {
    fn add_row(&mut self, table: u32, key: u64, row: &RowRef<'_>) {
        let weights = if row.is_live() { row.weights().len() } else { 0 };
        self.add(table, key, row.header().steps, weights, (row.values(), row.notes()));
    }
}
