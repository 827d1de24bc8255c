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
/// A longer file goes in parts.
const PARTS_FROM_BYTES: usize = 16 << 20;
/// Bytes of a part: stores take no shorter ones than 5 MiB.
const PART_BYTES: usize = 8 << 20;

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
        let put = if bytes.len() > PARTS_FROM_BYTES {
            self.put_in_parts(&self.path(&path), bytes).await
        } else {
            self.may_go(file.bytes).await;
            self.store.put(&self.path(&path), PutPayload::from_bytes(bytes.clone())).await.map(drop)
        };
        put.map_err(|error| self.error("write", &path, &error))?;
        Ok((file, true))
    }

    /// A part is one request: a slow connection repeats it, and not the whole file. The file is there after the last.
    async fn put_in_parts(&self, path: &object_store::path::Path, bytes: &Bytes) -> object_store::Result<()> {
        let mut upload = self.store.put_multipart(path).await?;
        let mut put = Ok(());
        let mut at = 0;
        while put.is_ok() && at < bytes.len() {
            let part = bytes.slice(at..bytes.len().min(at + PART_BYTES));
            at += part.len();
            self.may_go(part.len() as u64).await;
            put = upload.put_part(PutPayload::from_bytes(part)).await;
        }
        let put = match put {
            Ok(()) => upload.complete().await.map(drop),
            Err(error) => Err(error),
        };
        if put.is_err() {
            // The error is the one of the part. What stays in the store is not seen.
            let _ = upload.abort().await;
        }
        put
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
        self.look_at_files(&content.files()).await
    }

    pub(super) async fn look_at_files(&self, files: &[FileEntry]) -> Result<(), TargetError> {
        let look = |file: FileEntry| {
            let target = self.clone();
            async move { target.look_at(&file).await }
        };
        stream::iter(files.to_vec()).map(look).buffer_unordered(LOOKS_AT_ONCE).try_collect().await
    }

    /// A manifest as bytes, before anything is asked of the store.
    pub(super) fn encode_manifest(&self, content: &Content) -> Result<Vec<u8>, TargetError> {
        let path = Self::manifest_path(&content.name);
        let target = || self.url.to_string();
        encode(content).map_err(|source| TargetError::Manifest { target: target(), path, source })
    }

    /// Creates the manifest of files that are there.
    pub(super) async fn create_manifest(&self, content: &Content, bytes: Vec<u8>) -> Result<(), TargetError> {
        let path = Self::manifest_path(&content.name);
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
