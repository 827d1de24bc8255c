//! What a user of large files asks of the system besides reading and writing: how much room there is, and not to keep
//! what will not be read again.
//!
//! Not here: files that must survive a crash (`Disk`).

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Room on a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Bytes that this process may still write.
    pub free: u64,
    /// Bytes in all.
    pub total: u64,
}

/// The room on the file system that `path` is on.
///
/// # Errors
/// What the system said.
pub fn space(path: &Path) -> io::Result<Space> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    let mut found = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `name` ends with a zero byte and lives through the call; `found` is memory for one such structure.
    let result = unsafe { libc::statvfs(name.as_ptr(), found.as_mut_ptr()) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a call that succeeded has filled in the whole structure.
    let found = unsafe { found.assume_init() };
    let block = found.f_frsize;
    Ok(Space { free: block.saturating_mul(found.f_bavail), total: block.saturating_mul(found.f_blocks) })
}

/// Tells the system that these bytes of a file will not be read again, so that they push nothing else out of its cache.
/// Only a hint: that it is not taken is no error.
pub fn forget_cached(file: &File, offset: u64, bytes: u64) {
    let (Ok(offset), Ok(bytes)) = (libc::off_t::try_from(offset), libc::off_t::try_from(bytes)) else {
        return;
    };
    // SAFETY: `posix_fadvise` takes a descriptor that `file` keeps open for the call, and no pointers.
    let _ = unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, bytes, libc::POSIX_FADV_DONTNEED) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_and_hints_do_no_harm() {
        let folder = tempfile::tempdir().unwrap();
        let found = space(folder.path()).unwrap();
        assert!(found.free <= found.total && found.total > 0, "{found:?}");
        assert_eq!(space(&folder.path().join("absent")).unwrap_err().kind(), io::ErrorKind::NotFound);
        let path = folder.path().join("f");
        std::fs::write(&path, [7; 10_000]).unwrap();
        forget_cached(&File::open(&path).unwrap(), 0, 10_000);
        assert_eq!(std::fs::read(&path).unwrap(), [7; 10_000]);
    }
}
