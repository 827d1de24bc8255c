//! A shard's part: a chain of links, and its small state.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::text;
use crate::hash::FileHash;

/// A shard as of its cut.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// Its number.
    pub shard: u32,
    /// Its Raft group.
    pub group: u64,
    /// Index of the `Cut` entry.
    pub cut: u64,
    /// Term of the `Cut` entry.
    pub term: u64,
    /// Its lowest key.
    #[serde(with = "text::key")]
    pub first_key: u64,
    /// Its highest key.
    #[serde(with = "text::key")]
    pub last_key: u64,
    /// Base first.
    pub links: Vec<Link>,
    /// Clocks, steps and definitions as of the cut.
    pub state: StateEntry,
}

/// What a chain is made of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// All rows, or those that changed since the link before.
    pub kind: LinkKind,
    /// As of this entry.
    pub cut: u64,
    /// In any order; keys may overlap, and are of equal rows then.
    pub runs: Vec<RunEntry>,
    /// Tables that were cleared since the link before, and the entries that did it: rows of lower versions are none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub floors: BTreeMap<u32, u64>,
}

/// Which rows a link has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
    /// All.
    Base,
    /// What changed since the cut of the link before, and tombstones of what was removed since.
    Delta,
}

/// A run of a link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RunEntry {
    /// Its file.
    pub hash: FileHash,
    /// The table's permanent number.
    pub table: u32,
    /// Rows, tombstones and counting records among them.
    pub rows: u64,
    /// Its lowest key.
    #[serde(with = "text::key")]
    pub first_key: u64,
    /// Its highest key.
    #[serde(with = "text::key")]
    pub last_key: u64,
    /// Its length.
    pub bytes: u64,
    /// Of all its bytes.
    pub crc32: u32,
}

/// A shard's small state.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StateEntry {
    /// Its file.
    pub hash: FileHash,
    /// Its length.
    pub bytes: u64,
    /// Of all its bytes.
    pub crc32: u32,
}

/// What kind of file it is, which its name ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FileKind {
    /// Rows.
    Run,
    /// A shard's small state.
    State,
}

/// A file of a target, whoever needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileEntry {
    /// What it is.
    pub kind: FileKind,
    /// Of its bytes.
    pub hash: FileHash,
    /// Its length.
    pub bytes: u64,
    /// Of its bytes.
    pub crc32: u32,
}

impl FileEntry {
    /// Its path in a target.
    #[must_use]
    pub fn path(&self) -> String {
        let end = match self.kind {
            FileKind::Run => "run",
            FileKind::State => "state",
        };
        format!("files/{}.{end}", self.hash)
    }
}

impl RunEntry {
    /// The file that it is.
    #[must_use]
    pub fn file(&self) -> FileEntry {
        FileEntry { kind: FileKind::Run, hash: self.hash, bytes: self.bytes, crc32: self.crc32 }
    }
}

impl StateEntry {
    /// The file that it is.
    #[must_use]
    pub fn file(&self) -> FileEntry {
        FileEntry { kind: FileKind::State, hash: self.hash, bytes: self.bytes, crc32: self.crc32 }
    }
}

impl ShardEntry {
    /// The files of its part.
    pub fn files(&self) -> impl Iterator<Item = FileEntry> {
        let runs = self.links.iter().flat_map(|link| link.runs.iter().map(RunEntry::file));
        runs.chain(std::iter::once(self.state.file()))
    }
}
