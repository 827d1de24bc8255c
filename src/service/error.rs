//! Errors on the wire: the one place where an inner error becomes an [`ErrorDetail`] and a gRPC status.
//!
//! Invariant: a status carries the encoded detail, so that a unary caller and an Exchange stream learn the same.

use evershard_proto::v1::{ErrorDetail, ErrorKind, WorkerIdentity};
use evershard_raft::{GroupError, NotServing, Peer, ProposeError};
use prost::Message;
use tonic::{Code, Status};

/// How long a client should wait before it asks again after a passing refusal.
const RETRY_AFTER_MS: u32 = 10;

/// A request that was not answered as asked.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{}", .0.message)]
pub struct RequestError(pub Box<ErrorDetail>);

impl RequestError {
    /// An error of `kind`; `message` names the table, shard, node or id.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        RequestError(Box::new(ErrorDetail {
            kind: kind as i32,
            message: message.into(),
            ..Default::default()
        }))
    }

    /// The worker that a call is made for.
    ///
    /// # Errors
    /// INVALID when it names none.
    pub fn need_worker(worker: Option<WorkerIdentity>) -> Result<WorkerIdentity, Self> {
        worker.ok_or_else(|| Self::new(ErrorKind::Invalid, "the call needs a worker"))
    }

    /// For a group.
    #[must_use]
    pub fn in_group(mut self, group: u64) -> Self {
        self.0.group = group;
        self
    }

    /// Another try may succeed after a pause.
    #[must_use]
    pub fn retry_soon(mut self) -> Self {
        self.0.retry_after_ms = RETRY_AFTER_MS;
        self
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind()
    }

    /// Another replica leads the group.
    #[must_use]
    pub fn not_leader(group: u64, leader: Option<&(u64, Peer)>) -> Self {
        let message = match leader {
            Some((_, peer)) => format!("group {group} is led by {peer}"),
            None => format!("group {group} has no leader that this node knows of"),
        };
        let mut error = Self::new(ErrorKind::NotLeader, message).in_group(group).retry_soon();
        if let Some((_, peer)) = leader {
            error.0.leader_address.clone_from(&peer.address);
            error.0.leader_node = peer.node;
        }
        error
    }

    /// A group refused a proposal.
    #[must_use]
    pub fn from_propose(group: u64, error: &ProposeError) -> Self {
        match error {
            ProposeError::NotLeader { leader } | ProposeError::OutcomeUnknown { leader } => {
                Self::not_leader(group, leader.as_ref())
            }
            ProposeError::Exhausted { .. } => {
                Self::new(ErrorKind::Exhausted, format!("group {group}: {error}"))
                    .in_group(group)
                    .retry_soon()
            }
            ProposeError::TooLarge { .. } => {
                Self::new(ErrorKind::TooLarge, format!("group {group}: {error}")).in_group(group)
            }
            ProposeError::Unavailable | ProposeError::Stopped | ProposeError::Halted { .. } => {
                Self::new(ErrorKind::Unavailable, format!("group {group}: {error}"))
                    .in_group(group)
                    .retry_soon()
            }
        }
    }

    /// A replica does not serve leader reads now.
    #[must_use]
    pub fn from_not_serving(group: u64, error: &NotServing) -> Self {
        match error {
            NotServing::NotLeader { leader } => Self::not_leader(group, leader.as_ref()),
            _ => Self::new(ErrorKind::Unavailable, format!("group {group}: {error}"))
                .in_group(group)
                .retry_soon(),
        }
    }

    /// A group could not be changed.
    #[must_use]
    pub fn from_group(group: u64, error: &GroupError) -> Self {
        match error {
            GroupError::NotLeader { leader } => Self::not_leader(group, leader.as_ref()),
            GroupError::Absent { .. } => {
                Self::new(ErrorKind::UnknownGroup, error.to_string()).in_group(group).retry_soon()
            }
            GroupError::Timeout { .. } | GroupError::Stopped | GroupError::Halted { .. } => {
                Self::new(ErrorKind::Unavailable, error.to_string()).in_group(group).retry_soon()
            }
            _ => Self::new(ErrorKind::Internal, error.to_string()).in_group(group),
        }
    }

    /// What a gRPC status says of it, if the status is one of ours.
    #[must_use]
    pub fn from_status(status: &Status) -> Self {
        match ErrorDetail::decode(status.details()) {
            Ok(detail) if !status.details().is_empty() => RequestError(Box::new(detail)),
            _ => Self::new(ErrorKind::Unavailable, status.message().to_string()).retry_soon(),
        }
    }
}

impl From<ErrorDetail> for RequestError {
    fn from(detail: ErrorDetail) -> Self {
        RequestError(Box::new(detail))
    }
}

impl From<RequestError> for Status {
    fn from(error: RequestError) -> Self {
        let code = code_of(error.kind());
        let details = error.0.encode_to_vec();
        Status::with_details(code, error.0.message, details.into())
    }
}

fn code_of(kind: ErrorKind) -> Code {
    match kind {
        ErrorKind::Invalid
        | ErrorKind::WrongDim
        | ErrorKind::LengthMismatch
        | ErrorKind::NonFinite
        | ErrorKind::TooLarge => Code::InvalidArgument,
        ErrorKind::OutOfRange => Code::OutOfRange,
        ErrorKind::UnknownTable | ErrorKind::UnknownJob => Code::NotFound,
        ErrorKind::NoOptimizer | ErrorKind::NotInitialized | ErrorKind::WrongCluster => {
            Code::FailedPrecondition
        }
        ErrorKind::Conflict => Code::AlreadyExists,
        ErrorKind::Corrupt => Code::DataLoss,
        ErrorKind::NotLeader
        | ErrorKind::UnknownGroup
        | ErrorKind::WrongRange
        | ErrorKind::Unavailable
        | ErrorKind::OtherRecovery
        | ErrorKind::TooStale => Code::Unavailable,
        ErrorKind::Exhausted => Code::ResourceExhausted,
        ErrorKind::OutOfOrder
        | ErrorKind::SessionExpired
        | ErrorKind::Withdrawn
        | ErrorKind::Forgotten
        | ErrorKind::Fenced
        | ErrorKind::JobAborted => Code::Aborted,
        ErrorKind::Internal | ErrorKind::Unspecified => Code::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_gives_back_the_detail() {
        let peer = Peer { node: 3, address: "http://c:1".into() };
        let error = RequestError::not_leader(7, Some(&(9, peer)));
        let status = Status::from(error.clone());
        assert_eq!(status.code(), Code::Unavailable);
        assert_eq!(RequestError::from_status(&status), error);
    }
}
