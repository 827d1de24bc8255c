//! How RocksDB is set up: many small instances in one process that share what costs memory and threads.
//!
//! A node has an instance per replica: 8 shards with 3 replicas on one machine are 24 of them. Nothing is ever written through
//! a memtable or a WAL, only whole sorted runs are ingested: so what matters is compaction, the cache and the bloom filters.
//!
//! Not here: files and steps (`database`, `store`).

use std::path::Path;
use std::sync::Arc;

use rocksdb::statistics::StatsLevel;
use rocksdb::{BlockBasedOptions, Cache, DBCompressionType, Env, LogLevel, Options, WriteBufferManager};

use super::dead_rows::{Dead, DeadRows};
use super::error::StoreError;
use crate::disk::{FatalHandler, stop_process};

/// What an operator may set; one for all replicas of a node.
#[derive(Debug, Clone, PartialEq)]
pub struct RocksOptions {
    /// Memory for blocks, indexes and filters of all replicas together.
    pub block_cache_bytes: usize,
    /// Threads that compact, for all replicas together.
    pub background_threads: u8,
    /// Files that each replica keeps open.
    pub open_files_per_replica: u16,
    /// A sorted run longer than this goes on in another file.
    pub run_file_bytes_max: u64,
    /// Files of this size come out of compaction.
    pub file_bytes: u64,
    /// Bytes of the first level below level 0; each further one has ten times as many.
    pub first_level_bytes: u64,
    /// Bytes of a block: what a read from the disk reads at the least, and what one entry of an index stands for.
    pub block_bytes: usize,
    /// Bits of the bloom filters for each row.
    pub filter_bits_per_row: f64,
    /// Runs in level 0 that begin a compaction.
    pub level_0_files: u8,
    /// Whether compaction compresses (LZ4).
    pub compression: bool,
    /// Bytes a second that compaction of all replicas together may write, handed out ten times a second: so that it writes evenly, not
    /// in bursts that the log's syncs wait behind. Far more than flushes bring, or runs would pile up.
    pub compaction_bytes_per_s: u64,
}

impl Default for RocksOptions {
    fn default() -> Self {
        Self {
            block_cache_bytes: 128 << 20,
            background_threads: 2,
            open_files_per_replica: 128,
            run_file_bytes_max: 256 << 20,
            file_bytes: 64 << 20,
            first_level_bytes: 64 << 20,
            block_bytes: 16 << 10,
            filter_bits_per_row: 10.0,
            level_0_files: 4,
            compression: true,
            compaction_bytes_per_s: 256 << 20,
        }
    }
}

/// What all replicas of a node share: cache, background threads, the bound on write buffers. Cheap to clone.
#[derive(Clone)]
pub struct RocksShared {
    options: RocksOptions,
    env: Env,
    cache: Cache,
    write_buffers: WriteBufferManager,
    /// Has what copies of it share: the limit to what compaction writes.
    base: Options,
    /// Files of sorted runs.
    run: Arc<Options>,
    on_failed_sync: FatalHandler,
}

impl std::fmt::Debug for RocksShared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("RocksShared").field("options", &self.options).finish_non_exhaustive()
    }
}

impl RocksShared {
    /// Once per node.
    ///
    /// # Errors
    /// [`StoreError::Rocks`] when RocksDB has no environment for us.
    pub fn new(options: RocksOptions) -> Result<Self, StoreError> {
        let mut env =
            Env::new().map_err(|error| StoreError::rocks(Path::new("."), "make an environment", &error))?;
        env.set_low_priority_background_threads(i32::from(options.background_threads.max(1)));
        // Memtable flushes hardly happen: nothing is written through memtables.
        env.set_high_priority_background_threads(1);
        let cache = Cache::new_lru_cache(options.block_cache_bytes);
        let write_buffers =
            WriteBufferManager::new_write_buffer_manager_with_cache(8 << 20, false, cache.clone());
        // Every run is taken in under a snapshot (`Database::ingest`), and letting go of one would have RocksDB write files of the
        // last level again only to forget their sequence numbers.
        let mut base = Options::default()
            .get_options_from_string("bottommost_file_compaction_delay=4294967295")
            .map_err(|error| StoreError::rocks(Path::new("."), "make options", &error))?;
        let rate = i64::try_from(options.compaction_bytes_per_s).unwrap_or(i64::MAX);
        base.set_ratelimiter(rate.max(1 << 20), 100_000, 10);
        let run = Arc::new(Options::default());
        let mut shared =
            Self { options, env, cache, write_buffers, base, run, on_failed_sync: Arc::new(stop_process) };
        let mut run = shared.database(false, &Dead::default());
        // A run is compacted soon, and floats hardly compress: no time for it where training competes for the processor.
        run.set_compression_type(DBCompressionType::None);
        shared.run = Arc::new(run);
        Ok(shared)
    }

    /// Calls `handler` instead of ending the process when a sync of a store has failed.
    #[must_use]
    pub fn with_failed_sync_handler(mut self, handler: FatalHandler) -> Self {
        self.on_failed_sync = handler;
        self
    }

    /// What a store does with whatever it answers: a failed sync goes no further than this, in production.
    pub(super) fn watch<T>(&self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        if let Err(StoreError::Sync { path, source }) = &result {
            (self.on_failed_sync)(path, source);
        }
        result
    }

    /// What it was made with.
    #[must_use]
    pub fn options(&self) -> &RocksOptions {
        &self.options
    }

    /// Bytes of the shared cache in use.
    #[must_use]
    pub fn cache_bytes(&self) -> usize {
        self.cache.get_usage()
    }

    pub(super) fn run(&self) -> &Options {
        &self.run
    }

    /// Options of one replica's database.
    pub(super) fn database(&self, create: bool, dead: &Dead) -> Options {
        let mut options = self.base.clone();
        options.create_if_missing(create);
        options.set_compaction_filter_factory(DeadRows(dead.clone()));
        // Counters only: they say what compaction writes.
        options.enable_statistics();
        options.set_statistics_level(StatsLevel::ExceptHistogramOrTimers);
        options.set_env(&self.env);
        options.set_paranoid_checks(true);

        // Memory: 24 instances and more. Memtables stay empty, so they are as small as they go.
        options.set_write_buffer_size(256 << 10);
        options.set_arena_block_size(16 << 10);
        options.set_max_write_buffer_number(2);
        options.set_write_buffer_manager(&self.write_buffers);
        options.set_block_based_table_factory(&self.tables());
        options.set_max_open_files(i32::from(self.options.open_files_per_replica));
        options.set_max_file_opening_threads(2);
        // Opening reads no table properties: restart time must not depend on the size of the table.
        options.set_skip_stats_update_on_db_open(true);
        options.set_table_cache_num_shard_bits(2);

        // Shape: each flush cycle ingests one run over the whole range of keys, which lands in level 0. Few levels with sizes
        // that follow the data (dynamic) keep space near 1.1 x. A small first level: a store of a gigabyte has fewer sorted runs to
        // look through then, and reads of rows on disk are two to three times as fast (docs/performance.md).
        options.set_level_compaction_dynamic_level_bytes(true);
        options.set_level_zero_file_num_compaction_trigger(i32::from(self.options.level_0_files));
        options.set_target_file_size_base(self.options.file_bytes);
        options.set_max_bytes_for_level_base(self.options.first_level_bytes);
        options.set_max_background_jobs(2);
        options.set_max_subcompactions(1);
        // Write compaction output back in small steps: not in one burst that the log's fdatasync waits behind.
        options.set_bytes_per_sync(1 << 20);
        options.set_compaction_readahead_size(1 << 20);
        let compressed =
            if self.options.compression { DBCompressionType::Lz4 } else { DBCompressionType::None };
        options.set_compression_type(compressed);

        // Small change on disk and in the log folder.
        options.set_manifest_preallocation_size(64 << 10);
        options.set_max_manifest_file_size(4 << 20);
        options.set_keep_log_file_num(2);
        options.set_max_log_file_size(1 << 20);
        options.set_log_level(LogLevel::Warn);
        options.set_stats_dump_period_sec(0);
        options.set_stats_persist_period_sec(0);
        options
    }

    fn tables(&self) -> BlockBasedOptions {
        let mut tables = BlockBasedOptions::default();
        tables.set_block_cache(&self.cache);
        // Rows are 100 B to 1 KiB: 16 KiB blocks keep the index at a fiftieth to a tenth of a percent.
        tables.set_block_size(self.options.block_bytes);
        tables.set_format_version(5);
        // A pull of an id never seen asks every level: the filter answers for it.
        tables.set_bloom_filter(self.options.filter_bits_per_row, false);
        tables.set_optimize_filters_for_memory(true);
        // Indexes and filters count against the one cache, and are the last to leave it.
        tables.set_cache_index_and_filter_blocks(true);
        tables.set_cache_index_and_filter_blocks_with_high_priority(true);
        tables.set_pin_l0_filter_and_index_blocks_in_cache(true);
        tables
    }
}
