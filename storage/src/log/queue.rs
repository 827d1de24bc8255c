//! What waits for the writer.
//!
//! Invariants:
//! - Operations leave in the order they came.
//! - Bytes count from `push` until `finish`: queued or being written. `push` never blocks or refuses for size;
//!   callers wait at `admitted` first, which is what bounds the queue.
//! - Once stopped nothing is taken in, and what was queued comes out with the reason.
//!
//! Not here: what the operations do (`batch`).

use super::Entry;
use super::group::Group;
use super::group_index::{Freed, OnDisk};
use super::group_log::DurableCallback;
use super::record::record_bytes;
use super::{EntryId, QuarantineCause};
use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// One thing for the writer to do.
#[derive(Debug)]
pub(super) enum Action {
    Append {
        ticket: u64,
        entries: Vec<Entry>,
    },
    Vote(Bytes),
    /// The commit position, as it is when this is written. Nobody waits for it: it wakes no writer.
    Committed,
    Truncate {
        index: u64,
        freed: Freed,
    },
    Purge {
        id: EntryId,
        freed: Freed,
    },
    Create,
    Destroy,
    Quarantine {
        cause: QuarantineCause,
        reason: String,
    },
    Release,
    /// Copy forward what is still wanted of these entries and, with `anchors`, of the group's other records.
    Relocate {
        entries: Vec<(OnDisk, Entry)>,
        anchors: bool,
    },
}

/// An action of a group, and whom to tell.
pub(super) struct Operation {
    pub(super) group: Arc<Group>,
    pub(super) action: Action,
    pub(super) done: Option<DurableCallback>,
}

impl Operation {
    fn is_urgent(&self) -> bool {
        !matches!(self.action, Action::Committed)
    }

    /// Bytes in the log, nearly.
    pub(super) fn bytes(&self) -> u64 {
        match &self.action {
            Action::Append { entries, .. } => {
                entries.iter().map(|entry| record_bytes(entry.payload.len())).sum()
            }
            Action::Relocate { entries, .. } => {
                entries.iter().map(|(_, entry)| record_bytes(entry.payload.len())).sum::<u64>()
                    + record_bytes(0)
            }
            Action::Vote(body) => record_bytes(body.len()),
            _ => record_bytes(0),
        }
    }
}

#[derive(Default)]
struct State {
    operations: VecDeque<Operation>,
    bytes: u64,
    /// How many of the operations somebody waits for.
    urgent: usize,
    stopped: Option<Arc<str>>,
}

/// What waits for the writer.
pub(super) struct Queue {
    state: Mutex<State>,
    arrived: Condvar,
    is_full: watch::Sender<bool>,
    bytes_max: u64,
}

impl Queue {
    pub(super) fn new(bytes_max: u64) -> Self {
        let (is_full, _) = watch::channel(false);
        Queue { state: Mutex::default(), arrived: Condvar::new(), is_full, bytes_max }
    }

    /// Takes the operation in; gives it back with the reason if the log is stopped.
    pub(super) fn push(&self, operation: Operation) -> Result<(), (Operation, Arc<str>)> {
        let mut state = self.state.lock();
        if let Some(reason) = &state.stopped {
            return Err((operation, reason.clone()));
        }
        let is_urgent = operation.is_urgent();
        state.bytes += operation.bytes();
        state.urgent += usize::from(is_urgent);
        state.operations.push_back(operation);
        self.note_fill(&state);
        drop(state);
        if is_urgent {
            self.arrived.notify_one();
        }
        Ok(())
    }

    /// The oldest operations, at least one if there is one, then while they fit `bytes_max`.
    pub(super) fn take(&self, bytes_max: u64) -> Vec<Operation> {
        take(&mut self.state.lock(), bytes_max)
    }

    /// As `take`, but waits for an urgent one, or until the time is over; empty when there is none.
    pub(super) fn wait_and_take(&self, bytes_max: u64, timeout: Duration) -> Vec<Operation> {
        let mut state = self.state.lock();
        if state.urgent == 0 && state.stopped.is_none() {
            let _timed_out = self.arrived.wait_for(&mut state, timeout);
        }
        take(&mut state, bytes_max)
    }

    /// Puts operations back where they were taken from: the disk is full. Their bytes still count.
    pub(super) fn put_back(&self, operations: Vec<Operation>) {
        for operation in &operations {
            if matches!(operation.action, Action::Committed) {
                // It takes the value of when it is written, as before: no second one is needed meanwhile.
                operation.group.lock().is_committed_queued = true;
            }
        }
        let mut state = self.state.lock();
        state.urgent += operations.iter().filter(|operation| operation.is_urgent()).count();
        for operation in operations.into_iter().rev() {
            state.operations.push_front(operation);
        }
    }

    /// These bytes are written (or given up).
    pub(super) fn finish(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.bytes = state.bytes.saturating_sub(bytes);
        self.note_fill(&state);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }

    pub(super) fn is_empty(&self) -> bool {
        self.state.lock().operations.is_empty()
    }

    /// Takes nothing in any more; the first reason stays.
    pub(super) fn stop(&self, reason: &str) {
        let mut state = self.state.lock();
        if state.stopped.is_none() {
            state.stopped = Some(reason.into());
        }
        self.is_full.send_replace(false);
        drop(state);
        self.arrived.notify_all();
    }

    pub(super) fn stopped(&self) -> Option<Arc<str>> {
        self.state.lock().stopped.clone()
    }

    /// Waits until there is room, or the log is stopped.
    pub(super) async fn admitted(&self) {
        let mut is_full = self.is_full.subscribe();
        // The sender lives in `self`: it cannot be gone.
        let _admitted = is_full.wait_for(|is_full| !is_full).await;
    }

    fn note_fill(&self, state: &State) {
        let is_full = state.bytes > self.bytes_max && state.stopped.is_none();
        self.is_full.send_if_modified(|was_full| std::mem::replace(was_full, is_full) != is_full);
    }
}

fn take(state: &mut State, bytes_max: u64) -> Vec<Operation> {
    let mut bytes = 0;
    let mut count = 0;
    for operation in &state.operations {
        bytes += operation.bytes();
        if count > 0 && bytes > bytes_max {
            break;
        }
        count += 1;
    }
    let taken: Vec<Operation> = state.operations.drain(..count).collect();
    state.urgent -= taken.iter().filter(|operation| operation.is_urgent()).count();
    taken
}
