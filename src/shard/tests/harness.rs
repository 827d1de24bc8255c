//! A machine over a store in a temporary folder, and a log that is as durable as the test wants.

use std::cell::Cell;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use bytes::{Bytes, BytesMut};
use evershard_proto::key::key_of;
use evershard_raft::state_machine::{CommittedEntry, EntryContent, LogPosition, StateMachine};
use evershard_storage::rocks::{ReplicaIdentity, ReplicaStore, RocksOptions, RocksShared};
use parking_lot::Mutex;
use proptest::prelude::ProptestConfig;
use tempfile::TempDir;

use crate::flush::{DurableIndex, FlushReport, flush_replica};
use crate::memory::MemoryBudget;
use crate::model::KeyRange;
use crate::read::Digest;
use crate::shard::{OnDamage, ShardError, ShardMachine, ShardOptions, SmallState};

/// Each case opens stores on a real disk: fewer than usual, unless PROPTEST_CASES says otherwise.
pub(super) fn cases() -> ProptestConfig {
    let cases =
        if std::env::var_os("PROPTEST_CASES").is_some() { ProptestConfig::default().cases } else { 40 };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

static ROCKS: LazyLock<RocksShared> =
    LazyLock::new(|| RocksShared::new(RocksOptions::default()).expect("an environment"));

/// A replica that can be closed and opened again.
pub(super) struct Replica {
    pub(super) home: TempDir,
    pub(super) range: KeyRange,
    machine: Option<Arc<ShardMachine>>,
    replica: u64,
    budget: u64,
}

impl Replica {
    pub(super) fn new(replica: u64, range: KeyRange) -> Self {
        Self::with_budget(replica, range, 0)
    }

    /// One whose rows may take so many bytes of memory; 0: as many as they like.
    pub(super) fn with_budget(replica: u64, range: KeyRange, budget: u64) -> Self {
        let home = tempfile::tempdir().expect("a folder");
        let store =
            ReplicaStore::create(&home.path().join("store"), &identity(replica), &ROCKS).expect("created");
        let machine = open(range, budget, store);
        Replica { home, range, machine: Some(machine), replica, budget }
    }

    pub(super) fn machine(&self) -> &Arc<ShardMachine> {
        self.machine.as_ref().expect("open")
    }

    /// Forgets everything in memory, as a crash does, and opens what is on disk.
    pub(super) fn crash(&mut self) {
        self.machine = None;
        let (store, _) = ReplicaStore::open(&self.home.path().join("store"), &identity(self.replica), &ROCKS)
            .expect("opened");
        self.machine = Some(open(self.range, self.budget, store));
    }

    pub(super) fn folder(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }
}

fn open(range: KeyRange, budget: u64, store: ReplicaStore) -> Arc<ShardMachine> {
    let budget = MemoryBudget::new(budget);
    let on_damage: OnDamage = Arc::new(|reason| panic!("damage: {reason}"));
    let options = ShardOptions { budget, on_damage: Some(on_damage), ..ShardOptions::new(range) };
    Arc::new(ShardMachine::open(options, store).expect("loaded"))
}

fn identity(replica: u64) -> ReplicaIdentity {
    ReplicaIdentity { cluster: "test".into(), node: replica, group: 1, shard: 3, replica }
}

/// The log as a flush sees it: what happens between its batches and before its commit is the test's choice.
pub(super) struct Log<F: FnMut() + Send> {
    durable: bool,
    between: Mutex<F>,
}

impl<F: FnMut() + Send> DurableIndex for Log<F> {
    fn wait_durable(&self, _: u64) -> bool {
        (self.between.lock())();
        self.durable
    }

    fn bytes_since(&self, _: u64) -> u64 {
        0
    }

    fn pace(&self, _: u64) {
        (self.between.lock())();
    }
}

pub(super) fn flush(machine: &ShardMachine) -> Option<FlushReport> {
    flush_with(machine, true, || ()).expect("flushed")
}

pub(super) fn flush_with(
    machine: &ShardMachine,
    durable: bool,
    between: impl FnMut() + Send,
) -> Result<Option<FlushReport>, ShardError> {
    let log = Log { durable, between: Mutex::new(between) };
    flush_replica(machine, &log)
}

/// Crashes this thread at a crash point of the storage crate, once; other threads pass it by. False when crash points are
/// not compiled in, or the point was not reached.
pub(super) fn crash_at(point: &'static str, work: impl FnOnce()) -> bool {
    thread_local! { static ARMED: Cell<Option<&'static str>> = const { Cell::new(None) }; }
    if !cfg!(feature = "failpoints") {
        return false;
    }
    let crash = move || {
        if ARMED.get() == Some(point) {
            ARMED.set(None);
            // Past the panic hook: this is no failure.
            std::panic::resume_unwind(Box::new("crash"));
        }
    };
    fail::cfg_callback(point, crash).expect("a crash point");
    ARMED.set(Some(point));
    let crashed = std::panic::catch_unwind(AssertUnwindSafe(work)).is_err();
    ARMED.set(None);
    crashed
}

/// What must be equal in replicas that applied the same entries.
#[derive(Debug, PartialEq)]
pub(super) struct Fingerprint {
    pub(super) digest: Digest,
    pub(super) small: SmallState,
    pub(super) membership: Bytes,
    pub(super) applied: Option<LogPosition>,
}

pub(super) fn fingerprint(machine: &ShardMachine) -> Fingerprint {
    machine.run_scans();
    let (_, digest) = machine.digest().expect("ready");
    let state = machine.lock_small();
    Fingerprint {
        digest,
        small: state.small.clone(),
        membership: state.membership.clone(),
        applied: state.position,
    }
}

pub(super) fn entry(index: u64, content: EntryContent) -> CommittedEntry {
    CommittedEntry { position: LogPosition { term: 1 + index / 7, leader: 1, index }, content }
}

pub(super) fn command(index: u64, command: Bytes) -> CommittedEntry {
    entry(index, EntryContent::Command { time_ms: 1_000 + (index * 37) % 101 * 100, command })
}

pub(super) fn apply(machine: &ShardMachine, entry: CommittedEntry) -> Bytes {
    machine.apply(&[entry]).expect("applied").remove(0)
}

/// Weights of an id, and whether the row exists.
pub(super) fn pull(machine: &ShardMachine, table: u32, id: u64) -> (Vec<f32>, bool) {
    let (mut rows, mut exists) = (BytesMut::new(), BytesMut::new());
    let keys = key_of(table, id).to_le_bytes();
    machine.pull(table, &keys, Some(&mut exists), &mut rows).expect("a pull");
    let values = rows.chunks_exact(4).map(|raw| f32::from_le_bytes(raw.try_into().expect("four"))).collect();
    (values, exists[0] == 1)
}
