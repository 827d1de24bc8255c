//! A disk that hangs when told to: a loop-mounted file system and `fsfreeze`.
//!
//! Whoever writes to a frozen file system cannot be killed until it is thawed. So another process thaws it after a while,
//! whatever becomes of the test.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Mutex;

/// Mounted on a node's data folder; gone with the test.
#[derive(Debug)]
pub(crate) struct FrozenDisk {
    path: PathBuf,
    image: PathBuf,
    guard: Mutex<Option<Child>>,
}

fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output =
        Command::new(program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr)))
}

impl FrozenDisk {
    /// Mounts one, not frozen; `None`, with a word why, where this test may not.
    pub(crate) fn mount(path: &Path) -> Option<Self> {
        std::fs::create_dir_all(path).unwrap();
        let image = path.with_extension("ext4");
        let disk = FrozenDisk { path: path.to_owned(), image, guard: Mutex::new(None) };
        let (image, path) = (disk.image.display().to_string(), disk.path.display().to_string());
        std::fs::File::create(&disk.image).unwrap().set_len(1 << 30).unwrap();
        let mounted =
            run("mkfs.ext4", &["-q", &image]).and_then(|()| run("mount", &["-o", "loop", &image, &path]));
        match mounted {
            Ok(()) => Some(disk),
            Err(problem) => {
                eprintln!("skipped: no file system can be mounted here: {problem}");
                None
            }
        }
    }

    /// From now on writes wait, until [`FrozenDisk::thaw`] or for 40 seconds.
    pub(crate) fn freeze(&self) {
        let thaw = format!("sleep 40; fsfreeze -u '{}'", self.path.display());
        // In a session of its own: it outlives a test that is killed.
        let guard = Command::new("setsid").args(["sh", "-c", &thaw]).spawn();
        let guard = guard.unwrap_or_else(|error| panic!("without a guard nothing is frozen: {error}"));
        *self.guard.lock().unwrap() = Some(guard);
        run("fsfreeze", &["-f", &self.path.display().to_string()]).unwrap();
    }

    pub(crate) fn thaw(&self) {
        let thawed = run("fsfreeze", &["-u", &self.path.display().to_string()]);
        if let Some(mut guard) = self.guard.lock().unwrap().take() {
            if thawed.is_ok() {
                // Or it would thaw the next time, too early.
                guard.kill().unwrap();
            }
            guard.wait().unwrap();
        }
    }
}

impl Drop for FrozenDisk {
    fn drop(&mut self) {
        self.thaw();
        let _ended = run("umount", &["-l", &self.path.display().to_string()]);
        let _gone = std::fs::remove_file(&self.image);
    }
}
