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
/// 1 when the node is ready.
pub const NODE_READY: &str = "evershard_node_ready";
/// Free bytes on the file system of the data directory.
pub const DISK_FREE_BYTES: &str = "evershard_disk_free_bytes";
/// Free inodes on it.
pub const DISK_FREE_INODES: &str = "evershard_disk_free_inodes";
/// Below this many free bytes the node takes no pushes.
pub const DISK_LOW_WATER_BYTES: &str = "evershard_disk_low_water_bytes";
/// 1 while the disk is below its low-water mark.
pub const DISK_LOW: &str = "evershard_disk_low";
/// How long the write or sync of the log in progress has taken.
pub const LOG_STALLED_SECONDS: &str = "evershard_log_stalled_seconds";
/// 1 while that is too long: the node leads nothing.
pub const LOG_STALLED: &str = "evershard_log_stalled";

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
    describe_gauge!(NODE_READY, "1 when the node is ready");
    describe_gauge!(DISK_FREE_BYTES, Unit::Bytes, "Free on the file system of the data directory");
    describe_gauge!(DISK_FREE_INODES, "Free inodes on it");
    describe_gauge!(DISK_LOW_WATER_BYTES, Unit::Bytes, "Below this much free the node takes no pushes");
    describe_gauge!(DISK_LOW, "1 while the disk is below its low-water mark");
    describe_gauge!(LOG_STALLED_SECONDS, Unit::Seconds, "How long the log's write in progress has taken");
    describe_gauge!(LOG_STALLED, "1 while that is too long: the node leads nothing");
}
