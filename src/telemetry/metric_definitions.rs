//! Every metric's name, in one place: unit last, labels from closed sets.

/// Pushes answered, by `outcome` (`applied`, `replayed`, `refused`, `failed`).
pub const PUSHES_TOTAL: &str = "evershard_pushes_total";
/// Bytes of push bodies that arrived.
pub const PUSH_BYTES_TOTAL: &str = "evershard_push_bytes_total";
/// Seconds from a push's arrival to its answer.
pub const PUSH_SECONDS: &str = "evershard_push_seconds";
/// Pulls answered, by `outcome` (`ok`, `refused`, `failed`).
pub const PULLS_TOTAL: &str = "evershard_pulls_total";
/// Rows read by pulls.
pub const PULL_ROWS_TOTAL: &str = "evershard_pull_rows_total";
/// Seconds from a pull's arrival to its answer.
pub const PULL_SECONDS: &str = "evershard_pull_seconds";
/// 1 for each replica, by `shard` and `role`.
pub const REPLICA_ROLE: &str = "evershard_replica_role";
/// Log index applied, by `shard`.
pub const REPLICA_APPLIED_INDEX: &str = "evershard_replica_applied_index";
/// Log index flushed to RocksDB, by `shard`.
pub const REPLICA_FLUSHED_INDEX: &str = "evershard_replica_flushed_index";
/// Live rows, by `shard`.
pub const REPLICA_ROWS: &str = "evershard_replica_rows";
/// Raft snapshots, by `outcome` (`sent`, `received`, `failed`); `failed` are attempts to send that broke off.
pub const SNAPSHOTS_TOTAL: &str = "evershard_snapshots_total";
/// Attempts to send a raft snapshot that went on where an earlier one broke off.
pub const SNAPSHOTS_RESUMED_TOTAL: &str = "evershard_snapshots_resumed_total";
/// Bytes of raft snapshots, by `kind` (`sent`, `received`, `skipped`); `skipped` were not sent because the receiver had them.
pub const SNAPSHOT_BYTES_TOTAL: &str = "evershard_snapshot_bytes_total";
/// Chunks of raft snapshots that were sent again because they arrived damaged.
pub const SNAPSHOT_CHUNKS_REPEATED_TOTAL: &str = "evershard_snapshot_chunks_repeated_total";
/// Bytes of raft snapshots sent a second, of late.
pub const SNAPSHOT_BYTES_PER_SECOND: &str = "evershard_snapshot_bytes_per_second";
/// 1 when the node is ready.
pub const NODE_READY: &str = "evershard_node_ready";

/// Gives every metric its help text.
pub fn describe() {
    use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
    describe_counter!(PUSHES_TOTAL, Unit::Count, "Pushes answered, by outcome");
    describe_counter!(PUSH_BYTES_TOTAL, Unit::Bytes, "Bytes of push bodies that arrived");
    describe_histogram!(PUSH_SECONDS, Unit::Seconds, "From a push's arrival to its answer");
    describe_counter!(PULLS_TOTAL, Unit::Count, "Pulls answered, by outcome");
    describe_counter!(PULL_ROWS_TOTAL, Unit::Count, "Rows read by pulls");
    describe_histogram!(PULL_SECONDS, Unit::Seconds, "From a pull's arrival to its answer");
    describe_gauge!(REPLICA_ROLE, "1 for each replica, by shard and role");
    describe_gauge!(REPLICA_APPLIED_INDEX, "Log index applied, by shard");
    describe_gauge!(REPLICA_FLUSHED_INDEX, "Log index flushed to RocksDB, by shard");
    describe_gauge!(REPLICA_ROWS, "Live rows, by shard");
    describe_counter!(SNAPSHOTS_TOTAL, Unit::Count, "Raft snapshots, by outcome");
    describe_counter!(
        SNAPSHOTS_RESUMED_TOTAL,
        Unit::Count,
        "Raft snapshots gone on with where they broke off"
    );
    describe_counter!(SNAPSHOT_BYTES_TOTAL, Unit::Bytes, "Bytes of raft snapshots, by kind");
    describe_counter!(
        SNAPSHOT_CHUNKS_REPEATED_TOTAL,
        Unit::Count,
        "Chunks sent again because they were damaged"
    );
    describe_gauge!(SNAPSHOT_BYTES_PER_SECOND, Unit::Bytes, "Bytes of raft snapshots sent a second, of late");
    describe_gauge!(NODE_READY, "1 when the node is ready");
}
