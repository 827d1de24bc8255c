//! The disk as the log and the record files see it: a trait, and the real one.
//!
//! Everything that must survive a crash goes through [`Disk`] and [`DiskFile`], so that a simulated disk
//! (`crate::testing::SimDisk`) can cut the power after any one of the calls.
//!
//! Invariants:
//! - What was written is durable only after `sync_data` or `sync_all` of the file returned `Ok`.
//! - A created, renamed, linked or removed name is durable only after `sync_dir` of its directory returned `Ok`.
//! - A failed sync is never retried by anybody: the caller stops the node.
//!
//! Not here: RocksDB, which does its own I/O.

mod durable_file;
mod fatal;
mod free_space;
mod hints;
mod real_disk;

pub use durable_file::{WriteError, read_whole, write_durably};
pub use fatal::{FatalHandler, stop_process, sync_folder_or_stop, sync_or_stop, write_durably_or_stop};
pub use free_space::FreeSpace;
pub use hints::forget_cached;
pub use real_disk::RealDisk;

use std::fmt::Debug;
use std::io::{self, IoSlice};
use std::path::Path;
use std::sync::Arc;

/// A file system, as far as durable state needs one.
pub trait Disk: Debug + Send + Sync {
    /// Creates a directory and its parents; an existing one is fine.
    fn create_dir_all(&self, path: &Path) -> io::Result<()>;
    /// Creates a new empty file; `AlreadyExists` if the name is taken.
    fn create(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>>;
    /// Opens an existing file for reading and writing.
    fn open(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>>;
    /// The names in a directory, sorted.
    fn list(&self, directory: &Path) -> io::Result<Vec<String>>;
    /// Whether a file or directory of this name exists.
    fn exists(&self, path: &Path) -> io::Result<bool>;
    /// Renames a file, replacing what had the new name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Gives a file a second name.
    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file's name; open handles stay readable.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Makes the names in a directory durable.
    fn sync_dir(&self, directory: &Path) -> io::Result<()>;
    /// How many bytes are free where this directory is; `None` where nobody knows.
    fn free_bytes(&self, _directory: &Path) -> Option<u64> {
        None
    }
    /// Locks a file (creating it) against other processes, until the lock is dropped; `WouldBlock` if it is taken.
    fn lock(&self, path: &Path) -> io::Result<DirectoryLock>;
}

/// A lock that is held until it is dropped, or the process ends.
#[derive(Debug)]
pub struct DirectoryLock(
    #[allow(dead_code, reason = "held, not looked at")] pub(crate) Option<std::fs::File>,
);

/// An open file. All methods take `&self`: handles are shared between the writer and the readers.
pub trait DiskFile: Debug + Send + Sync {
    /// Fills the buffer from `offset`; `UnexpectedEof` if the file ends before.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all bytes at `offset`, extending the file where needed.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Writes all slices one after another from `offset`, without joining them first.
    fn write_all_vectored_at(&self, slices: &[IoSlice<'_>], offset: u64) -> io::Result<()>;
    /// The file's length in bytes.
    fn length(&self) -> io::Result<u64>;
    /// Cuts or extends (with zeros) the file.
    fn set_length(&self, length: u64) -> io::Result<()>;
    /// Reserves space and makes the file at least `length` bytes long; new bytes read as zeros.
    fn allocate(&self, length: u64) -> io::Result<()>;
    /// Makes the written bytes durable (`fdatasync`).
    fn sync_data(&self) -> io::Result<()>;
    /// Makes the written bytes and the metadata durable (`fsync`).
    fn sync_all(&self) -> io::Result<()>;
}
