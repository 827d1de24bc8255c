//! What a checkpoint is.

use std::collections::BTreeMap;

use evershard_proto::v1::{JobDefinition, TableDefinition};
use prost::Message;
use serde::{Deserialize, Serialize};

use super::part::{FileEntry, ShardEntry};
use super::text;
use crate::name::CheckpointName;

/// What a checkpoint is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Content {
    /// Its name, which is its file's name too.
    pub name: CheckpointName,
    /// When it was cut: milliseconds since 1970, by the clock of who made it.
    pub created_ms: u64,
    /// The cluster that it is of.
    pub cluster: String,
    /// Which version of replicated behaviour that had.
    pub cluster_version: u32,
    /// In ascending order of their numbers.
    pub tables: Vec<TableEntry>,
    /// In ascending order of their ranges.
    pub shards: Vec<ShardEntry>,
    /// Bytes of all its files.
    pub bytes_total: u64,
    /// Bytes of those that were uploaded for it.
    pub bytes_added: u64,
    /// The checkpoint whose files it builds upon. For people: all that is needed is named here.
    pub parent: Option<CheckpointName>,
    /// The training runs, in ascending order of their names.
    pub jobs: Vec<JobEntry>,
    /// What its maker says about it.
    pub metadata: BTreeMap<String, String>,
    /// How long workers were held, from the last one's arrival to the last commit of a cut. Milliseconds.
    pub hold_ms: f64,
    /// How long was waited for workers to arrive. Milliseconds.
    pub wait_ms: f64,
}

/// A table as of the cut.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TableEntry {
    /// Its name.
    pub name: String,
    /// Its permanent number, which ids are hashed with.
    pub number: u32,
    /// Its `v1::TableDefinition`, encoded. Kept as bytes: fields that this build does not know survive being read and written.
    #[serde(with = "text::base64")]
    pub definition: Vec<u8>,
    /// How often the definition was changed.
    pub definition_version: u64,
    /// Live rows over all shards.
    pub rows: u64,
    /// The digest of its rows over all shards, counting records too: 32 hexadecimal digits.
    pub digest: String,
}

/// A job as of the cut.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobEntry {
    /// Its name.
    pub name: String,
    /// Its permanent number in its cluster.
    pub number: u64,
    /// Its `v1::JobDefinition`, encoded.
    #[serde(with = "text::base64")]
    pub definition: Vec<u8>,
    /// The step that it has done: of a job without steps of its own, the lowest clock.
    pub step: u64,
    /// In ascending order of their ranks.
    pub workers: Vec<WorkerEntry>,
}

/// A worker as of the cut.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerEntry {
    /// Its rank.
    pub rank: u32,
    /// Steps that it has ended.
    pub clock: u64,
    /// Barriers that it has passed.
    pub barriers: u64,
    /// Where it is in its data: its own words.
    #[serde(with = "text::base64")]
    pub cursor: Vec<u8>,
}

impl Content {
    /// Every file that it needs, each once.
    #[must_use]
    pub fn files(&self) -> Vec<FileEntry> {
        let mut files: Vec<FileEntry> = self.shards.iter().flat_map(ShardEntry::files).collect();
        files.sort_by_key(|file| (file.kind, file.hash));
        files.dedup_by_key(|file| (file.kind, file.hash));
        files
    }

    /// What [`Content::bytes_total`] must be.
    #[must_use]
    pub fn sum_of_bytes(&self) -> u64 {
        self.files().iter().map(|file| file.bytes).sum()
    }

    /// The table of this number.
    #[must_use]
    pub fn table(&self, number: u32) -> Option<&TableEntry> {
        let at = self.tables.binary_search_by_key(&number, |table| table.number);
        at.ok().map(|at| &self.tables[at])
    }
}

impl TableEntry {
    /// The definition, as far as this build knows its fields.
    ///
    /// # Errors
    /// The bytes are no definition.
    pub fn decode(&self) -> Result<TableDefinition, prost::DecodeError> {
        TableDefinition::decode(&self.definition[..])
    }
}

impl JobEntry {
    /// The definition, as far as this build knows its fields.
    ///
    /// # Errors
    /// The bytes are no definition.
    pub fn decode(&self) -> Result<JobDefinition, prost::DecodeError> {
        JobDefinition::decode(&self.definition[..])
    }
}
