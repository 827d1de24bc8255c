//! One tokio runtime a process, and waiting on it from Python.
//!
//! Invariants:
//! - The GIL is never held while a future is polled.
//! - A waiting call notices Ctrl-C (any Python signal handler that raises) within [`SIGNAL_POLL`].
//! - A runtime is used only in the process that made it: its threads do not survive a fork. The forked child makes its
//!   own; the parent's is left where it is, since touching it may wait for threads that are gone.
//!
//! Not here: what is waited for.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};

/// How long a Ctrl-C may go unnoticed.
const SIGNAL_POLL: Duration = Duration::from_millis(50);
/// Threads for sockets and codecs; the calling thread works as well.
const WORKER_THREADS: usize = 2;

struct Owned {
    pid: u32,
    runtime: Runtime,
}

/// Not a mutex: a forked child must not find it locked.
static CURRENT: AtomicPtr<Owned> = AtomicPtr::new(std::ptr::null_mut());

/// The runtime of this process, made on first use and kept until the process ends.
///
/// # Errors
/// The threads could not be started.
pub(crate) fn runtime() -> PyResult<&'static Runtime> {
    let pid = std::process::id();
    loop {
        let current = CURRENT.load(Ordering::Acquire);
        // SAFETY: a pointer stored here came from `Box::into_raw` and is never freed.
        if let Some(owned) = unsafe { current.as_ref() }
            && owned.pid == pid
        {
            return Ok(&owned.runtime);
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(WORKER_THREADS)
            .thread_name("evershard")
            .enable_all()
            .build()
            .map_err(|error| PyRuntimeError::new_err(format!("cannot start threads: {error}")))?;
        let made = Box::into_raw(Box::new(Owned { pid, runtime }));
        if CURRENT.compare_exchange(current, made, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // Another thread of this process was first.
            // SAFETY: `made` came from `Box::into_raw` just now and nobody else has seen it.
            drop(unsafe { Box::from_raw(made) });
        }
    }
}

/// Waits for a future with the GIL released.
///
/// # Errors
/// What a Python signal handler raised meanwhile (`KeyboardInterrupt`); the future is dropped then.
pub(crate) fn wait<F>(py: Python<'_>, future: F) -> PyResult<F::Output>
where
    F: Future + Send,
    F::Output: Send,
{
    let runtime = runtime()?;
    let mut future = pin!(future);
    loop {
        let polled = py
            .detach(|| runtime.block_on(async { tokio::time::timeout(SIGNAL_POLL, future.as_mut()).await }));
        match polled {
            Ok(output) => return Ok(output),
            // Outside of the runtime: a handler may call Evershard itself.
            Err(_) => py.check_signals()?,
        }
    }
}
