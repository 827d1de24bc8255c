//! Whose data a directory holds: the cluster, the node, and the replicas that were made in it.
//!
//! Invariants:
//! - a directory belongs to one node of one cluster for ever; anything else is refused before a byte is read;
//! - a replica is listed here, as `started`, before it takes part in its group: a started replica without data is a lost
//!   one, and never starts again under its old id;
//! - which replicas were given up by unsafe recoveries is never forgotten.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::durable_file::{self, DurableFileError};

const FILE_NAME: &str = "identity";
const MAGIC: [u8; 8] = *b"EVIDENTY";
/// Without `given_up`.
const VERSION_PLAIN: u32 = 1;
/// With it. Written only when there is something in it, so that an older build reads all others, and none of these: it would
/// start what was given up.
const VERSION: u32 = 2;

/// The data directory cannot be used by this node.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The file.
    #[error(transparent)]
    File(#[from] DurableFileError),
    /// Its bytes are not what was written: nobody knows what this node held.
    #[error(
        "{path} is damaged: {what}. This node cannot know what it held; while the other nodes have a majority, wipe its data \
         directory and start it empty: it is filled again from its peers (docs/recovery.md)"
    )]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The directory is another node's, or of another cluster.
    #[error("{path} belongs to {field} {found}, this node is of {field} {expected}: nothing was changed")]
    Mismatch {
        /// The file.
        path: PathBuf,
        /// `cluster` or `node`.
        field: &'static str,
        /// As found.
        found: String,
        /// As configured.
        expected: String,
    },
}

/// A replica that was made in this directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedReplica {
    /// Its group.
    pub group: u64,
    /// Its shard (`META_SHARD` for the meta group).
    pub shard: u32,
    /// Its id.
    pub replica: u64,
    /// The keys it owns, both ends inclusive.
    pub range_start: u64,
    /// See `range_start`.
    pub range_end: u64,
    /// It takes part in its group: the meta group knows that it is here, so that it can be missed.
    pub started: bool,
    /// Drawn when it was made, and known to the meta group: no other disk's replica of this id has it.
    #[serde(default)]
    pub making: u64,
    /// It was found damaged: it never starts again, and stays only until its successor has what it had.
    #[serde(default)]
    pub damaged: bool,
}

/// The identity file's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The cluster's id.
    pub cluster_id: String,
    /// The node's number.
    pub node: u64,
    /// Every replica that was made here and not destroyed.
    pub replicas: Vec<ListedReplica>,
    /// Replicas of the cluster, here or elsewhere, that were given up by unsafe recoveries.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub given_up: BTreeSet<u64>,
}

impl Identity {
    /// Reads the identity of `data`; `None` when the directory is new. `cluster_id` may be empty: any cluster.
    ///
    /// # Errors
    /// [`IdentityError::Mismatch`] when it is not of this cluster and node.
    pub fn read(data: &Path, cluster_id: &str, node: u64) -> Result<Option<Self>, IdentityError> {
        let path = data.join(FILE_NAME);
        let body = match durable_file::read_from(&path, MAGIC, VERSION_PLAIN..=VERSION) {
            Ok(Some(body)) => body,
            Ok(None) => return Ok(None),
            Err(DurableFileError::Corrupt { path, what }) => {
                return Err(IdentityError::Malformed { path, what });
            }
            Err(error) => return Err(error.into()),
        };
        let identity = Self::decode(&body)
            .map_err(|e| IdentityError::Malformed { path: path.clone(), what: e.to_string() })?;
        let mismatch = |field, found: String, expected: String| {
            Err(IdentityError::Mismatch { path: path.clone(), field, found, expected })
        };
        if !cluster_id.is_empty() && identity.cluster_id != cluster_id {
            return mismatch("cluster", identity.cluster_id, cluster_id.into());
        }
        if identity.node != node {
            return mismatch("node", identity.node.to_string(), node.to_string());
        }
        Ok(Some(identity))
    }

    fn decode(body: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(body)
    }

    /// Replaces the identity of `data`, durably.
    ///
    /// # Errors
    /// What the disk said.
    pub fn write(&self, data: &Path) -> Result<(), IdentityError> {
        let path = data.join(FILE_NAME);
        let body = serde_json::to_vec(self)
            .map_err(|e| IdentityError::Malformed { path: path.clone(), what: e.to_string() })?;
        let version = if self.given_up.is_empty() { VERSION_PLAIN } else { VERSION };
        Ok(durable_file::write(&path, MAGIC, version, &body)?)
    }

    /// Adds a replica, or changes what is known of it.
    #[must_use]
    pub fn with(&self, listed: ListedReplica) -> Self {
        let mut changed = self.without(listed.replica);
        changed.replicas.push(listed);
        changed.replicas.sort_by_key(|r| r.group);
        changed
    }

    /// Takes a replica off the list.
    #[must_use]
    pub fn without(&self, replica: u64) -> Self {
        let mut changed = self.clone();
        changed.replicas.retain(|r| r.replica != replica);
        changed
    }
}

#[cfg(test)]
mod tests {
    use evershard_formats::golden::golden;
    use evershard_formats::{bytes_or_damaged, frugal};
    use proptest::prelude::*;

    use super::*;

    fn example() -> Identity {
        let listed = ListedReplica {
            group: 1,
            shard: 0,
            replica: 12,
            range_start: 0,
            range_end: u64::MAX,
            started: true,
            making: 99,
            damaged: false,
        };
        Identity { cluster_id: "c".into(), node: 1, replicas: vec![listed], given_up: BTreeSet::new() }
    }

    fn recovered() -> Identity {
        Identity { given_up: [7, 8].into(), ..example() }
    }

    #[test]
    fn version_1_stays_as_it_is() {
        let encoded = serde_json::to_vec(&example()).expect("json");
        let bytes = golden(env!("CARGO_MANIFEST_DIR"), "identity-1.json", &encoded);
        assert_eq!(Identity::decode(&bytes).expect("of version 1"), example());
    }

    #[test]
    fn version_2_stays_as_it_is() {
        let encoded = serde_json::to_vec(&recovered()).expect("json");
        let bytes = golden(env!("CARGO_MANIFEST_DIR"), "identity-2.json", &encoded);
        assert_eq!(Identity::decode(&bytes).expect("of version 2"), recovered());
    }

    #[test]
    fn an_older_build_reads_it_until_something_was_given_up() {
        let directory = tempfile::tempdir().expect("tempdir");
        let data = directory.path();
        let path = data.join(FILE_NAME);
        example().write(data).expect("write");
        assert!(durable_file::read(&path, MAGIC, VERSION_PLAIN).is_ok());
        recovered().write(data).expect("write");
        let refused = durable_file::read(&path, MAGIC, VERSION_PLAIN);
        assert!(matches!(refused, Err(DurableFileError::OtherVersion { found: 2, .. })), "{refused:?}");
        assert_eq!(Identity::read(data, "c", 1).expect("read"), Some(recovered()));
    }

    proptest! {
        /// The checksum is the file's; what it lets through is still not believed.
        #[test]
        fn fuzz_identity(bytes in bytes_or_damaged(Just(serde_json::to_vec(&recovered()).expect("json")))) {
            let _ = frugal(bytes.len(), || Identity::decode(&bytes));
        }
    }

    #[test]
    fn a_directory_of_another_cluster_or_node_is_refused() {
        let directory = tempfile::tempdir().expect("tempdir");
        let data = directory.path();
        assert_eq!(Identity::read(data, "", 1).expect("new"), None);
        let identity =
            Identity { cluster_id: "c".into(), node: 1, replicas: vec![], given_up: BTreeSet::new() };
        identity.write(data).expect("write");
        assert_eq!(Identity::read(data, "c", 1).expect("ours"), Some(identity));
        let error = Identity::read(data, "d", 1).expect_err("another cluster").to_string();
        assert!(error.contains("cluster c") && error.contains("cluster d"), "{error}");
        assert!(Identity::read(data, "c", 2).is_err());
    }
}
