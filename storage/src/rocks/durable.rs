//! Folders of RocksDB, which does its own I/O, on the real file system: what is in them is there after a power cut.
//!
//! A failed fsync is a [`StoreError::Sync`]: the pages may be gone though the next fsync would succeed, so nobody asks again.
//!
//! Not here: what is written; the meta record (`crate::disk::write_durably`, so that the simulated disk can cut the power at
//! every step of its replacement).

use std::fs::{self, File};
use std::io;
use std::path::Path;

use super::error::StoreError;

/// Makes the names in a folder durable.
pub(super) fn sync_directory(directory: &Path) -> Result<(), StoreError> {
    let file = File::open(directory).map_err(|source| StoreError::io(directory, source))?;
    sync(directory, &file)
}

/// Makes a file's content durable.
pub(super) fn sync_file(path: &Path) -> Result<(), StoreError> {
    let file = File::open(path).map_err(|source| StoreError::io(path, source))?;
    sync(path, &file)
}

/// Makes every file in a folder durable, the folder itself too. The folder has no folders.
pub(super) fn sync_files_in(directory: &Path) -> Result<(), StoreError> {
    for entry in fs::read_dir(directory).map_err(|source| StoreError::io(directory, source))? {
        let path = entry.map_err(|source| StoreError::io(directory, source))?.path();
        sync_file(&path)?;
    }
    sync_directory(directory)
}

/// Removes a folder and what is in it, or nothing when it is not there.
pub(super) fn remove_directory(path: &Path) -> Result<(), StoreError> {
    ignore_absent(path, fs::remove_dir_all(path))
}

/// Removes a file, or nothing when it is not there.
pub(super) fn remove_file(path: &Path) -> Result<(), StoreError> {
    ignore_absent(path, fs::remove_file(path))
}

fn sync(path: &Path, file: &File) -> Result<(), StoreError> {
    file.sync_all().map_err(|source| StoreError::sync(path, source))
}

fn ignore_absent(path: &Path, result: io::Result<()>) -> Result<(), StoreError> {
    match result {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(StoreError::io(path, source)),
        _ => Ok(()),
    }
}
