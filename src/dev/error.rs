//! What can go wrong in `evershard dev`. Every message names the file, port or node.

use std::path::PathBuf;
use std::process::ExitStatus;

/// Why `evershard dev` failed.
#[derive(Debug, thiserror::Error)]
pub enum DevError {
    /// A file or folder could not be used.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// `dev.json` is not what this program wrote.
    #[error("{} is damaged: {source}", path.display())]
    Settings {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        source: serde_json::Error,
    },
    /// A flag contradicts what the directory's cluster was created with.
    #[error("{} holds a cluster with {field} {existing}, not {asked}: use another directory, or leave the flag out", dir.display())]
    Contradiction {
        /// The directory.
        dir: PathBuf,
        /// The flag.
        field: &'static str,
        /// As the cluster was created.
        existing: String,
        /// As asked for now.
        asked: String,
    },
    /// A number of nodes, replicas or ports that cannot be.
    #[error("{what}")]
    Invalid {
        /// What does not fit, in full.
        what: String,
    },
    /// Another `evershard dev` runs on the directory.
    #[error("another `evershard dev` runs in {}", dir.display())]
    Running {
        /// The directory.
        dir: PathBuf,
    },
    /// The directory holds no cluster.
    #[error("{} holds no cluster of `evershard dev`", dir.display())]
    NoCluster {
        /// The directory.
        dir: PathBuf,
    },
    /// Somebody else listens where a node would.
    #[error("port {port} is in use (node {node} needs it for {purpose}): {source}")]
    PortInUse {
        /// The port.
        port: u16,
        /// The node.
        node: u64,
        /// "gRPC" or "HTTP".
        purpose: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// The server program could not be started.
    #[error("cannot start node {node}: {source}")]
    Spawn {
        /// The node.
        node: u64,
        /// What the system said.
        source: std::io::Error,
    },
    /// A node ended before the cluster was ready.
    #[error("node {node} ended while the cluster started ({status}); the end of {}:\n{tail}", log.display())]
    NodeEnded {
        /// The node.
        node: u64,
        /// How it ended.
        status: ExitStatus,
        /// Its log.
        log: PathBuf,
        /// The last lines of it.
        tail: String,
    },
    /// The cluster refused to be created.
    #[error("the cluster could not be created: {status}")]
    Init {
        /// What node 1 answered.
        status: Box<tonic::Status>,
    },
    /// Time was up before every shard had a leader.
    #[error("the cluster was not ready within {seconds} s: {missing}")]
    NotReady {
        /// The limit.
        seconds: u64,
        /// What was still missing.
        missing: String,
    },
    /// The node is not one of the cluster's.
    #[error("node {node} is not in this cluster: it has nodes 1 to {nodes}")]
    UnknownNode {
        /// As asked for.
        node: u64,
        /// How many there are.
        nodes: u64,
    },
    /// A running node cannot be started, a dead one not be stopped.
    #[error("node {node} {state}")]
    NodeState {
        /// The node.
        node: u64,
        /// Why the command makes no sense for it.
        state: String,
    },
    /// The parent refused a command.
    #[error("{message}")]
    Refused {
        /// In its words.
        message: String,
    },
}
