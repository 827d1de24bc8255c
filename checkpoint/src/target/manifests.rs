//! Manifests in a target.

use futures_util::TryStreamExt;
use object_store::ObjectStoreExt;

use super::{Target, TargetError};
use crate::manifest::{Content, MANIFEST_BYTES_MAX, ManifestError, decode};
use crate::name::CheckpointName;

/// A checkpoint of a target, before its manifest is read.
#[derive(Debug, Clone, PartialEq)]
pub struct Listed {
    /// Its name.
    pub name: CheckpointName,
    /// When its manifest was created: milliseconds since 1970, by the store's clock.
    pub created_ms: u64,
    /// Length of its manifest.
    pub manifest_bytes: u64,
}

impl Target {
    pub(super) fn manifest_path(name: &CheckpointName) -> String {
        format!("manifests/{name}.json")
    }

    /// The checkpoints, in ascending order of their names. Other files in their folder are no checkpoints.
    ///
    /// # Errors
    /// [`TargetError`].
    pub async fn list(&self) -> Result<Vec<Listed>, TargetError> {
        let folder = self.path("manifests");
        let found: Result<Vec<_>, _> = self.store.list(Some(&folder)).try_collect().await;
        let found = match found {
            Ok(found) => found,
            Err(object_store::Error::NotFound { .. }) => return Ok(Vec::new()),
            Err(error) => return Err(self.error("list", "manifests", &error)),
        };
        let listed = |meta: &object_store::ObjectMeta| {
            let name = meta.location.filename()?.strip_suffix(".json")?.parse().ok()?;
            let created_ms = u64::try_from(meta.last_modified.timestamp_millis()).unwrap_or(0);
            Some(Listed { name, created_ms, manifest_bytes: meta.size })
        };
        let mut checkpoints: Vec<Listed> = found.iter().filter_map(listed).collect();
        checkpoints.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(checkpoints)
    }

    /// Whether there is a checkpoint of this name.
    ///
    /// # Errors
    /// [`TargetError`].
    pub async fn has(&self, name: &CheckpointName) -> Result<bool, TargetError> {
        let path = Self::manifest_path(name);
        match self.store.head(&self.path(&path)).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(self.error("look at", &path, &error)),
        }
    }

    /// The manifest of a checkpoint.
    ///
    /// # Errors
    /// There is none of this name; it cannot be read, is damaged, or of another version.
    pub async fn get_manifest(&self, name: &CheckpointName) -> Result<Content, TargetError> {
        let path = Self::manifest_path(name);
        let target = || self.url.to_string();
        let got = match self.store.get(&self.path(&path)).await {
            Ok(got) => got,
            Err(object_store::Error::NotFound { .. }) => {
                return Err(TargetError::Unknown { target: target(), name: name.clone() });
            }
            Err(error) => return Err(self.error("read", &path, &error)),
        };
        let wrong = |source| TargetError::Manifest { target: target(), path: path.clone(), source };
        if got.meta.size > MANIFEST_BYTES_MAX as u64 {
            return Err(wrong(ManifestError::TooLong { bytes: got.meta.size }));
        }
        let bytes = got.bytes().await.map_err(|error| self.error("read", &path, &error))?;
        let content = decode(&bytes).map_err(wrong)?;
        if content.name != *name {
            let what = format!("it is the manifest of {}", content.name);
            return Err(TargetError::Contradiction { target: target(), path, what });
        }
        Ok(content)
    }
}
