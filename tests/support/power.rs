//! Disks whose power can be cut: each a file system of its own on a loop device, shut down without writing anything
//! back. What was not synced by then is gone, which `kill -9` alone never does: the page cache survives the process.
//!
//! Needs root, loop devices, `mkfs.xfs` or `mkfs.ext4`, and `xfs_io` (package xfsprogs). A test that cannot have them is
//! skipped, and says so.
//!
//! The disks are mounted in a mount namespace of the test's own: however the test ends, its mounts and loop devices end
//! with its last process.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes of a disk; the image takes what is written to it only. XFS wants 300 MiB at least.
const DISK_BYTES: u64 = 1 << 30;

/// Why power cannot be cut here; `None` when it can.
pub(crate) fn what_is_missing() -> Option<String> {
    // SAFETY: geteuid has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return Some("not root".to_owned());
    }
    if !Path::new("/dev/loop-control").exists() {
        return Some("no loop devices".to_owned());
    }
    if !exists("xfs_io") {
        return Some("no xfs_io (package xfsprogs)".to_owned());
    }
    if file_system().is_none() {
        return Some("neither mkfs.xfs nor mkfs.ext4".to_owned());
    }
    // Root in a container may not, though everything is there.
    let may = |program: &str, args: &[&str]| {
        Command::new(program).args(args).output().is_ok_and(|output| output.status.success())
    };
    if !may("unshare", &["--mount", "mount", "--make-rprivate", "/"]) {
        return Some("this root may not mount".to_owned());
    }
    if may("losetup", &["--find"]) { None } else { Some("no free loop device".to_owned()) }
}

fn exists(program: &str) -> bool {
    ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].iter().any(|folder| Path::new(folder).join(program).exists())
}

/// XFS before ext4; `EVERSHARD_TEST_POWER_CUT_FS` chooses.
fn file_system() -> Option<String> {
    if let Ok(chosen) = std::env::var("EVERSHARD_TEST_POWER_CUT_FS") {
        return Some(chosen);
    }
    ["xfs", "ext4"].into_iter().find(|name| exists(&format!("mkfs.{name}"))).map(str::to_owned)
}

/// From here on this thread, and the threads and processes that it starts, see mounts that nobody else sees. To be called
/// before any other thread is started.
pub(crate) fn mounts_of_our_own() {
    // SAFETY: unshare takes flags by value.
    let unshared = unsafe { libc::unshare(libc::CLONE_NEWNS) };
    assert_eq!(unshared, 0, "unshare: {}", std::io::Error::last_os_error());
    run(Command::new("mount").args(["--make-rprivate", "/"]));
}

/// A disk of one node.
#[derive(Debug)]
pub(crate) struct PowerDisk {
    image: PathBuf,
    folder: PathBuf,
    is_mounted: bool,
}

impl PowerDisk {
    /// A new, empty disk, mounted at `folder`.
    pub(crate) fn create(folder: PathBuf) -> Self {
        let file_system = file_system().expect("checked before");
        let image = folder.with_extension("image");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::File::create(&image).unwrap().set_len(DISK_BYTES).unwrap();
        let quiet = if file_system == "ext4" { "-F" } else { "-f" };
        run(Command::new(format!("mkfs.{file_system}")).args(["-q", quiet]).arg(&image));
        let mut disk = PowerDisk { image, folder, is_mounted: false };
        disk.mount();
        // ext4 makes a folder of its own; the node's data directory must be empty.
        let _ = std::fs::remove_dir(disk.folder.join("lost+found"));
        disk
    }

    fn mount(&mut self) {
        run(Command::new("mount").args(["-o", "loop"]).arg(&self.image).arg(&self.folder));
        self.is_mounted = true;
    }

    /// The power goes: from now on every write fails, and what was not synced is lost.
    pub(crate) fn cut(&self) {
        run(Command::new("xfs_io").args(["-x", "-c", "shutdown"]).arg(&self.folder));
    }

    /// The power is back. No process has the disk open any more.
    pub(crate) fn power_on(&mut self) {
        self.unmount().unwrap();
        self.mount();
    }

    fn unmount(&mut self) -> Result<(), String> {
        let mut problem = String::new();
        for _ in 0..100 {
            let output = Command::new("umount").arg(&self.folder).output().unwrap();
            if output.status.success() {
                self.is_mounted = false;
                return Ok(());
            }
            problem = String::from_utf8_lossy(&output.stderr).into_owned();
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        Err(problem)
    }
}

impl Drop for PowerDisk {
    fn drop(&mut self) {
        if self.is_mounted
            && let Err(problem) = self.unmount()
        {
            // The namespace's end unmounts it all the same.
            eprintln!("{} stays mounted: {problem}", self.folder.display());
        }
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
