//! Marks: small files by which who writes a checkpoint and who collects files see each other.
//!
//! Invariants:
//! - a mark is put before its maker looks for the other kind: of two that begin at once, one at least sees the other;
//! - how old a mark is, is a difference of two times of the store's clock: the clocks of those who look do not matter;
//! - a mark that is not renewed grows stale, and is of somebody who died.
//!
//! What a mark says is for people. Nobody reads it: that it is there, and how long ago it was put, is all that counts.
//!
//! Not here: what is done under a mark (`writing`, `crate::prune`).

use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use object_store::{ObjectMeta, ObjectStoreExt};
use uuid::Uuid;

use super::{PRUNING_STALE_AFTER, Target, TargetError, WRITING_STALE_AFTER};

/// Whose mark it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MarkKind {
    /// A checkpoint is in the making.
    Writing,
    /// Files are being collected.
    Pruning,
}

impl MarkKind {
    fn folder(self) -> &'static str {
        match self {
            MarkKind::Writing => "writing",
            MarkKind::Pruning => "pruning",
        }
    }

    pub(crate) fn stale_after(self) -> Duration {
        match self {
            MarkKind::Writing => WRITING_STALE_AFTER,
            MarkKind::Pruning => PRUNING_STALE_AFTER,
        }
    }
}

/// The store's clock, read once and followed since.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoreTime {
    at_ms: i64,
    read: Instant,
}

impl StoreTime {
    /// How long ago a file was put. A file of the store's future was put just now.
    pub(crate) fn age(&self, file: &ObjectMeta) -> Duration {
        let then = self.at_ms.saturating_sub(file.last_modified.timestamp_millis());
        Duration::from_millis(u64::try_from(then).unwrap_or(0)) + self.read.elapsed()
    }
}

/// A mark that was put, and by whom. Dropping it leaves it where it is.
#[derive(Debug)]
pub(crate) struct Mark {
    kind: MarkKind,
    path: String,
    text: String,
    /// Before it was last put: it is at least this young.
    renewed: Instant,
}

impl Mark {
    /// Its path in the target.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// How long ago it was put, at most.
    pub(crate) fn age(&self) -> Duration {
        self.renewed.elapsed()
    }

    /// Whether everybody takes it for one of somebody who lives, for as long again as one request may last.
    pub(crate) fn is_young(&self) -> bool {
        self.age() < self.kind.stale_after() / 2
    }
}

impl Target {
    /// Puts a mark. `about` is for people, and a part of its name: a checkpoint's name, or nothing.
    pub(crate) async fn put_mark(&self, kind: MarkKind, about: &str) -> Result<Mark, TargetError> {
        let nonce = Uuid::new_v4().simple();
        let separator = if about.is_empty() { "" } else { "-" };
        let path = format!("{}/{about}{separator}{nonce}.json", kind.folder());
        let text = serde_json::json!({ "process": std::process::id(), "about": about }).to_string();
        let mut mark = Mark { kind, path, text, renewed: Instant::now() };
        self.renew_mark(&mut mark).await?;
        Ok(mark)
    }

    /// Puts a mark again: it is young then, and there, even if somebody took it for stale.
    pub(crate) async fn renew_mark(&self, mark: &mut Mark) -> Result<(), TargetError> {
        let before = Instant::now();
        let put = self.store.put(&self.path(&mark.path), mark.text.clone().into()).await;
        put.map_err(|error| self.error("write", &mark.path, &error))?;
        mark.renewed = before;
        Ok(())
    }

    /// Takes a mark away.
    pub(crate) async fn remove_mark(&self, mark: Mark) -> Result<(), TargetError> {
        self.remove(&mark.path).await
    }

    /// The store's clock, by the mark that was just put.
    pub(crate) async fn store_time(&self, mark: &Mark) -> Result<StoreTime, TargetError> {
        let meta = self.store.head(&self.path(&mark.path)).await;
        let meta = meta.map_err(|error| self.error("look at", &mark.path, &error))?;
        Ok(StoreTime { at_ms: meta.last_modified.timestamp_millis(), read: mark.renewed })
    }

    /// The marks of a kind: first the paths of those whose makers live, then of those whose makers died.
    pub(crate) async fn marks(
        &self,
        kind: MarkKind,
        now: StoreTime,
    ) -> Result<(Vec<String>, Vec<String>), TargetError> {
        let found = self.files_in(kind.folder()).await?;
        let (mut young, mut stale) = (Vec::new(), Vec::new());
        for file in found {
            let Some(name) = file.location.filename() else { continue };
            let path = format!("{}/{name}", kind.folder());
            if now.age(&file) < kind.stale_after() { young.push(path) } else { stale.push(path) }
        }
        Ok((young, stale))
    }

    /// What lies in a folder that has few files.
    async fn files_in(&self, folder: &'static str) -> Result<Vec<ObjectMeta>, TargetError> {
        match self.store.list(Some(&self.path(folder))).try_collect().await {
            Ok(found) => Ok(found),
            Err(object_store::Error::NotFound { .. }) => Ok(Vec::new()),
            Err(error) => Err(self.error("list", folder, &error)),
        }
    }

    /// Removes a file. One that is not there is removed.
    pub(crate) async fn remove(&self, path: &str) -> Result<(), TargetError> {
        match self.store.delete(&self.path(path)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.error("remove", path, &error)),
        }
    }
}
