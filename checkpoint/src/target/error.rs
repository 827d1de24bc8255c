//! Why a target did not give or take what was asked.

use crate::manifest::ManifestError;
use crate::name::CheckpointName;
use crate::run::RunError;

/// Why a target did not give or take what was asked.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The URL leads nowhere.
    #[error("{url} is not a target (like file:///checkpoints or s3://bucket/path): {reason}")]
    Url {
        /// Without what may be secret.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The store refused, or is not there.
    #[error("{target}: cannot {action} {path}: {reason}")]
    Store {
        /// The target.
        target: String,
        /// What was tried.
        action: &'static str,
        /// With which file.
        path: String,
        /// What the store said, without what may be secret.
        reason: String,
    },
    /// A file that must be there is not.
    #[error("{target}: {path} is missing")]
    Missing {
        /// The target.
        target: String,
        /// Which file.
        path: String,
    },
    /// A file has another length than its manifest says.
    #[error("{target}: {path} has {found} bytes, its manifest says {expected}")]
    Length {
        /// The target.
        target: String,
        /// Which file.
        path: String,
        /// As the manifest says.
        expected: u64,
        /// What there is.
        found: u64,
    },
    /// A file's bytes have changed.
    #[error("{target}: {path} is damaged: its bytes do not have the {what} they should have")]
    Damaged {
        /// The target.
        target: String,
        /// Which file.
        path: String,
        /// Hash or crc32.
        what: &'static str,
    },
    /// A run that cannot be read.
    #[error("{target}: {source}")]
    Run {
        /// The target.
        target: String,
        /// Which, and where.
        source: RunError,
    },
    /// A manifest that cannot be read or written.
    #[error("{target}: {path}: {source}")]
    Manifest {
        /// The target.
        target: String,
        /// Which file.
        path: String,
        /// What is wrong with it.
        source: ManifestError,
    },
    /// A file that is whole, but not what its manifest or another file says.
    #[error("{target}: {path}: {what}")]
    Contradiction {
        /// The target.
        target: String,
        /// Which file.
        path: String,
        /// What contradicts what.
        what: String,
    },
    /// There is a checkpoint of this name.
    #[error("{target}: there is a checkpoint {name} already")]
    Exists {
        /// The target.
        target: String,
        /// Its name.
        name: CheckpointName,
    },
    /// There is no checkpoint of this name.
    #[error("{target}: there is no checkpoint {name}")]
    Unknown {
        /// The target.
        target: String,
        /// What was asked for.
        name: CheckpointName,
    },
}

impl TargetError {
    /// Whether the store could not be reached: another time it may be.
    #[must_use]
    pub fn is_of_the_store(&self) -> bool {
        matches!(self, TargetError::Store { .. })
    }

    /// Whether a checkpoint is not whole: a file is missing, cut or damaged.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        !matches!(
            self,
            TargetError::Url { .. }
                | TargetError::Store { .. }
                | TargetError::Exists { .. }
                | TargetError::Unknown { .. }
        )
    }
}

/// What the store said, innermost first, without what stands behind a question mark (signatures of requests) or in a header.
pub(super) fn reason(error: &object_store::Error) -> String {
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    redact(&innermost.to_string())
}

/// Leaves out queries of URLs and what looks like a credential.
pub(super) fn redact(text: &str) -> String {
    let is_secret = |word: &str| {
        let word = word.to_ascii_lowercase();
        ["secret", "token", "signature", "authorization", "password", "accountkey", "credential="]
            .iter()
            .any(|name| word.contains(name) && word.contains(['=', ':']))
    };
    let words = text.split(' ').map(|word| {
        if is_secret(word) {
            return "<hidden>".to_owned();
        }
        match word.split_once('?') {
            Some((before, _)) if before.contains("://") => format!("{before}?<hidden>"),
            _ => word.to_owned(),
        }
    });
    words.collect::<Vec<_>>().join(" ")
}
