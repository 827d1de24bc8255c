//! Settings of the raft room, with their defaults and their validation.
//!
//! Invariant: nothing is repaired silently; [`RaftOptions::validate`] names the field that is wrong.
//!
//! Not here: reading them from a file (`src/config`).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use evershard_proto::limits::MESSAGE_BYTES_MAX;

use crate::error::GroupError;

const MIB: u64 = 1024 * 1024;

/// Timers of every group. All replicas of a cluster must use the same `election_max`: it is the leader lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RaftTiming {
    /// Between heartbeats.
    pub heartbeat: Duration,
    /// The least time without a leader before an election.
    pub election_min: Duration,
    /// The most; also the leader lease.
    pub election_max: Duration,
    /// Taken off the lease when serving reads, for clocks that run at different speeds.
    pub lease_margin: Duration,
    /// How long an append may stay unanswered before its stream is given up.
    pub append_timeout: Duration,
    /// How long a peer is given to accept a connection.
    pub connect_timeout: Duration,
}

impl Default for RaftTiming {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(50),
            election_min: Duration::from_millis(250),
            election_max: Duration::from_millis(500),
            lease_margin: Duration::from_millis(50),
            append_timeout: Duration::from_secs(2),
            connect_timeout: Duration::from_millis(500),
        }
    }
}

/// Byte bounds of every group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RaftLimits {
    /// Proposed and not yet answered, per group.
    pub in_flight_bytes: u64,
    /// The same, in entries.
    pub in_flight_entries: u64,
    /// One command.
    pub command_bytes: usize,
    /// One AppendEntries (at least one entry goes).
    pub append_bytes: usize,
    /// Sent to one follower and not yet acknowledged, per group.
    pub append_in_flight_bytes: usize,
    /// Handed to the state machine at once.
    pub apply_bytes: usize,
    /// The same, in entries.
    pub apply_entries: usize,
    /// Log kept behind a flush for followers that lag.
    pub retain_log_bytes: u64,
    /// One chunk of a snapshot.
    pub snapshot_chunk_bytes: usize,
    /// Snapshot bytes per second, over all transfers of the node; `None`: as fast as it goes.
    pub snapshot_bytes_per_second: Option<u64>,
    /// The same while the node's log takes in pushes ([`crate::GroupRegistry::watch_log`]); `None`: no other.
    pub snapshot_busy_bytes_per_second: Option<u64>,
    /// Log kept, beyond `retain_log_bytes`, behind a snapshot that is being sent or was a moment ago.
    pub snapshot_hold_log_bytes: u64,
    /// How long the links of a snapshot stay after their last receiver.
    pub snapshot_links_kept: Duration,
    /// How long parts of a snapshot stay that nobody goes on sending.
    pub snapshot_parts_kept: Duration,
}

impl Default for RaftLimits {
    fn default() -> Self {
        Self {
            in_flight_bytes: 8 * MIB,
            in_flight_entries: 16 * 1024,
            command_bytes: MESSAGE_BYTES_MAX - 64 * 1024,
            append_bytes: MIB as usize,
            append_in_flight_bytes: 8 * MIB as usize,
            apply_bytes: MIB as usize,
            apply_entries: 256,
            retain_log_bytes: 64 * MIB,
            snapshot_chunk_bytes: MIB as usize,
            snapshot_bytes_per_second: None,
            snapshot_busy_bytes_per_second: None,
            snapshot_hold_log_bytes: 2048 * MIB,
            snapshot_links_kept: Duration::from_secs(60),
            snapshot_parts_kept: Duration::from_secs(15 * 60),
        }
    }
}

/// Milliseconds since 1970; injected so that a simulation owns it.
pub type WallClock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// What a node's groups share.
#[derive(Clone)]
pub struct RaftOptions {
    /// The cluster's id; streams of another cluster are refused.
    pub cluster_id: String,
    /// This node.
    pub node: u64,
    /// The node's data folder: `outgoing/` and `incoming/` below it are used for snapshots.
    pub data: PathBuf,
    /// Timers.
    pub timing: RaftTiming,
    /// Byte bounds.
    pub limits: RaftLimits,
    /// The clock that stamps proposals.
    pub clock: WallClock,
}

impl RaftOptions {
    /// Defaults for a node of a cluster, with the system's clock.
    #[must_use]
    pub fn new(cluster_id: impl Into<String>, node: u64, data: impl Into<PathBuf>) -> Self {
        Self {
            cluster_id: cluster_id.into(),
            node,
            data: data.into(),
            timing: RaftTiming::default(),
            limits: RaftLimits::default(),
            clock: Arc::new(system_clock_ms),
        }
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`GroupError::Config`] naming the first field that is wrong.
    pub fn validate(&self) -> Result<(), GroupError> {
        let timing = &self.timing;
        let limits = &self.limits;
        let checks = [
            (!self.cluster_id.is_empty(), "cluster_id", "is empty"),
            (timing.heartbeat >= Duration::from_millis(1), "timing.heartbeat", "must be at least 1 ms"),
            (timing.election_min > timing.heartbeat, "timing.election_min", "must exceed the heartbeat"),
            (timing.election_max > timing.election_min, "timing.election_max", "must exceed election_min"),
            (timing.lease_margin < timing.election_max, "timing.lease_margin", "must be below election_max"),
            (!timing.append_timeout.is_zero(), "timing.append_timeout", "is zero"),
            (!timing.connect_timeout.is_zero(), "timing.connect_timeout", "is zero"),
            (limits.in_flight_bytes > 0, "limits.in_flight_bytes", "is zero"),
            (
                (1..=32 * 1024).contains(&limits.in_flight_entries),
                "limits.in_flight_entries",
                "must be between 1 and 32768",
            ),
            (
                (1..MESSAGE_BYTES_MAX).contains(&limits.command_bytes),
                "limits.command_bytes",
                "must be below the message limit",
            ),
            (
                (1..=MESSAGE_BYTES_MAX / 2).contains(&limits.append_bytes),
                "limits.append_bytes",
                "must be at most half the message limit",
            ),
            (limits.append_in_flight_bytes > 0, "limits.append_in_flight_bytes", "is zero"),
            (limits.apply_bytes > 0, "limits.apply_bytes", "is zero"),
            (limits.apply_entries > 0, "limits.apply_entries", "is zero"),
            (
                (1..=MESSAGE_BYTES_MAX / 2).contains(&limits.snapshot_chunk_bytes),
                "limits.snapshot_chunk_bytes",
                "must be at most half the message limit",
            ),
            (limits.snapshot_bytes_per_second != Some(0), "limits.snapshot_bytes_per_second", "is zero"),
            (
                limits.snapshot_busy_bytes_per_second != Some(0),
                "limits.snapshot_busy_bytes_per_second",
                "is zero",
            ),
            (
                limits.snapshot_links_kept >= Duration::from_millis(100),
                "limits.snapshot_links_kept",
                "must be at least 100 ms",
            ),
            (!limits.snapshot_parts_kept.is_zero(), "limits.snapshot_parts_kept", "is zero"),
        ];
        match checks.iter().find(|(ok, ..)| !ok) {
            Some((_, field, reason)) => Err(GroupError::Config { field, reason: (*reason).to_owned() }),
            None => Ok(()),
        }
    }

    /// openraft's configuration for a group. Elections start disabled: the group enables them when its vote door opens.
    pub(crate) fn openraft_config(&self, group: u64) -> Result<openraft::Config, GroupError> {
        let millis = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        openraft::Config {
            cluster_name: format!("{}/{group}", self.cluster_id),
            heartbeat_interval: millis(self.timing.heartbeat),
            election_timeout_min: millis(self.timing.election_min),
            election_timeout_max: millis(self.timing.election_max),
            // Entries of an append are bounded by bytes in the log store.
            max_payload_entries: 4096,
            replication_lag_threshold: 1024,
            snapshot_policy: openraft::SnapshotPolicy::Never,
            max_in_snapshot_log_to_keep: u64::MAX,
            purge_batch_size: 1,
            enable_elect: false,
            enable_pre_vote: Some(true),
            removed_leader_step_down: openraft::StepDownPolicy::Never,
            // A leader that restarts may have lost an unsynced tail that followers hold: it must not write other
            // entries under the same term and index.
            enable_leader_restore: Some(false),
            allow_log_reversion: Some(false),
            backoff: "20ms".to_owned(),
            ..openraft::Config::default()
        }
        .validate()
        .map_err(|error| GroupError::Config { field: "timing", reason: error.to_string() })
    }
}

fn system_clock_ms() -> u64 {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX));
    fail::fail_point!("clock::day_ahead", |_| now + 86_400_000);
    now
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_a_wrong_field_is_named() {
        let mut options = RaftOptions::new("c", 1, "/tmp");
        options.validate().expect("defaults");
        options.openraft_config(1).expect("openraft agrees");
        options.timing.election_min = options.timing.heartbeat;
        let error = options.validate().expect_err("election below heartbeat");
        assert!(matches!(error, GroupError::Config { field: "timing.election_min", .. }), "{error}");
    }
}
