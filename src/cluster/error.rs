//! What can go wrong with a node and its replicas.

use evershard_raft::GroupError;
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
    /// Work on a blocking thread was cancelled or panicked.
    #[error("{what} did not finish")]
    Unfinished {
        /// What was under way.
        what: &'static str,
    },
    /// A shard's state could not be recovered.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// The meta group's state could not be recovered.
    #[error("the meta group's state: {0}")]
    Meta(#[from] MetaRecordError),
}

impl NodeError {
    /// True when what a replica has on disk is not what was written. Everything else may be better at the next try.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
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
