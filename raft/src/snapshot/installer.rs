//! Receiving a snapshot: writes its files into a folder of their own, checks them, syncs them, and only then hands them
//! to openraft to install.
//!
//! Invariants:
//! - at most one transfer per replica: a new Begin forgets the one before;
//! - chunks of a file arrive in order, without holes, and never exceed the declared size;
//! - what does not agree in size or crc32 is removed and refused; the state stays as it was.
//!
//! Not here: sending (`stream`), the install itself (`applier`).

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::builder::remove_folder;
use super::message::{Begin, Chunk, Finish};
use crate::executor::ApplyExecutor;
use crate::state_machine::{SnapshotError, SnapshotMark};

/// Receives snapshots for one replica. Its methods block.
pub(crate) struct Installer {
    /// `DATA/incoming/<group>-<replica>`.
    incoming: PathBuf,
    executor: Arc<dyn ApplyExecutor>,
    current: Mutex<Option<Transfer>>,
    next_folder: AtomicU64,
}

struct Transfer {
    id: u64,
    mark: SnapshotMark,
    files: Vec<IncomingFile>,
    folder: IncomingFolder,
}

struct IncomingFile {
    path: PathBuf,
    bytes: u64,
    received: u64,
    crc32: crc32fast::Hasher,
    file: Option<File>,
}

/// Removed on drop, on the thread that installs: after whatever install was queued before.
struct IncomingFolder {
    path: PathBuf,
    executor: Arc<dyn ApplyExecutor>,
}

impl Drop for IncomingFolder {
    fn drop(&mut self) {
        let path = std::mem::take(&mut self.path);
        self.executor.execute_long(Box::new(move || remove_folder(&path)));
    }
}

/// Files that were received whole, verified and synced. Its folder is removed on drop.
pub(crate) struct ReceivedSnapshot {
    mark: SnapshotMark,
    folder: IncomingFolder,
}

impl ReceivedSnapshot {
    pub(crate) fn mark(&self) -> &SnapshotMark {
        &self.mark
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.folder.path
    }
}

impl Installer {
    pub(crate) fn new(incoming: PathBuf, executor: Arc<dyn ApplyExecutor>) -> Self {
        Self { incoming, executor, current: Mutex::new(None), next_folder: AtomicU64::new(0) }
    }

    pub(crate) fn begin(&self, begin: Begin) -> Result<(), SnapshotError> {
        let number = self.next_folder.fetch_add(1, Ordering::Relaxed);
        let folder = IncomingFolder {
            path: self.incoming.join(number.to_string()),
            executor: Arc::clone(&self.executor),
        };
        // A leftover of an earlier process has the same number.
        remove_folder(&folder.path);
        make_folders(&folder.path)?;
        let mut files = Vec::with_capacity(begin.files.len());
        for entry in begin.files {
            let path = folder.path.join(&entry.name);
            if let Some(parent) = path.parent() {
                make_folders(parent)?;
            }
            let crc32 = crc32fast::Hasher::new();
            let mut incoming = IncomingFile { path, bytes: entry.bytes, received: 0, crc32, file: None };
            if incoming.bytes == 0 {
                incoming.open()?;
                incoming.close_if_whole()?;
            }
            files.push(incoming);
        }
        let transfer = Transfer { id: begin.transfer, mark: begin.mark, files, folder };
        *self.current.lock() = Some(transfer);
        Ok(())
    }

    pub(crate) fn chunk(&self, chunk: &Chunk) -> Result<(), SnapshotError> {
        let mut current = self.current.lock();
        let written = match current.as_mut() {
            Some(transfer) if transfer.id == chunk.transfer => transfer.write(chunk),
            _ => return Err(unknown(chunk.transfer)),
        };
        if written.is_err() {
            *current = None;
        }
        written
    }

    /// Verifies and syncs everything; the snapshot leaves the installer's hands.
    pub(crate) fn finish(&self, finish: &Finish) -> Result<ReceivedSnapshot, SnapshotError> {
        let transfer = {
            let mut current = self.current.lock();
            match current.take() {
                Some(transfer) if transfer.id == finish.transfer => transfer,
                other => {
                    *current = other;
                    return Err(unknown(finish.transfer));
                }
            }
        };
        transfer.verified(&finish.crc32s)
    }

    pub(crate) fn abort(&self, transfer: u64) {
        let mut current = self.current.lock();
        if current.as_ref().is_some_and(|held| held.id == transfer) {
            *current = None;
        }
    }
}

impl Transfer {
    fn write(&mut self, chunk: &Chunk) -> Result<(), SnapshotError> {
        let Some(file) = self.files.get_mut(chunk.file as usize) else {
            return Err(SnapshotError::Invalid(format!("chunk of unknown file {}", chunk.file)));
        };
        let end = chunk.offset.saturating_add(chunk.data.len() as u64);
        if chunk.offset != file.received || end > file.bytes {
            return Err(SnapshotError::Invalid(format!(
                "chunk {}..{end} of {} does not follow its {} of {} bytes",
                chunk.offset,
                file.path.display(),
                file.received,
                file.bytes
            )));
        }
        if chunk.data.is_empty() {
            return Err(SnapshotError::Invalid(format!("an empty chunk of {}", file.path.display())));
        }
        if file.received == 0 {
            file.open()?;
        }
        if let Some(out) = &mut file.file {
            out.write_all(&chunk.data).map_err(|source| io(&file.path, source))?;
        }
        file.crc32.update(&chunk.data);
        file.received = end;
        file.close_if_whole()
    }

    fn verified(self, crc32s: &[u32]) -> Result<ReceivedSnapshot, SnapshotError> {
        if crc32s.len() != self.files.len() {
            return Err(SnapshotError::Invalid(format!(
                "{} checksums for {} files",
                crc32s.len(),
                self.files.len()
            )));
        }
        let mut folders = vec![self.folder.path.clone()];
        for (file, expected) in self.files.into_iter().zip(crc32s) {
            let found = file.crc32.finalize();
            if file.received != file.bytes || found != *expected {
                return Err(SnapshotError::Invalid(format!(
                    "{}: {} of {} bytes, crc32 {found:08x}, expected {expected:08x}",
                    file.path.display(),
                    file.received,
                    file.bytes
                )));
            }
            if let Some(parent) = file.path.parent()
                && !folders.iter().any(|known| known == parent)
            {
                folders.push(parent.to_owned());
            }
        }
        for folder in &folders {
            File::open(folder).and_then(|opened| opened.sync_all()).map_err(|source| io(folder, source))?;
        }
        Ok(ReceivedSnapshot { mark: self.mark, folder: self.folder })
    }
}

impl IncomingFile {
    /// Opened with its first byte, so that a snapshot of many files holds one open at a time.
    fn open(&mut self) -> Result<(), SnapshotError> {
        self.file = Some(File::create_new(&self.path).map_err(|source| io(&self.path, source))?);
        Ok(())
    }

    /// Syncs and closes the file once all of it is here.
    fn close_if_whole(&mut self) -> Result<(), SnapshotError> {
        if self.received == self.bytes
            && let Some(file) = self.file.take()
        {
            file.sync_all().map_err(|source| io(&self.path, source))?;
        }
        Ok(())
    }
}

fn make_folders(path: &Path) -> Result<(), SnapshotError> {
    std::fs::create_dir_all(path).map_err(|source| io(path, source))
}

fn io(path: &Path, source: std::io::Error) -> SnapshotError {
    SnapshotError::Io { path: path.to_owned(), source }
}

fn unknown(transfer: u64) -> SnapshotError {
    SnapshotError::Invalid(format!("no transfer {transfer} is under way"))
}
