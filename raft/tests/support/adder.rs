//! A state machine for tests: adds u64 deltas, remembers a digest of everything it applied, flushes into one file.
//!
//! Not here: anything a real state machine needs (rows, sessions, versions).

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use evershard_raft::state_machine::{
    CommittedEntry, EntryContent, Halt, LogPosition, SnapshotError, SnapshotMark, StateMachine,
};
use parking_lot::Mutex;

/// A command that halts whoever applies it.
pub const POISON: &[u8] = b"poison";

/// Told of every entry applied, with the digest after it.
pub type Witness = Arc<dyn Fn(LogPosition, u64) + Send + Sync>;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    pub position: Option<LogPosition>,
    pub membership: Bytes,
    pub sum: u64,
    pub count: u64,
    pub digest: u64,
    /// Where each delta was applied last.
    pub numbers: BTreeMap<u64, u64>,
}

pub struct Adder {
    directory: PathBuf,
    installs: AtomicU64,
    /// Deltas announced since it was opened.
    announced: Mutex<BTreeSet<u64>>,
    /// Deltas applied that nobody had announced.
    surprises: Mutex<Vec<u64>>,
    live: Mutex<State>,
    flushed: Mutex<State>,
    /// Flushes after every apply.
    eager: bool,
    witness: Option<Witness>,
}

impl Adder {
    pub fn open(directory: &Path, eager: bool, witness: Option<Witness>) -> Arc<Self> {
        std::fs::create_dir_all(directory).expect("folder");
        let state = match std::fs::read(directory.join("state")) {
            Ok(raw) => decode(&raw).expect("a whole state"),
            Err(_) => State::default(),
        };
        Arc::new(Self {
            directory: directory.to_owned(),
            installs: AtomicU64::new(0),
            announced: Mutex::default(),
            surprises: Mutex::default(),
            live: Mutex::new(state.clone()),
            flushed: Mutex::new(state),
            eager,
            witness,
        })
    }

    /// The index at which a delta was applied here; works with deltas that are unique numbers.
    pub fn index_of(&self, number: u64) -> Option<u64> {
        self.live.lock().numbers.get(&number).copied()
    }

    /// What was applied since it was opened and had not been announced before.
    pub fn surprises(&self) -> Vec<u64> {
        self.surprises.lock().clone()
    }

    /// Snapshots installed since it was opened.
    pub fn installs(&self) -> u64 {
        self.installs.load(Ordering::Relaxed)
    }

    pub fn state(&self) -> State {
        self.live.lock().clone()
    }

    /// Makes the state as of at most `durable` the durable one; does nothing when it is ahead of that.
    pub fn flush(&self, durable: Option<u64>) -> bool {
        let state = self.live.lock().clone();
        let covered = state.position.is_none_or(|at| durable.is_some_and(|durable| at.index <= durable));
        if covered {
            write(&self.directory, &state).expect("flush");
            *self.flushed.lock() = state;
        }
        covered
    }
}

impl StateMachine for Adder {
    fn recovered(&self) -> SnapshotMark {
        mark(&self.flushed.lock())
    }

    fn apply(&self, entries: &[CommittedEntry]) -> Result<Vec<Bytes>, Halt> {
        let mut live = self.live.lock();
        let mut answers = Vec::with_capacity(entries.len());
        for entry in entries {
            let mut hash = crc32fast::Hasher::new_with_initial(live.digest as u32);
            hash.update(&entry.position.index.to_le_bytes());
            hash.update(&entry.position.term.to_le_bytes());
            match &entry.content {
                EntryContent::Blank => {}
                EntryContent::Membership(membership) => live.membership = membership.clone(),
                EntryContent::Command { command, .. } if &command[..] == POISON => {
                    let index = entry.position.index;
                    return Err(Halt { index, reason: "an unknown kind".to_owned() });
                }
                EntryContent::Command { command, .. } => {
                    hash.update(command);
                    let delta = delta_of(command);
                    if !self.announced.lock().contains(&delta) {
                        self.surprises.lock().push(delta);
                    }
                    live.sum = live.sum.wrapping_add(delta);
                    live.count += 1;
                    live.numbers.insert(delta, entry.position.index);
                }
            }
            live.digest = u64::from(hash.finalize());
            live.position = Some(entry.position);
            if let Some(witness) = &self.witness {
                witness(entry.position, live.digest);
            }
            answers.push(Bytes::copy_from_slice(&live.sum.to_le_bytes()));
        }
        drop(live);
        if self.eager {
            self.flush(Some(u64::MAX));
        }
        Ok(answers)
    }

    fn announced(&self, command: &Bytes) {
        self.announced.lock().insert(delta_of(command));
    }

    fn snapshot_mark(&self) -> SnapshotMark {
        mark(&self.flushed.lock())
    }

    fn link_snapshot(&self, directory: &Path) -> Result<SnapshotMark, SnapshotError> {
        let io = |source| SnapshotError::Io { path: directory.to_owned(), source };
        std::fs::create_dir(directory).map_err(io)?;
        // A folder and an empty file, as a real state machine's checkpoint has.
        std::fs::create_dir(directory.join("rocks")).map_err(io)?;
        std::fs::write(directory.join("rocks/CURRENT"), b"").map_err(io)?;
        std::fs::write(directory.join("rocks/000001.sst"), vec![7u8; 3_000_000]).map_err(io)?;
        let flushed = self.flushed.lock();
        write(directory, &flushed).map_err(io)?;
        Ok(mark(&flushed))
    }

    fn install_snapshot(&self, expected: &SnapshotMark, directory: &Path) -> Result<(), SnapshotError> {
        let path = directory.join("state");
        let raw = std::fs::read(&path).map_err(|source| SnapshotError::Io { path: path.clone(), source })?;
        let state = decode(&raw).ok_or_else(|| SnapshotError::Invalid("damaged".to_owned()))?;
        if mark(&state) != *expected {
            return Err(SnapshotError::Invalid("another mark".to_owned()));
        }
        if std::fs::read(directory.join("rocks/000001.sst")).map(|sst| sst.len()).unwrap_or(0) != 3_000_000 {
            return Err(SnapshotError::Invalid("a file is missing".to_owned()));
        }
        write(&self.directory, &state)
            .map_err(|source| SnapshotError::Io { path: self.directory.clone(), source })?;
        self.installs.fetch_add(1, Ordering::Relaxed);
        *self.flushed.lock() = state.clone();
        *self.live.lock() = state;
        Ok(())
    }
}

fn delta_of(command: &Bytes) -> u64 {
    command.first_chunk::<8>().map_or(0, |raw| u64::from_le_bytes(*raw))
}

fn mark(state: &State) -> SnapshotMark {
    SnapshotMark { position: state.position, membership: state.membership.clone() }
}

fn write(directory: &Path, state: &State) -> std::io::Result<()> {
    let mut raw = Vec::new();
    let position = state.position.unwrap_or_default();
    for number in [
        u64::from(state.position.is_some()),
        position.term,
        position.leader,
        position.index,
        state.sum,
        state.count,
        state.digest,
    ] {
        raw.extend_from_slice(&number.to_le_bytes());
    }
    raw.extend_from_slice(&(state.numbers.len() as u64).to_le_bytes());
    for (number, index) in &state.numbers {
        raw.extend_from_slice(&number.to_le_bytes());
        raw.extend_from_slice(&index.to_le_bytes());
    }
    raw.extend_from_slice(&state.membership);
    let (temporary, path) = (directory.join("state.tmp"), directory.join("state"));
    let mut file = std::fs::File::create(&temporary)?;
    file.write_all(&raw)?;
    file.sync_all()?;
    std::fs::rename(&temporary, &path)
}

fn decode(raw: &[u8]) -> Option<State> {
    let number = |i: usize| Some(u64::from_le_bytes(raw.get(8 * i..8 * i + 8)?.try_into().ok()?));
    let position = LogPosition { term: number(1)?, leader: number(2)?, index: number(3)? };
    let count = number(7)? as usize;
    let mut numbers = BTreeMap::new();
    for i in 0..count {
        numbers.insert(number(8 + 2 * i)?, number(9 + 2 * i)?);
    }
    Some(State {
        position: (number(0)? == 1).then_some(position),
        membership: Bytes::copy_from_slice(raw.get(64 + 16 * count..)?),
        sum: number(4)?,
        count: number(5)?,
        digest: number(6)?,
        numbers,
    })
}
