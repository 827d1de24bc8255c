//! Threads that bring rows to memory before the pushes that need them are applied: two per node, over all its replicas.
//!
//! A push is known to a replica when it is appended to the log; it is applied when a quorum has it, a sync and a round trip later,
//! and after all pushes before it. In that time its cold rows can be read, and apply finds them in memory. What was not read in
//! time apply reads by itself: a hint that is dropped costs time and nothing else.
//!
//! Invariant: the queue is bounded, and a full one drops the hint.
//!
//! Not here: reading rows (`cold`), applying (`crate::apply`).

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use bytes::Bytes;
use crossbeam_channel::{Receiver, Sender, bounded};
use evershard_proto::push_body::{KIND_PUSH, PushBody};
use evershard_proto::shard_command::{KIND_EVICT, KIND_STEP, ShardCommand};

use super::cold::Fetched;
use super::rows::Rows;

/// Pushes waiting for a thread; each holds its bytes, 256 KiB at the most, which the log holds too.
const QUEUE_MAX: usize = 256;
const THREADS: usize = 2;

struct Hint {
    rows: Weak<Rows>,
    command: Bytes,
}

/// Where hints go. Cheap to clone.
#[derive(Clone)]
pub struct Prefetches {
    queue: Sender<Hint>,
}

impl std::fmt::Debug for Prefetches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prefetches").field("waiting", &self.queue.len()).finish()
    }
}

impl Prefetches {
    /// These rows will be needed. Never waits.
    pub(crate) fn hint(&self, rows: &Arc<Rows>, command: &Bytes) {
        if matches!(command.first(), Some(&(KIND_PUSH | KIND_STEP | KIND_EVICT))) && rows.may_lack_rows() {
            let hint = Hint { rows: Arc::downgrade(rows), command: command.clone() };
            if self.queue.try_send(hint).is_err() {
                metrics::counter!(crate::telemetry::metric_definitions::PREFETCHES_DROPPED_TOTAL)
                    .increment(1);
            }
        }
    }
}

/// Owns the threads; dropping it ends and joins them.
#[derive(Debug)]
pub struct Prefetcher {
    queue: Option<Prefetches>,
    threads: Vec<JoinHandle<()>>,
}

impl Prefetcher {
    /// Starts the threads.
    ///
    /// # Errors
    /// When the system has no thread to give.
    pub fn start() -> std::io::Result<Self> {
        let (queue, hints) = bounded(QUEUE_MAX);
        let threads = (0..THREADS).map(|number| {
            let hints = hints.clone();
            std::thread::Builder::new().name(format!("prefetch-{number}")).spawn(move || run(&hints))
        });
        let threads = threads.collect::<Result<_, _>>()?;
        Ok(Prefetcher { queue: Some(Prefetches { queue }), threads })
    }

    /// For the machines' options. `None` when the threads have ended.
    #[must_use]
    pub fn prefetches(&self) -> Option<Prefetches> {
        self.queue.clone()
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        // Machines may hold a sender still: the threads end when they are told so.
        if let Some(prefetches) = self.queue.take() {
            for _ in &self.threads {
                // An empty hint is the word to end. A full queue empties: its hints are short work.
                if prefetches.queue.send(Hint { rows: Weak::new(), command: Bytes::new() }).is_err() {
                    break;
                }
            }
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a prefetch thread had panicked");
            }
        }
    }
}

fn run(hints: &Receiver<Hint>) {
    let (mut keys, mut fetched) = (Vec::new(), Fetched::default());
    for hint in hints {
        if hint.command.is_empty() {
            return;
        }
        // A replica that is gone, and what is no push, need nothing.
        let Some(rows) = hint.rows.upgrade() else { continue };
        let sums = match ShardCommand::decode(&hint.command) {
            Ok(ShardCommand::Evict { table, rows: evicted, .. }) => {
                keys.clear();
                keys.extend(evicted.iter().map(|row| row.key));
                fetch(&rows, table, &keys, &mut fetched);
                continue;
            }
            Ok(ShardCommand::Step { body, .. }) => Some(body),
            _ => None,
        };
        let parsed = match &sums {
            Some(sums) => PushBody::parse_step(sums),
            None => PushBody::parse_without_checksum(&hint.command),
        };
        let Ok(body) = parsed else { continue };
        for section in body.sections() {
            keys.clear();
            keys.extend(section.keys());
            fetch(&rows, section.table, &keys, &mut fetched);
        }
    }
}

fn fetch(rows: &Rows, table: u32, keys: &[u64], fetched: &mut Fetched) {
    let Some((absent, shape)) = rows.absent(table, keys) else { return };
    fetched.clear();
    // Errors were reported; apply will meet them.
    if rows.fetch(table, shape, &absent.keys, fetched).is_ok() {
        // What apply read meanwhile was not prefetched in time, and does not count.
        rows.cold_counts().add_prefetched(rows.take_in(&absent, fetched));
    }
}
