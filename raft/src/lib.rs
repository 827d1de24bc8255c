//! Agreement: replicated groups over openraft. The only crate that names openraft.
//!
//! A node has one [`GroupRegistry`]; it opens one [`Group`] per replica from a [`StateMachine`] and the replica's part of
//! the node's log. Commands are bytes here; what they mean is the state machine's business.
//!
//! Rooms, from the bottom: `type_config`, `cursor` and `membership_codec` (words and their bytes), `log_store` (openraft's
//! log over ours), `executor` and `applier` (openraft's state machine over ours), `snapshot`, `transport`, `endpoint`
//! (what a replica answers to peers), `leadership`, `purge`, `membership`, `bootstrap`, `group`, `status`, `group_registry`.
//!
//! Not here: gradients, tables, sessions, configuration files.

#[cfg(test)]
extern crate self as evershard_raft;

mod applier;
mod bootstrap;
mod budget;
#[cfg(test)]
mod contract_test;
mod cursor;
mod endpoint;
mod error;
pub mod executor;
#[cfg(test)]
mod formats_test;
pub mod group;
pub mod group_registry;
mod leadership;
mod log_store;
mod membership;
mod membership_codec;
mod options;
mod purge;
mod reply;
mod snapshot;
pub mod state_machine;
mod status;
pub mod transport;
mod type_config;
mod unsafe_recovery;

pub use bootstrap::GroupHost;
pub use cursor::DecodeError;
pub use error::{GroupError, NotServing, ProposeError};
pub use executor::{ApplyExecutor, ApplyThreads, InlineExecutor};
pub use group::{Answer, Group};
pub use group_registry::{GroupRegistry, peer_service};
pub use leadership::Leadership;
pub use membership_codec::Members;
pub use options::{RaftLimits, RaftOptions, RaftTiming, WallClock};
pub use snapshot::traffic::{LogWritten, SnapshotFigures, SnapshotTraffic};
pub use state_machine::{
    CommittedEntry, EntryContent, Halt, LogPosition, SnapshotError, SnapshotMark, StateMachine,
};
pub use status::{GroupStatus, Role};
pub use transport::peer_service::{PeerService, tuned};
pub use type_config::{Peer, Runtime, Tokio};
pub use unsafe_recovery::make_sole_voter;

/// Counts what decoders take.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: evershard_formats::Counting = evershard_formats::Counting;
