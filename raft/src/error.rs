//! What can go wrong in a group, with a verdict in the type: try again, ask another, give up.
//!
//! Invariant: an error that says "not proposed" is only made when the command certainly is not in any log;
//! [`ProposeError::OutcomeUnknown`] is the one for everything else.
//!
//! Not here: wire errors of the transport (`transport`), errors of the state machine (`state_machine`).

use std::path::PathBuf;
use std::time::Duration;

use crate::type_config::Peer;

/// Why a proposal was not answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// Not proposed: another replica leads. `leader` when it is known.
    #[error("not the leader; leader: {leader:?}")]
    NotLeader {
        /// The replica that leads and where it is.
        leader: Option<(u64, Peer)>,
    },
    /// Not proposed: no quorum was heard lately, or leadership moves. Try again after a pause.
    #[error("no leader with a valid lease now; try again")]
    Unavailable,
    /// Not proposed: too much is in flight. Try again when something was answered.
    #[error("{in_flight_bytes} bytes in flight in this group; try again later")]
    Exhausted {
        /// Bytes proposed and not yet answered.
        in_flight_bytes: u64,
    },
    /// Not proposed: the command is larger than the group accepts.
    #[error("command of {bytes} bytes is over the limit of {limit}")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The most.
        limit: usize,
    },
    /// It may be committed, or never be: leadership was lost after it went into the log. Ask the leader with the same
    /// session number.
    #[error("leadership changed while the command was in the log; its outcome is unknown")]
    OutcomeUnknown {
        /// The replica that leads now, when it is known.
        leader: Option<(u64, Peer)>,
    },
    /// The group on this node was shut down; when the command went into the log before, its outcome is unknown.
    #[error("the group is shut down on this node")]
    Stopped,
    /// The replica stopped for good and must be replaced; the outcome of what it had in flight is unknown.
    #[error("the replica is halted: {reason}")]
    Halted {
        /// Why.
        reason: String,
    },
}

impl ProposeError {
    /// Whether the same node may succeed with the same command after a pause.
    #[must_use]
    pub fn is_retryable_here(&self) -> bool {
        matches!(self, Self::Unavailable | Self::Exhausted { .. })
    }

    /// Whether the command is certainly in no log.
    #[must_use]
    pub fn is_not_proposed(&self) -> bool {
        !matches!(self, Self::OutcomeUnknown { .. } | Self::Stopped | Self::Halted { .. })
    }
}

/// Why this replica may not answer a leader-consistent read now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotServing {
    /// Another replica leads. `leader` when it is known.
    #[error("not the leader; leader: {leader:?}")]
    NotLeader {
        /// The replica that leads and where it is.
        leader: Option<(u64, Peer)>,
    },
    /// It leads, but has not yet applied everything up to its own first entry.
    #[error("the new leader is still applying what came before it")]
    Recovering,
    /// It leads, but no quorum acknowledged it within the lease.
    #[error("the leader's lease ran out {age:?} after the last quorum acknowledgement")]
    LeaseExpired {
        /// Time since the last quorum acknowledgement; `None` when there was none in this term.
        age: Option<Duration>,
    },
    /// It leads, but gives leadership away.
    #[error("leadership is being transferred")]
    Transferring,
    /// The replica stopped for good.
    #[error("the replica is halted: {reason}")]
    Halted {
        /// Why.
        reason: String,
    },
}

/// Why a group could not be opened, changed or moved.
#[derive(Debug, Clone, thiserror::Error)]
pub enum GroupError {
    /// A setting makes no sense.
    #[error("raft setting {field}: {reason}")]
    Config {
        /// The setting.
        field: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// The replica is open already, or its group is held under another replica id.
    #[error("group {group} is open on this node as replica {replica}")]
    AlreadyOpen {
        /// The group.
        group: u64,
        /// The replica that holds it.
        replica: u64,
    },
    /// No such replica here.
    #[error("group {group} is not on this node")]
    Absent {
        /// The group.
        group: u64,
    },
    /// The replica's storage is unusable, or it stopped for good; it must be replaced.
    #[error("replica {replica} of group {group} is halted: {reason}")]
    Halted {
        /// The group.
        group: u64,
        /// The replica.
        replica: u64,
        /// Why.
        reason: String,
    },
    /// A folder could not be made or cleaned.
    #[error("{path}: {reason}")]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What the disk said.
        reason: String,
    },
    /// The group has members already, or this replica is not among those given.
    #[error("group {group} cannot be initialised: {reason}")]
    Initialize {
        /// The group.
        group: u64,
        /// Why.
        reason: String,
    },
    /// Only the leader can do this.
    #[error("not the leader; leader: {leader:?}")]
    NotLeader {
        /// The replica that leads and where it is.
        leader: Option<(u64, Peer)>,
    },
    /// A membership change is refused: another is under way, or what was asked makes no sense.
    #[error("membership change refused: {reason}")]
    Membership {
        /// What openraft said.
        reason: String,
    },
    /// It did not happen in time; it may still.
    #[error("timed out after {after:?} waiting for {what}")]
    Timeout {
        /// What was waited for.
        what: &'static str,
        /// How long.
        after: Duration,
    },
    /// The group was shut down on this node.
    #[error("the group is shut down on this node")]
    Stopped,
}
