//! A manifest as bytes.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::MANIFEST_BYTES_MAX;
use super::content::Content;
use super::error::ManifestError;
use crate::hash::FileHash;

const MAGIC: &str = "evershard-checkpoint";
const VERSION: u32 = 1;
/// The version that is read and written.
pub(super) const KNOWN_VERSION: u32 = VERSION;

#[derive(Serialize, Deserialize)]
struct Envelope<'a> {
    format: String,
    version: u32,
    checksum: String,
    #[serde(borrow)]
    content: &'a RawValue,
}

fn malformed(error: &serde_json::Error) -> ManifestError {
    ManifestError::Malformed { reason: error.to_string() }
}

/// Writes a manifest.
///
/// # Errors
/// The content contradicts itself, or is longer than a manifest may be: such a checkpoint could not be read.
pub fn encode(content: &Content) -> Result<Vec<u8>, ManifestError> {
    content.check()?;
    let text = serde_json::to_string(content).map_err(|error| malformed(&error))?;
    let checksum = FileHash::of(text.as_bytes()).to_string();
    let content = RawValue::from_string(text).map_err(|error| malformed(&error))?;
    let envelope = Envelope { format: MAGIC.to_owned(), version: VERSION, checksum, content: &content };
    let bytes = serde_json::to_vec(&envelope).map_err(|error| malformed(&error))?;
    if bytes.len() > MANIFEST_BYTES_MAX {
        return Err(ManifestError::TooLong { bytes: bytes.len() as u64 });
    }
    Ok(bytes)
}

/// Reads a manifest.
///
/// # Errors
/// It is no manifest, of another version, damaged, beyond a limit, or contradicts itself.
pub fn decode(bytes: &[u8]) -> Result<Content, ManifestError> {
    if bytes.len() > MANIFEST_BYTES_MAX {
        return Err(ManifestError::TooLong { bytes: bytes.len() as u64 });
    }
    let envelope: Envelope<'_> = serde_json::from_slice(bytes).map_err(|error| malformed(&error))?;
    if envelope.format != MAGIC {
        return Err(ManifestError::Malformed { reason: format!("its format is {:?}", envelope.format) });
    }
    if envelope.version != VERSION {
        return Err(ManifestError::Version { found: envelope.version });
    }
    let found = FileHash::of(envelope.content.get().as_bytes()).to_string();
    if found != envelope.checksum {
        return Err(ManifestError::Checksum { expected: envelope.checksum, found });
    }
    let content: Content = serde_json::from_str(envelope.content.get()).map_err(|error| malformed(&error))?;
    content.check()?;
    Ok(content)
}
