//! What a Raft group drives: a state machine that takes command bytes in log order.
//!
//! The raft crate does not know what a command means. `src` implements this trait for a shard and for the meta group.
//!
//! Invariants the implementor holds:
//! - [`StateMachine::apply`] is deterministic in (its state, the entry) and never panics;
//! - an entry it cannot decode because its kind or version is of another build is a [`Halt`]: applied does not advance;
//! - [`StateMachine::snapshot_mark`] answers the same or a later position after it answered once, also right after an
//!   install, until the replica is destroyed.

use std::path::Path;

use bytes::Bytes;

/// A place in a group's log, with the leader that proposed it. Ordered by (term, leader, index); within one group's
/// committed log the order of indexes is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LogPosition {
    /// The leader's term.
    pub term: u64,
    /// The leader's replica id.
    pub leader: u64,
    /// The entry's index, from 0.
    pub index: u64,
}

/// What an entry carries.
#[derive(Debug, Clone)]
pub enum EntryContent {
    /// A leader's first entry.
    Blank,
    /// A proposed command.
    Command {
        /// The leader's clock when it proposed, in milliseconds since 1970.
        time_ms: u64,
        /// Opaque to the raft crate.
        command: Bytes,
    },
    /// A membership, encoded by the raft crate; the state machine keeps the last one with its state and gives it back.
    Membership(Bytes),
}

/// A committed entry, to be applied.
#[derive(Debug, Clone)]
pub struct CommittedEntry {
    /// Where it stands.
    pub position: LogPosition,
    /// What it carries.
    pub content: EntryContent,
}

/// How far a state machine's durable state reaches, and the membership as of there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapshotMark {
    /// The last entry that the state holds; `None` before the first.
    pub position: Option<LogPosition>,
    /// Encoded by the raft crate; empty when none was applied yet.
    pub membership: Bytes,
}

/// The replica stops here: it cannot go on without breaking a promise.
#[derive(Debug, Clone, thiserror::Error)]
#[error("replica halted at index {index}: {reason}")]
pub struct Halt {
    /// The entry that could not be applied.
    pub index: u64,
    /// Why.
    pub reason: String,
}

/// A snapshot could not be linked or installed.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The disk said no.
    #[error("snapshot in {path}: {source}")]
    Io {
        /// The file or folder.
        path: std::path::PathBuf,
        /// What the disk said.
        source: std::io::Error,
    },
    /// What was received is not a snapshot of this group, or is damaged.
    #[error("snapshot refused: {0}")]
    Invalid(String),
    /// The disk has no room for it. Worth trying again when there is.
    #[error("{path}: a snapshot needs {needed} bytes, {free} may be taken")]
    NoSpace {
        /// The folder.
        path: std::path::PathBuf,
        /// Bytes that are missing of it.
        needed: u64,
        /// Bytes that a snapshot may take there.
        free: u64,
    },
}

impl SnapshotError {
    /// Whether it is for want of room on the disk.
    #[must_use]
    pub fn is_disk_full(&self) -> bool {
        match self {
            Self::NoSpace { .. } => true,
            Self::Io { source, .. } => {
                matches!(source.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)
            }
            Self::Invalid(_) => false,
        }
    }
}

/// A group's state. All methods may block: the raft crate calls them on threads made for it, never on the runtime.
pub trait StateMachine: Send + Sync + 'static {
    /// What recovery found: replay starts after it. Asked once, at start.
    fn recovered(&self) -> SnapshotMark;

    /// Applies entries in order, answering each; called by one thread at a time. Entries at or below the recovered
    /// position are never given. The answers are for the proposers, in the order of the entries.
    ///
    /// # Errors
    /// [`Halt`] when an entry is of an unknown kind or version. Entries before it were applied.
    fn apply(&self, entries: &[CommittedEntry]) -> Result<Vec<Bytes>, Halt>;

    /// A command was appended to the log here, or is read back to be replayed, and will be applied unless another leader
    /// overwrites it: whatever it takes to do so may be made ready. Called on the runtime: must not wait.
    fn announced(&self, command: &Bytes) {
        let _ = command;
    }

    /// The replicated clock: the latest time of an applied entry, in milliseconds since 1970; 0 while there is none. Bounds how far
    /// a leader's clock may be ahead (design 14.11). Called on the runtime: must not wait.
    fn clock_ms(&self) -> u64 {
        0
    }

    /// The virtual snapshot: the last position whose state is durable (a flush cycle ended there).
    fn snapshot_mark(&self) -> SnapshotMark;

    /// Makes `directory` (which does not exist yet) and fills it with hard links or files that hold the state as of a
    /// mark at or after [`StateMachine::snapshot_mark`]; answers with that mark. Called when a snapshot is sent.
    ///
    /// # Errors
    /// [`SnapshotError`] naming the path.
    fn link_snapshot(&self, directory: &Path) -> Result<SnapshotMark, SnapshotError>;

    /// Replaces the state with the received one, durably, or leaves it as it was. May move or link files out of
    /// `directory`, which is on the same file system and is removed by the caller afterwards.
    ///
    /// # Errors
    /// [`SnapshotError`]: the old state is still there.
    fn install_snapshot(&self, mark: &SnapshotMark, directory: &Path) -> Result<(), SnapshotError>;
}
