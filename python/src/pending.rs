//! Pushes under way, seen from Python.
//!
//! Invariant: a push that was begun is settled by a task of its own, whether or not anybody waits, so a wait that Ctrl-C
//! interrupted can be repeated and tells the same.
//!
//! Not here: how a push is settled (tools/client).

use std::sync::Mutex;

use evershard::{Error, PushHandle};
use pyo3::prelude::*;
use tokio::sync::watch;

use crate::errors::{InvalidArgument, exception};
use crate::process_bound::ProcessBound;
use crate::runtime::{runtime, wait};

type Outcome = Option<Result<(), Error>>;

/// A push that was begun. `wait()` returns when a quorum has all of it, or raises; it may be called again.
#[pyclass(frozen, module = "evershard")]
#[derive(Debug)]
pub(crate) struct PendingPush {
    outcome: ProcessBound<watch::Receiver<Outcome>>,
}

impl PendingPush {
    /// Settles the pushes in the background, in order; the first error counts.
    ///
    /// # Errors
    /// The runtime cannot start.
    pub(crate) fn new(handles: Vec<PushHandle>) -> PyResult<Self> {
        let (sender, receiver) = watch::channel(None);
        runtime()?.spawn(async move {
            let mut outcome = Ok(());
            for handle in handles {
                let settled = handle.wait().await.map(|_| ());
                outcome = outcome.and(settled);
            }
            sender.send_replace(Some(outcome));
        });
        Ok(PendingPush { outcome: ProcessBound::new(receiver) })
    }
}

#[pymethods]
impl PendingPush {
    /// Waits until a quorum of replicas has the push; raises what went wrong.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let mut receiver = self.outcome.get()?.clone();
        let outcome = wait(py, async move {
            match receiver.wait_for(Option::is_some).await {
                Ok(outcome) => outcome.clone().unwrap_or(Ok(())),
                Err(_) => Err(Error::Closed),
            }
        })?;
        outcome.map_err(|error| exception(py, error))
    }

    /// Whether `wait()` would return (or raise) at once.
    fn done(&self) -> PyResult<bool> {
        Ok(self.outcome.get()?.borrow().is_some())
    }
}

/// What `PartialPush.retry()` goes on with.
#[pyclass(frozen, module = "evershard._evershard")]
#[derive(Debug)]
pub(crate) struct Resume {
    handle: ProcessBound<Mutex<Option<PushHandle>>>,
}

impl Resume {
    pub(crate) fn new(handle: PushHandle) -> Self {
        Resume { handle: ProcessBound::new(Mutex::new(Some(handle))) }
    }
}

#[pymethods]
impl Resume {
    /// Sends again what was not acknowledged, under its old numbers, and waits.
    fn retry(&self, py: Python<'_>) -> PyResult<()> {
        let taken = self.handle.get()?.lock().ok().and_then(|mut handle| handle.take());
        let Some(handle) = taken else {
            return Err(InvalidArgument::new_err(
                "this push was retried already: the new error, if any, can be",
            ));
        };
        PendingPush::new(vec![handle])?.wait(py)
    }
}
