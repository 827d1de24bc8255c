//! What an operator sees of a replica.

use super::machine::ShardMachine;

/// A replica's figures, as of one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardStatus {
    /// The last applied index, 0 before the first.
    pub applied: u64,
    /// The last index that the store holds entirely, 0 before the first flush.
    pub flushed: u64,
    /// Serves once applied has reached it.
    pub complete_at: u64,
    /// True when it serves.
    pub ready: bool,
    /// Sessions that have pushed here and live.
    pub sessions: usize,
    /// The tables, in ascending order of their numbers.
    pub tables: Vec<TableStatus>,
}

/// One table's figures in a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableStatus {
    /// The table's number.
    pub table: u32,
    /// Live rows, in memory and on disk.
    pub rows: u64,
    /// False while a restarted replica has not counted its rows yet: `rows` is then what is in memory.
    pub is_counted: bool,
    /// Of them, in memory; tombstones too.
    pub resident: u64,
    /// Removed rows that are still remembered.
    pub tombstones: u64,
    /// Rows that changed since they were last flushed.
    pub dirty_rows: u64,
    /// Memory taken.
    pub memory_bytes: u64,
    /// Of it, what holds no row now and takes the next ones that come: places of rows that left.
    pub free_bytes: u64,
    /// Of it, what the rows in memory take beside their floats: headers, index, bookkeeping.
    pub overhead_bytes: u64,
}

impl ShardMachine {
    /// The replica's figures.
    #[must_use]
    pub fn status(&self) -> ShardStatus {
        let (applied, sessions) = {
            let small = self.lock_small();
            (small.index(), small.small.sessions.len())
        };
        let set = self.rows.read();
        let tables = set
            .tables()
            .iter()
            .map(|(number, table)| TableStatus {
                table: *number,
                rows: set.live_rows(*number).unwrap_or(table.len()),
                is_counted: set.live_rows(*number).is_some(),
                resident: table.resident(),
                tombstones: table.tombstones(),
                dirty_rows: table.dirty_rows(),
                memory_bytes: table.memory_bytes() as u64,
                free_bytes: table.free_bytes() as u64,
                overhead_bytes: ((table.memory_bytes() - table.free_bytes()) as u64)
                    .saturating_sub(table.resident() * table.shape().floats() as u64 * 4),
            })
            .collect();
        ShardStatus {
            applied,
            flushed: self.mark.lock().position.map_or(0, |position| position.index),
            complete_at: self.rows.complete_at(),
            ready: self.ready(),
            sessions,
            tables,
        }
    }

    /// About how many bytes a flush would write now.
    #[must_use]
    pub fn dirty_bytes(&self) -> u64 {
        const HEAD_BYTES: u64 = 24;
        let set = self.rows.read();
        let bytes = |shape: evershard_storage::table::RowShape| HEAD_BYTES + shape.floats() as u64 * 4;
        set.tables().values().map(|table| table.dirty_rows() * bytes(table.shape())).sum()
    }
}
