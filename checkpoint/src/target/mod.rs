//! Where checkpoints lie: a directory, or a bucket of an object store.
//!
//! ```text
//! manifests/<name>.json           one checkpoint
//! files/<hash>.run                rows
//! files/<hash>.state              a shard's small state
//! ```
//!
//! A checkpoint walks in: [`Target::put_run`], [`Target::put_state`], from any process -> [`Target::finish`] (all files are there ->
//! the manifest is created). It walks out: [`Target::get_manifest`] -> [`Target::read_file`].
//!
//! Invariants:
//! - a manifest is created once, never changed, and only after every file that it names is there and durable;
//! - a file has the bytes that its name is the hash of: what is there already is not put again;
//! - credentials come from the environment, and are in no text that leaves here.
//!
//! Not here: what files and manifests hold (`crate::run`, `crate::manifest`); collecting files that no manifest names.

mod error;
mod get;
mod manifests;
mod open;
mod put;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use object_store::ObjectStore;
use object_store::path::Path;

pub use error::TargetError;
pub use get::FileStream;
pub use manifests::Listed;

/// An opened target. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Target {
    store: Arc<dyn ObjectStore>,
    root: Path,
    url: Arc<str>,
}

impl Target {
    /// The URL, as users call it.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
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
