//! Every maximum that both ends of a wire hold to. A message over a limit gets a typed error, and nothing changes.

/// Bytes of one push message: the client cuts there. 64-256 KiB entries are where consensus is fastest.
pub const PUSH_BODY_BYTES_MAX: usize = 256 * 1024;
/// A row wider than a push message travels alone; this is the most one push message may then have.
pub const PUSH_BODY_BYTES_HARD_MAX: usize = 2 * 1024 * 1024;
/// Bytes of a part of a step: most are of the length of a push.
pub const STEP_BODY_BYTES_HARD_MAX: usize = 7 * 1024 * 1024;
/// Bytes of rows in one pull reply: the client cuts there.
pub const PULL_REPLY_BYTES_MAX: usize = 1024 * 1024;
/// Floats in a row.
pub const DIM_MAX: u32 = 64 * 1024;
/// Bytes of one gRPC message, either way.
pub const MESSAGE_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Push messages a client may have unacknowledged per shard; the session table keeps as many results.
pub const PUSHES_IN_FLIGHT_MAX: usize = 64;
/// Sizes in a dense tensor's shape.
pub const TENSOR_RANK_MAX: usize = 8;
/// Elements of a dense tensor: 256 GiB of f32.
pub const TENSOR_ELEMENTS_MAX: u64 = 1 << 36;
/// Tables in one push message.
pub const PUSH_TABLES_MAX: usize = 256;
/// Tables in a cluster.
pub const TABLES_MAX: usize = 4096;
/// Entries of one report of values that are not finite: one by table and by what was done.
pub const NON_FINITE_REPORT_ROWS_MAX: usize = TABLES_MAX * 3;
/// What one entry of such a report may count.
pub const NON_FINITE_REPORT_COUNT_MAX: u64 = u32::MAX as u64;
/// Bytes of a table's name.
pub const TABLE_NAME_BYTES_MAX: usize = 128;
/// Rows in one entry that evicts.
pub const EVICTED_ROWS_MAX: usize = 4096;
/// Shards in a cluster.
pub const SHARDS_MAX: u32 = 4096;
/// Jobs in a cluster.
pub const JOBS_MAX: usize = 256;
/// Workers in a job.
pub const WORKERS_MAX: u32 = 4096;
/// Bytes of a worker's cursor.
pub const CURSOR_BYTES_MAX: usize = 16 * 1024;
/// Bytes of what a worker calls itself.
pub const WORKER_NAME_BYTES_MAX: usize = 128;
