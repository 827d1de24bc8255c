//! One simulated replica: the server's `ShardMachine` over its real store, watched entry by entry.
//!
//! The store is RocksDB in a temporary folder, on the machine's own disk, which loses nothing: what a power cut takes is
//! everything in memory, the flush cycle under way, and what the simulated disk loses of the log.
//!
//! What must hold:
//! - every replica answers each entry alike, also when it replays it, and as the model does;
//! - what can be pulled is the state as of the index that the pull names;
//! - digests taken at one index are equal;
//! - what a flush made durable is not ahead of the durable log (design 14.2).
//!
//! Not here: nodes and power cuts (`world`), where cycles stop (`flush`).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Bytes, BytesMut};
use evershard_proto::key::key_of;
use evershard_proto::push_body::PushBody;
use evershard_raft::group::Answer;
use evershard_raft::{CommittedEntry, Group, Halt, Runtime, SnapshotError, SnapshotMark, StateMachine};
use evershard_server::flush::FlushReport;
use evershard_server::ingest::SequenceDoor;
use evershard_server::model::KeyRange;
use evershard_server::shard::{ScrubResult, ShardError, ShardMachine, ShardOptions};
use evershard_storage::log::GroupLog;
use evershard_storage::rocks::{ReplicaIdentity, ReplicaStore, RocksOptions, RocksShared, StoreError};
use openraft_rt_sim::SimRuntime;
use parking_lot::Mutex;

use super::flush::{Cycle, Step, Stop, Word};
use super::model::{CELL_DIM, CELL_IDS, CELLS, Model, SUM_DIM, SUM_IDS, SUMS};
use super::oracle::Oracle;
use super::sim_net::Dice;
use super::world::{GROUP, Machine, Place};

/// The nodes with shards.
pub type World = super::world::World<Shard>;

/// What the replicas of one run share.
pub struct Shared {
    rocks: RocksShared,
    pub model: Arc<Mutex<Model>>,
    pub counts: Arc<Counts>,
}

/// What happened, to show that something did.
#[derive(Debug, Default)]
pub struct Counts {
    pub flushes: AtomicU64,
    pub flushes_put_off: AtomicU64,
    /// Cycles that a power cut ended.
    pub flushes_killed: AtomicU64,
    pub installs: AtomicU64,
    pub pulls: AtomicU64,
    /// Starts at which rows on disk were ahead of `replay_from`.
    pub fuzzy_starts: AtomicU64,
    /// Rows that left memory.
    pub let_go: AtomicU64,
    /// Warm-ups that ran.
    pub warm_ups: AtomicU64,
}

impl Counts {
    fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

impl Shared {
    pub fn new() -> Self {
        let keys = |table, ids| (0..ids).map(|id| key_of(table, id)).collect::<Vec<u64>>();
        let tables = BTreeMap::from([
            (SUMS, (keys(SUMS, SUM_IDS), SUM_DIM)),
            (CELLS, (keys(CELLS, CELL_IDS), CELL_DIM)),
        ]);
        let options =
            RocksOptions { block_cache_bytes: 8 << 20, background_threads: 1, ..Default::default() };
        Self {
            rocks: RocksShared::new(options).expect("RocksDB has an environment"),
            model: Arc::new(Mutex::new(Model::new(tables))),
            counts: Arc::default(),
        }
    }
}

/// See the module.
pub struct Shard {
    node: u64,
    /// `None` once the process is dead.
    machine: Mutex<Option<Arc<ShardMachine>>>,
    door: SequenceDoor,
    /// The flush under way, and the store's `complete_at` when it began.
    cycle: Mutex<Option<(Cycle, u64)>>,
    /// The last index at which this process took a digest of its own.
    digested: AtomicU64,
    oracle: Arc<Mutex<Oracle>>,
    model: Arc<Mutex<Model>>,
    counts: Arc<Counts>,
}

impl Machine for Shard {
    type Shared = Shared;

    fn open(place: &Place<'_, Shared>) -> Arc<Self> {
        let identity = ReplicaIdentity {
            cluster: "sim".into(),
            node: place.node,
            group: GROUP,
            shard: 0,
            replica: place.replica,
        };
        let store = match ReplicaStore::open(&place.directory, &identity, &place.shared.rocks) {
            Ok((store, _)) => store,
            Err(StoreError::Absent { .. }) => {
                ReplicaStore::create(&place.directory, &identity, &place.shared.rocks).expect("a new store")
            }
            Err(error) => panic!("the store does not open: {error}"),
        };
        let state = store.state();
        if state.complete_at > state.replay_from.map_or(0, |at| at.index) {
            Counts::add(&place.shared.counts.fuzzy_starts);
        }
        let machine =
            ShardMachine::open(ShardOptions::new(KeyRange::ALL), store).expect("the store fits together");
        Arc::new(Self {
            node: place.node,
            machine: Mutex::new(Some(Arc::new(machine))),
            door: SequenceDoor::default(),
            cycle: Mutex::default(),
            digested: AtomicU64::new(0),
            oracle: Arc::clone(place.oracle),
            model: Arc::clone(&place.shared.model),
            counts: Arc::clone(&place.shared.counts),
        })
    }

    fn die(&self) {
        if self.cycle.lock().take().is_some() {
            Counts::add(&self.counts.flushes_killed);
        }
        let Some(machine) = self.machine.lock().take() else { return };
        assert_eq!(Arc::strong_count(&machine), 1, "a dead process holds its store open");
    }

    fn applied(&self) -> u64 {
        self.machine().and_then(|machine| machine.applied()).map_or(0, |at| at.index)
    }
}

impl Shard {
    fn machine(&self) -> Option<Arc<ShardMachine>> {
        self.machine.lock().clone()
    }

    fn violated(&self, what: &str) -> ! {
        self.oracle.lock().violated(format!("node {}: {what}", self.node))
    }

    /// What the server's door does with a push; `None` when it is refused.
    pub fn push(&self, group: &Group<SimRuntime>, bytes: &Bytes) -> Option<Answer<SimRuntime>> {
        let machine = self.machine()?;
        group.serving_lease().ok()?;
        let term = group.leadership().term;
        let body = PushBody::parse(bytes).expect("a push of ours");
        machine.check_push(&body).ok()?;
        self.door.admit(term, body.session, body.seq, || machine.last_seq(body.session)).ok()?;
        let answer = group.propose(bytes.clone());
        answer.inspect_err(|_| self.door.retract(term, body.session)).ok()
    }

    /// A message of the session was not answered: see [`SequenceDoor::retract`].
    pub fn unanswered(&self, term: u64, session: u64) {
        self.door.retract(term, session);
    }

    /// Begins a flush cycle, unless one is under way, and drives it with pauses in between until it ends.
    pub fn flush(self: &Arc<Self>, group: &Group<SimRuntime>, dice: &Dice) {
        let Some(machine) = self.machine() else { return };
        let mut cycle = self.cycle.lock();
        if cycle.is_some() {
            return;
        }
        // A snapshot's may be ahead of the log here: its sender's log was durable that far.
        let complete_at = machine.store().state().complete_at;
        *cycle = Some((Cycle::new(machine, group.log().clone()), complete_at));
        let (shard, group, dice) = (Arc::clone(self), group.clone(), dice.clone());
        drop(SimRuntime::spawn(async move {
            let mut word = Word::GoOn;
            while let Some(at) = shard.step(group.log(), word) {
                // The server waits ten seconds; here it has less patience now and then.
                word = if at == Stop::NotDurable && dice.chance(20) { Word::GiveUp } else { Word::GoOn };
                SimRuntime::sleep(dice.micros(0, 30_000)).await;
            }
            group.flushed();
        }));
    }

    /// Lets the cycle on; where it stopped, or `None` when there is none any more.
    fn step(&self, log: &GroupLog, word: Word) -> Option<Stop> {
        let mut under_way = self.cycle.lock();
        let (cycle, before) = under_way.as_mut()?;
        let before = *before;
        let step = cycle.step(word);
        let durable = log.durable_index().unwrap_or(0);
        let flushed = self.machine()?.store().state().complete_at;
        if flushed > durable.max(before) {
            self.violated(&format!("flushed up to {flushed}, the log is durable up to {durable}"));
        }
        match step {
            Step::Stopped(at) => Some(at),
            Step::Done(result) => {
                *under_way = None;
                self.ended(result);
                None
            }
        }
    }

    /// Whoever needs the store for itself waits for the cycle.
    fn end_cycle(&self) {
        let mut under_way = self.cycle.lock();
        let Some((mut cycle, _)) = under_way.take() else { return };
        let mut word = Word::GoOn;
        let result = loop {
            match cycle.step(word) {
                Step::Stopped(Stop::NotDurable) => word = Word::GiveUp,
                Step::Stopped(_) => word = Word::GoOn,
                Step::Done(result) => break result,
            }
        };
        self.ended(result);
    }

    fn ended(&self, result: Result<Option<FlushReport>, ShardError>) {
        match result {
            Ok(_) => Counts::add(&self.counts.flushes),
            Err(ShardError::LogNotDurable { .. }) => Counts::add(&self.counts.flushes_put_off),
            Err(error) => self.violated(&format!("a flush failed: {error}")),
        }
    }

    /// Compares what can be read here with the model.
    pub fn look(&self) {
        let Some(machine) = self.machine() else { return };
        for table in [SUMS, CELLS] {
            // It serves nothing before the table is there, and while it replays.
            let Some((index, rows)) = self.rows(table) else { continue };
            Counts::add(&self.counts.pulls);
            if self.model.lock().picture(table, index) != Some(crc32fast::hash(&rows)) {
                self.violated(&format!("table {table} is not what the entries up to {index} make of it"));
            }
        }
        let applied = self.applied();
        if self.digested.swap(applied, Ordering::Relaxed) != applied
            && let Some((index, digest)) = machine.digest()
        {
            self.compare(index, false, digest.to_u128());
        }
    }

    /// Lets go of some rows of each table that are on disk.
    pub fn let_go(&self, rows: u64) {
        let Some(machine) = self.machine() else { return };
        let gone = machine.rows().let_go(rows as u32);
        self.counts.let_go.fetch_add(gone, Ordering::Relaxed);
    }

    /// Brings all rows to memory, once a start.
    pub fn warm_up(&self) {
        let Some(machine) = self.machine() else { return };
        if machine.warm_up() {
            machine.run_scans();
            Counts::add(&self.counts.warm_ups);
        }
    }

    /// Takes the digests that scrub entries asked for. `last` is the highest scrub there was.
    pub fn scrub(&self, last: u64) {
        let Some(machine) = self.machine() else { return };
        machine.run_scans();
        for scrub in last.saturating_sub(4)..=last {
            if let Some(ScrubResult::Done { index, digest }) = machine.scrub_result(scrub) {
                self.compare(index, true, digest.to_u128());
            }
        }
    }

    fn compare(&self, index: u64, is_scrub: bool, digest: u128) {
        let outcome = self.model.lock().digest(index, is_scrub, digest);
        outcome.unwrap_or_else(|problem| self.violated(&problem));
    }

    /// All rows of a table as a pull shows them, and the index; `None` while nothing is served.
    pub fn rows(&self, table: u32) -> Option<(u64, Vec<u8>)> {
        let machine = self.machine()?;
        let raw: Vec<u8> = self.model.lock().keys(table).0.iter().flat_map(|key| key.to_le_bytes()).collect();
        let (mut exists, mut rows) = (BytesMut::new(), BytesMut::new());
        let index = machine.pull(table, &raw, Some(&mut exists), &mut rows).ok()?;
        rows.extend_from_slice(&exists);
        Some((index, rows.to_vec()))
    }

    /// The digest of everything it holds, and the index.
    pub fn digest(&self) -> Option<(u64, u128)> {
        self.machine()?.digest().map(|(index, digest)| (index, digest.to_u128()))
    }
}

impl StateMachine for Shard {
    fn recovered(&self) -> SnapshotMark {
        self.snapshot_mark()
    }

    fn apply(&self, entries: &[CommittedEntry]) -> Result<Vec<Bytes>, Halt> {
        let Some(machine) = self.machine() else {
            return Err(Halt { index: entries[0].position.index, reason: "dead".into() });
        };
        let answers = machine.apply(entries)?;
        for (entry, answer) in entries.iter().zip(&answers) {
            let outcome = self.model.lock().applied(entry, answer);
            outcome.unwrap_or_else(|problem| self.violated(&problem));
        }
        Ok(answers)
    }

    fn snapshot_mark(&self) -> SnapshotMark {
        self.machine().map_or_else(SnapshotMark::default, |machine| machine.snapshot_mark())
    }

    fn link_snapshot(&self, directory: &Path) -> Result<SnapshotMark, SnapshotError> {
        self.end_cycle();
        match self.machine() {
            Some(machine) => machine.link_snapshot(directory),
            None => Err(SnapshotError::Invalid("dead".into())),
        }
    }

    fn install_snapshot(&self, mark: &SnapshotMark, directory: &Path) -> Result<(), SnapshotError> {
        self.end_cycle();
        let Some(machine) = self.machine() else { return Err(SnapshotError::Invalid("dead".into())) };
        machine.install_snapshot(mark, directory)?;
        Counts::add(&self.counts.installs);
        Ok(())
    }
}
