//! Every metric's name, in one place: unit last, labels from closed sets.

/// Pushes answered, by `outcome` (`applied`, `replayed`, `refused`, `failed`).
pub const PUSHES_TOTAL: &str = "evershard_pushes_total";
/// Bytes of push bodies that arrived.
pub const PUSH_BYTES_TOTAL: &str = "evershard_push_bytes_total";
/// Seconds from a push's arrival to its answer.
pub const PUSH_SECONDS: &str = "evershard_push_seconds";
/// What was done about values that are not finite since the process started, by `shard`, `table` and `action` (`rejected`: pushes;
/// `skipped`, `clipped`: rows). Of tables that had such values alone. Every replica counts what is in the log, so it is taken
/// from one of them (`max by (shard, table, action)`); workers are no label, since there is no bound to them. A counter never
/// falls: that of a replica or table that begins anew under its old name stands still until it is overtaken.
pub const NON_FINITE_TOTAL: &str = "evershard_non_finite_total";
/// Bytes of gradients that workers contributed to steps that are summed.
pub const STEP_BYTES_TOTAL: &str = "evershard_step_bytes_total";
/// Pulls answered, by `outcome` (`ok`, `refused`, `failed`).
pub const PULLS_TOTAL: &str = "evershard_pulls_total";
/// Rows read by pulls.
pub const PULL_ROWS_TOTAL: &str = "evershard_pull_rows_total";
/// Rows of pulls that were read from disk, or looked for there.
pub const PULL_COLD_ROWS_TOTAL: &str = "evershard_pull_cold_rows_total";
/// Seconds from a pull's arrival to its answer.
pub const PULL_SECONDS: &str = "evershard_pull_seconds";
/// Calls to leaders for read points, which BOUNDED pulls need, by `outcome` (`answered`, `failed`).
pub const READ_POINTS_ASKED_TOTAL: &str = "evershard_read_points_asked_total";
/// Streams that were ended because their clients did not take what they were answered.
pub const STREAMS_CUT_TOTAL: &str = "evershard_streams_cut_total";
/// 1 for each replica, by `shard` and `role`.
pub const REPLICA_ROLE: &str = "evershard_replica_role";
/// Log index applied, by `shard`.
pub const REPLICA_APPLIED_INDEX: &str = "evershard_replica_applied_index";
/// Log index flushed to RocksDB, by `shard`.
pub const REPLICA_FLUSHED_INDEX: &str = "evershard_replica_flushed_index";
/// Live rows, by `shard`.
pub const REPLICA_ROWS: &str = "evershard_replica_rows";
/// Bytes proposed and not yet answered, by `shard`; bounded by `group_in_flight_bytes`.
pub const REPLICA_IN_FLIGHT_BYTES: &str = "evershard_replica_in_flight_bytes";
/// Rows that were brought to memory before the pushes that need them were applied.
pub const PREFETCHED_ROWS_TOTAL: &str = "evershard_prefetched_rows_total";
/// Rows that pushes changed and that were not prefetched in time: apply read them from disk, and everything behind it waited.
pub const APPLY_COLD_ROWS_TOTAL: &str = "evershard_apply_cold_rows_total";
/// Pushes whose rows were not prefetched because too many waited.
pub const PREFETCHES_DROPPED_TOTAL: &str = "evershard_prefetches_dropped_total";
/// Bytes that rows take in memory, over all replicas.
pub const MEMORY_USED_BYTES: &str = "evershard_memory_used_bytes";
/// Bytes that rows may take in memory; 0 when there is no limit.
pub const MEMORY_BUDGET_BYTES: &str = "evershard_memory_budget_bytes";
/// Bytes written to disk since the process started, by `part`: `log` (records, without the zeros that segments are made of),
/// `flush` (keys and values, which are not compressed), `compaction` (files). Over `evershard_push_bytes_total`: write
/// amplification; over all nodes, since pushes arrive at the leader and are written by every replica.
pub const DISK_WRITTEN_BYTES_TOTAL: &str = "evershard_disk_written_bytes_total";
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
/// Rows and counts of ids that this node, as a leader, found to go and had the shard evict; those that changed meanwhile stayed.
pub const EVICTIONS_TOTAL: &str = "evershard_evictions_total";
/// Shards scrubbed through this node, by `result` (`equal`, `different`, `quarantined`, `incomplete`, `failed`).
pub const SCRUBS_TOTAL: &str = "evershard_scrubs_total";
/// When this node last ended a scheduled scrub that compared all replicas of all shards, in unix time.
pub const SCRUBBED_TIMESTAMP_SECONDS: &str = "evershard_scrubbed_timestamp_seconds";
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
/// 1 while that is too long.
pub const LOG_STALLED: &str = "evershard_log_stalled";
/// How long the log, or the probe that asks the disk while the log is idle, has waited for the disk.
pub const DISK_STALLED_SECONDS: &str = "evershard_disk_stalled_seconds";
/// 1 while that is too long: the node leads nothing.
pub const DISK_STALLED: &str = "evershard_disk_stalled";

/// Gives every metric its help text.
pub fn describe() {
    use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
    describe_counter!(PUSHES_TOTAL, Unit::Count, "Pushes answered, by outcome");
    describe_counter!(PUSH_BYTES_TOTAL, Unit::Bytes, "Bytes of push bodies that arrived");
    describe_histogram!(PUSH_SECONDS, Unit::Seconds, "From a push's arrival to its answer");
    describe_counter!(
        NON_FINITE_TOTAL,
        Unit::Count,
        "Pushes rejected, rows skipped or clipped for values that are not finite"
    );
    describe_counter!(STEP_BYTES_TOTAL, Unit::Bytes, "Bytes contributed to steps that are summed");
    describe_counter!(PULLS_TOTAL, Unit::Count, "Pulls answered, by outcome");
    describe_counter!(PULL_ROWS_TOTAL, Unit::Count, "Rows read by pulls");
    describe_counter!(PULL_COLD_ROWS_TOTAL, Unit::Count, "Rows of pulls that were not in memory");
    describe_histogram!(PULL_SECONDS, Unit::Seconds, "From a pull's arrival to its answer");
    describe_counter!(
        STREAMS_CUT_TOTAL,
        Unit::Count,
        "Streams ended: their clients took no reply for too long"
    );
    describe_gauge!(REPLICA_ROLE, "1 for each replica, by shard and role");
    describe_gauge!(REPLICA_APPLIED_INDEX, "Log index applied, by shard");
    describe_gauge!(REPLICA_FLUSHED_INDEX, "Log index flushed to RocksDB, by shard");
    describe_gauge!(REPLICA_ROWS, "Live rows, by shard");
    describe_gauge!(REPLICA_IN_FLIGHT_BYTES, Unit::Bytes, "Proposed and not yet answered, by shard");
    describe_counter!(PREFETCHED_ROWS_TOTAL, Unit::Count, "Rows brought to memory ahead of apply");
    describe_counter!(APPLY_COLD_ROWS_TOTAL, Unit::Count, "Rows that apply read from disk itself");
    describe_counter!(PREFETCHES_DROPPED_TOTAL, Unit::Count, "Pushes not prefetched: too many waited");
    describe_gauge!(MEMORY_USED_BYTES, Unit::Bytes, "What rows take in memory");
    describe_gauge!(MEMORY_BUDGET_BYTES, Unit::Bytes, "What rows may take in memory; 0: no limit");
    describe_counter!(
        DISK_WRITTEN_BYTES_TOTAL,
        Unit::Bytes,
        "Written to disk, by part: log, flush, compaction"
    );
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
    describe_counter!(EVICTIONS_TOTAL, Unit::Count, "Rows that the rules of their tables let go of");
    describe_counter!(SCRUBS_TOTAL, Unit::Count, "Shards scrubbed through this node, by result");
    describe_gauge!(SCRUBBED_TIMESTAMP_SECONDS, Unit::Seconds, "End of the last whole scrub, in unix time");
    describe_gauge!(NODE_READY, "1 when the node is ready");
    describe_gauge!(DISK_FREE_BYTES, Unit::Bytes, "Free on the file system of the data directory");
    describe_gauge!(DISK_FREE_INODES, "Free inodes on it");
    describe_gauge!(DISK_LOW_WATER_BYTES, Unit::Bytes, "Below this much free the node takes no pushes");
    describe_gauge!(DISK_LOW, "1 while the disk is below its low-water mark");
    describe_gauge!(LOG_STALLED_SECONDS, Unit::Seconds, "How long the log's write in progress has taken");
    describe_gauge!(LOG_STALLED, "1 while that is too long");
    describe_gauge!(DISK_STALLED_SECONDS, Unit::Seconds, "How long the log or the probe waits for the disk");
    describe_gauge!(DISK_STALLED, "1 while that is too long: the node leads nothing");
}
