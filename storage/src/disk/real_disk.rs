//! The operating system's file system.
//!
//! Not here: any buffering; each call is a system call.

use super::{DirectoryLock, Disk, DiskFile, FreeSpace};
use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// Slices handed to one `pwritev`; Linux takes at most 1024 (`IOV_MAX`).
const SLICES_MAX: usize = 1024;

/// The operating system's file system.
#[derive(Debug, Default, Clone, Copy)]
pub struct RealDisk;

#[derive(Debug)]
struct RealFile(File);

impl Disk for RealDisk {
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn create(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        Ok(Arc::new(RealFile(file)))
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Arc::new(RealFile(file)))
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(directory)? {
            // A name that is not UTF-8 is none of ours.
            if let Ok(name) = entry?.file_name().into_string() {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        path.try_exists()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_dir(&self, directory: &Path) -> io::Result<()> {
        File::open(directory)?.sync_all()
    }

    fn free_bytes(&self, directory: &Path) -> Option<u64> {
        FreeSpace::of(directory).ok().map(|free| free.bytes)
    }

    fn lock(&self, path: &Path) -> io::Result<DirectoryLock> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        file.try_lock()?;
        Ok(DirectoryLock(Some(file)))
    }
}

impl DiskFile for RealFile {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_exact_at(buffer, offset)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn write_all_vectored_at(&self, slices: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        let mut position = offset;
        for group in slices.chunks(SLICES_MAX) {
            let mut group: Vec<IoSlice<'_>> = group.iter().map(|slice| IoSlice::new(slice)).collect();
            let mut rest = group.as_mut_slice();
            IoSlice::advance_slices(&mut rest, 0);
            while !rest.is_empty() {
                let written = write_vectored(&self.0, rest, position)?;
                if written == 0 {
                    return Err(io::ErrorKind::WriteZero.into());
                }
                position += written as u64;
                IoSlice::advance_slices(&mut rest, written);
            }
        }
        Ok(())
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.0.set_len(length)
    }

    fn allocate(&self, length: u64) -> io::Result<()> {
        let length_signed = libc::off_t::try_from(length).map_err(|_| io::ErrorKind::FileTooLarge)?;
        // SAFETY: `fallocate` takes a descriptor that `self.0` keeps open for the call, and no pointers.
        let result = unsafe { libc::fallocate(self.0.as_raw_fd(), 0, 0, length_signed) };
        if result == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        // A file system without fallocate (some network and overlay ones): the length alone, sparse.
        if error.raw_os_error() == Some(libc::EOPNOTSUPP) {
            if self.length()? < length {
                self.set_length(length)?;
            }
            return Ok(());
        }
        Err(error)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn sync_all(&self) -> io::Result<()> {
        self.0.sync_all()
    }
}

/// One `pwritev`, repeated when a signal interrupts it.
fn write_vectored(file: &File, slices: &[IoSlice<'_>], offset: u64) -> io::Result<usize> {
    let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::FileTooLarge)?;
    let count = libc::c_int::try_from(slices.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    loop {
        // SAFETY: `IoSlice` is ABI-compatible with `iovec` on Unix (documented by std); the slices outlive the
        // call, and `count` is their number.
        let written =
            unsafe { libc::pwritev(file.as_raw_fd(), slices.as_ptr().cast::<libc::iovec>(), count, offset) };
        if let Ok(written) = usize::try_from(written) {
            return Ok(written);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gather_write_of_any_number_of_slices_is_whole() {
        let directory = tempfile::tempdir().unwrap();
        let file = RealDisk.create(&directory.path().join("f")).unwrap();
        let pieces: Vec<Vec<u8>> = (0..3000_usize).map(|piece| vec![piece as u8; piece % 7]).collect();
        let slices: Vec<IoSlice<'_>> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
        file.write_all_vectored_at(&slices, 10).unwrap();
        let expected = pieces.concat();
        assert_eq!(file.length().unwrap(), 10 + expected.len() as u64);
        let mut found = vec![0; expected.len()];
        file.read_exact_at(&mut found, 10).unwrap();
        assert_eq!(found, expected);
        file.allocate(100_000).unwrap();
        assert_eq!(file.length().unwrap(), 100_000);
        file.set_length(5).unwrap();
        assert!(file.read_exact_at(&mut found, 0).is_err());
        file.sync_all().unwrap();
        RealDisk.sync_dir(directory.path()).unwrap();
    }

    #[test]
    fn names_are_created_once_linked_and_listed() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        RealDisk.create(&path("b")).unwrap();
        assert_eq!(RealDisk.create(&path("b")).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        RealDisk.hard_link(&path("b"), &path("a")).unwrap();
        RealDisk.rename(&path("b"), &path("c")).unwrap();
        assert_eq!(RealDisk.list(directory.path()).unwrap(), ["a", "c"]);
        let lock = RealDisk.lock(&path("lock")).unwrap();
        assert_eq!(RealDisk.lock(&path("lock")).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(lock);
        RealDisk.lock(&path("lock")).unwrap();
    }
}
