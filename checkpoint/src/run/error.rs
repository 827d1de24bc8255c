//! What is wrong with a run.

/// A run that is not as it should be: which file, and where in it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}: at byte {offset}: {fault}")]
pub struct RunError {
    /// The run's path in its target; of one that is being written, its table.
    pub file: String,
    /// Where what is wrong begins.
    pub offset: u64,
    /// What is wrong.
    pub fault: RunFault,
}

/// What can be wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RunFault {
    /// Other bytes than a run begins with.
    #[error("this is no run of rows: the magic is missing")]
    Magic,
    /// Of another version of Evershard.
    #[error("run format {found}, this build reads {version}", version = super::head::KNOWN_VERSION)]
    Version {
        /// What the file says.
        found: u32,
    },
    /// The head does not have its crc32.
    #[error("the head is damaged (crc32)")]
    HeadChecksum,
    /// A number of the head that cannot be.
    #[error("the head's {field} cannot be {found}")]
    Head {
        /// Which.
        field: &'static str,
        /// What it says.
        found: u64,
    },
    /// A block of an impossible length.
    #[error("a block cannot have {bytes} bytes and {rows} rows")]
    BlockLength {
        /// Bytes it claims.
        bytes: u32,
        /// Rows it claims.
        rows: u32,
    },
    /// The block does not have its crc32.
    #[error("the block is damaged (crc32)")]
    BlockChecksum,
    /// A row beyond its block's end, or a block beyond its rows.
    #[error("row and block end at different places")]
    RowLength,
    /// Flags of another version, or of none.
    #[error("a row cannot have the flags {found:#x}")]
    Flags {
        /// What it has.
        found: u32,
    },
    /// Rows out of order.
    #[error("key {key:016x} comes after {before:016x}")]
    Order {
        /// The row's.
        key: u64,
        /// The row's before it.
        before: u64,
    },
    /// What the head says is not what came.
    #[error("the head says {expected} as its {what}, the rows say {found}")]
    Contradiction {
        /// What of it.
        what: &'static str,
        /// The head's.
        expected: u64,
        /// What was found.
        found: u64,
    },
    /// The file ends too early.
    #[error("the file ends here, and should not")]
    Short,
    /// The file goes on after its last block.
    #[error("the file goes on after its last block")]
    Long,
    /// Of a row to write: other floats than its shape has.
    #[error("a row of {expected} floats was given {found}")]
    Floats {
        /// As the shape and the flags say.
        expected: usize,
        /// How many there are.
        found: usize,
    },
    /// To write: no more rows go in.
    #[error("the run is full")]
    Full,
    /// To write: there is no row.
    #[error("a run has a row at least")]
    Empty,
}
