//! Receiving a snapshot: writes its files into a folder of their own, checks them, syncs them, and only then hands them
//! to openraft to install. A transfer that broke off is gone on with, also by another process.
//!
//! Invariants:
//! - at most one transfer per replica: a new Begin forgets the one before, and keeps those of its files that the new one
//!   has too (name, size, sender; the sender then compares the crc32 of what is here);
//! - a chunk is written only when its bytes agree with the crc32 that was taken when they were read;
//! - what does not agree in size or crc32 in the end is forgotten and refused; the state stays as it was;
//! - a snapshot that does not fit the disk is refused before its first byte, and one that filled it gives all of it back;
//! - what nobody goes on with is removed after a while.
//!
//! Not here: the folder's layout (`incoming`), sending (`stream`), the install itself (`applier`).

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use evershard_storage::disk;
use parking_lot::Mutex;

use super::builder::remove_folder;
use super::chunk_map::Misplaced;
use super::incoming::{Incoming, make_folders};
use super::message::{Begin, Chunk, Finish, Forget, Kept};
use super::traffic::SnapshotCounters;
use crate::executor::ApplyExecutor;
use crate::state_machine::{SnapshotError, SnapshotMark};
use crate::transport::Refusal;

/// Smaller files are never kept for another transfer: the few that change without changing their size are among them, and
/// sending them costs nothing.
pub(crate) const KEPT_BYTES_MIN: u64 = 64 * 1024;
/// Room that a snapshot leaves on the disk for the log and the flush, or a twentieth of the disk when that is less.
const ROOM_LEFT_BYTES: u64 = 256 << 20;

/// Why a frame of a transfer was not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    /// The transfer is over, unless it begins anew.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// These bytes are not what was read: send them again.
    #[error("a chunk's crc32 is {found:08x}, expected {expected:08x}")]
    Damaged { found: u32, expected: u32 },
    /// An earlier one is being installed.
    #[error("a snapshot is being installed")]
    Installing,
}

impl ReceiveError {
    /// What the sender is told.
    pub(crate) fn into_refusal(self) -> Refusal {
        match self {
            Self::Snapshot(error) if error.is_disk_full() => Refusal::NoSpace(error.to_string()),
            Self::Snapshot(error) => Refusal::Snapshot(error.to_string()),
            Self::Damaged { .. } => Refusal::Unreadable(self.to_string()),
            Self::Installing => Refusal::Busy,
        }
    }
}

/// Receives snapshots for one replica. Its methods block.
pub(crate) struct Installer {
    /// `DATA/incoming/<group>-<replica>`.
    incoming: PathBuf,
    executor: Arc<dyn ApplyExecutor>,
    counters: Arc<SnapshotCounters>,
    state: Arc<Mutex<State>>,
}

struct State {
    phase: Phase,
    /// Looks at it since something arrived last.
    idle_looks: u32,
}

enum Phase {
    /// An earlier process may have left something.
    Unknown,
    /// There is nothing.
    Empty,
    Receiving(Box<Incoming>),
    /// The files are someone else's until the guard is dropped.
    Installing,
}

/// Files that were received whole, verified and synced. They are removed on drop.
pub(crate) struct ReceivedSnapshot {
    mark: SnapshotMark,
    directory: PathBuf,
    incoming: PathBuf,
    executor: Arc<dyn ApplyExecutor>,
    state: Arc<Mutex<State>>,
}

impl ReceivedSnapshot {
    pub(crate) fn mark(&self) -> &SnapshotMark {
        &self.mark
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }
}

impl Drop for ReceivedSnapshot {
    fn drop(&mut self) {
        let (path, state) = (std::mem::take(&mut self.incoming), Arc::clone(&self.state));
        // On the thread that installs: after whatever install was queued before.
        self.executor.execute_long(Box::new(move || {
            remove_folder(&path);
            state.lock().phase = Phase::Empty;
        }));
    }
}

impl Installer {
    pub(crate) fn new(
        incoming: PathBuf,
        executor: Arc<dyn ApplyExecutor>,
        counters: Arc<SnapshotCounters>,
    ) -> Self {
        let state = State { phase: Phase::Unknown, idle_looks: 0 };
        Self { incoming, executor, counters, state: Arc::new(Mutex::new(state)) }
    }

    /// Takes up a transfer; answers what is here of each of its files.
    pub(crate) fn begin(&self, begin: Begin) -> Result<Vec<Kept>, ReceiveError> {
        let mut state = self.state.lock();
        state.idle_looks = 0;
        // Should this fail, what is on the disk is looked at again the next time.
        let earlier = match std::mem::replace(&mut state.phase, Phase::Unknown) {
            Phase::Installing => {
                state.phase = Phase::Installing;
                return Err(ReceiveError::Installing);
            }
            Phase::Receiving(earlier) => Some(earlier),
            Phase::Unknown => Incoming::recover(&self.incoming).map(Box::new),
            Phase::Empty => None,
        };
        make_folders(&self.incoming)?;
        let kept = keep(earlier.as_deref(), &begin);
        self.check_room(earlier.as_deref(), &begin, &kept)?;
        let started = Incoming::start(&self.incoming, begin, earlier.as_deref(), &kept)?;
        let fronts: Vec<Kept> =
            (0..started.begin.files.len()).map(|number| started.map(number).front()).collect();
        state.phase = Phase::Receiving(Box::new(started));
        Ok(fronts)
    }

    fn check_room(
        &self,
        earlier: Option<&Incoming>,
        begin: &Begin,
        kept: &[Option<usize>],
    ) -> Result<(), SnapshotError> {
        let io = |source| SnapshotError::Io { path: self.incoming.clone(), source };
        let room = disk::FreeSpace::of(&self.incoming).map_err(io)?;
        let here = |number: usize| earlier.map_or(0, |earlier| earlier.map(number).front().bytes);
        let missing: u64 = begin
            .files
            .iter()
            .zip(kept)
            .map(|(file, then)| file.bytes - then.map_or(0, here).min(file.bytes))
            .fold(0, u64::saturating_add);
        let kept_bytes: u64 = kept.iter().flatten().map(|then| here(*then)).sum();
        let given_back = earlier.map_or(0, Incoming::bytes_here).saturating_sub(kept_bytes);
        let left = ROOM_LEFT_BYTES.min(room.bytes_total / 20);
        let free = room.bytes.saturating_add(given_back).saturating_sub(left);
        fail::fail_point!("snapshot::no_room", |_| {
            Err(SnapshotError::NoSpace { path: self.incoming.clone(), needed: missing, free: 0 })
        });
        if missing > free {
            return Err(SnapshotError::NoSpace { path: self.incoming.clone(), needed: missing, free });
        }
        Ok(())
    }

    /// What the sender does not recognise as its own.
    pub(crate) fn forget(&self, forget: &Forget) -> Result<(), ReceiveError> {
        self.receiving(forget.transfer, |incoming| {
            for number in &forget.files {
                if incoming.entry(*number as usize).is_none() {
                    return Err(unknown_file(*number));
                }
                incoming.forget(*number as usize)?;
            }
            Ok(())
        })
    }

    pub(crate) fn chunk(&self, chunk: &Chunk) -> Result<(), ReceiveError> {
        let found = crc32fast::hash(&chunk.data);
        if found != chunk.crc32 {
            return Err(ReceiveError::Damaged { found, expected: chunk.crc32 });
        }
        self.receiving(chunk.transfer, |incoming| {
            let number = chunk.file as usize;
            let Some(entry) = incoming.entry(number) else { return Err(unknown_file(chunk.file)) };
            let length = chunk.data.len() as u64;
            match incoming.map(number).check(chunk.offset, length, entry.bytes) {
                Ok(()) => {}
                // Sent again because its answer was lost.
                Err(Misplaced::Known) => return Ok(()),
                Err(wrong) => {
                    return Err(SnapshotError::Invalid(format!(
                        "{length} bytes at {} of {}: {wrong}",
                        chunk.offset, entry.name
                    )));
                }
            }
            incoming.write(number, chunk.offset, &chunk.data, chunk.crc32)?;
            self.counters.bytes_received.add(length);
            Ok(())
        })
    }

    /// Verifies and syncs everything; the files leave the installer's hands.
    pub(crate) fn finish(&self, finish: &Finish) -> Result<ReceivedSnapshot, ReceiveError> {
        self.receiving(finish.transfer, |incoming| check_whole(incoming, &finish.crc32s))?;
        let mut state = self.state.lock();
        match std::mem::replace(&mut state.phase, Phase::Installing) {
            Phase::Receiving(whole) if whole.begin.transfer == finish.transfer => Ok(ReceivedSnapshot {
                mark: whole.begin.mark.clone(),
                directory: whole.files(),
                incoming: self.incoming.clone(),
                executor: Arc::clone(&self.executor),
                state: Arc::clone(&self.state),
            }),
            other => {
                state.phase = other;
                Err(unknown(finish.transfer).into())
            }
        }
    }

    /// The sender will not go on.
    pub(crate) fn abort(&self, transfer: u64) {
        let mut state = self.state.lock();
        if matches!(&state.phase, Phase::Receiving(held) if held.begin.transfer == transfer) {
            self.discard(&mut state);
        }
    }

    /// What was received is the replica's state now.
    pub(crate) fn count_installed(&self) {
        self.counters.received.add(1);
    }

    /// Called now and then; removes what nobody has gone on with for `looks_max` calls.
    pub(crate) fn look(&self, looks_max: u32) {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Empty | Phase::Installing) {
            return;
        }
        state.idle_looks += 1;
        if state.idle_looks > looks_max {
            self.discard(&mut state);
        }
    }

    fn discard(&self, state: &mut State) {
        state.phase = Phase::Empty;
        remove_folder(&self.incoming);
    }

    fn receiving(
        &self,
        transfer: u64,
        work: impl FnOnce(&mut Incoming) -> Result<(), SnapshotError>,
    ) -> Result<(), ReceiveError> {
        let mut state = self.state.lock();
        state.idle_looks = 0;
        let outcome = match &mut state.phase {
            Phase::Receiving(held) if held.begin.transfer == transfer => work(held),
            _ => return Err(unknown(transfer).into()),
        };
        if let Err(SnapshotError::Io { .. } | SnapshotError::NoSpace { .. }) = &outcome {
            // A full disk gets its room back at once, for the log's sake; after any other error nothing that was written is
            // believed.
            self.discard(&mut state);
        }
        Ok(outcome?)
    }
}

/// For each file of `begin` the number of the same file of an earlier transfer, when that can be gone on with.
fn keep(earlier: Option<&Incoming>, begin: &Begin) -> Vec<Option<usize>> {
    let sender = |begin: &Begin| begin.vote.leader_id.node_id;
    let mut known = HashMap::new();
    if let Some(earlier) = earlier.filter(|earlier| sender(&earlier.begin) == sender(begin)) {
        let files = earlier.begin.files.iter().enumerate();
        known.extend(
            files
                .filter(|(number, file)| {
                    file.bytes >= KEPT_BYTES_MIN && earlier.map(*number).front().bytes > 0
                })
                .map(|(number, file)| ((file.name.as_str(), file.bytes), number)),
        );
    }
    begin.files.iter().map(|file| known.get(&(file.name.as_str(), file.bytes)).copied()).collect()
}

fn check_whole(incoming: &mut Incoming, crc32s: &[u32]) -> Result<(), SnapshotError> {
    if crc32s.len() != incoming.begin.files.len() {
        let files = incoming.begin.files.len();
        return Err(SnapshotError::Invalid(format!("{} checksums for {files} files", crc32s.len())));
    }
    let mut wrong = None;
    for (number, expected) in crc32s.iter().enumerate() {
        let front = incoming.map(number).front();
        let bytes = incoming.begin.files[number].bytes;
        if (front.bytes, front.crc32) == (bytes, *expected) {
            continue;
        }
        // Only what is wrong is sent again, the next time.
        incoming.forget(number)?;
        wrong.get_or_insert_with(|| {
            format!(
                "{}: {} of {bytes} bytes, crc32 {:08x}, expected {expected:08x}",
                incoming.begin.files[number].name, front.bytes, front.crc32
            )
        });
    }
    match wrong {
        Some(reason) => Err(SnapshotError::Invalid(reason)),
        None => incoming.sync(),
    }
}

fn unknown(transfer: u64) -> SnapshotError {
    SnapshotError::Invalid(format!("no transfer {transfer:x} is under way"))
}

fn unknown_file(number: u32) -> SnapshotError {
    SnapshotError::Invalid(format!("there is no file {number}"))
}
