//! Opening a target.

use std::sync::Arc;

use object_store::local::LocalFileSystem;
use object_store::path::Path;
use url::Url;

use super::{Target, TargetError};

/// Without a password, and without what stands behind a question mark.
fn shown(url: &str) -> String {
    let Ok(mut url) = Url::parse(url) else { return super::error::redact(url) };
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
        Self::open_or_create(url, true)
    }

    /// Opens a target that exists, as [`Target::create`] does.
    ///
    /// # Errors
    /// The URL leads nowhere.
    pub fn open(url: &str) -> Result<Self, TargetError> {
        Self::open_or_create(url, false)
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
        Ok(Target { store: Arc::new(store), root: Path::default(), url: shown(text).into() })
    }

    #[cfg(feature = "clouds")]
    fn bucket(url: &Url, shown: String) -> Result<Self, String> {
        let known = ["AWS_", "GOOGLE_", "AZURE_"];
        let options = std::env::vars()
            .filter(|(name, _)| known.iter().any(|start| name.starts_with(start)))
            .map(|(name, value)| (name.to_ascii_lowercase(), value));
        let (store, root) =
            object_store::parse_url_opts(url, options).map_err(|error| super::error::reason(&error))?;
        Ok(Target { store: store.into(), root, url: shown.into() })
    }

    #[cfg(not(feature = "clouds"))]
    fn bucket(url: &Url, _: String) -> Result<Self, String> {
        Err(format!("this build knows file:// only, and not {}:// (feature `clouds`)", url.scheme()))
    }
}
