//! Where checkpoints lie: a directory, or a bucket of an object store.
//!
//! ```text
//! manifests/<name>.json           one checkpoint
//! files/<hash>.run                rows
//! files/<hash>.state              a shard's small state
//! writing/<name>-<nonce>.json     a checkpoint in the making
//! pruning/<nonce>.json            files are being collected
//! ```
//!
//! A checkpoint walks in: [`Target::begin`] (a mark) -> [`Target::put_run`], [`Target::put_state`], from any process ->
//! [`Writing::finish`] (all files are there -> the manifest is created -> the mark goes). It walks out: [`Target::get_manifest`] ->
//! [`Target::read_file`].
//!
//! Invariants:
//! - a manifest is created once, never changed, and only after every file that it names is there and durable;
//! - a file has the bytes that its name is the hash of: what is there already is not put again;
//! - who writes and who collects files see each other: each makes its mark first and looks for the other's then;
//! - credentials come from the environment, and are in no text that leaves here.
//!
//! Not here: what files and manifests hold (`crate::run`, `crate::manifest`), which may go (`crate::prune`).

mod directory;
#[cfg(test)]
mod dying;
mod error;
mod get;
mod manifests;
mod marks;
mod open;
mod put;
mod rate;
mod redact;
#[cfg(test)]
mod tests;
mod unneeded;
mod writing;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use object_store::ObjectStore;
use object_store::path::Path;

#[cfg(test)]
pub(crate) use dying::Dying;
pub use error::TargetError;
pub use get::FileStream;
pub use manifests::Listed;
pub(crate) use marks::{Mark, MarkKind, StoreTime};
pub use open::TargetOptions;
pub(crate) use unneeded::Unneeded;
pub use writing::Writing;

/// A mark of who writes, when it was not renewed for so long, is of somebody who died.
pub const WRITING_STALE_AFTER: Duration = Duration::from_secs(60 * 60);
/// A mark of who collects files, when it was not renewed for so long, is of somebody who died. Longer than the store repeats one
/// request: what is deleted is deleted before.
pub const PRUNING_STALE_AFTER: Duration = Duration::from_secs(10 * 60);

/// An opened target. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Target {
    store: Arc<dyn ObjectStore>,
    root: Path,
    url: Arc<str>,
    /// Of a target that is one.
    directory: Option<Arc<std::path::Path>>,
    rate: Option<Arc<rate::Rate>>,
    bytes_read: Arc<AtomicU64>,
}

impl Target {
    /// The URL, as users call it.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Bytes of files that were read from it, by all who share it: for a progress bar.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Waits until so many bytes may go, in or out.
    async fn may_go(&self, bytes: u64) {
        if let Some(rate) = &self.rate {
            rate.take(bytes).await;
        }
    }

    fn path(&self, relative: &str) -> Path {
        relative.split('/').fold(self.root.clone(), |path, part| path.join(part))
    }

    /// Without credentials: the store's own text is not asked for them.
    fn error(&self, action: &'static str, path: &str, error: &object_store::Error) -> TargetError {
        if matches!(error, object_store::Error::NotFound { .. }) {
            return TargetError::Missing { target: self.url.to_string(), path: path.to_owned() };
        }
        TargetError::Store {
            target: self.url.to_string(),
            action,
            path: path.to_owned(),
            reason: error::reason(error),
        }
    }
}
