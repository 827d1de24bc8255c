//! Reading a shard: pulls and digests. The types here have no method that writes: a pull cannot change anything, the
//! compiler says so.
//!
//! A pull walks: keys -> range check -> index and rows in prefetched batches under the lock for reading -> floats straight
//! into the reply -> rows that do not exist are computed, outside the lock, from the table's initialiser. Rows that are on disk
//! only are read in a second step ([`ColdPull`]), where that may block: rows in memory do not wait for them.
//!
//! Not here: who may read when (leases, read indexes: the service), rows (`evershard_storage::table`).

mod digest;
mod error;
mod marks;
mod reader;
mod table_scan;

pub(crate) use digest::AddRow;
pub use digest::Digest;
pub use error::ReadError;
pub use marks::Marks;
pub use reader::{ColdPull, PullInfo, Reader};
pub use table_scan::TablePiece;
