//! From a virtual snapshot to hard links on disk, and away with them.
//!
//! Invariants:
//! - a link folder is used by one transfer only, and removed when its guard is dropped;
//! - linking and removing run on the group's blocking thread, never on the runtime.
//!
//! Not here: sending (`stream`), openraft's side (`applier`).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::executor::{self, ApplyExecutor};
use crate::state_machine::{SnapshotError, SnapshotMark, StateMachine};

/// Makes links of one replica's state, when asked.
#[derive(Clone)]
pub(crate) struct LinkSource {
    pub(crate) state_machine: Arc<dyn StateMachine>,
    pub(crate) executor: Arc<dyn ApplyExecutor>,
    pub(crate) lane: u64,
    /// `DATA/outgoing/<group>-<replica>`.
    pub(crate) outgoing: PathBuf,
}

/// Links of one state, removed on drop.
pub(crate) struct LinkedSnapshot {
    pub(crate) mark: SnapshotMark,
    folder: LinkFolder,
}

impl LinkedSnapshot {
    pub(crate) fn directory(&self) -> &Path {
        &self.folder.path
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
    /// Links the state as it is now.
    pub(crate) async fn link(&self) -> Result<LinkedSnapshot, SnapshotError> {
        let number = NEXT_LINK.fetch_add(1, Ordering::Relaxed);
        let path = self.outgoing.join(number.to_string());
        let folder = LinkFolder { path: path.clone(), executor: Arc::clone(&self.executor) };
        let state_machine = Arc::clone(&self.state_machine);
        let outgoing = self.outgoing.clone();
        // Not on the group's lane: whoever flushes may hold the state for a while, and apply must not wait for that.
        let linked = executor::read(&*self.executor, move || {
            make_folder(&outgoing)?;
            let mark = state_machine.link_snapshot(&path)?;
            fail::fail_point!("snapshot::after_link");
            Ok(mark)
        })
        .await
        .map_err(|lost| SnapshotError::Invalid(lost.to_string()))?;
        linked.map(|mark| LinkedSnapshot { mark, folder })
    }
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
