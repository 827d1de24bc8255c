//! Threads for work that may block: applying entries, linking and installing snapshots; reading logs and files.
//!
//! A group is pinned to one apply thread, so that work runs in the order given and one at a time; reads have threads of
//! their own, so that no replay waits behind an apply; snapshots' files are read and written on others, so that no read of the
//! log waits behind those; and installing a snapshot has its own, so that no other group's apply waits for that. A simulation runs everything inline.
//!
//! Invariants:
//! - work of one lane runs in order, never two at once;
//! - a panic in one piece of work ends neither the thread nor other groups: the caller sees its answer's channel close;
//! - the queues need no bound of their own: a group has at most its state machine's worker, a snapshot link, a mark query
//!   and a read per follower and transfer outstanding.
//!
//! Not here: what is run (`applier`, `snapshot`).

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};
use tokio::sync::oneshot;

/// A piece of blocking work.
pub type Work = Box<dyn FnOnce() + Send>;

/// Runs blocking work of groups; see the module.
pub trait ApplyExecutor: Send + Sync + 'static {
    /// Runs `work` after all earlier work of the same lane.
    fn execute(&self, lane: u64, work: Work);

    /// Runs `work`, such as a read from a file, in no particular order.
    fn execute_read(&self, work: Work);

    /// Runs `work` on a snapshot's files, in no particular order: its reads and writes are large, and its syncs slow.
    fn execute_file(&self, work: Work);

    /// Runs `work` that takes seconds, such as installing a snapshot, after all earlier work of this kind.
    fn execute_long(&self, work: Work);
}

/// Threads that read.
const READERS: usize = 2;
/// Threads that read and write snapshots' files.
const FILE_WORKERS: usize = 2;

/// A fixed pool of named threads. Ends its threads, after what is queued, when dropped.
pub struct ApplyThreads {
    queues: Vec<Sender<Work>>,
    reads: Option<Sender<Work>>,
    files: Option<Sender<Work>>,
    long: Option<Sender<Work>>,
    threads: Vec<JoinHandle<()>>,
}

impl ApplyThreads {
    /// Starts `threads` threads (at least one).
    ///
    /// # Errors
    /// What the system said when a thread could not be made.
    pub fn start(threads: usize) -> std::io::Result<Arc<Self>> {
        let (reads, read_work) = crossbeam_channel::unbounded::<Work>();
        let (files, file_work) = crossbeam_channel::unbounded::<Work>();
        let (long, long_work) = crossbeam_channel::unbounded::<Work>();
        let mut pool = Self {
            queues: Vec::new(),
            reads: Some(reads),
            files: Some(files),
            long: Some(long),
            threads: Vec::new(),
        };
        for number in 0..threads.max(1) {
            let (queue, work) = crossbeam_channel::unbounded::<Work>();
            pool.threads.push(spawn(format!("apply-{number}"), work)?);
            pool.queues.push(queue);
        }
        for number in 0..READERS {
            pool.threads.push(spawn(format!("raft-read-{number}"), read_work.clone())?);
        }
        for number in 0..FILE_WORKERS {
            pool.threads.push(spawn(format!("raft-files-{number}"), file_work.clone())?);
        }
        pool.threads.push(spawn("raft-install".to_owned(), long_work)?);
        Ok(Arc::new(pool))
    }
}

impl ApplyExecutor for ApplyThreads {
    fn execute(&self, lane: u64, work: Work) {
        let number = (lane % self.queues.len().max(1) as u64) as usize;
        if let Some(queue) = self.queues.get(number) {
            // Only fails when the thread is gone; the work is dropped and its caller sees that.
            let _ = queue.send(work);
        }
    }

    fn execute_read(&self, work: Work) {
        if let Some(reads) = &self.reads {
            let _ = reads.send(work);
        }
    }

    fn execute_file(&self, work: Work) {
        if let Some(files) = &self.files {
            let _ = files.send(work);
        }
    }

    fn execute_long(&self, work: Work) {
        if let Some(long) = &self.long {
            let _ = long.send(work);
        }
    }
}

fn spawn(name: String, work: Receiver<Work>) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name).spawn(move || {
        for piece in work {
            run_caught(piece);
        }
    })
}

impl Drop for ApplyThreads {
    fn drop(&mut self) {
        self.queues.clear();
        self.reads = None;
        self.files = None;
        self.long = None;
        let current = std::thread::current().id();
        for thread in self.threads.drain(..) {
            // The last handle may be dropped by work on one of these threads, which cannot wait for itself.
            if thread.thread().id() != current && thread.join().is_err() {
                tracing::error!("an apply thread panicked outside of its work");
            }
        }
    }
}

/// Runs work at once, on the caller's thread: for simulations.
#[derive(Debug, Default, Clone, Copy)]
pub struct InlineExecutor;

impl ApplyExecutor for InlineExecutor {
    fn execute(&self, _lane: u64, work: Work) {
        run_caught(work);
    }

    fn execute_read(&self, work: Work) {
        run_caught(work);
    }

    fn execute_file(&self, work: Work) {
        run_caught(work);
    }

    fn execute_long(&self, work: Work) {
        run_caught(work);
    }
}

fn run_caught(work: Work) {
    if let Err(panic) = std::panic::catch_unwind(AssertUnwindSafe(work)) {
        let text = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        tracing::error!(panic = %text, "work of a group panicked");
    }
}

/// The work did not finish: it panicked, or its thread ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the work panicked or its thread ended")]
pub struct WorkLost;

/// Runs `work` on the executor and waits for what it returns.
pub(crate) async fn run<T, F>(executor: &dyn ApplyExecutor, lane: u64, work: F) -> Result<T, WorkLost>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    answered(work, |work| executor.execute(lane, work)).await
}

/// Runs long work on the executor and waits for what it returns.
pub(crate) async fn run_long<T, F>(executor: &dyn ApplyExecutor, work: F) -> Result<T, WorkLost>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    answered(work, |work| executor.execute_long(work)).await
}

/// Runs a read on the executor and waits for what it returns.
pub(crate) async fn read<T, F>(executor: &dyn ApplyExecutor, work: F) -> Result<T, WorkLost>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    answered(work, |work| executor.execute_read(work)).await
}

/// Runs work on a snapshot's files on the executor and waits for what it returns.
pub(crate) async fn file<T, F>(executor: &dyn ApplyExecutor, work: F) -> Result<T, WorkLost>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    answered(work, |work| executor.execute_file(work)).await
}

/// Hands `work` over, and waits for what it returns.
async fn answered<T, F>(work: F, hand_over: impl FnOnce(Work)) -> Result<T, WorkLost>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    let (done, answer) = oneshot::channel();
    hand_over(Box::new(move || {
        // The caller may have gone away: then nobody wants the result.
        let _ = done.send(work());
    }));
    answer.await.map_err(|_| WorkLost)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn keeps_order_in_a_lane_and_survives_a_panic() {
        let pool = ApplyThreads::start(2).expect("threads");
        let (seen, order) = crossbeam_channel::unbounded();
        for number in 0..100u64 {
            let seen = seen.clone();
            pool.execute(7, Box::new(move || seen.send(number).expect("open")));
        }
        assert_eq!(run(&*pool, 7, || -> u64 { panic!("on purpose") }).await, Err(WorkLost));
        assert_eq!(run(&*pool, 7, || 5).await, Ok(5));
        assert_eq!(read(&*pool, || 6).await, Ok(6));
        assert_eq!(file(&*pool, || 8).await, Ok(8));
        assert_eq!(run_long(&*pool, || 7).await, Ok(7));
        assert_eq!(order.try_iter().collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
    }
}
