//! The system tells of a failed write-back once per open file: whoever syncs the writer's file beside the writer may take
//! the bad news from it, and it acknowledges what is lost.

use std::io::{self, IoSlice};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use evershard_storage::disk::{DirectoryLock, Disk, DiskFile};
use evershard_storage::log::{Driver, Log};
use evershard_storage::testing::SimDisk;
use parking_lot::Mutex;

use crate::model::{entry, ok, options, segments};

type Hook = Arc<Mutex<Option<Box<dyn FnOnce() + Send>>>>;

/// Runs a hook in the middle of a sync, once, and counts the syncs of the same file that come meanwhile.
#[derive(Clone)]
struct Watched {
    disk: SimDisk,
    hook: Hook,
    inside: Arc<Mutex<Option<PathBuf>>>,
    nested: Arc<AtomicU64>,
}

struct WatchedFile {
    file: Arc<dyn DiskFile>,
    path: PathBuf,
    watched: Watched,
}

impl std::fmt::Debug for Watched {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Watched")
    }
}

impl std::fmt::Debug for WatchedFile {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.file.fmt(formatter)
    }
}

impl Watched {
    fn file(&self, path: &Path, file: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        Arc::new(WatchedFile { file, path: path.to_owned(), watched: self.clone() })
    }
}

impl Disk for Watched {
    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        self.disk.create_dir_all(path)
    }
    fn create(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        Ok(self.file(path, self.disk.create(path)?))
    }
    fn open(&self, path: &Path) -> io::Result<Arc<dyn DiskFile>> {
        Ok(self.file(path, self.disk.open(path)?))
    }
    fn list(&self, directory: &Path) -> io::Result<Vec<String>> {
        self.disk.list(directory)
    }
    fn exists(&self, path: &Path) -> io::Result<bool> {
        self.disk.exists(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.disk.rename(from, to)
    }
    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.disk.hard_link(from, to)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.disk.remove_file(path)
    }
    fn sync_dir(&self, directory: &Path) -> io::Result<()> {
        self.disk.sync_dir(directory)
    }
    fn lock(&self, path: &Path) -> io::Result<DirectoryLock> {
        self.disk.lock(path)
    }
}

impl DiskFile for WatchedFile {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }
    fn write_all_vectored_at(&self, slices: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        self.file.write_all_vectored_at(slices, offset)
    }
    fn length(&self) -> io::Result<u64> {
        self.file.length()
    }
    fn set_length(&self, length: u64) -> io::Result<()> {
        self.file.set_length(length)
    }
    fn allocate(&self, length: u64) -> io::Result<()> {
        self.file.allocate(length)
    }
    fn sync_data(&self) -> io::Result<()> {
        let watched = &self.watched;
        if watched.inside.lock().as_ref() == Some(&self.path) {
            watched.nested.fetch_add(1, Ordering::SeqCst);
        }
        let hook = watched.hook.lock().take();
        if let Some(hook) = hook {
            *watched.inside.lock() = Some(self.path.clone());
            hook();
            *watched.inside.lock() = None;
        }
        self.file.sync_data()
    }
    fn sync_all(&self) -> io::Result<()> {
        self.file.sync_all()
    }
}

#[test]
fn letting_segments_go_syncs_nothing_that_the_writer_is_about_to_acknowledge() {
    let watched = Watched {
        disk: SimDisk::new(1),
        hook: Hook::default(),
        inside: Arc::default(),
        nested: Arc::default(),
    };
    let (log, _) = Log::open(options(&Arc::default()), Arc::new(watched.clone()), Driver::Manual).unwrap();
    let group = log.group(1, 10).unwrap();
    for index in 0..60 {
        group.append(vec![entry(index, 1, &[1; 300])], ok());
        log.pump();
        log.housekeep();
    }
    group.purge_through(group.entry_id(50).unwrap(), ok());
    log.pump();
    // What the oldest segment still says of the group is copied forward; then it and others may go.
    log.housekeep();
    log.pump();
    let before = segments(&watched.disk).len();
    // A record is written and not yet synced when they do.
    let chores = log.clone();
    *watched.hook.lock() = Some(Box::new(move || chores.housekeep()));
    group.append(vec![entry(60, 1, &[1; 30])], ok());
    log.pump();
    assert!(watched.hook.lock().is_none(), "the writer synced");
    let after = segments(&watched.disk).len();
    assert!(after < before, "segments went meanwhile: {before}, then {after}");
    assert_eq!(watched.nested.load(Ordering::SeqCst), 0, "syncs of others meanwhile");
}
