//! Removes checkpoints that no rule keeps, and collects the files that no checkpoint needs any more.
//!
//! A prune walks: manifests -> which stay ([`Keep`]) -> the others' manifests go -> a mark -> who writes? -> manifests again -> files
//! that none of them names, older than a grace -> its mark goes.
//!
//! Invariants:
//! - a file goes only when every manifest that was there after the mark was read, and none names it. A manifest that cannot be read may
//!   need any file: then none goes;
//! - while somebody writes a checkpoint no file goes: it may build upon files that nobody names yet, or no longer. Who begins to write
//!   waits for the mark (`crate::target`, the marks);
//! - a manifest is gone durably before a file is touched. So a death at any point leaves whole checkpoints, and files that a later prune
//!   collects;
//! - memory is bounded by one manifest at a time, and the names of the files that are needed.
//!
//! Not here: marks (`crate::target`).

mod plan;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::TryStreamExt;

use crate::hash::FileHash;
use crate::manifest::{Content, FileKind};
use crate::name::CheckpointName;
use crate::target::{Mark, MarkKind, PRUNING_STALE_AFTER, StoreTime, Target, TargetError, Unneeded};
pub use plan::{Keep, KeepError};

/// The grace, when nobody says.
pub const GRACE_DEFAULT: Duration = Duration::from_secs(24 * 60 * 60);
/// What a put left that died is no longer written to after this long, whatever the grace.
const STAGED_GRACE_MIN: Duration = Duration::from_secs(60 * 60);

/// How a target is pruned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PruneOptions {
    /// Which checkpoints stay.
    pub keep: Keep,
    /// Files that were put less long ago stay, whoever needs them.
    pub grace: Duration,
}

/// What a prune did, or would do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PruneReport {
    /// Checkpoints that stay, the newest first.
    pub kept: Vec<CheckpointName>,
    /// Checkpoints that went, the newest first.
    pub removed: Vec<CheckpointName>,
    /// Files that went.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Why files that nobody needs were left to a later prune.
    pub files_left: Option<FilesLeft>,
    /// Manifests that cannot be read, and why. They stay.
    pub broken: Vec<(CheckpointName, String)>,
}

/// Why no file was touched, or not all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FilesLeft {
    /// A checkpoint is in the making.
    #[error("a checkpoint is being written ({mark}): files are left to the next prune")]
    Writing {
        /// Whose mark.
        mark: String,
    },
    /// A manifest cannot be read: it may need any file.
    #[error("a manifest cannot be read: no file is touched until it is removed or mended")]
    Broken,
    /// This process stood still for so long that its mark may have been taken for stale.
    #[error("this prune was paused for too long: the other files are left to the next")]
    Paused,
}

/// What the manifests of a target say.
#[derive(Default)]
struct Manifests<T> {
    whole: Vec<T>,
    broken: Vec<(CheckpointName, String)>,
}

/// Reads all manifests, one at a time, and keeps of each what is asked for.
async fn read<T>(target: &Target, mut keep: impl FnMut(Content) -> T) -> Result<Manifests<T>, TargetError> {
    let mut found = Manifests { whole: Vec::new(), broken: Vec::new() };
    for listed in target.list().await? {
        match target.get_manifest(&listed.name).await {
            Ok(content) => found.whole.push(keep(content)),
            // Somebody else removed it since.
            Err(TargetError::Unknown { .. }) => {}
            Err(error) if error.is_of_the_store() => return Err(error),
            Err(error) => found.broken.push((listed.name, error.to_string())),
        }
    }
    Ok(found)
}

/// What the rules say of the checkpoints that are there.
async fn decide(target: &Target, keep: Keep) -> Result<PruneReport, TargetError> {
    let manifests = read(target, |content| (content.created_ms, content.name)).await?;
    let (kept, removed) = keep.part(manifests.whole);
    Ok(PruneReport { kept, removed, broken: manifests.broken, ..PruneReport::default() })
}

/// The files that checkpoints need, those in `but` left out. `None`: a manifest cannot be read.
async fn needed(
    target: &Target,
    but: &[CheckpointName],
) -> Result<Option<BTreeSet<(FileKind, FileHash)>>, TargetError> {
    let but: BTreeSet<&CheckpointName> = but.iter().collect();
    let mut needed = BTreeSet::new();
    let manifests = read(target, |content| {
        if !but.contains(&content.name) {
            needed.extend(content.files().iter().map(|file| (file.kind, file.hash)));
        }
    })
    .await?;
    Ok(manifests.broken.is_empty().then_some(needed))
}

/// What a prune would do. Changes nothing.
///
/// # Errors
/// The store fails.
pub async fn plan(target: &Target, options: &PruneOptions) -> Result<PruneReport, TargetError> {
    let mut report = decide(target, options.keep).await?;
    let now = StoreTime::of_this_machine();
    let (writing, _) = target.marks(MarkKind::Writing, now).await?;
    if let Some(mark) = writing.into_iter().next() {
        report.files_left = Some(FilesLeft::Writing { mark });
        return Ok(report);
    }
    let Some(needed) = needed(target, &report.removed).await? else {
        report.files_left = Some(FilesLeft::Broken);
        return Ok(report);
    };
    let mut files = target.unneeded(needed, now, options.grace);
    while let Some(file) = files.try_next().await? {
        report.files += 1;
        report.bytes += file.bytes;
    }
    Ok(report)
}

/// Prunes a target.
///
/// # Errors
/// The store fails. What is left then is whole, and a later prune goes on.
pub async fn prune(target: &Target, options: &PruneOptions) -> Result<PruneReport, TargetError> {
    let mut report = decide(target, options.keep).await?;
    for name in &report.removed {
        target.remove_manifest(name).await?;
    }
    target.sync_removals("manifests").await?;
    let mut mark = target.put_mark(MarkKind::Pruning, "").await?;
    let collected = collect(target, &mut mark, options.grace, &mut report).await;
    let removed = target.remove_mark(mark).await;
    collected?;
    removed?;
    Ok(report)
}

/// Collects files under a mark.
async fn collect(
    target: &Target,
    mark: &mut Mark,
    grace: Duration,
    report: &mut PruneReport,
) -> Result<(), TargetError> {
    let now = target.store_time(mark).await?;
    let (writing, died) = target.marks(MarkKind::Writing, now).await?;
    if let Some(mark) = writing.into_iter().next() {
        report.files_left = Some(FilesLeft::Writing { mark });
        return Ok(());
    }
    // Whoever wrote and ended since has its manifest there by now: marks are looked at first.
    let Some(needed) = needed(target, &[]).await? else {
        report.files_left = Some(FilesLeft::Broken);
        return Ok(());
    };
    let mut files = target.unneeded(needed, now, grace);
    while let Some(Unneeded { path, bytes }) = files.try_next().await? {
        // Whoever finds the mark stale begins to write. So nothing is removed with one that is not young.
        if !mark.is_young() {
            report.files_left = Some(FilesLeft::Paused);
            return Ok(());
        }
        target.remove(&path).await?;
        report.files += 1;
        report.bytes += bytes;
        if mark.age() > PRUNING_STALE_AFTER / 8 {
            target.renew_mark(mark).await?;
        }
    }
    let (_, stopped) = target.marks(MarkKind::Pruning, now).await?;
    for path in died.iter().chain(&stopped) {
        target.remove(path).await?;
    }
    target.remove_staged(grace.max(STAGED_GRACE_MIN)).await
}
