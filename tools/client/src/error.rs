//! What an operation can fail with.
//!
//! Invariant: an error says whether something was changed: a [`Error::Refused`] changed nothing, an [`Error::Unavailable`]
//! of a pull changed nothing, of a push it says what is unknown ([`Error::PartialPush`]).

use std::sync::Arc;
use std::time::Duration;

use evershard_proto::v1::{ErrorDetail, ErrorKind};
use prost::Message;

use crate::push::PushHandle;

/// A request that the server or this client refused, for good. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// Why, for programs.
    pub kind: ErrorKind,
    /// Why, for people: names the table, shard, node or id.
    pub message: String,
}

/// A push of which not every message was acknowledged. Ids are as given by the caller, without repetitions.
#[derive(Debug, Clone)]
pub struct PartialPush {
    /// Applied, for certain.
    pub applied: Vec<u64>,
    /// Refused, for certain; with the first reason.
    pub refused: Vec<u64>,
    /// Not acknowledged in time: they may be applied or not. What [`PartialPush::retry`] goes on with, and what nobody can
    /// tell any more because its session has ended.
    pub unknown: Vec<u64>,
    /// Those of `unknown` that were never sent: nothing was changed, and only [`PartialPush::retry`] sends them.
    pub unsent: Vec<u64>,
    /// The first refusal, or what was last seen.
    pub cause: String,
    /// The kind of the first refusal.
    pub kind: Option<ErrorKind>,
    pub(crate) retry: Option<Arc<parking_lot::Mutex<Option<PushHandle>>>>,
}

impl PartialPush {
    /// Sends again what was not acknowledged, under its old numbers, and then what was never sent: each id that was not
    /// refused ends up applied exactly once. It is acknowledged only when every id of the whole push is applied. Possible
    /// once, as long as the error lives; dropping the error gives up on what was sent, and its outcome stays unknown.
    ///
    /// What was never sent comes after pushes that were begun since. The error holds its bytes, which count towards
    /// [`crate::ClientOptions::push_bytes_in_flight`] only while they are under way.
    #[must_use]
    pub fn retry(&self) -> Option<PushHandle> {
        self.retry.as_ref().and_then(|handle| handle.lock().take())
    }
}

/// Anything that can go wrong.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The request can never succeed as it is; nothing was changed.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Nobody could answer until the deadline.
    #[error(
        "{operation}: no answer within {elapsed:.1?}; tried {}; last: {last}",
        tried.join(", ")
    )]
    Unavailable {
        /// What was asked.
        operation: String,
        /// The addresses that were tried.
        tried: Vec<String>,
        /// The last reason.
        last: String,
        /// How long was waited.
        elapsed: Duration,
    },
    /// A push was not acknowledged as a whole.
    #[error(
        "push not acknowledged as a whole: {} ids applied, {} refused, {} with unknown outcome; {}",
        .0.applied.len(), .0.refused.len(), .0.unknown.len(), .0.cause
    )]
    PartialPush(Box<PartialPush>),
    /// The client's session ended while pushes were not acknowledged: their outcome is unknown.
    #[error("{0}")]
    SessionExpired(String),
    /// The client was closed.
    #[error("the client is closed")]
    Closed,
}

impl Error {
    pub(crate) fn refused(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error::Refused(Refusal { kind, message: message.into() })
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::refused(ErrorKind::Invalid, message)
    }

    /// The kind, for programs.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Refused(refusal) => refusal.kind,
            Error::Unavailable { .. } | Error::Closed => ErrorKind::Unavailable,
            Error::PartialPush(partial) => partial.kind.unwrap_or(ErrorKind::Unavailable),
            Error::SessionExpired(_) => ErrorKind::SessionExpired,
        }
    }

    /// Whether the same call may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Error::Unavailable { .. })
    }
}

/// What a gRPC status says; a status that is not the server's own is a passing failure.
pub(crate) fn detail_of(status: &tonic::Status) -> ErrorDetail {
    match ErrorDetail::decode(status.details()) {
        Ok(detail) if !status.details().is_empty() => detail,
        _ => ErrorDetail {
            kind: ErrorKind::Unavailable as i32,
            message: format!("{}: {}", status.code(), status.message()),
            ..Default::default()
        },
    }
}

/// Whether the same request may succeed at another node or another time.
pub(crate) fn is_passing(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::NotLeader
            | ErrorKind::UnknownGroup
            | ErrorKind::WrongRange
            | ErrorKind::Unavailable
            | ErrorKind::Exhausted
            | ErrorKind::OutOfOrder
            | ErrorKind::OtherRecovery
            | ErrorKind::TooStale
            | ErrorKind::NotInitialized
    )
}
