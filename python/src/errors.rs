//! The client's errors as the exceptions of `evershard.errors`, by kind.
//!
//! Not here: the classes themselves (Python), and what an error means for a retry (tools/client).

use evershard::{Error, ErrorKind, PartialPush as PartialPushError};
use numpy::PyArray1;
use pyo3::import_exception;
use pyo3::prelude::*;

use crate::pending::Resume;

import_exception!(evershard.errors, AlreadyClosed);
import_exception!(evershard.errors, Conflict);
import_exception!(evershard.errors, Corrupt);
import_exception!(evershard.errors, DeadlineExceeded);
import_exception!(evershard.errors, Exhausted);
import_exception!(evershard.errors, Fenced);
import_exception!(evershard.errors, Internal);
import_exception!(evershard.errors, InvalidArgument);
import_exception!(evershard.errors, JobAborted);
import_exception!(evershard.errors, LengthMismatch);
import_exception!(evershard.errors, NoOptimizer);
import_exception!(evershard.errors, NonFiniteGradient);
import_exception!(evershard.errors, OutOfRange);
import_exception!(evershard.errors, PartialPush);
import_exception!(evershard.errors, SessionExpired);
import_exception!(evershard.errors, TooLarge);
import_exception!(evershard.errors, Unavailable);
import_exception!(evershard.errors, UnknownJob);
import_exception!(evershard.errors, UnknownTable);
import_exception!(evershard.errors, WrongCluster);
import_exception!(evershard.errors, WrongDim);

/// The exception for an error.
pub(crate) fn exception(py: Python<'_>, error: Error) -> PyErr {
    match error {
        Error::Refused(refusal) => of_kind(refusal.kind, refusal.message),
        Error::Unavailable { .. } => DeadlineExceeded::new_err(error.to_string()),
        // Whoever is fenced cannot go on with what is known of its ids: its replacement begins at the last tick.
        Error::PartialPush(ref partial) if is_end(partial.kind) => {
            of_kind(partial.kind.unwrap_or(ErrorKind::Fenced), partial.cause.clone())
        }
        Error::PartialPush(ref partial) => {
            partial_push(py, error.to_string(), partial).unwrap_or_else(|failed| failed)
        }
        Error::SessionExpired(message) => SessionExpired::new_err(message),
        Error::Closed => AlreadyClosed::new_err(error.to_string()),
    }
}

fn is_end(kind: Option<ErrorKind>) -> bool {
    matches!(kind, Some(ErrorKind::Fenced | ErrorKind::JobAborted | ErrorKind::UnknownJob))
}

fn of_kind(kind: ErrorKind, message: String) -> PyErr {
    match kind {
        ErrorKind::Invalid => InvalidArgument::new_err(message),
        ErrorKind::UnknownTable => UnknownTable::new_err(message),
        ErrorKind::OutOfRange => OutOfRange::new_err(message),
        ErrorKind::WrongDim => WrongDim::new_err(message),
        ErrorKind::LengthMismatch => LengthMismatch::new_err(message),
        ErrorKind::NonFinite => NonFiniteGradient::new_err(message),
        ErrorKind::NoOptimizer => NoOptimizer::new_err(message),
        ErrorKind::TooLarge => TooLarge::new_err(message),
        ErrorKind::Corrupt => Corrupt::new_err(message),
        ErrorKind::Conflict => Conflict::new_err(message),
        ErrorKind::Exhausted => Exhausted::new_err(message),
        ErrorKind::SessionExpired => SessionExpired::new_err(message),
        ErrorKind::WrongCluster => WrongCluster::new_err(message),
        ErrorKind::Fenced => Fenced::new_err(message),
        ErrorKind::JobAborted => JobAborted::new_err(message),
        ErrorKind::UnknownJob => UnknownJob::new_err(message),
        ErrorKind::NotLeader
        | ErrorKind::UnknownGroup
        | ErrorKind::WrongRange
        | ErrorKind::Unavailable
        | ErrorKind::OutOfOrder
        | ErrorKind::OtherRecovery
        | ErrorKind::TooStale
        | ErrorKind::NotInitialized => Unavailable::new_err(message),
        ErrorKind::Unspecified | ErrorKind::Internal | ErrorKind::Withdrawn | ErrorKind::Forgotten => {
            Internal::new_err(message)
        }
    }
}

/// With the ids by outcome, and what `retry()` goes on with.
fn partial_push(py: Python<'_>, message: String, partial: &PartialPushError) -> PyResult<PyErr> {
    let ids = |ids: &[u64]| PyArray1::from_slice(py, ids);
    let arguments = (message, ids(&partial.applied), ids(&partial.refused), ids(&partial.unknown));
    let value = py.get_type::<PartialPush>().call1(arguments)?;
    if let Some(handle) = partial.retry() {
        value.setattr("_resume", Resume::new(handle))?;
    }
    Ok(PyErr::from_value(value))
}
