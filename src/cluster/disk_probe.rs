//! Asks the disk now and then whether it still answers: nobody else does while nothing is pushed, or while everything that is asked
//! for is in memory, and a node on a disk that hangs would be found out by the first push.
//!
//! A thread of its own writes and syncs a block of a file beside the stores, unless the log did its like since it last asked, and
//! reads the block back past the page cache. How long the question under way has taken is read without waiting.
//!
//! Invariants:
//! - an error is no hang: it is looked at by those whose data it hits; here it is asked again;
//! - what the file holds means nothing, and nothing is read from it that matters.
//!
//! Not here: what follows from a hang (`disk_keeper.rs`).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

const BLOCK: usize = 4096;

/// Aligned, as reading past the page cache wants it.
#[repr(C, align(4096))]
struct Block([u8; BLOCK]);

/// See the module. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct DiskProbe {
    since: Arc<Mutex<Option<Instant>>>,
    stop: Arc<AtomicBool>,
    thread: Thread,
}

impl DiskProbe {
    /// Asks through the file `path` after each `pause`. `log_time` is how long the log's I/O has taken so far: when it grew, the
    /// disk has taken writes.
    ///
    /// # Errors
    /// When the system has no thread to give.
    pub(super) fn start(
        path: PathBuf,
        pause: Duration,
        log_time: impl Fn() -> Duration + Send + 'static,
    ) -> io::Result<Self> {
        let since = Arc::new(Mutex::new(None));
        let stop = Arc::new(AtomicBool::new(false));
        let (asking, stopped) = (since.clone(), stop.clone());
        // Not joined: on a disk that hangs it may never end, and it holds nothing.
        let thread = thread::Builder::new().name("disk-probe".into()).spawn(move || {
            let (mut files, mut before) = (None, log_time());
            while !stopped.load(Ordering::Acquire) {
                thread::park_timeout(pause);
                if stopped.load(Ordering::Acquire) {
                    return;
                }
                let now = log_time();
                let has_written = std::mem::replace(&mut before, now) != now;
                *asking.lock() = Some(Instant::now());
                let answered = ask(&path, &mut files, has_written);
                *asking.lock() = None;
                if let Err(error) = answered {
                    tracing::debug!(path = %path.display(), %error, "the disk answers with an error");
                    files = None;
                }
            }
        })?;
        Ok(DiskProbe { since, stop, thread: thread.thread().clone() })
    }

    /// The age of the question under way.
    pub(super) fn stalled_for(&self) -> Duration {
        self.since.lock().map_or(Duration::ZERO, |since| since.elapsed())
    }
}

impl Drop for DiskProbe {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// The same file twice.
struct Files {
    written: File,
    /// Past the page cache; `None` where the file system knows no such thing.
    read: Option<File>,
}

fn ask(path: &Path, files: &mut Option<Files>, has_written: bool) -> io::Result<()> {
    fail::fail_point!("disk_probe::before_asking");
    let mut block = Box::new(Block([0; BLOCK]));
    let files = match files {
        Some(files) if has_written => files,
        Some(files) => {
            // In place: no block is allocated, nothing but the block itself has to reach the disk.
            files.written.write_all_at(&block.0, 0)?;
            files.written.sync_data()?;
            files
        }
        None => files.insert(create(path, &block)?),
    };
    if let Some(read) = &files.read
        && let Err(error) = read.read_exact_at(&mut block.0, 0)
    {
        files.read = None;
        return if error.kind() == io::ErrorKind::InvalidInput { Ok(()) } else { Err(error) };
    }
    Ok(())
}

fn create(path: &Path, block: &Block) -> io::Result<Files> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let written = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
    written.write_all_at(&block.0, 0)?;
    written.sync_all()?;
    let read = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).ok();
    Ok(Files { written, read })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;

    const PAUSE: Duration = Duration::from_millis(5);

    fn wait_until(is_so: impl Fn() -> bool) {
        let since = Instant::now();
        while !is_so() {
            assert!(since.elapsed() < Duration::from_secs(60), "it never came to that");
            thread::sleep(PAUSE);
        }
    }

    #[test]
    fn a_disk_that_does_not_answer_shows_until_it_does() {
        let home = tempfile::tempdir().expect("a folder");
        let path = home.path().join("probe");
        let name = CString::new(path.display().to_string()).expect("a name");
        // SAFETY: mkfifo reads a string that ends, which `name` does.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        // Opening a pipe for writing waits until somebody reads it.
        let probe = DiskProbe::start(path.clone(), PAUSE, || Duration::ZERO).expect("a thread");
        wait_until(|| probe.stalled_for() > 10 * PAUSE);
        let reader = File::open(&path).expect("opened");
        wait_until(|| probe.stalled_for() < 10 * PAUSE);
        drop(reader);
    }

    #[test]
    fn it_writes_and_reads_its_own_file_and_goes_on_after_an_error() {
        let home = tempfile::tempdir().expect("a folder");
        let path = home.path().join("replicas/probe");
        // A file where the folder should be.
        std::fs::write(home.path().join("replicas"), "").expect("written");
        let probe = DiskProbe::start(path.clone(), PAUSE, || Duration::ZERO).expect("a thread");
        thread::sleep(4 * PAUSE);
        std::fs::remove_file(home.path().join("replicas")).expect("removed");
        wait_until(|| std::fs::metadata(&path).is_ok_and(|of| of.len() == BLOCK as u64));
        drop(probe);
    }

    #[test]
    fn a_block_is_not_written_when_the_log_wrote() {
        let home = tempfile::tempdir().expect("a folder");
        let path = home.path().join("probe");
        let mut files = None;
        ask(&path, &mut files, true).expect("made");
        std::fs::write(&path, [7; BLOCK]).expect("written");
        ask(&path, &mut files, true).expect("read only");
        assert_eq!(std::fs::read(&path).expect("read"), [7; BLOCK]);
        ask(&path, &mut files, false).expect("written");
        assert_eq!(std::fs::read(&path).expect("read"), [0; BLOCK]);
    }
}
