//! Why a log could not be opened or a group not be had.
//!
//! Not here: failures while writing; those go to the fatal handler and to every pending callback.

use super::GroupKey;
use std::io;
use std::path::{Path, PathBuf};

/// Why a log could not be opened or a group not be had.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The disk refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// Written by another version of Evershard.
    #[error("{path} has format version {found}, this program knows {known}")]
    UnsupportedVersion {
        /// The file.
        path: PathBuf,
        /// The version it has.
        found: u32,
        /// The version this program writes.
        known: u32,
    },
    /// Part of the replica's log is lost: it must neither vote nor serve, and be rebuilt under a new replica id.
    #[error("the log of {key} is quarantined: {reason}")]
    Quarantined {
        /// The replica.
        key: GroupKey,
        /// What was found.
        reason: String,
    },
    /// The replica is forgotten; its id is not used again.
    #[error("the log of {key} is forgotten")]
    Destroyed {
        /// The replica.
        key: GroupKey,
    },
    /// There is no log, and `LogOptions::must_exist` says that there was one. None was created.
    #[error("there is no log in {path}")]
    Gone {
        /// The directory.
        path: PathBuf,
    },
    /// An option makes no sense.
    #[error("log option {field}: {reason}")]
    InvalidOption {
        /// The field of `LogOptions`.
        field: &'static str,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A write or a sync failed earlier, or the log was closed.
    #[error("the log is stopped: {reason}")]
    Stopped {
        /// Why.
        reason: String,
    },
}

impl LogError {
    /// Whether a sync failed: after that nothing on the disk can be trusted.
    pub(crate) fn is_failed_sync(&self) -> bool {
        matches!(self, LogError::Io { action, .. } if action.starts_with("sync"))
    }

    /// Whether there is no space, bytes or inodes: nothing was lost, and a later try may succeed. Space is asked for
    /// before anything is written into it; a sync that says so has failed like any other.
    #[must_use]
    pub fn is_disk_full(&self) -> bool {
        let LogError::Io { source, .. } = self else { return false };
        !self.is_failed_sync()
            && matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }

    /// Adds to an I/O error what was tried on which file.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LogError {
        let path = path.to_owned();
        move |source| LogError::Io { action, path, source }
    }
}
