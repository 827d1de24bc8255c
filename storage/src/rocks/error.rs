//! What can go wrong with a replica's store, typed, naming the file.
//!
//! Not here: what to do about it ([`StoreError::Sync`] ends the process, see [`super::RocksShared`]; the server: [`StoreError::Corrupt`] quarantines the
//! replica, disk full holds pushes).

use std::io;
use std::path::{Path, PathBuf};

use crate::disk::WriteError;

/// A replica's store cannot do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file system said no; nothing that was durable is lost.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// An fsync failed: what was written before may be gone, and asking again would lie. The process must end.
    #[error("cannot make {path} durable: {source}; stop, and do not retry")]
    Sync {
        /// The file or folder.
        path: PathBuf,
        /// What the file system said.
        source: io::Error,
    },
    /// There is no replica here: the folder does not exist or holds nothing but leftovers of a creation that never ended.
    #[error("{path}: no replica here")]
    Absent {
        /// The folder.
        path: PathBuf,
    },
    /// There is a replica here already.
    #[error("{path}: there is a replica here already")]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// What is on disk is not what was written.
    #[error("{path} is corrupt: {what}")]
    Corrupt {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// What is on disk is whole, and of another version: no damage, and nothing to repair.
    #[error(
        "{path} is of version {found}, this build reads version {known}; nothing was changed: start the build that wrote it"
    )]
    OtherVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// The folder belongs to someone else.
    #[error("{path}: {field} is {found}, expected {expected}")]
    IdentityMismatch {
        /// The meta record.
        path: PathBuf,
        /// Which part of the identity.
        field: &'static str,
        /// What it must be.
        expected: String,
        /// What is written there.
        found: String,
    },
    /// RocksDB said no.
    #[error("RocksDB in {path} cannot {doing}: {message}")]
    Rocks {
        /// Its folder.
        path: PathBuf,
        /// What was asked of it.
        doing: &'static str,
        /// What it said.
        message: String,
    },
    /// What was asked breaks a rule of the store (rows out of order, a position going back): a mistake of the caller; nothing
    /// changed.
    #[error("refused: {what}")]
    Refused {
        /// What is wrong with it.
        what: String,
    },
    /// A snapshot was installed since the run began: its rows belong to a state that is gone. Drop it.
    #[error("a snapshot was installed since this run began")]
    Superseded,
    /// A commit failed before in a way that leaves the disk unknown; nothing is written any more. Open the store again.
    #[error("{path}: an earlier failure left the disk unknown, nothing is written any more")]
    Poisoned {
        /// The folder.
        path: PathBuf,
    },
}

impl StoreError {
    pub(super) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(super) fn sync(path: &Path, source: io::Error) -> Self {
        Self::Sync { path: path.to_owned(), source }
    }

    pub(super) fn corrupt(path: &Path, what: impl ToString) -> Self {
        Self::Corrupt { path: path.to_owned(), what: what.to_string() }
    }

    pub(super) fn rocks(path: &Path, doing: &'static str, error: &rocksdb::Error) -> Self {
        if error.kind() == rocksdb::ErrorKind::Corruption {
            return Self::corrupt(path, format_args!("RocksDB cannot {doing}: {error}"));
        }
        // Its C interface gives text only; this is what it says of its own syncs, of the MANIFEST's above all.
        let message = error.as_ref();
        if ["While fsync", "While fdatasync", "While sync_file_range"]
            .iter()
            .any(|sync| message.contains(sync))
        {
            return Self::sync(path, io::Error::other(format!("RocksDB cannot {doing}: {message}")));
        }
        Self::Rocks { path: path.to_owned(), doing, message: message.to_owned() }
    }

    /// Whether what is here is not what was written, or not all of it: the replica has lost something.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        matches!(self, Self::Corrupt { .. } | Self::IdentityMismatch { .. } | Self::Absent { .. })
    }

    /// Whether the disk (or a quota) is full: worth trying again when there is space.
    #[must_use]
    pub fn is_disk_full(&self) -> bool {
        match self {
            Self::Io { source, .. } => {
                matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
            }
            // RocksDB's C interface gives text only; this is its name for ENOSPC.
            Self::Rocks { message, .. } => message.contains("No space left on device"),
            _ => false,
        }
    }
}

impl From<WriteError> for StoreError {
    fn from(WriteError { path, failed_sync, source }: WriteError) -> Self {
        if failed_sync { Self::Sync { path, source } } else { Self::Io { path, source } }
    }
}
