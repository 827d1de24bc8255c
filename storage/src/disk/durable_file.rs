//! Small whole files that are replaced atomically and durably.
//!
//! Invariant: after a crash the file holds the old bytes or the new ones, whole.
//!
//! Not here: what the bytes mean; every user has a magic, a version and a checksum of its own.

use super::Disk;
use std::io;
use std::path::{Path, PathBuf};

/// Replaces the file at `path`: temporary file, fsync, rename, fsync of the directory.
pub fn write_durably(disk: &dyn Disk, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = temporary_name(path)?;
    let directory = parent(path)?;
    if disk.exists(&temporary)? {
        disk.remove_file(&temporary)?;
    }
    let file = disk.create(&temporary)?;
    file.write_all_at(bytes, 0)?;
    file.sync_all()?;
    disk.rename(&temporary, path)?;
    disk.sync_dir(directory)
}

/// Reads a whole file of at most `bytes_max` bytes; a longer one is `InvalidData`, and no memory is taken for it.
pub fn read_whole(disk: &dyn Disk, path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let file = disk.open(path)?;
    let length = file.length()?;
    if length > bytes_max {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{} is {length} bytes long, at most {bytes_max} expected", path.display()),
        ));
    }
    let length = usize::try_from(length).map_err(|_| io::ErrorKind::FileTooLarge)?;
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

pub(super) fn parent(path: &Path) -> io::Result<&Path> {
    path.parent().ok_or_else(|| no_name(path))
}

pub(super) fn temporary_name(path: &Path) -> io::Result<PathBuf> {
    let mut name = path.file_name().ok_or_else(|| no_name(path))?.to_os_string();
    name.push(".tmp");
    Ok(path.with_file_name(name))
}

fn no_name(path: &Path) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{} names no file", path.display()))
}
