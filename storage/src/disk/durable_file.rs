//! Small whole files that are replaced atomically and durably.
//!
//! Invariant: after a crash the file holds the old bytes or the new ones, whole.
//!
//! Not here: what the bytes mean; every user has a magic, a version and a checksum of its own.

use super::Disk;
use std::io;
use std::path::{Path, PathBuf};

/// Why a file could not be replaced.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", path.display())]
pub struct WriteError {
    /// The file or folder that it was about.
    pub path: PathBuf,
    /// It was a sync: the new content may or may not be there after a crash, and nobody may ask again. Otherwise the old
    /// content is there, or the new one.
    pub failed_sync: bool,
    /// What the disk said.
    pub source: io::Error,
}

impl WriteError {
    fn of(path: &Path) -> impl Fn(io::Error) -> Self {
        move |source| Self { path: path.to_owned(), failed_sync: false, source }
    }

    fn of_sync(path: &Path) -> impl Fn(io::Error) -> Self {
        move |source| Self { path: path.to_owned(), failed_sync: true, source }
    }
}

/// Replaces the file at `path` in one step: temporary file (`path` with `.tmp` behind it), fsync, rename, fsync of the
/// folder. On return the new content is durable.
///
/// # Errors
/// [`WriteError`], which tells a failed sync from all else.
pub fn write_durably(disk: &dyn Disk, path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    let temporary = temporary_name(path).map_err(WriteError::of(path))?;
    let folder = parent(path).map_err(WriteError::of(path))?;
    let write = || {
        if disk.exists(&temporary)? {
            disk.remove_file(&temporary)?;
        }
        let file = disk.create(&temporary)?;
        file.write_all_at(bytes, 0)?;
        Ok(file)
    };
    let file = write().map_err(WriteError::of(&temporary))?;
    may_fail(&temporary).and_then(|()| file.sync_all()).map_err(WriteError::of_sync(&temporary))?;
    drop(file);
    fail::fail_point!("durable_file::before_rename");
    disk.rename(&temporary, path).map_err(WriteError::of(path))?;
    fail::fail_point!("durable_file::before_sync_folder");
    disk.sync_dir(folder).map_err(WriteError::of_sync(folder))
}

/// The crash tests name a part of the path of whose sync shall fail.
pub(super) fn may_fail(path: &Path) -> io::Result<()> {
    fail::fail_point!("disk::sync_error", |part| match part {
        Some(part) if path.to_string_lossy().contains(&part) => Err(io::Error::from_raw_os_error(5)),
        _ => Ok(()),
    });
    // Only used where there are failpoints.
    let _ = path;
    Ok(())
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

fn parent(path: &Path) -> io::Result<&Path> {
    path.parent().ok_or_else(|| no_name(path))
}

fn temporary_name(path: &Path) -> io::Result<PathBuf> {
    let mut name = path.file_name().ok_or_else(|| no_name(path))?.to_os_string();
    name.push(".tmp");
    Ok(path.with_file_name(name))
}

fn no_name(path: &Path) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{} names no file", path.display()))
}
