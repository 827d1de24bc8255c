//! The meta group's state machine: applies meta commands in log order and keeps the state on disk.
//!
//! An entry passes: decode -> `state::apply` -> the watchers learn of the new state -> the answer goes to the proposer.
//! The state is written to disk by [`MetaMachine::flush`], called now and then by the node (never by apply).
//!
//! Invariant: `published` is always the state as of `applied`; readers get it without a lock on the applying thread.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use evershard_proto::v1::{MetaCommand, MetaOutcome, MetaState};
use evershard_raft::state_machine::{
    CommittedEntry, EntryContent, Halt, SnapshotError, SnapshotMark, StateMachine,
};
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::watch;

use super::cluster_version::beyond_this_build;
use super::record::{FILE_NAME, MetaRecord, MetaRecordError};
use super::state;

/// The state machine of group 0 on this node.
#[derive(Debug)]
pub struct MetaMachine {
    directory: PathBuf,
    recovered: SnapshotMark,
    current: Mutex<MetaRecord>,
    flushed: Mutex<SnapshotMark>,
    published: watch::Sender<Arc<MetaState>>,
}

impl MetaMachine {
    /// Opens the state in `directory`, which is made when absent.
    ///
    /// # Errors
    /// [`MetaRecordError`]: the file is damaged or unreadable; the replica must be quarantined.
    pub fn open(directory: &Path) -> Result<Self, MetaRecordError> {
        std::fs::create_dir_all(directory).map_err(|source| {
            MetaRecordError::File(crate::durable_file::DurableFileError::Io {
                path: directory.into(),
                source,
            })
        })?;
        let record = MetaRecord::read(directory)?.unwrap_or_default();
        Ok(MetaMachine {
            directory: directory.to_path_buf(),
            recovered: record.mark.clone(),
            flushed: Mutex::new(record.mark.clone()),
            published: watch::Sender::new(Arc::new(record.state.clone())),
            current: Mutex::new(record),
        })
    }

    /// The state as applied here, and its changes.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Arc<MetaState>> {
        self.published.subscribe()
    }

    /// The state as applied here.
    #[must_use]
    pub fn state(&self) -> Arc<MetaState> {
        self.published.borrow().clone()
    }

    /// Log index of the last entry applied.
    #[must_use]
    pub fn applied_index(&self) -> u64 {
        self.current.lock().mark.position.map_or(0, |p| p.index)
    }

    /// Log index that the state on disk reaches.
    #[must_use]
    pub fn flushed_index(&self) -> u64 {
        self.flushed.lock().position.map_or(0, |p| p.index)
    }

    /// Writes the state to disk if it changed since the last time; blocks on the disk. `wait_durable` is asked to wait
    /// until the local log is durable up to an index and to say whether it is: state beyond it must not be written.
    /// Answers whether the state on disk moved.
    ///
    /// # Errors
    /// [`MetaRecordError`]: the state on disk is the old one.
    pub fn flush(&self, wait_durable: impl Fn(u64) -> bool) -> Result<bool, MetaRecordError> {
        let record = self.current.lock().clone();
        let Some(position) = record.mark.position else { return Ok(false) };
        let mut flushed = self.flushed.lock();
        if flushed.position >= record.mark.position || !wait_durable(position.index) {
            return Ok(false);
        }
        record.write(&self.directory)?;
        *flushed = record.mark;
        Ok(true)
    }

    fn apply_one(record: &mut MetaRecord, entry: &CommittedEntry) -> Result<MetaOutcome, Halt> {
        let outcome = match &entry.content {
            EntryContent::Blank => MetaOutcome::default(),
            EntryContent::Membership(membership) => {
                record.mark.membership = membership.clone();
                MetaOutcome::default()
            }
            EntryContent::Command { command, .. } => {
                let halt = |reason| Halt { index: entry.position.index, reason };
                let command = MetaCommand::decode(command.clone())
                    .map_err(|e| halt(format!("a meta command does not decode: {e}")))?;
                let Some(known) = &command.command else {
                    return Err(halt("a meta command of a newer version".into()));
                };
                if let Some(reason) = beyond_this_build(known) {
                    return Err(halt(reason));
                }
                state::apply(&mut record.state, command)
            }
        };
        record.mark.position = Some(entry.position);
        Ok(outcome)
    }
}

impl StateMachine for MetaMachine {
    fn recovered(&self) -> SnapshotMark {
        self.recovered.clone()
    }

    fn apply(&self, entries: &[CommittedEntry]) -> Result<Vec<Bytes>, Halt> {
        let mut record = self.current.lock();
        let mut answers = Vec::with_capacity(entries.len());
        let mut halted = None;
        for entry in entries {
            match Self::apply_one(&mut record, entry) {
                Ok(outcome) => answers.push(Bytes::from(outcome.encode_to_vec())),
                Err(halt) => {
                    halted = Some(halt);
                    break;
                }
            }
        }
        let state = Arc::new(record.state.clone());
        drop(record);
        self.published.send_replace(state);
        halted.map_or(Ok(answers), Err)
    }

    fn snapshot_mark(&self) -> SnapshotMark {
        self.flushed.lock().clone()
    }

    fn link_snapshot(&self, directory: &Path) -> Result<SnapshotMark, SnapshotError> {
        let flushed = self.flushed.lock();
        let io = |path: &Path| {
            let path = path.to_path_buf();
            move |source| SnapshotError::Io { path, source }
        };
        std::fs::create_dir_all(directory).map_err(io(directory))?;
        let to = directory.join(FILE_NAME);
        std::fs::hard_link(self.directory.join(FILE_NAME), &to).map_err(io(&to))?;
        Ok(flushed.clone())
    }

    fn install_snapshot(&self, mark: &SnapshotMark, directory: &Path) -> Result<(), SnapshotError> {
        let invalid = |e: MetaRecordError| SnapshotError::Invalid(e.to_string());
        let mut received = MetaRecord::read(directory)
            .map_err(invalid)?
            .ok_or_else(|| SnapshotError::Invalid(format!("there is no {FILE_NAME} in it")))?;
        if received.mark.position != mark.position {
            let what =
                format!("its state is of {:?}, announced was {:?}", received.mark.position, mark.position);
            return Err(SnapshotError::Invalid(what));
        }
        received.mark = mark.clone();
        let mut flushed = self.flushed.lock();
        received.write(&self.directory).map_err(invalid)?;
        *flushed = mark.clone();
        self.published.send_replace(Arc::new(received.state.clone()));
        *self.current.lock() = received;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evershard_proto::v1::{OpenMetaSession, meta_command::Command};
    use evershard_raft::state_machine::LogPosition;

    fn open_session(index: u64, nonce: &'static [u8]) -> CommittedEntry {
        let command = MetaCommand {
            command: Some(Command::OpenSession(OpenMetaSession { nonce: nonce.into(), worker: None })),
        };
        CommittedEntry {
            position: LogPosition { term: 1, leader: 1, index },
            content: EntryContent::Command { time_ms: 0, command: command.encode_to_vec().into() },
        }
    }

    fn session_of(answer: &Bytes) -> u64 {
        MetaOutcome::decode(answer.clone()).expect("an outcome").session
    }

    #[test]
    fn a_flushed_state_is_there_after_reopen_and_travels_as_a_snapshot() {
        let directory = tempfile::tempdir().expect("tempdir");
        let home = directory.path().join("a");
        let machine = MetaMachine::open(&home).expect("open");
        let answers = machine.apply(&[open_session(1, b"x"), open_session(2, b"y")]).expect("apply");
        assert_eq!(session_of(&answers[1]), session_of(&answers[0]) + 1);
        assert!(!machine.flush(|_| false).expect("the log is not durable yet"));
        assert!(machine.flush(|_| true).expect("flush"));
        assert!(!machine.flush(|_| true).expect("nothing new"));

        let reopened = MetaMachine::open(&home).expect("reopen");
        assert_eq!(reopened.recovered(), machine.snapshot_mark());
        assert_eq!(*reopened.state(), *machine.state());

        let links = directory.path().join("links");
        let mark = machine.link_snapshot(&links).expect("link");
        let other = MetaMachine::open(&directory.path().join("b")).expect("open");
        other.install_snapshot(&mark, &links).expect("install");
        assert_eq!(*other.state(), *machine.state());
        assert_eq!(other.snapshot_mark(), mark);
    }

    #[test]
    fn a_command_of_a_newer_version_halts_and_is_not_skipped() {
        let directory = tempfile::tempdir().expect("tempdir");
        let machine = MetaMachine::open(directory.path()).expect("open");
        let mut unknown = open_session(1, b"x");
        unknown.content =
            EntryContent::Command { time_ms: 0, command: Bytes::from_static(&[0xfa, 0x3f, 0x00]) };
        assert!(machine.apply(&[unknown]).is_err());
        assert_eq!(machine.applied_index(), 0);
    }
}
