//! What the log holds, in the words of its callers.
//!
//! Not here: how it looks on disk (`record`).

use bytes::Bytes;
use std::fmt;

/// A replica's log within the node's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupKey {
    /// The Raft group.
    pub group: u64,
    /// The replica, unique over the cluster and never reused.
    pub replica: u64,
}

impl fmt::Display for GroupKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "group {} replica {}", self.group, self.replica)
    }
}

/// One log entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Position in the group's log.
    pub index: u64,
    /// Term of the leader that proposed it.
    pub term: u64,
    /// The leader that proposed it.
    pub leader: u64,
    /// What the payload is; the log does not look.
    pub kind: u8,
    /// Leader time, milliseconds; the log does not look.
    pub time_ms: u64,
    /// The payload; never copied on its way to the disk.
    pub payload: Bytes,
}

impl Entry {
    /// The entry's identity.
    pub fn id(&self) -> EntryId {
        EntryId { index: self.index, term: self.term, leader: self.leader }
    }
}

/// An entry's identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId {
    /// Position in the group's log.
    pub index: u64,
    /// Term of the leader that proposed it.
    pub term: u64,
    /// The leader that proposed it.
    pub leader: u64,
}

/// What a group's log holds at present; appends not yet durable included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GroupLogState {
    /// The last entry that was purged.
    pub last_purged: Option<EntryId>,
    /// Index of the first entry there is, or would be: one after `last_purged`, else the first one appended, else 0.
    pub first: u64,
    /// The last entry; equals `last_purged` when there are no entries.
    pub last: Option<EntryId>,
    /// All entries up to this one are durable, and so are the truncations before them.
    pub durable_index: Option<u64>,
}

/// Why a group is quarantined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuarantineCause {
    /// Records that were acknowledged are lost or unreadable. The replica is rebuilt under a new id.
    Damage,
    /// `Durability::Memory`, and the operating system restarted uncleanly: the tail may be lost. The data stays, so
    /// that an operator who has nothing better can release it.
    OsRestart,
}

impl QuarantineCause {
    /// The number on disk.
    pub(super) fn number(self) -> u8 {
        match self {
            QuarantineCause::Damage => 1,
            QuarantineCause::OsRestart => 2,
        }
    }

    /// Unknown numbers are the worse case.
    pub(super) fn from_number(number: u8) -> Self {
        if number == 2 { QuarantineCause::OsRestart } else { QuarantineCause::Damage }
    }
}
