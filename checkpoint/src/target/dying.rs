//! A store that dies: for tests of crash points. Every change counts; from one on all calls fail, as they do for whoever is dead.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt, stream};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

use super::Target;

#[derive(Debug)]
pub(crate) struct Dying {
    inner: Arc<dyn ObjectStore>,
    /// Changes that are still made.
    left: Arc<AtomicUsize>,
}

impl Dying {
    /// The target, for somebody who dies after so many changes.
    pub(crate) fn after(target: &Target, changes: usize) -> Target {
        let store = Dying { inner: target.store.clone(), left: Arc::new(AtomicUsize::new(changes)) };
        Target { store: Arc::new(store), ..target.clone() }
    }

    fn dead() -> Error {
        Error::Generic { store: "dying", source: "this process is dead".into() }
    }

    fn alive(&self) -> Result<()> {
        if self.left.load(Ordering::SeqCst) == 0 { Err(Self::dead()) } else { Ok(()) }
    }

    fn change(left: &AtomicUsize) -> Result<()> {
        let counted = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        counted.map(drop).map_err(|_| Self::dead())
    }
}

impl fmt::Display for Dying {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("dying")
    }
}

#[async_trait]
impl ObjectStore for Dying {
    async fn put_opts(&self, path: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        Self::change(&self.left)?;
        self.inner.put_opts(path, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Self::change(&self.left)?;
        self.inner.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        self.alive()?;
        self.inner.get_opts(path, options).await
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let left = self.left.clone();
        let counted = paths.map(move |path| Self::change(&left).and(path));
        self.inner.delete_stream(counted.boxed())
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.alive() {
            Ok(()) => self.inner.list(prefix),
            Err(error) => stream::iter([Err(error)]).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.alive()?;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        Self::change(&self.left)?;
        self.inner.copy_opts(from, to, options).await
    }
}
