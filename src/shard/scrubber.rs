//! The thread that takes digests, one per node over all its replicas, asleep until a scrub entry is applied.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use super::machine::{SCAN_SLOTS, ShardMachine};
use super::rows::Rows;

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    roused: Condvar,
}

#[derive(Debug, Default)]
struct State {
    roused: bool,
    stopping: bool,
    replicas: Vec<Weak<Rows>>,
}

/// Rouses the scrubber. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ScrubWaker {
    shared: Arc<Shared>,
}

impl ScrubWaker {
    /// There is something to scan.
    pub fn wake(&self) {
        let mut state = self.shared.state.lock();
        if !state.roused {
            state.roused = true;
            self.shared.roused.notify_one();
        }
    }
}

/// Owns the thread; dropping it ends and joins it.
#[derive(Debug)]
pub struct Scrubber {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Scrubber {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system has no thread to give.
    pub fn start() -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let mine = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("scrubber".into()).spawn(move || run(&mine))?;
        Ok(Scrubber { shared, thread: Some(thread) })
    }

    /// For the machines' options.
    #[must_use]
    pub fn waker(&self) -> ScrubWaker {
        ScrubWaker { shared: Arc::clone(&self.shared) }
    }

    /// Takes care of this replica until it is gone.
    pub fn add(&self, machine: &ShardMachine) {
        self.shared.state.lock().replicas.push(Arc::downgrade(machine.rows()));
        self.waker().wake();
    }
}

impl Drop for Scrubber {
    fn drop(&mut self) {
        self.shared.state.lock().stopping = true;
        self.shared.roused.notify_one();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the scrubber's thread had panicked");
        }
    }
}

fn run(shared: &Shared) {
    loop {
        let replicas = {
            let mut state = shared.state.lock();
            while !state.roused && !state.stopping {
                shared.roused.wait(&mut state);
            }
            if state.stopping {
                return;
            }
            state.roused = false;
            state.replicas.retain(|rows| rows.strong_count() > 0);
            state.replicas.clone()
        };
        // Replica by replica: two at a time would only fight over the cache.
        for rows in replicas {
            while let Some(rows) = rows.upgrade() {
                if shared.state.lock().stopping || !rows.scan_slice(SCAN_SLOTS) {
                    break;
                }
            }
        }
    }
}
