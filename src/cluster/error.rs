//! What can go wrong with a node and its replicas.

use std::io;
use std::path::Path;

use evershard_raft::GroupError;
use evershard_storage::disk::FreeSpace;
use evershard_storage::log::LogError;
use evershard_storage::rocks::StoreError;

use super::identity::IdentityError;
use crate::meta::MetaRecordError;
use crate::shard::ShardError;

/// A node could not start, or a replica could not be made or opened.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The data directory is another's, or its identity is damaged.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The node's log.
    #[error("the node's log: {0}")]
    Log(#[from] LogError),
    /// RocksDB.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A group.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The data directory has an identity and replicas, but its log is gone.
    #[error(
        "{path} holds replicas, but its log is gone: the node would forget acknowledged pushes; wipe the data directory so that its replicas are rebuilt from their peers"
    )]
    LogGone {
        /// The data directory.
        path: std::path::PathBuf,
    },
    /// The node belongs to another cluster than the one that asks.
    #[error("node {node} belongs to cluster {own}, the request is of cluster {asked}: nothing was changed")]
    WrongCluster {
        /// This node.
        node: u64,
        /// Its cluster.
        own: String,
        /// The other.
        asked: String,
    },
    /// The request is for another node.
    #[error("this is node {own}, the request is for node {asked}")]
    WrongNode {
        /// This node.
        own: u64,
        /// The other.
        asked: u64,
    },
    /// The group is held here under another replica id.
    #[error("node {node} holds group {group} as replica {held}, not {asked}")]
    AlreadyHeld {
        /// This node.
        node: u64,
        /// The group.
        group: u64,
        /// The replica here.
        held: u64,
        /// As asked.
        asked: u64,
    },
    /// The node does not belong to a cluster yet.
    #[error(
        "node {node} does not belong to a cluster yet: run `evershardctl cluster init` or start it with --peers"
    )]
    NoCluster {
        /// This node.
        node: u64,
    },
    /// A file or folder.
    #[error("{path}: {source}")]
    Io {
        /// Which.
        path: std::path::PathBuf,
        /// What the disk said.
        source: std::io::Error,
    },
    /// The disk is full, and the node needs some of it to begin.
    #[error(
        "the disk of {path} is full ({free_bytes} bytes and {free_inodes} inodes free), and the node cannot start without any: {source}; nothing was changed"
    )]
    DiskFull {
        /// The data directory.
        path: std::path::PathBuf,
        /// What is left.
        free_bytes: u64,
        /// The same, in inodes.
        free_inodes: u64,
        /// What was tried, and what the disk said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Work on a blocking thread was cancelled or panicked.
    #[error("{what} did not finish")]
    Unfinished {
        /// What was under way.
        what: &'static str,
    },
    /// Its flush found a replica damaged before its group was open.
    #[error("replica {replica} is damaged: {reason}")]
    Damaged {
        /// The replica.
        replica: u64,
        /// What was found.
        reason: String,
    },
    /// A shard's state could not be recovered.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// The meta group's state could not be recovered.
    #[error("the meta group's state: {0}")]
    Meta(#[from] MetaRecordError),
}

impl NodeError {
    /// The log could not be opened in this data directory.
    pub(super) fn of_log(data: &Path, error: LogError) -> Self {
        if error.is_disk_full() { Self::disk_full(data, error) } else { error.into() }
    }

    /// The data directory could not be used.
    pub(super) fn of_data(data: &Path, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::disk_full(data, source),
            _ => NodeError::Io { path: data.to_owned(), source },
        }
    }

    fn disk_full(data: &Path, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        // The directory itself may be what could not be made.
        let exists = data.ancestors().find(|path| path.exists()).unwrap_or(data);
        let free = FreeSpace::of(exists).unwrap_or_default();
        NodeError::DiskFull {
            path: data.to_owned(),
            free_bytes: free.bytes,
            free_inodes: free.inodes,
            source: source.into(),
        }
    }

    /// True when what a replica has on disk is not what was written. Everything else may be better at the next try.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            NodeError::Damaged { .. } => true,
            NodeError::Store(error) => error.is_damage(),
            NodeError::Shard(error) => error.is_damage(),
            NodeError::Meta(error) => error.is_damage(),
            NodeError::Log(error) => {
                matches!(error, LogError::Quarantined { .. } | LogError::Destroyed { .. })
            }
            _ => false,
        }
    }
}
