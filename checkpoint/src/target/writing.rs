//! A checkpoint in the making.
//!
//! It walks: a mark -> no files are being pruned -> files are put, by whoever -> the mark anew -> no files are being pruned -> all
//! files are there -> the manifest -> the mark goes.
//!
//! Why twice: whoever was paused for so long that its mark grew stale may have lost files to a prune. It sees that, since a prune that
//! did not see the mark made its own before.
//!
//! Not here: marks themselves (`marks`), the files (`put`).

use std::time::{Duration, Instant};

use super::marks::{Mark, MarkKind};
use super::{Target, TargetError, WRITING_STALE_AFTER};
use crate::manifest::{Content, FileEntry};
use crate::name::CheckpointName;

/// For a prune to end that is under way.
const PRUNE_WAIT_MAX: Duration = Duration::from_secs(120);
/// Between two looks at it.
const PRUNE_LOOK_EVERY: Duration = Duration::from_millis(200);
/// Files that are looked at before the mark's age is.
const LOOKS_BETWEEN_RENEWALS: usize = 4096;

/// A checkpoint that is being written: while its mark is young no prune takes files away. Files may be put by other processes too.
///
/// Invariants:
/// - a file may be taken for "there already" only while the mark is young: renew it at least every ten minutes;
/// - dropping it leaves the mark, which grows stale: whoever died looks the same.
#[derive(Debug)]
pub struct Writing {
    target: Target,
    name: CheckpointName,
    mark: Mark,
}

impl Target {
    /// Begins a checkpoint. Waits until files are no longer being pruned.
    ///
    /// # Errors
    /// There is one of this name already; files are being pruned for too long; or the store fails.
    pub async fn begin(&self, name: &CheckpointName) -> Result<Writing, TargetError> {
        self.begin_within(name, PRUNE_WAIT_MAX).await
    }

    pub(crate) async fn begin_within(
        &self,
        name: &CheckpointName,
        wait_max: Duration,
    ) -> Result<Writing, TargetError> {
        if self.has(name).await? {
            return Err(TargetError::Exists { target: self.url.to_string(), name: name.clone() });
        }
        let mark = self.put_mark(MarkKind::Writing, name.as_str()).await?;
        let mut writing = Writing { target: self.clone(), name: name.clone(), mark };
        match writing.wait_for_prunes(wait_max).await {
            Ok(()) => Ok(writing),
            Err(error) => {
                // Its own error is the one to hear of. A mark that stays grows stale.
                let _ = writing.abandon().await;
                Err(error)
            }
        }
    }

    /// Makes a checkpoint of files that were put without [`Target::begin`]. It is whole or it is none, but a prune at the same time may
    /// have taken old files that it builds upon: it fails then.
    ///
    /// # Errors
    /// As [`Writing::finish`], and as [`Target::begin`].
    pub async fn finish(&self, content: &Content) -> Result<(), TargetError> {
        self.begin(&content.name).await?.finish(content).await
    }
}

impl Writing {
    /// Where it goes.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// What it will be called.
    #[must_use]
    pub fn name(&self) -> &CheckpointName {
        &self.name
    }

    /// Keeps the mark young.
    ///
    /// # Errors
    /// The store fails. The mark is as old as it was.
    pub async fn renew(&mut self) -> Result<(), TargetError> {
        self.target.renew_mark(&mut self.mark).await
    }

    /// As if this process had been paused.
    #[cfg(test)]
    pub(crate) fn make_old(&mut self, age: Duration) {
        self.target.make_old(&mut self.mark, age);
    }

    /// With a young mark: until nobody prunes who may not have seen it.
    async fn wait_for_prunes(&mut self, wait_max: Duration) -> Result<(), TargetError> {
        let began = Instant::now();
        loop {
            let now = self.target.store_time(&self.mark).await?;
            let (young, _) = self.target.marks(MarkKind::Pruning, now).await?;
            let Some(path) = young.into_iter().next() else { return Ok(()) };
            let waited = began.elapsed();
            if waited >= wait_max {
                let target = self.target.url.to_string();
                return Err(TargetError::Pruning { target, path, seconds: waited.as_secs() });
            }
            tokio::time::sleep(PRUNE_LOOK_EVERY.min(wait_max)).await;
            self.renew().await?;
        }
    }

    /// Makes it a checkpoint: sees that every file is there with its length, and creates the manifest. When this returns it is
    /// durable. The mark goes in any case.
    ///
    /// # Errors
    /// The content has another name; a file is missing or has another length; there is a checkpoint of this name already; the content
    /// contradicts itself; the store fails. There is no checkpoint then, unless the store failed at the very end: [`Target::has`] tells.
    pub async fn finish(mut self, content: &Content) -> Result<(), TargetError> {
        let created = self.create(content).await;
        let mark = self.target.remove_mark(self.mark).await;
        if let Err(error) = mark {
            // The checkpoint is what it is. The mark holds prunes up until it is stale.
            tracing::warn!(%error, "the mark of a checkpoint stays");
        }
        created
    }

    async fn create(&mut self, content: &Content) -> Result<(), TargetError> {
        if content.name != self.name {
            let path = Target::manifest_path(&self.name);
            let what = format!("it would be the manifest of {}", content.name);
            return Err(TargetError::Contradiction { target: self.target.url.to_string(), path, what });
        }
        let bytes = self.target.encode_manifest(content)?;
        let files = content.files();
        while !self.look_at(&files).await? {}
        self.target.create_manifest(content, bytes).await
    }

    /// Sees that the files are there, and that nobody can have begun to prune since. `false`: look again, this process was paused.
    async fn look_at(&mut self, files: &[FileEntry]) -> Result<bool, TargetError> {
        self.renew().await?;
        self.wait_for_prunes(PRUNE_WAIT_MAX).await?;
        for some in files.chunks(LOOKS_BETWEEN_RENEWALS) {
            self.target.look_at_files(some).await?;
            if !self.mark.is_young() {
                return Ok(false);
            }
            if self.mark.age() > WRITING_STALE_AFTER / 8 {
                self.renew().await?;
            }
        }
        Ok(self.mark.is_young())
    }

    /// Gives up. Files that were put stay until a prune.
    ///
    /// # Errors
    /// [`TargetError`]: the mark stays until it is stale.
    pub async fn abandon(self) -> Result<(), TargetError> {
        self.target.remove_mark(self.mark).await
    }
}
