//! Threads that answer large pulls, so that gathering a megabyte of rows never holds up the runtime.
//!
//! Invariants: the queue is bounded, a full one is an answer (EXHAUSTED) and not a wait; threads are joined on drop.
//!
//! Not here: what a pull reads (`read/`).

use std::thread::JoinHandle;

use crossbeam_channel::{Sender, TrySendError, bounded};
use tokio::sync::oneshot;

type Work = Box<dyn FnOnce() + Send>;

/// Pulls waiting for a thread, at the most.
const QUEUE_MAX: usize = 1024;

/// The pool could not take or finish the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReadPoolError {
    /// Too many pulls are waiting.
    #[error("{QUEUE_MAX} pulls are waiting for a thread")]
    Full,
    /// The node is shutting down.
    #[error("the node is shutting down")]
    Stopped,
}

/// A fixed number of named threads.
#[derive(Debug)]
pub struct ReadPool {
    queue: Option<Sender<Work>>,
    threads: Vec<JoinHandle<()>>,
}

impl ReadPool {
    /// Starts `threads` threads with this name.
    ///
    /// # Errors
    /// What the system said when it refused a thread.
    pub fn start(name: &str, threads: usize) -> std::io::Result<Self> {
        let (queue, work) = bounded::<Work>(QUEUE_MAX);
        let threads = (0..threads)
            .map(|n| {
                let work = work.clone();
                std::thread::Builder::new().name(format!("{name}-{n}")).spawn(move || {
                    for job in work {
                        job();
                    }
                })
            })
            .collect::<Result<_, _>>()?;
        Ok(ReadPool { queue: Some(queue), threads })
    }

    /// Runs `work` on one of the threads.
    ///
    /// # Errors
    /// [`ReadPoolError`]; `work` has not run, or its result was dropped with the pool.
    pub async fn run<R: Send + 'static>(
        &self,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R, ReadPoolError> {
        let (done, result) = oneshot::channel();
        let job: Work = Box::new(move || {
            // The caller may have gone away: then nobody wants the result.
            let _ = done.send(work());
        });
        let queue = self.queue.as_ref().ok_or(ReadPoolError::Stopped)?;
        match queue.try_send(job) {
            Ok(()) => result.await.map_err(|_| ReadPoolError::Stopped),
            Err(TrySendError::Full(_)) => Err(ReadPoolError::Full),
            Err(TrySendError::Disconnected(_)) => Err(ReadPoolError::Stopped),
        }
    }
}

impl Drop for ReadPool {
    fn drop(&mut self) {
        self.queue = None;
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a read thread panicked");
            }
        }
    }
}
