//! Files on their way in.

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::{ObjectStoreExt, PutMode, PutOptions, PutPayload};

use super::{Target, TargetError};
use crate::hash::FileHasher;
use crate::manifest::{Content, FileEntry, FileKind, RunEntry, StateEntry, encode};
use crate::run::Run;

/// Files whose lengths are asked for at a time.
const LOOKS_AT_ONCE: usize = 16;

impl Target {
    /// Puts a run, and says whether its bytes were uploaded: they were not there yet.
    ///
    /// # Errors
    /// [`TargetError`]. A part of the file is never seen.
    pub async fn put_run(&self, run: &Run) -> Result<(RunEntry, bool), TargetError> {
        let (file, is_new) = self.put(FileKind::Run, &run.bytes).await?;
        let entry = RunEntry {
            hash: file.hash,
            table: run.head.table,
            rows: run.head.rows,
            first_key: run.head.first_key,
            last_key: run.head.last_key,
            bytes: file.bytes,
            crc32: file.crc32,
        };
        Ok((entry, is_new))
    }

    /// Puts a shard's small state, and says whether its bytes were uploaded.
    ///
    /// # Errors
    /// [`TargetError`]. A part of the file is never seen.
    pub async fn put_state(&self, state: &Bytes) -> Result<(StateEntry, bool), TargetError> {
        let (file, is_new) = self.put(FileKind::State, state).await?;
        Ok((StateEntry { hash: file.hash, bytes: file.bytes, crc32: file.crc32 }, is_new))
    }

    async fn put(&self, kind: FileKind, bytes: &Bytes) -> Result<(FileEntry, bool), TargetError> {
        let mut hasher = FileHasher::default();
        hasher.update(bytes);
        let found = hasher.finish();
        let file = FileEntry { kind, hash: found.hash, bytes: found.bytes, crc32: found.crc32 };
        match self.look_at(&file).await {
            Ok(()) => return Ok((file, false)),
            // Not there, or what was there is cut: the right bytes take its place.
            Err(error) if error.is_damage() => {}
            Err(error) => return Err(error),
        }
        let path = file.path();
        let payload = PutPayload::from_bytes(bytes.clone());
        let put = self.store.put(&self.path(&path), payload).await;
        put.map_err(|error| self.error("write", &path, &error))?;
        Ok((file, true))
    }

    /// That a file is there, with its length. What is in it is not looked at.
    async fn look_at(&self, file: &FileEntry) -> Result<(), TargetError> {
        let path = file.path();
        let meta = self.store.head(&self.path(&path)).await;
        let found = meta.map_err(|error| self.error("look at", &path, &error))?.size;
        if found != file.bytes {
            return Err(TargetError::Length {
                target: self.url.to_string(),
                path,
                expected: file.bytes,
                found,
            });
        }
        Ok(())
    }

    /// That every file of a checkpoint is there, with its length. What is in them is not looked at.
    ///
    /// # Errors
    /// The first that is missing or has another length; or the store fails.
    pub async fn look_at_all(&self, content: &Content) -> Result<(), TargetError> {
        let look = |file: FileEntry| {
            let target = self.clone();
            async move { target.look_at(&file).await }
        };
        let looks: Vec<_> = content.files().into_iter().map(look).collect();
        stream::iter(looks).buffer_unordered(LOOKS_AT_ONCE).try_collect().await
    }

    /// Makes it a checkpoint: sees that every file is there with its length, and creates the manifest. When this returns it is
    /// durable.
    ///
    /// # Errors
    /// A file is missing or has another length; there is a checkpoint of this name already; the content contradicts itself; the
    /// store fails. There is no checkpoint then, unless the store failed at the very end: [`Target::has`] tells.
    pub async fn finish(&self, content: &Content) -> Result<(), TargetError> {
        let path = Self::manifest_path(&content.name);
        let bytes = encode(content).map_err(|source| TargetError::Manifest {
            target: self.url.to_string(),
            path: path.clone(),
            source,
        })?;
        self.look_at_all(content).await?;
        let options = PutOptions::from(PutMode::Create);
        match self.store.put_opts(&self.path(&path), bytes.into(), options).await {
            Ok(_) => Ok(()),
            Err(object_store::Error::AlreadyExists { .. }) => {
                Err(TargetError::Exists { target: self.url.to_string(), name: content.name.clone() })
            }
            Err(error) => Err(self.error("write", &path, &error)),
        }
    }
}
