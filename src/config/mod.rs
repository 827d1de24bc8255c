//! The configuration of a node: flags over environment (`EVERSHARD_*`) over a TOML file over the defaults here.
//!
//! Invariants: unknown keys are errors, in the file and in the environment; a value that makes no sense is refused by
//! [`ServerConfig::validate`] with the field's name, never repaired.
//!
//! Not here: flags (`cli.rs`).

pub mod cli;
mod error;
mod sources;

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use error::ConfigError;
pub use sources::load;

/// When a push is acknowledged. Every figure names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// A quorum has it on disk (fdatasync).
    Fsync,
    /// A quorum has it in the page cache; on disk within 10 ms. Survives `kill -9`, not a power cut of a quorum.
    Memory,
}

/// Everything a node needs to know. Sizes in bytes, times in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerConfig {
    /// This node's number, unique in the cluster, from 1.
    pub node_id: u64,
    /// Where gRPC listens.
    pub listen: SocketAddr,
    /// Where other nodes and clients reach this one: `http://host:port`. Empty: `http://` + `listen`.
    pub advertise: String,
    /// Where metrics and health listen. Port 0: a free one.
    pub http: SocketAddr,
    /// The data directory.
    pub data: PathBuf,
    /// Addresses of other nodes, to join through.
    pub peers: Vec<String>,
    /// Refuse to start when the data directory belongs to another cluster than this one. Empty: not checked.
    pub cluster_id: String,
    /// When a push is acknowledged.
    pub durability: Durability,
    /// A leader's heartbeat interval.
    pub heartbeat_ms: u64,
    /// A follower stands for election after a random time between these two without a heartbeat.
    pub election_min_ms: u64,
    /// See `election_min_ms`; also the leader's lease.
    pub election_max_ms: u64,
    /// Bytes of a log segment.
    pub log_segment_bytes: u64,
    /// Recent log entries kept in memory, over all groups. The buffers that they were received in, which they keep alive, are up
    /// to two and a half times as large.
    pub log_cache_bytes: u64,
    /// Log kept for followers that lag, per group, although the flush has passed it.
    pub log_retain_bytes: u64,
    /// Rows in memory, over all shards: above it rows that are not used leave, and come back from disk on use. 0: no limit.
    pub memory_budget: u64,
    /// What compaction of all replicas together may write, at the most, in bytes a second, so as not to get in the way of the log.
    pub compaction_bytes_per_s: u64,
    /// Log kept beyond `log_retain_bytes`, per group, behind a raft snapshot while it is being sent: less than is pushed in
    /// that time, and the receiver needs another one at once.
    pub log_hold_bytes: u64,
    /// Time between two flush cycles of a shard, at the most.
    pub flush_interval_ms: u64,
    /// A shard with this many dirty bytes is flushed without waiting for the interval.
    pub flush_dirty_bytes: u64,
    /// Threads that apply log entries.
    pub apply_threads: usize,
    /// Threads that answer pulls.
    pub read_threads: usize,
    /// Proposed and not yet applied bytes, per group: above it pushes are answered EXHAUSTED.
    pub group_in_flight_bytes: u64,
    /// With less free on the disk of the data directory pushes are answered EXHAUSTED and leadership moves to nodes with
    /// room; 0: 256 MiB, adapted to small disks and large log segments.
    pub disk_low_water_bytes: u64,
    /// A node whose log waits for its disk for this long gives up its leaderships; so does one whose disk does not answer a probe,
    /// which is made as often as this.
    pub disk_stall_ms: u64,
    /// Requests being answered, and their replies until they are sent, per client stream. Pulls that wait for the disk take half of
    /// it at the most, over all clients: above that they are answered EXHAUSTED.
    pub stream_in_flight_bytes: u64,
    /// Requests being answered, and their replies until they are sent, over all client streams: above it streams wait.
    pub node_in_flight_bytes: u64,
    /// Gradients kept for steps that are summed over workers and not complete yet: above it workers wait. The gradients of all
    /// workers for one step must fit.
    pub step_buffer_bytes: u64,
    /// A client that leaves replies lying for this long, and takes none, loses its stream: what is held for it is wanted by others.
    pub reply_patience_seconds: u32,
    /// A session whose client was not heard of for this long ends.
    pub session_lease_seconds: u32,
    /// How often the leader of a shard looks for rows that go by the eviction rules of their tables; 0: never.
    pub eviction_interval_ms: u64,
    /// Once in this time the leader of the meta group compares the replicas of every shard; 0: only when it is asked to.
    pub scrub_interval_seconds: u32,
    /// What such a scrub finds to differ is rebuilt from the others, where more than half of them are equal.
    pub scrub_repair: bool,
    /// Bytes a second of raft snapshots sent, over all receivers; 0: no limit.
    pub snapshot_bytes_per_second: u64,
    /// The same while this node's log takes in pushes; 0: no other limit.
    pub snapshot_busy_bytes_per_second: u64,
    /// Listen on other than loopback although there is no TLS.
    pub insecure: bool,
}

impl Default for ServerConfig {
    fn default() -> Self {
        let loopback = |port| SocketAddr::from(([127, 0, 0, 1], port));
        ServerConfig {
            node_id: 1,
            listen: loopback(7400),
            advertise: String::new(),
            http: loopback(7401),
            data: PathBuf::from("evershard-data"),
            peers: Vec::new(),
            cluster_id: String::new(),
            durability: Durability::Fsync,
            heartbeat_ms: 30,
            election_min_ms: 100,
            election_max_ms: 200,
            log_segment_bytes: 64 << 20,
            log_cache_bytes: 64 << 20,
            log_retain_bytes: 64 << 20,
            memory_budget: 0,
            compaction_bytes_per_s: 256 << 20,
            log_hold_bytes: 2 << 30,
            flush_interval_ms: 2000,
            flush_dirty_bytes: 64 << 20,
            apply_threads: 2,
            read_threads: 2,
            group_in_flight_bytes: 8 << 20,
            disk_low_water_bytes: 0,
            disk_stall_ms: 1000,
            stream_in_flight_bytes: 64 << 20,
            node_in_flight_bytes: 512 << 20,
            step_buffer_bytes: 512 << 20,
            reply_patience_seconds: 60,
            session_lease_seconds: 3600,
            eviction_interval_ms: 10_000,
            scrub_interval_seconds: 86_400,
            scrub_repair: true,
            snapshot_bytes_per_second: 100 << 20,
            snapshot_busy_bytes_per_second: 16 << 20,
            insecure: false,
        }
    }
}

impl ServerConfig {
    /// Checks every field and fills in `advertise`.
    ///
    /// # Errors
    /// [`ConfigError::Field`] naming the field and what it must be.
    pub fn validate(mut self) -> Result<Self, ConfigError> {
        let field = |name: &'static str, problem: String| Err(ConfigError::Field { name, problem });
        if self.node_id == 0 {
            return field("node_id", "must be 1 or more".into());
        }
        if self.heartbeat_ms == 0 {
            return field("heartbeat_ms", "must be at least 1".into());
        }
        if self.election_min_ms < self.heartbeat_ms * 3 {
            let least = self.heartbeat_ms * 3;
            return field("election_min_ms", format!("must be at least 3 x heartbeat_ms = {least}"));
        }
        if self.election_max_ms <= self.election_min_ms {
            return field(
                "election_max_ms",
                format!("must be above election_min_ms = {}", self.election_min_ms),
            );
        }
        if !(1 << 20..=4 << 30).contains(&self.log_segment_bytes) {
            return field("log_segment_bytes", "must be from 1 MiB to 4 GiB".into());
        }
        for (name, rate) in [
            ("snapshot_bytes_per_second", self.snapshot_bytes_per_second),
            ("snapshot_busy_bytes_per_second", self.snapshot_busy_bytes_per_second),
        ] {
            if (1..1 << 20).contains(&rate) {
                return field(name, "must be 0 (no limit) or at least 1 MiB".into());
            }
        }
        if self.apply_threads == 0 || self.apply_threads > 256 {
            return field("apply_threads", "must be from 1 to 256".into());
        }
        if self.read_threads == 0 || self.read_threads > 256 {
            return field("read_threads", "must be from 1 to 256".into());
        }
        if self.group_in_flight_bytes < 4 << 20 {
            return field("group_in_flight_bytes", "must be at least 4 MiB".into());
        }
        if self.disk_stall_ms < 50 {
            return field("disk_stall_ms", "must be at least 50".into());
        }
        if self.stream_in_flight_bytes < 16 << 20 {
            return field("stream_in_flight_bytes", "must be at least 16 MiB".into());
        }
        if (1..16 << 20).contains(&self.memory_budget) {
            return field("memory_budget", "must be 0 (no limit) or at least 16 MiB".into());
        }
        if self.node_in_flight_bytes < self.stream_in_flight_bytes {
            let least = self.stream_in_flight_bytes;
            return field(
                "node_in_flight_bytes",
                format!("must be at least stream_in_flight_bytes = {least}"),
            );
        }
        if self.flush_interval_ms < 10 {
            return field("flush_interval_ms", "must be at least 10".into());
        }
        if self.step_buffer_bytes < 16 << 20 {
            return field("step_buffer_bytes", "must be at least 16 MiB".into());
        }
        if self.reply_patience_seconds < 1 {
            return field("reply_patience_seconds", "must be at least 1".into());
        }
        if self.session_lease_seconds < 10 {
            return field("session_lease_seconds", "must be at least 10".into());
        }
        if !self.insecure {
            for (name, address) in [("listen", self.listen), ("http", self.http)] {
                if !address.ip().is_loopback() {
                    let problem =
                        format!("{address} is not loopback, and there is no TLS: add --insecure to allow it");
                    return field(name, problem);
                }
            }
        }
        if self.advertise.is_empty() {
            self.advertise = format!("http://{}", self.listen);
        }
        for (name, address) in
            std::iter::once(("advertise", &self.advertise)).chain(self.peers.iter().map(|p| ("peers", p)))
        {
            if !address.starts_with("http://") || address.len() <= "http://".len() {
                return field(name, format!("{address:?} is not of the form http://host:port"));
            }
        }
        Ok(self)
    }

    /// The longest time a leader answers from its lease after a quorum last heard of it.
    #[must_use]
    pub fn leader_lease_ms(&self) -> u64 {
        self.election_max_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        let config = ServerConfig::default().validate().expect("defaults");
        assert_eq!(config.advertise, "http://127.0.0.1:7400");
    }

    #[test]
    fn a_field_that_makes_no_sense_is_named() {
        let bad = ServerConfig { election_max_ms: 90, ..ServerConfig::default() };
        let error = bad.validate().expect_err("90 ms is below the minimum");
        assert!(error.to_string().contains("election_max_ms"), "{error}");
    }

    #[test]
    fn another_interface_needs_insecure() {
        let listen = SocketAddr::from(([0, 0, 0, 0], 7400));
        let config = ServerConfig { listen, advertise: "http://a:1".into(), ..ServerConfig::default() };
        assert!(config.clone().validate().is_err());
        assert!(ServerConfig { insecure: true, ..config }.validate().is_ok());
    }
}
