//! A file on its way in from a target.

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::ObjectStoreExt;

use super::{Target, TargetError};
use crate::hash::FileHasher;
use crate::manifest::{FileEntry, RunEntry, STATE_BYTES_MAX, StateEntry};

/// A file that is being read.
///
/// Invariant: after [`FileStream::next`] has said that there is no more, all bytes had the length, the crc32 and the hash that the
/// manifest says. Until then they are not known to.
pub struct FileStream {
    target: Target,
    file: FileEntry,
    pieces: BoxStream<'static, object_store::Result<Bytes>>,
    hasher: Option<FileHasher>,
}

impl std::fmt::Debug for FileStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileStream").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Target {
    /// Begins to read a run.
    ///
    /// # Errors
    /// It is missing, has another length, or the store fails.
    pub async fn read_run(&self, run: &RunEntry) -> Result<FileStream, TargetError> {
        self.read_file(run.file()).await
    }

    /// Begins to read a file.
    ///
    /// # Errors
    /// It is missing, has another length, or the store fails.
    pub async fn read_file(&self, file: FileEntry) -> Result<FileStream, TargetError> {
        let path = file.path();
        let got = self.store.get(&self.path(&path)).await;
        let got = got.map_err(|error| self.error("read", &path, &error))?;
        if got.meta.size != file.bytes {
            let (expected, found) = (file.bytes, got.meta.size);
            return Err(TargetError::Length { target: self.url.to_string(), path, expected, found });
        }
        let pieces = got.into_stream();
        Ok(FileStream { target: self.clone(), file, pieces, hasher: Some(FileHasher::default()) })
    }

    /// Reads a shard's small state.
    ///
    /// # Errors
    /// It is missing, cut or damaged, or the store fails.
    pub async fn read_state(&self, state: &StateEntry) -> Result<Bytes, TargetError> {
        let mut file = self.read_file(state.file()).await?;
        let mut bytes = Vec::with_capacity(state.bytes.min(STATE_BYTES_MAX) as usize);
        while let Some(piece) = file.next().await? {
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes.into())
    }
}

impl FileStream {
    /// The file's path in its target.
    #[must_use]
    pub fn path(&self) -> String {
        self.file.path()
    }

    /// The next bytes; `None` after the last, when all of them were right.
    ///
    /// # Errors
    /// The store fails; the file has another length, crc32 or hash.
    pub async fn next(&mut self) -> Result<Option<Bytes>, TargetError> {
        let path = self.file.path();
        if let Some(piece) = self.pieces.next().await {
            let piece = piece.map_err(|error| self.target.error("read", &path, &error))?;
            if let Some(hasher) = &mut self.hasher {
                hasher.update(&piece);
            }
            return Ok(Some(piece));
        }
        let Some(found) = self.hasher.take().map(FileHasher::finish) else { return Ok(None) };
        let target = self.target.url.to_string();
        if found.bytes != self.file.bytes {
            let (expected, found) = (self.file.bytes, found.bytes);
            return Err(TargetError::Length { target, path, expected, found });
        }
        let what = match () {
            () if found.crc32 != self.file.crc32 => "crc32",
            () if found.hash != self.file.hash => "hash",
            () => return Ok(None),
        };
        Err(TargetError::Damaged { target, path, what })
    }
}
