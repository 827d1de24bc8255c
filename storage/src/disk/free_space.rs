//! How much space a file system has left.
//!
//! Not here: how much there must be (the server).

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// What is left on the file system of a path, for processes without privileges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FreeSpace {
    /// Free bytes.
    pub bytes: u64,
    /// Bytes in all.
    pub bytes_total: u64,
    /// Free inodes.
    pub inodes: u64,
    /// Inodes in all; 0 where they are not counted.
    pub inodes_total: u64,
}

impl FreeSpace {
    /// Asks the operating system. May block on a file system that hangs.
    pub fn of(path: &Path) -> io::Result<FreeSpace> {
        let name = CString::new(path.as_os_str().as_bytes())?;
        let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
        // SAFETY: `name` ends with a NUL and outlives the call, which fills `stat` when it returns 0.
        let stat = unsafe {
            if libc::statvfs(name.as_ptr(), stat.as_mut_ptr()) != 0 {
                return Err(io::Error::last_os_error());
            }
            stat.assume_init()
        };
        let bytes = |blocks: libc::fsblkcnt_t| blocks.saturating_mul(stat.f_frsize);
        Ok(FreeSpace {
            bytes: bytes(stat.f_bavail),
            bytes_total: bytes(stat.f_blocks),
            inodes: stat.f_favail,
            inodes_total: stat.f_files,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_something_and_no_more_than_all() {
        let directory = tempfile::tempdir().unwrap();
        let free = FreeSpace::of(directory.path()).unwrap();
        assert!(free.bytes > 0 && free.bytes <= free.bytes_total, "{free:?}");
        assert!(free.inodes <= free.inodes_total, "{free:?}");
        assert!(FreeSpace::of(&directory.path().join("absent")).is_err());
    }
}
