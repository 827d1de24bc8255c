//! Flush cycles that stop where a crash or another entry hurts most, and go on when they are told to.
//!
//! The server's own `flush_replica` runs on a thread of its own, but only while the simulation waits for it: it stops
//! before each batch of rows, while the log is not durable, and at the crash points between the steps on disk. So entries
//! are applied in the middle of a cycle, and a power cut ends it there, although nothing really runs at the same time.
//!
//! Not here: when to flush, what must hold afterwards (`shard`).

use std::cell::RefCell;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Once};
use std::thread::JoinHandle;

use evershard_server::flush::{DurableIndex, FlushReport, flush_replica};
use evershard_server::shard::{ShardError, ShardMachine};
use evershard_storage::log::GroupLog;

/// Crash points of the store's commit; only there with the feature `failpoints`.
const POINTS: [&str; 4] =
    ["flush::before_complete_at", "flush::before_ingest", "flush::before_meta", "flush::after_meta"];

/// Where a cycle stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Before a batch of rows.
    Batch,
    /// The log is not durable up to where the cycle needs it.
    NotDurable,
    /// Between two steps on disk.
    Point(&'static str),
}

/// What a stopped cycle is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    GoOn,
    /// Waiting for the log took too long.
    GiveUp,
    /// The process is dead.
    Die,
}

/// What a cycle did when it was let on.
#[derive(Debug)]
pub enum Step {
    Stopped(Stop),
    Done(Result<Option<FlushReport>, ShardError>),
}

/// The cycle's end of the conversation.
struct Hand {
    stops: Sender<Stop>,
    words: Receiver<Word>,
}

thread_local! {
    static HAND: RefCell<Option<Hand>> = const { RefCell::new(None) };
}

/// The dead process's cycle unwinds with this.
struct Dead;

/// Stops the cycle that runs on this thread, if one does; false when it shall give up waiting.
fn stop(at: Stop) -> bool {
    HAND.with_borrow(|hand| {
        let Some(hand) = hand else { return true };
        let told = hand.stops.send(at).ok().and_then(|()| hand.words.recv().ok());
        match told {
            Some(Word::GoOn) => true,
            Some(Word::GiveUp) => false,
            // Without the noise of a panic.
            Some(Word::Die) | None => std::panic::resume_unwind(Box::new(Dead)),
        }
    })
}

/// The log as a cycle sees it.
struct PacedLog(GroupLog);

impl DurableIndex for PacedLog {
    fn wait_durable(&self, index: u64) -> bool {
        while self.0.durable_index().is_none_or(|durable| durable < index) {
            if !stop(Stop::NotDurable) {
                return false;
            }
        }
        true
    }

    fn bytes_since(&self, index: u64) -> u64 {
        self.0.bytes_since(index)
    }

    fn pace(&self, _: u64) {
        stop(Stop::Batch);
    }
}

/// A cycle under way. Dropping it ends it as a power cut would.
pub struct Cycle {
    words: Sender<Word>,
    stops: Receiver<Stop>,
    thread: Option<JoinHandle<Result<Option<FlushReport>, ShardError>>>,
}

impl Cycle {
    /// A cycle that has not done anything yet.
    pub fn new(machine: Arc<ShardMachine>, log: GroupLog) -> Self {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            for point in POINTS {
                // An error says that this build has no crash points.
                let _ = fail::cfg_callback(point, move || {
                    stop(Stop::Point(point));
                });
            }
        });
        let (words, told) = channel();
        let (stopped, stops) = channel();
        let run = move || {
            HAND.set(Some(Hand { stops: stopped, words: told }));
            stop(Stop::Batch);
            let result = flush_replica(&machine, &PacedLog(log));
            HAND.set(None);
            result
        };
        let thread = std::thread::Builder::new().name("sim-flush".into()).spawn(run).expect("a thread");
        let cycle = Self { words, stops, thread: Some(thread) };
        let _at_its_start = cycle.stops.recv();
        cycle
    }

    /// Lets it on until it stops again or ends.
    pub fn step(&mut self, word: Word) -> Step {
        let _ = self.words.send(word);
        if let Ok(stop) = self.stops.recv() {
            return Step::Stopped(stop);
        }
        let thread = self.thread.take().expect("a cycle ends once");
        match thread.join() {
            Ok(result) => Step::Done(result),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl Drop for Cycle {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = self.words.send(Word::Die);
            // Its end is the unwinding that it was told to.
            let _ = thread.join();
        }
    }
}
