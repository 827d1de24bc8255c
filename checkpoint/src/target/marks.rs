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

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

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
    /// For whoever changes nothing, and so has no file of its own to look at.
    pub(crate) fn of_this_machine() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        StoreTime { at_ms: i64::try_from(now.as_millis()).unwrap_or(i64::MAX), read: Instant::now() }
    }

    /// How old a file was when the clock was read: it is at least that old now.
    pub(crate) fn age_at_first(&self, file: &ObjectMeta) -> Duration {
        let then = self.at_ms.saturating_sub(file.last_modified.timestamp_millis());
        Duration::from_millis(u64::try_from(then).unwrap_or(0))
    }

    /// How long ago a file was put. A file of the store's future was put just now.
    pub(crate) fn age(&self, file: &ObjectMeta) -> Duration {
        self.age_at_first(file) + self.read.elapsed()
    }
}

/// A mark that was put, and by whom. Dropping it leaves it where it is.
#[derive(Debug)]
pub(crate) struct Mark {
    kind: MarkKind,
    about: String,
    path: String,
    /// Before it was last put: it is at least this young. A machine that was suspended has a clock that stood still, so both are asked.
    renewed: (Instant, SystemTime),
}

/// A path that no mark has had.
fn new_path(kind: MarkKind, about: &str) -> String {
    let separator = if about.is_empty() { "" } else { "-" };
    format!("{}/{about}{separator}{}.json", kind.folder(), Uuid::new_v4().simple())
}

impl Mark {
    /// How long ago it was put, at most.
    pub(crate) fn age(&self) -> Duration {
        self.renewed.0.elapsed().max(self.renewed.1.elapsed().unwrap_or_default())
    }

    /// Whether everybody takes it for one of somebody who lives, for as long again as one request may last.
    pub(crate) fn is_young(&self) -> bool {
        self.age() < self.kind.stale_after() / 2
    }
}

impl Target {
    /// Puts a mark. `about` is for people, and a part of its name: a checkpoint's name, or nothing.
    pub(crate) async fn put_mark(&self, kind: MarkKind, about: &str) -> Result<Mark, TargetError> {
        let renewed = (Instant::now(), SystemTime::now());
        let mark = Mark { kind, about: about.to_owned(), path: new_path(kind, about), renewed };
        self.write_mark(&mark).await?;
        Ok(mark)
    }

    /// Puts a mark again: it is young then. One that somebody may have taken for stale gets another name: whoever did removes the old
    /// one, and perhaps only now.
    pub(crate) async fn renew_mark(&self, mark: &mut Mark) -> Result<(), TargetError> {
        let renewed = (Instant::now(), SystemTime::now());
        if mark.is_young() {
            self.write_mark(mark).await?;
            mark.renewed = renewed;
            return Ok(());
        }
        let Mark { kind, about, .. } = &*mark;
        let new = Mark { kind: *kind, about: about.clone(), path: new_path(*kind, about), renewed };
        self.write_mark(&new).await?;
        let old = std::mem::replace(mark, new);
        self.remove_mark(old).await
    }

    async fn write_mark(&self, mark: &Mark) -> Result<(), TargetError> {
        let text = serde_json::json!({ "process": std::process::id(), "about": mark.about }).to_string();
        let put = self.store.put(&self.path(&mark.path), text.into()).await;
        put.map(drop).map_err(|error| self.error("write", &mark.path, &error))
    }

    /// As if nobody had renewed it for so long: for tests of pauses.
    #[cfg(test)]
    pub(crate) fn make_old(&self, mark: &mut Mark, age: Duration) {
        mark.renewed.1 -= age;
        if let Some(directory) = &self.directory {
            let file =
                std::fs::File::options().write(true).open(directory.join(&mark.path)).expect("the mark");
            file.set_modified(SystemTime::now() - age).expect("changed");
        }
    }

    /// Takes a mark away.
    pub(crate) async fn remove_mark(&self, mark: Mark) -> Result<(), TargetError> {
        self.remove(&mark.path).await
    }

    /// The store's clock, by the mark that was just put.
    pub(crate) async fn store_time(&self, mark: &Mark) -> Result<StoreTime, TargetError> {
        let meta = self.store.head(&self.path(&mark.path)).await;
        let meta = meta.map_err(|error| self.error("look at", &mark.path, &error))?;
        Ok(StoreTime { at_ms: meta.last_modified.timestamp_millis(), read: mark.renewed.0 })
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
