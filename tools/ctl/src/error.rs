//! What can go wrong, and the exit code that says so.

use evershard_checkpoint::target::TargetError;
use evershard_proto::v1::{ErrorDetail, ErrorKind};
use prost::Message;
use tonic::{Code, Status};

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CtlError {
    /// An endpoint is not a URL.
    #[error("{endpoint:?} is not an endpoint (like http://127.0.0.1:7400): {reason}")]
    Endpoint { endpoint: String, reason: String },
    /// Nobody answered.
    #[error("no node answers within {seconds} s; tried:\n{tried}")]
    Unavailable { seconds: u64, tried: String },
    /// A node answers, but no cluster was created.
    #[error("{address} runs but belongs to no cluster yet: create one with `evershardctl cluster init`")]
    NotInitialized { address: String },
    /// A node refused.
    #[error("{address} refused to {action}: {message}")]
    Refused { address: String, action: &'static str, message: String },
    /// The name is not one of the cluster's.
    #[error("there is no {what} {name}; there are: {existing}")]
    Unknown { what: &'static str, name: String, existing: String },
    /// A reply that contradicts itself.
    #[error("{address} answered nonsense: {what}")]
    BadReply { address: String, what: String },
    /// Something was started but did not come about in time.
    #[error("{what} within {seconds} s")]
    NotDone { what: String, seconds: u64 },
    /// A hyper-parameter of another kind of optimizer.
    #[error("table {table} has the optimizer {optimizer}: there is no {flag} to change")]
    NotOfThisOptimizer { table: String, optimizer: String, flag: &'static str },
    /// A checkpoint, or what it lies in.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A checkpoint that is not whole.
    #[error("checkpoint {name} is not whole: {problems} problems")]
    NotWhole { name: String, problems: usize },
    /// The user did not say yes.
    #[error("not confirmed: {hint}")]
    NotConfirmed { hint: &'static str },
    /// stdout is gone.
    #[error("cannot write the output: {0}")]
    Output(#[from] std::io::Error),
}

impl CtlError {
    /// 1 failed, 2 wrong usage, 3 unavailable.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            CtlError::Endpoint { .. }
            | CtlError::NotOfThisOptimizer { .. }
            | CtlError::NotConfirmed { .. } => 2,
            CtlError::Target(TargetError::Url { .. }) => 2,
            CtlError::Target(TargetError::Store { .. }) | CtlError::Unavailable { .. } => 3,
            CtlError::Target(_)
            | CtlError::NotWhole { .. }
            | CtlError::NotInitialized { .. }
            | CtlError::Refused { .. }
            | CtlError::Unknown { .. }
            | CtlError::BadReply { .. }
            | CtlError::NotDone { .. }
            | CtlError::Output(_) => 1,
        }
    }
}

/// What the server said beyond the gRPC code, when it did.
pub(crate) fn detail_of(status: &Status) -> Option<ErrorDetail> {
    if status.details().is_empty() { None } else { ErrorDetail::decode(status.details()).ok() }
}

/// True when another try, there or elsewhere, may succeed.
pub(crate) fn is_transient(status: &Status) -> bool {
    if let Some(kind) = detail_of(status).and_then(|detail| ErrorKind::try_from(detail.kind).ok()) {
        match kind {
            ErrorKind::NotLeader
            | ErrorKind::UnknownGroup
            | ErrorKind::Unavailable
            | ErrorKind::Exhausted => return true,
            ErrorKind::Unspecified => {}
            _ => return false,
        }
    }
    matches!(
        status.code(),
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::ResourceExhausted
    )
}

/// True when the node belongs to no cluster yet.
pub(crate) fn is_not_initialized(status: &Status) -> bool {
    detail_of(status).is_some_and(|detail| detail.kind() == ErrorKind::NotInitialized)
}

/// A status in words.
pub(crate) fn words(status: &Status) -> String {
    let message = status.message();
    if message.is_empty() { format!("{:?}", status.code()) } else { message.to_owned() }
}
