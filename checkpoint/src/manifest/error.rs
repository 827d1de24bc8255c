//! What is wrong with a manifest. Who reads files says which.

use super::MANIFEST_BYTES_MAX;

/// A manifest that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// Longer than any.
    #[error("{bytes} bytes are more than a manifest may have ({MANIFEST_BYTES_MAX})")]
    TooLong {
        /// How long it is.
        bytes: u64,
    },
    /// No JSON, or other fields than a manifest has.
    #[error("this is no manifest of a checkpoint: {reason}")]
    Malformed {
        /// What the parser says, with line and column.
        reason: String,
    },
    /// Of another version of Evershard.
    #[error("manifest version {found}, this build reads {version}", version = super::codec::KNOWN_VERSION)]
    Version {
        /// What it says.
        found: u32,
    },
    /// Its bytes have changed.
    #[error("the manifest is damaged or was edited: its checksum is {expected}, its content has {found}")]
    Checksum {
        /// What it says.
        expected: String,
        /// What its content has.
        found: String,
    },
    /// It contradicts itself, or is beyond a limit.
    #[error("{place}: {what}")]
    Invalid {
        /// Where: like `shard 3, link 1`.
        place: String,
        /// What is wrong there.
        what: String,
    },
}
