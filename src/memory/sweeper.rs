//! The thread that lets go of rows nobody uses, one per node, at work only near the budget.
//!
//! A replica that needs room takes it from the table that needs it, because slots of one table are of no use to another. So a
//! table that was used once, and never is again, would keep what it has. The sweeper moves the hand of every table's clock a
//! little in each turn; where more slots are free than a piece of memory has, it empties the last piece and gives it back.
//!
//! Not here: the budget (`budget`), the clock (`evershard_storage::table`).

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::MemoryBudget;
use crate::shard::{Rows, ShardMachine};

/// How often it looks.
const TURN: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    stopped: Condvar,
}

#[derive(Debug, Default)]
struct State {
    stopping: bool,
    replicas: Vec<Weak<Rows>>,
}

/// Owns the thread; dropping it ends and joins it.
#[derive(Debug)]
pub struct Sweeper {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Sweeper {
    /// Starts the thread; none is needed without a limit.
    ///
    /// # Errors
    /// When the system has no thread to give.
    pub fn start(budget: &Arc<MemoryBudget>) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let thread = match budget.limit() {
            None => None,
            Some(_) => {
                let (mine, budget) = (Arc::clone(&shared), Arc::clone(budget));
                Some(std::thread::Builder::new().name("sweeper".into()).spawn(move || run(&mine, &budget))?)
            }
        };
        Ok(Sweeper { shared, thread })
    }

    /// Takes care of this replica until it is gone.
    pub fn add(&self, machine: &ShardMachine) {
        let mut state = self.shared.state.lock();
        state.replicas.retain(|rows| rows.strong_count() > 0);
        state.replicas.push(Arc::downgrade(machine.rows()));
    }
}

impl Drop for Sweeper {
    fn drop(&mut self) {
        self.shared.state.lock().stopping = true;
        self.shared.stopped.notify_one();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the sweeper's thread had panicked");
        }
    }
}

fn run(shared: &Shared, budget: &MemoryBudget) {
    loop {
        let replicas = {
            let mut state = shared.state.lock();
            if !state.stopping {
                shared.stopped.wait_for(&mut state, TURN);
            }
            if state.stopping {
                return;
            }
            state.replicas.clone()
        };
        if !budget.is_crowded() {
            continue;
        }
        for rows in replicas.iter().filter_map(Weak::upgrade) {
            rows.sweep();
        }
    }
}
