//! The thread that flushes: one per node, over all its replicas, one cycle at a time.
//!
//! A replica is due when its last cycle is older than the interval (five intervals, when its log has hardly grown since: the
//! replay would be over in a moment), or earlier when it has many dirty bytes or much log behind its last flush. A cycle that
//! took long makes the next one wait ten times as long: flushing takes a tenth of the thread's time at most, unless memory or
//! log press. How fast a cycle writes is the `pacer`'s to say.
//!
//! Now and then, and at its end, the thread also has each replica remember which rows are hot.
//!
//! Invariants:
//! - the thread is owned and joined; a replica that was removed is not flushed any more when `remove` returns, which waits
//!   for the running cycle without holding the thread of whoever asks;
//! - a transient error is tried again, a failed sync ends the process (design 14: nothing is durable after it), any other
//!   error ends the replica's flushing and is reported once.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

use super::pacer::{self, Paced};
use super::{DurableIndex, flush_replica};
use crate::shard::ShardMachine;
use crate::telemetry::metric_definitions as metric;

/// Log bytes behind the last flush that make a replica due at once: what a restart has to replay.
const LOG_BYTES_MAX: u64 = 256 << 20;
/// Less log than this behind the last flush is replayed in a moment.
const LOG_BYTES_FEW: u64 = 1 << 20;
/// How many intervals a flush may wait then.
const INTERVALS_MAX: u32 = 5;
/// How often a replica remembers which of its rows are hot, and how many times as long as that took it rests at least.
const REMEMBER: Duration = Duration::from_secs(60);
const REMEMBER_REST: u32 = 100;
/// How often the thread looks who is due.
const LOOK: Duration = Duration::from_millis(100);
/// After a cycle that was put off.
const RETRY: Duration = Duration::from_secs(1);
/// A cycle of length t puts the next one off by at least this many t.
const REST: u32 = 10;

/// Called after a cycle: the snapshot mark has moved.
pub type OnFlushed = Arc<dyn Fn() + Send + Sync>;
/// Called once when a replica cannot be flushed any more, with the reason.
pub type OnFailed = Arc<dyn Fn(String) + Send + Sync>;

struct Replica {
    machine: Arc<ShardMachine>,
    log: Box<dyn DurableIndex>,
    on_flushed: OnFlushed,
    on_failed: OnFailed,
    /// Set while the thread works on it or when it is no longer wanted.
    state: Mutex<ReplicaState>,
    idle: Notify,
}

#[derive(Debug)]
struct ReplicaState {
    busy: bool,
    removed: bool,
    /// When the last cycle ended, how long it took, and whether it was put off.
    ended: Instant,
    took: Duration,
    put_off: bool,
    /// When the hot rows are to be remembered next.
    remember_at: Instant,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    roused: Condvar,
    interval: Duration,
    dirty_bytes_max: u64,
}

#[derive(Default)]
struct State {
    stopping: bool,
    replicas: Vec<Arc<Replica>>,
}

/// Owns the thread; stopping or dropping it ends and joins it.
pub struct Flusher {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for Flusher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flusher").field("replicas", &self.shared.state.lock().replicas.len()).finish()
    }
}

impl Flusher {
    /// Starts the thread. `interval` is how old a replica's last flush may grow, `dirty_bytes_max` how much a replica may
    /// have to write before it is due at once.
    ///
    /// # Errors
    /// When the system has no thread to give.
    pub fn start(interval: Duration, dirty_bytes_max: u64) -> std::io::Result<Self> {
        let shared = Arc::new(Shared { interval, dirty_bytes_max, ..Shared::default() });
        let mine = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("flusher".into()).spawn(move || run(&mine))?;
        Ok(Flusher { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Takes care of a replica: `on_flushed` after each cycle, `on_failed` once if it cannot go on. Both are called on the
    /// flusher's thread.
    pub fn add(
        &self,
        machine: Arc<ShardMachine>,
        log: impl DurableIndex + 'static,
        on_flushed: OnFlushed,
        on_failed: OnFailed,
    ) {
        let state = ReplicaState {
            busy: false,
            removed: false,
            ended: Instant::now(),
            took: Duration::ZERO,
            put_off: false,
            remember_at: Instant::now() + REMEMBER,
        };
        self.shared.state.lock().replicas.push(Arc::new(Replica {
            machine,
            log: Box::new(log),
            on_flushed,
            on_failed,
            state: Mutex::new(state),
            idle: Notify::new(),
        }));
    }

    /// Forgets a replica; a cycle that runs ends by itself.
    pub fn forget(&self, group: u64, replica: u64) {
        drop(self.take(group, replica));
    }

    fn take(&self, group: u64, replica: u64) -> Vec<Arc<Replica>> {
        let mut state = self.shared.state.lock();
        let is_it = |candidate: &Arc<Replica>| {
            let identity = candidate.machine.identity();
            (identity.group, identity.replica) == (group, replica)
        };
        let taken: Vec<_> = state.replicas.extract_if(.., |candidate| is_it(candidate)).collect();
        for replica in &taken {
            replica.state.lock().removed = true;
        }
        taken
    }

    /// Forgets a replica; waits for its running cycle to end. Not to be called from its callbacks.
    pub async fn remove(&self, group: u64, replica: u64) {
        for replica in self.take(group, replica) {
            loop {
                let mut idle = std::pin::pin!(replica.idle.notified());
                // From here on no end of a cycle is missed.
                idle.as_mut().enable();
                if !replica.state.lock().busy {
                    break;
                }
                idle.await;
            }
        }
    }

    /// Ends the thread after its running cycle. Fine when it has ended.
    pub fn stop(&self) {
        self.shared.state.lock().stopping = true;
        self.shared.roused.notify_all();
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the flusher's thread had panicked");
        }
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        self.stop();
    }
}

fn run(shared: &Shared) {
    loop {
        let replicas = {
            let mut state = shared.state.lock();
            if !state.stopping {
                shared.roused.wait_for(&mut state, LOOK);
            }
            state.replicas.clone()
        };
        let dirty = replicas.iter().map(|replica| replica.machine.dirty_bytes()).sum();
        let rate = pacer::rate(dirty, shared.interval);
        for replica in &replicas {
            if shared.is_stopping() {
                break;
            }
            if shared.is_due(replica) && replica.begin() {
                let failed = replica.flush(shared, rate);
                replica.end();
                if failed {
                    shared.state.lock().replicas.retain(|other| !Arc::ptr_eq(other, replica));
                }
            }
            if replica.state.lock().remember_at <= Instant::now() && replica.begin() {
                replica.remember_hottest();
                replica.end();
            }
        }
        if shared.is_stopping() {
            for replica in replicas {
                if replica.begin() {
                    replica.remember_hottest();
                    replica.end();
                }
            }
            return;
        }
    }
}

impl Shared {
    fn is_due(&self, replica: &Replica) -> bool {
        let (age, took, put_off) = {
            let state = replica.state.lock();
            (state.ended.elapsed(), state.took, state.put_off)
        };
        if put_off && age < RETRY {
            return false;
        }
        let log_bytes = replica.log.bytes_since(replica.machine.flushed_index());
        let intervals = if log_bytes < LOG_BYTES_FEW { INTERVALS_MAX } else { 1 };
        age >= (self.interval * intervals).max(took * REST)
            || replica.machine.dirty_bytes() >= self.dirty_bytes_max.min(replica.dirty_share())
            || log_bytes >= LOG_BYTES_MAX
    }

    fn is_stopping(&self) -> bool {
        self.state.lock().stopping
    }

    /// Waits, at most until the flusher is to end.
    fn wait(&self, pause: Duration) {
        let mut state = self.state.lock();
        if !state.stopping {
            self.roused.wait_for(&mut state, pause);
        }
    }

    /// Whether a replica's flush has no time to lose: half way to where it would be due at once, or its end is waited for.
    fn is_pressed(&self, replica: &Replica) -> bool {
        self.is_stopping()
            || replica.state.lock().removed
            || replica.machine.dirty_bytes() >= self.dirty_bytes_max.min(replica.dirty_share()) / 2
            || replica.log.bytes_since(replica.machine.flushed_index()) >= LOG_BYTES_MAX / 2
    }
}

impl Replica {
    /// Dirty rows cannot leave memory: no replica may let them grow to more than this part of the node's budget.
    fn dirty_share(&self) -> u64 {
        const PARTS: u64 = 16;
        self.machine.rows().budget().limit().map_or(u64::MAX, |limit| limit / PARTS)
    }

    fn begin(&self) -> bool {
        let mut state = self.state.lock();
        state.busy = !state.removed;
        state.busy
    }

    fn end(&self) {
        self.state.lock().busy = false;
        self.idle.notify_waiters();
    }

    /// Has the replica remember which of its rows are hot. That it could not costs no more than a slower start.
    fn remember_hottest(&self) {
        let began = Instant::now();
        if let Err(error) = self.machine.rows().remember_hottest() {
            tracing::debug!(%error, "hot rows are not remembered");
        }
        self.state.lock().remember_at = Instant::now() + REMEMBER.max(began.elapsed() * REMEMBER_REST);
    }

    /// One cycle; true when it is the last.
    fn flush(&self, shared: &Shared, rate: f64) -> bool {
        let began = Instant::now();
        let (hurry, wait) = (|| shared.is_pressed(self), |pause| shared.wait(pause));
        let log = Paced::new(&*self.log, rate, &hurry, &wait);
        let result = flush_replica(&self.machine, &log);
        {
            let mut state = self.state.lock();
            state.ended = Instant::now();
            state.took = began.elapsed().saturating_sub(log.paused());
            state.put_off = result.is_err();
        }
        match result {
            Ok(Some(report)) => {
                let group = self.machine.identity().group;
                let index = report.position.index;
                tracing::debug!(group, index, rows = report.rows, bytes = report.bytes, "flushed");
                metrics::counter!(metric::DISK_WRITTEN_BYTES_TOTAL, "part" => "flush")
                    .increment(report.bytes);
                (self.on_flushed)();
                false
            }
            Ok(None) => false,
            Err(error) if error.is_damage() => {
                tracing::error!(%error, "the replica cannot be flushed any more");
                (self.on_failed)(error.to_string());
                true
            }
            Err(error) => {
                // The log is kept meanwhile, so nothing is lost.
                tracing::warn!(%error, "a flush is put off");
                false
            }
        }
    }
}
