//! From a virtual snapshot to hard links on disk, shared by all who need one, and away with them.
//!
//! Links are made when the first receiver needs them and put on a shelf: another receiver, or the same one after its
//! connection broke, is sent the very same files. While they are there, the log behind them is kept.
//!
//! Invariants:
//! - whoever asks for a mark never gets links of an earlier one;
//! - links on the shelf are given out only while the log still has everything behind them;
//! - the log is held for them up to a bound of bytes; beyond it they are stale, and others are made;
//! - links go when nobody uses them and nobody has for a while; removing them changes no answer but that the next one is
//!   of the state machine's own mark;
//! - linking and removing run on blocking threads, never on the runtime.
//!
//! Not here: sending (`stream`), openraft's side (`applier`), purging (`purge`).

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use evershard_storage::log::GroupLog;
use parking_lot::Mutex;

use super::message::FileEntry;
use crate::executor::{self, ApplyExecutor};
use crate::state_machine::{SnapshotError, SnapshotMark, StateMachine};

/// Whole files whose crc32 is remembered.
const CRC32S_MAX: usize = 64 * 1024;

/// Makes and shares links of one replica's state. Clones share the shelf.
#[derive(Clone)]
pub(crate) struct LinkSource {
    pub(crate) state_machine: Arc<dyn StateMachine>,
    pub(crate) executor: Arc<dyn ApplyExecutor>,
    pub(crate) lane: u64,
    /// `DATA/outgoing/<group>-<replica>`.
    pub(crate) outgoing: PathBuf,
    pub(crate) log: GroupLog,
    /// Log that links may hold, in bytes.
    pub(crate) hold_bytes: u64,
    pub(crate) shelf: Arc<Shelf>,
}

#[derive(Default)]
pub(crate) struct Shelf {
    state: Mutex<ShelfState>,
    /// Held while links are made, so that two who need them make one set.
    linking: tokio::sync::Mutex<()>,
    crc32s: Mutex<HashMap<FileIdentity, u32>>,
}

#[derive(Default)]
struct ShelfState {
    set: Option<Arc<LinkSet>>,
    /// Looks at it since somebody used it last.
    idle_looks: u32,
}

/// A file that never changes once it is linked: if all of this is equal, so is the content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FileIdentity {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
}

/// A file to send.
#[derive(Debug)]
pub(crate) struct LinkedFile {
    pub(crate) path: PathBuf,
    pub(crate) entry: FileEntry,
    pub(crate) identity: FileIdentity,
}

/// Links of one state.
pub(crate) struct LinkSet {
    pub(crate) mark: SnapshotMark,
    pub(crate) files: Vec<LinkedFile>,
    folder: LinkFolder,
}

impl LinkSet {
    pub(crate) fn directory(&self) -> &Path {
        &self.folder.path
    }

    pub(crate) fn index(&self) -> u64 {
        self.mark.position.map_or(0, |at| at.index)
    }
}

struct LinkFolder {
    path: PathBuf,
    executor: Arc<dyn ApplyExecutor>,
}

impl Drop for LinkFolder {
    fn drop(&mut self) {
        let path = std::mem::take(&mut self.path);
        self.executor.execute_long(Box::new(move || remove_folder(&path)));
    }
}

static NEXT_LINK: AtomicU64 = AtomicU64::new(0);

impl LinkSource {
    /// Links of a state at `at_least` or after: those on the shelf, or new ones of the state as it is now.
    pub(crate) async fn link(&self, at_least: u64) -> Result<Arc<LinkSet>, SnapshotError> {
        let _one_at_a_time = self.shelf.linking.lock().await;
        if let Some(set) = self.fresh().filter(|set| set.index() >= at_least) {
            self.shelf.state.lock().idle_looks = 0;
            return Ok(set);
        }
        let number = NEXT_LINK.fetch_add(1, Ordering::Relaxed);
        let path = self.outgoing.join(number.to_string());
        let folder = LinkFolder { path: path.clone(), executor: Arc::clone(&self.executor) };
        let state_machine = Arc::clone(&self.state_machine);
        let outgoing = self.outgoing.clone();
        // Not on the group's lane: whoever flushes may hold the state for a while, and apply must not wait for that.
        let linked = executor::file(&*self.executor, move || {
            make_folder(&outgoing)?;
            let mark = state_machine.link_snapshot(&path)?;
            fail::fail_point!("snapshot::after_link");
            Ok((mark, list_files(&path)?))
        })
        .await
        .map_err(|lost| SnapshotError::Invalid(lost.to_string()))?;
        let (mark, files) = linked?;
        let set = Arc::new(LinkSet { mark, files, folder });
        let replaced = {
            let mut state = self.shelf.state.lock();
            state.idle_looks = 0;
            state.set.replace(Arc::clone(&set))
        };
        drop(replaced);
        Ok(set)
    }

    /// The links on the shelf, if a receiver of them could go on with the log.
    pub(crate) fn fresh(&self) -> Option<Arc<LinkSet>> {
        let set = self.shelf.state.lock().set.clone()?;
        (!self.is_overtaken(&set) && self.log.bytes_since(set.index()) <= self.hold_bytes).then_some(set)
    }

    /// Whether the log behind these links is gone already: who installs them could not go on with it.
    pub(crate) fn is_overtaken(&self, set: &LinkSet) -> bool {
        self.log.state().last_purged.is_some_and(|purged| purged.index > set.index())
    }

    /// Whether half of the log that is kept for a receiver has come already: it must be done before the rest has, or it
    /// will be sent another snapshot at once.
    pub(crate) fn is_late(&self) -> bool {
        let index = self.shelf.state.lock().set.as_ref().map(|set| set.index());
        index.is_some_and(|index| self.log.bytes_since(index) > self.hold_bytes / 2)
    }

    /// The index behind which the log is kept for a receiver.
    pub(crate) fn held_index(&self) -> Option<u64> {
        self.fresh().map(|set| set.index())
    }

    /// Called now and then; lets go of links that nobody has used for `looks_max` calls.
    pub(crate) fn look(&self, looks_max: u32) {
        let mut state = self.shelf.state.lock();
        match &state.set {
            Some(set) if Arc::strong_count(set) > 1 => state.idle_looks = 0,
            Some(_) => state.idle_looks += 1,
            None => return,
        }
        if state.idle_looks > looks_max {
            let idle = state.set.take();
            drop(state);
            drop(idle);
        }
    }

    /// Lets go of the links on the shelf: the state was replaced, or the group ends.
    pub(crate) fn clear(&self) {
        let taken = self.shelf.state.lock().set.take();
        drop(taken);
    }

    /// The crc32 of a whole file that was read before.
    pub(crate) fn known_crc32(&self, identity: &FileIdentity) -> Option<u32> {
        self.shelf.crc32s.lock().get(identity).copied()
    }

    pub(crate) fn learn_crc32(&self, identity: FileIdentity, crc32: u32) {
        let mut crc32s = self.shelf.crc32s.lock();
        if crc32s.len() >= CRC32S_MAX {
            crc32s.clear();
        }
        crc32s.insert(identity, crc32);
    }
}

/// All files below `root`, by name, in a fixed order.
fn list_files(root: &Path) -> Result<Vec<LinkedFile>, SnapshotError> {
    let mut folders = vec![root.to_owned()];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        let read = |source| SnapshotError::Io { path: folder.clone(), source };
        for entry in std::fs::read_dir(&folder).map_err(read)? {
            let path = entry.map_err(read)?.path();
            let meta = std::fs::metadata(&path)
                .map_err(|source| SnapshotError::Io { path: path.clone(), source })?;
            if meta.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(root).ok().and_then(Path::to_str).map(str::to_owned);
            let Some(name) = name else {
                return Err(SnapshotError::Invalid(format!(
                    "{} has a name that cannot be sent",
                    path.display()
                )));
            };
            let identity = FileIdentity {
                device: meta.dev(),
                inode: meta.ino(),
                bytes: meta.len(),
                modified: (meta.mtime(), meta.mtime_nsec()),
            };
            files.push(LinkedFile { path, entry: FileEntry { name, bytes: meta.len() }, identity });
        }
    }
    files.sort_by(|a, b| a.entry.name.cmp(&b.entry.name));
    Ok(files)
}

pub(crate) fn make_folder(path: &Path) -> Result<(), SnapshotError> {
    std::fs::create_dir_all(path).map_err(|source| SnapshotError::Io { path: path.to_owned(), source })
}

/// Removes a folder and what is in it; that it is not there is fine. Failing is only worth a warning: the folder holds
/// links or a partial transfer, and is removed at the next start.
pub(crate) fn remove_folder(path: &Path) {
    match std::fs::remove_dir_all(path) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "a snapshot folder could not be removed")
        }
    }
}
