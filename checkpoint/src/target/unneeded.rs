//! Files that no manifest names.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::stream::BoxStream;
use futures_util::{StreamExt, TryStreamExt, future};
use object_store::ObjectMeta;

use super::marks::StoreTime;
use super::{Target, TargetError};
use crate::hash::FileHash;
use crate::manifest::FileKind;
use crate::name::CheckpointName;

/// A file that nobody needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unneeded {
    pub(crate) path: String,
    pub(crate) bytes: u64,
}

/// What a file is by its name; `None`: it is not one of a checkpoint, and nobody's business.
fn file_of(meta: &ObjectMeta) -> Option<(FileKind, FileHash)> {
    let (hash, end) = meta.location.filename()?.split_once('.')?;
    let kind = match end {
        "run" => FileKind::Run,
        "state" => FileKind::State,
        _ => return None,
    };
    Some((kind, hash.parse().ok()?))
}

impl Target {
    /// The files that are not among those needed and were put at least `grace` ago.
    pub(crate) fn unneeded(
        &self,
        needed: BTreeSet<(FileKind, FileHash)>,
        now: StoreTime,
        grace: Duration,
    ) -> BoxStream<'static, Result<Unneeded, TargetError>> {
        let target = self.clone();
        let files = self.store.list(Some(&self.path("files")));
        let files = files.try_filter_map(move |meta| {
            let is_unneeded = file_of(&meta)
                .is_some_and(|file| !needed.contains(&file) && now.age_at_first(&meta) >= grace);
            let path = format!("files/{}", meta.location.filename().unwrap_or_default());
            future::ok(is_unneeded.then_some(Unneeded { path, bytes: meta.size }))
        });
        let files =
            files.filter(|file| future::ready(!matches!(file, Err(object_store::Error::NotFound { .. }))));
        files.map_err(move |error| target.error("list", "files", &error)).boxed()
    }

    /// Removes a checkpoint: its manifest, and no file.
    pub(crate) async fn remove_manifest(&self, name: &CheckpointName) -> Result<(), TargetError> {
        self.remove(&Self::manifest_path(name)).await
    }
}
