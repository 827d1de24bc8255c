//! The flags of `evershard server`. Each is a field of [`ServerConfig`](super::ServerConfig); absent flags leave the
//! environment, the file and the defaults as they are.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Serialize;

use super::Durability;

/// Flags of `evershard server`.
#[derive(Debug, Clone, Default, clap::Args, Serialize)]
pub struct ServerArgs {
    /// Read settings from this TOML file (see --print-config for its keys).
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// Print the configuration that would be used, as TOML, and exit.
    #[arg(long)]
    #[serde(skip)]
    pub print_config: bool,
    /// This node's number, unique in the cluster.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_id: Option<u64>,
    /// Where gRPC listens.
    #[arg(long, value_name = "HOST:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// Where others reach this node (default: http:// + --listen).
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advertise: Option<String>,
    /// Where metrics and health listen.
    #[arg(long, value_name = "HOST:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<SocketAddr>,
    /// The data directory.
    #[arg(long, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<PathBuf>,
    /// Other nodes, to join through.
    #[arg(long, value_name = "URL,URL", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peers: Option<Vec<String>>,
    /// Refuse a data directory of any other cluster than this one.
    #[arg(long, value_name = "UUID")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// When a push is acknowledged: on disk at a quorum, or in a quorum's memory.
    #[arg(long, value_enum)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub durability: Option<Durability>,
    /// A leader's heartbeat interval.
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heartbeat_ms: Option<u64>,
    /// Shortest time without heartbeat after which a follower stands for election.
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub election_min_ms: Option<u64>,
    /// Longest such time, and the leader's lease.
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub election_max_ms: Option<u64>,
    /// Bytes of a log segment.
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_segment_bytes: Option<u64>,
    /// Log kept per group for followers that lag.
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_retain_bytes: Option<u64>,
    /// Rows in memory over all shards; more than that stay on disk and come back on use (0: no limit).
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_budget: Option<u64>,
    /// Log kept, beyond --log-retain-bytes and per group, behind a raft snapshot that is being sent. If more is pushed than
    /// this while one is on its way, its receiver needs another at once: raise it, or --snapshot-bytes-per-second.
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_hold_bytes: Option<u64>,
    /// Longest time between two flush cycles of a shard.
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flush_interval_ms: Option<u64>,
    /// Dirty bytes of a shard that start a flush cycle at once.
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flush_dirty_bytes: Option<u64>,
    /// Threads that apply log entries.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub apply_threads: Option<usize>,
    /// Threads that answer pulls.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_threads: Option<usize>,
    /// How often a leader looks for rows that go by the eviction rules of their tables (0: never).
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eviction_interval_ms: Option<u64>,
    /// How often the replicas of every shard are compared, by the leader of the meta group (0: only on `evershardctl scrub`).
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scrub_interval_seconds: Option<u32>,
    /// Rebuild a replica that such a scrub finds to differ from a majority that is equal.
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scrub_repair: Option<bool>,
    /// Bytes a second of raft snapshots that this node sends, over all receivers (0: no limit). Lower it when pushes slow
    /// down while a replica is rebuilt; raise it when a rebuild takes longer than --log-hold-bytes lasts.
    #[arg(long, visible_alias = "snapshot-rate", value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_bytes_per_second: Option<u64>,
    /// The same while this node takes in pushes (0: no other limit): a snapshot may take its time, a training step may not.
    #[arg(long, value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_busy_bytes_per_second: Option<u64>,
    /// With less free space pushes are refused and leadership moves (0: 256 MiB, less on a small disk).
    #[arg(long, alias = "disk-low-water", value_name = "BYTES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_low_water_bytes: Option<u64>,
    /// A node whose disk hangs for this long gives up its leaderships.
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_stall_ms: Option<u64>,
    /// How long a silent client keeps its session.
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_lease_seconds: Option<u32>,
    /// Allow listening on other than loopback without TLS.
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub insecure: Option<bool>,
}
