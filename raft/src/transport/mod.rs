//! How replicas of a group on different nodes talk: frames on three lanes per pair of nodes, shared by all groups.
//!
//! A frame goes out through [`Transport::call`] (`peer_client` in production, a simulated network in tests), and comes
//! in through a [`router::Connection`], which finds the replica and answers. `network` and `pipeline` speak openraft's
//! side of the sender.
//!
//! Invariants:
//! - heartbeats, votes and transfers never wait behind entries or snapshots: each lane is its own connection;
//! - frames of one lane are sent in the order of the calls;
//! - every frame that arrives is answered, if only with a typed refusal, unless its connection ended.
//!
//! Not here: which replicas exist (`group_registry`).

pub mod codec;
#[cfg(test)]
mod codec_test;
pub(crate) mod heartbeat;
pub(crate) mod network;
pub(crate) mod peer_client;
pub(crate) mod peer_service;
pub(crate) mod pipeline;
pub mod router;

use bytes::Bytes;
use futures_util::future::BoxFuture;

pub use self::codec::{FrameKind, Refusal};
pub use self::router::{Connection, IncomingFrame, ReplyFrame, Router};
use crate::type_config::Peer;

/// One of the connections between two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// Heartbeats, votes, pre-votes, transfers.
    Control,
    /// Entries.
    Log,
    /// Snapshots.
    Snapshot,
}

impl Lane {
    /// The lane's name in metadata and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Log => "log",
            Self::Snapshot => "snapshot",
        }
    }

    /// The lane with this name.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        [Self::Control, Self::Log, Self::Snapshot].into_iter().find(|lane| lane.name() == name)
    }
}

/// The replica a frame is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Where it is.
    pub peer: Peer,
    /// Its group.
    pub group: u64,
    /// Its id.
    pub replica: u64,
}

/// Why there is no answer, or not the one asked for.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TransportError {
    /// No connection, or it broke before the answer.
    #[error("{peer} cannot be reached: {reason}")]
    Unreachable {
        /// The peer.
        peer: Peer,
        /// What was tried and failed.
        reason: String,
    },
    /// Too many frames wait for this lane.
    #[error("the {lane} lane to {peer} is full", lane = lane.name())]
    Full {
        /// The peer.
        peer: Peer,
        /// The lane.
        lane: Lane,
    },
    /// The other side refused, and said why.
    #[error("{peer} refused: {refusal}")]
    Refused {
        /// The peer.
        peer: Peer,
        /// Why.
        refusal: Refusal,
    },
    /// The answer is damaged or of another version.
    #[error("the answer of {peer} cannot be read: {reason}")]
    Damaged {
        /// The peer.
        peer: Peer,
        /// What is wrong.
        reason: String,
    },
}

/// A frame's body, laid out only when its turn to be sent has come.
pub struct Body {
    make: Box<dyn FnOnce() -> Bytes + Send>,
}

impl Body {
    /// Laid out already.
    #[must_use]
    pub fn ready(bytes: Bytes) -> Self {
        Self { make: Box::new(move || bytes) }
    }

    /// Laid out by `make`.
    #[must_use]
    pub fn lazy(make: impl FnOnce() -> Bytes + Send + 'static) -> Self {
        Self { make: Box::new(make) }
    }

    /// Lays it out.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        (self.make)()
    }
}

/// The body of the answer.
pub type ReplyFuture = BoxFuture<'static, Result<Bytes, TransportError>>;

/// Sends frames; see the module.
pub trait Transport: Send + Sync + 'static {
    /// Queues a frame now, behind earlier calls on the same lane to the same peer; the future is its answer.
    fn call(&self, target: &Target, lane: Lane, kind: FrameKind, body: Body) -> ReplyFuture;
}
