//! A disk of a known size for one node, and how to fill it.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use evershard_storage::disk::FreeSpace;

/// A file system mounted on a node's data folder; gone with the test.
#[derive(Debug)]
pub(crate) struct SmallDisk {
    path: PathBuf,
}

impl SmallDisk {
    /// Mounts a tmpfs; `None`, with a word why, where this test may not.
    pub(crate) fn mount(path: &Path, bytes: u64, inodes: u64) -> Option<Self> {
        std::fs::create_dir_all(path).unwrap();
        let options = format!("size={bytes},nr_inodes={inodes},mode=700");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "evershard-test"]).arg(path);
        has_done(&mut mount).then(|| SmallDisk { path: path.to_owned() })
    }

    /// The same with an ext4 on a loop device, whose inodes are those of its tables and not a number in memory.
    pub(crate) fn mount_ext4(path: &Path, bytes: u64, inodes: u64) -> Option<Self> {
        std::fs::create_dir_all(path).unwrap();
        let image = path.with_extension("image");
        File::create(&image).unwrap().set_len(bytes).unwrap();
        let mut make = Command::new("mkfs.ext4");
        make.args(["-q", "-F", "-m", "0", "-N", &inodes.to_string()]).arg(&image);
        let mut mount = Command::new("mount");
        mount.args(["-o", "loop"]).arg(&image).arg(path);
        if !has_done(&mut make) || !has_done(&mut mount) {
            return None;
        }
        // A data directory is empty at first.
        std::fs::remove_dir(path.join("lost+found")).unwrap();
        Some(SmallDisk { path: path.to_owned() })
    }

    pub(crate) fn free(&self) -> FreeSpace {
        FreeSpace::of(&self.path).unwrap()
    }

    /// Takes all but so many bytes.
    pub(crate) fn fill(&self, left: u64) {
        let ballast = File::options().create(true).append(true).open(self.ballast()).unwrap();
        while self.free().bytes > left {
            let length = ballast.metadata().unwrap().len();
            // A little at a time: the node takes space too.
            let more = (self.free().bytes - left).clamp(4096, 1 << 20);
            let (offset, more) = (i64::try_from(length).unwrap(), i64::try_from(more).unwrap());
            // SAFETY: fallocate takes no pointers, and the descriptor is open.
            if unsafe { libc::fallocate(ballast.as_raw_fd(), 0, offset, more) } != 0 {
                return;
            }
        }
    }

    /// Takes all but so many inodes.
    pub(crate) fn fill_inodes(&self, left: u64) {
        std::fs::create_dir_all(self.ballast()).unwrap();
        for number in 0.. {
            if self.free().inodes <= left || File::create(self.ballast().join(number.to_string())).is_err() {
                return;
            }
        }
    }

    /// Gives it all back.
    pub(crate) fn empty(&self) {
        let ballast = self.ballast();
        if ballast.is_dir() {
            std::fs::remove_dir_all(ballast).unwrap();
        } else {
            std::fs::remove_file(ballast).unwrap();
        }
    }

    fn ballast(&self) -> PathBuf {
        self.path.join("ballast")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: what a failing test left running must not keep it.
        let _ended = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

/// False, with a word why, where a test may not do this.
fn has_done(command: &mut Command) -> bool {
    let problem = match command.output() {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    eprintln!("skipped: no disk can be mounted here: {problem}");
    false
}
