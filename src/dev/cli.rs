//! The flags of `evershard dev`.

use std::path::PathBuf;

use crate::config::Durability;

/// Start a whole cluster on this machine, for development, demos and tests.
///
/// Prints `ready` on stdout when every shard has a leader, and runs until Ctrl-C. Data stays in the directory: the
/// next start continues with it, with the settings of the first.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  evershard dev --dir /tmp/es                            3 nodes, 8 shards, on ports 7400-7405
  evershard dev --dir /tmp/es --nodes 5 --replicas 3     of another size (of a new directory only)
  evershard dev --dir /tmp/es -- --heartbeat-ms 100      give flags to every server
  kill -9 $(cat /tmp/es/node-2/pid)                      see what a crash does
  evershard dev --dir /tmp/es start-node 2               bring the dead node back")]
pub struct DevArgs {
    /// Servers to run, each a process of its own [default: 3].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=64))]
    pub nodes: Option<u64>,
    /// Shards of the cluster, each a Raft group [default: 8].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub shards: Option<u32>,
    /// Copies of each shard [default: 3, or the number of nodes when that is less].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=7))]
    pub replicas: Option<u32>,
    /// Where everything of this cluster lives: node-<id>/{pid,log,data} and endpoints.
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
    /// First port: node i listens on P + 2(i-1), its HTTP on the port after [default: 7400].
    #[arg(long, value_name = "P", value_parser = clap::value_parser!(u16).range(1..))]
    pub base_port: Option<u16>,
    /// When a push is acknowledged: on disk at a quorum, or in a quorum's memory [default: fsync].
    #[arg(long, value_enum)]
    pub durability: Option<Durability>,
    /// Give up when not every shard has a leader by then.
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    pub ready_timeout: u64,
    /// End when standard input, a pipe, ends: with the process that holds its other end, however that dies.
    #[arg(long, hide = true)]
    pub end_with_stdin: bool,
    /// Given to every server as they are.
    #[arg(last = true, value_name = "SERVER FLAGS")]
    pub server_args: Vec<String>,
    /// A command to a cluster that exists already.
    #[command(subcommand)]
    pub command: Option<NodeCommand>,
}

/// What can be done to one node of a cluster under `evershard dev`.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum NodeCommand {
    /// Start a node that is dead; it keeps its data.
    StartNode {
        /// The node's number.
        id: u64,
    },
    /// End a node cleanly: it hands its leaderships over first.
    StopNode {
        /// The node's number.
        id: u64,
    },
    /// End a node with SIGKILL, as a crash would.
    KillNode {
        /// The node's number.
        id: u64,
    },
}
