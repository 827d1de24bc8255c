//! Opening a target.

use std::num::NonZeroU64;
use std::sync::Arc;

use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use url::Url;

use super::rate::Rate;
use super::redact::redact;
use super::{Target, TargetError};

/// How a target is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TargetOptions {
    /// Creates a directory that does not exist. A bucket must.
    pub create: bool,
    /// Holds uploads and downloads to so many bytes a second.
    pub bytes_per_second: Option<NonZeroU64>,
}

/// Without a password, and without what stands behind a question mark.
fn shown(url: &str) -> String {
    let Ok(mut url) = Url::parse(url) else { return redact(url) };
    url.set_query(None);
    url.set_fragment(None);
    if url.password().is_some() || !url.username().is_empty() {
        // A URL that can have a user can do without.
        let _ = (url.set_username(""), url.set_password(None));
    }
    url.to_string()
}

impl Target {
    /// Opens a target: `file:///directory`, whose directory is created; with the feature `clouds` also `s3://bucket/path`,
    /// `gs://bucket/path` and `az://container/path`, whose credentials come from the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`).
    /// Blocks on the disk.
    ///
    /// # Errors
    /// The URL leads nowhere, or the directory cannot be created.
    pub fn create(url: &str) -> Result<Self, TargetError> {
        Self::open_with(url, TargetOptions { create: true, ..TargetOptions::default() })
    }

    /// Opens a target that exists, as [`Target::create`] does.
    ///
    /// # Errors
    /// The URL leads nowhere.
    pub fn open(url: &str) -> Result<Self, TargetError> {
        Self::open_with(url, TargetOptions::default())
    }

    /// Opens a target, as [`Target::create`] does.
    ///
    /// # Errors
    /// The URL leads nowhere, or the directory cannot be created.
    pub fn open_with(text: &str, options: TargetOptions) -> Result<Self, TargetError> {
        let TargetOptions { create, bytes_per_second } = options;
        let mut target = Self::open_or_create(text, create)?;
        target.rate = bytes_per_second.map(|rate| Arc::new(Rate::new(rate)));
        Ok(target)
    }

    pub(crate) fn of_store(
        store: Arc<dyn ObjectStore>,
        root: Path,
        url: &str,
        directory: Option<Arc<std::path::Path>>,
    ) -> Self {
        Target { store, root, url: url.into(), directory, rate: None, bytes_read: Arc::default() }
    }

    fn open_or_create(text: &str, create: bool) -> Result<Self, TargetError> {
        let bad = |reason: String| TargetError::Url { url: shown(text), reason };
        let url = Url::parse(text).map_err(|error| bad(error.to_string()))?;
        let has_credentials = url.password().is_some() || !url.username().is_empty() || url.query().is_some();
        if has_credentials {
            return Err(bad("credentials and options come from the environment, not with the URL".into()));
        }
        if url.scheme() != "file" {
            return Self::bucket(&url, shown(text)).map_err(bad);
        }
        let directory = url.to_file_path().map_err(|()| bad("it names no absolute path".into()))?;
        if create {
            std::fs::create_dir_all(&directory).map_err(|error| bad(error.to_string()))?;
        }
        let store = LocalFileSystem::new_with_prefix(&directory)
            .map_err(|error| bad(super::error::reason(&error)))?
            .with_fsync(true);
        Ok(Self::of_store(Arc::new(store), Path::default(), &shown(text), Some(directory.into())))
    }

    #[cfg(feature = "clouds")]
    fn bucket(url: &Url, shown: String) -> Result<Self, String> {
        let known = ["AWS_", "GOOGLE_", "AZURE_"];
        let options = std::env::vars()
            .filter(|(name, _)| known.iter().any(|start| name.starts_with(start)))
            .map(|(name, value)| (name.to_ascii_lowercase(), value));
        let (store, root) =
            object_store::parse_url_opts(url, options).map_err(|error| super::error::reason(&error))?;
        Ok(Self::of_store(store.into(), root, &shown, None))
    }

    #[cfg(not(feature = "clouds"))]
    fn bucket(url: &Url, _: String) -> Result<Self, String> {
        Err(format!("this build knows file:// only, and not {}:// (feature `clouds`)", url.scheme()))
    }
}
