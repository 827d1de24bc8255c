//! The thread that takes digests and warms replicas up, one per node over all its replicas, asleep until there is something
//! to do.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use super::machine::ShardMachine;

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    roused: Condvar,
}

#[derive(Debug, Default)]
struct State {
    roused: bool,
    stopping: bool,
    replicas: Vec<Weak<ShardMachine>>,
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
    pub fn add(&self, machine: &Arc<ShardMachine>) {
        self.shared.state.lock().replicas.push(Arc::downgrade(machine));
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
            state.replicas.retain(|machine| machine.strong_count() > 0);
            state.replicas.clone()
        };
        let mut go_on = || !shared.state.lock().stopping;
        // Replica by replica: two at a time would only fight over the disk. First what all of them need most.
        for machine in replicas.iter().filter_map(Weak::upgrade) {
            machine.warm_hottest(&mut go_on);
        }
        for machine in replicas {
            while let Some(machine) = machine.upgrade() {
                machine.warm_up();
                if !go_on() || !machine.run_scan(&mut go_on) {
                    break;
                }
            }
        }
    }
}
