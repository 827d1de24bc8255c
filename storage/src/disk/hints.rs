//! What a user of large files asks of the system besides reading and writing: not to keep what will not be read again.
//!
//! Not here: files that must survive a crash (`Disk`).

use std::fs::File;
use std::os::fd::AsRawFd;

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
    fn hints_do_no_harm() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, [7; 10_000]).unwrap();
        forget_cached(&File::open(&path).unwrap(), 0, 10_000);
        assert_eq!(std::fs::read(&path).unwrap(), [7; 10_000]);
    }
}
