//! One replica of one shard, as the raft crate drives it.
//!
//! Invariants:
//! - entries are applied one after the other, without gaps; small state and rows belong to the same entry whenever
//!   `applier` is not locked;
//! - the snapshot mark is what the store's record says, never ahead of it;
//! - a replica that failed half-way through an install applies nothing any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use evershard_proto::push_body::PushBody;
use evershard_raft::state_machine::{
    CommittedEntry, EntryContent, Halt, LogPosition, SnapshotError, SnapshotMark, StateMachine,
};
use evershard_storage::rocks::{ReplicaIdentity, ReplicaStore};
use evershard_storage::table::Table;
use parking_lot::{Mutex, MutexGuard};

use super::cut::AwaitedCuts;
use super::error::ShardError;
use super::offence_journal::OffenceJournal;
use super::prefetcher::Prefetches;
use super::recovery::{self, Debts};
use super::rows::{OnDamage, Rows};
use super::scans::{ScanId, ScrubResult};
use super::scrubber::ScrubWaker;
use super::small_state::AppliedState;
use crate::apply::{Applier, PushRefusal, ShardScope, Target, validate_push};
use crate::memory::MemoryBudget;
use crate::model::{Admission, KeyRange, PushOutcome, StepProgress};
use crate::read::{Digest, Marks, ReadError, Reader};

/// What a machine needs to know about itself.
#[derive(Clone)]
pub struct ShardOptions {
    /// The keys the shard owns.
    pub range: KeyRange,
    /// Rouses the thread that takes digests and warms up; without one that is done by [`ShardMachine::run_scans`] and
    /// [`ShardMachine::warm_up`].
    pub scrub_waker: Option<ScrubWaker>,
    /// How much of the rows may be in memory.
    pub budget: Arc<MemoryBudget>,
    /// Brings rows to memory before they are needed; without it apply reads them.
    pub prefetches: Option<Prefetches>,
    /// Told when the store turns out to be damaged: the replica must not go on.
    pub on_damage: Option<OnDamage>,
}

impl ShardOptions {
    /// Of a shard with these keys, with nobody to help it and no limit to its memory.
    #[must_use]
    pub fn new(range: KeyRange) -> Self {
        let budget = MemoryBudget::unlimited();
        ShardOptions { range, scrub_waker: None, budget, prefetches: None, on_damage: None }
    }
}

impl std::fmt::Debug for ShardOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShardOptions").field("range", &self.range).finish_non_exhaustive()
    }
}

/// A replica's state machine.
#[derive(Debug)]
pub struct ShardMachine {
    identity: ReplicaIdentity,
    pub(super) rows: Arc<Rows>,
    pub(super) store: Arc<ReplicaStore>,
    /// One flush cycle, link or install at a time.
    debts: Mutex<Debts>,
    small: Mutex<AppliedState>,
    applier: Mutex<Applier>,
    pub(super) mark: Mutex<SnapshotMark>,
    scrub_waker: Option<ScrubWaker>,
    prefetches: Option<Prefetches>,
    /// Waiting for room did not help the last time.
    waits_in_vain: AtomicBool,
    offences: OffenceJournal,
    pub(super) awaited_cuts: AwaitedCuts,
    local_scans: AtomicU64,
    /// The warm-up has begun, or is not wanted.
    warmed: AtomicBool,
    /// As `warmed`, of the rows that were used most.
    hottest_warmed: AtomicBool,
    broken: AtomicBool,
    /// As in the small state, for whoever stamps entries: read without a lock.
    clock_ms: AtomicU64,
}

impl ShardMachine {
    /// Builds the machine over its opened store. No row is read: that takes as long for a large table as for a small one.
    ///
    /// # Errors
    /// [`ShardError`] when the store's record does not fit together.
    pub fn open(options: ShardOptions, store: ReplicaStore) -> Result<Self, ShardError> {
        let identity = store.identity();
        let recovered = recovery::recover(&identity, &store.state())?;
        let scope = ShardScope { shard: identity.shard, range: options.range };
        store.set_floors(&recovered.applied.small.floors);
        store.set_kept_above(recovered.applied.small.kept_above);
        let store = Arc::new(store);
        let rows = Rows::new(
            scope,
            (recovered.tables, recovered.applied.small.floors.clone()),
            Arc::clone(&recovered.applied.small.schemas),
            (recovered.applied.index(), recovered.complete_at),
            Arc::clone(&store),
            (options.budget, options.on_damage),
        );
        let clock_ms = AtomicU64::new(recovered.applied.small.clock_ms);
        let mark = SnapshotMark {
            position: recovered.applied.position,
            membership: recovered.applied.membership.clone(),
        };
        Ok(ShardMachine {
            identity,
            rows: Arc::new(rows),
            store,
            debts: Mutex::new(recovered.debts),
            small: Mutex::new(recovered.applied),
            applier: Mutex::default(),
            mark: Mutex::new(mark),
            scrub_waker: options.scrub_waker,
            prefetches: options.prefetches,
            waits_in_vain: AtomicBool::new(false),
            offences: OffenceJournal::default(),
            awaited_cuts: AwaitedCuts::default(),
            local_scans: AtomicU64::new(0),
            warmed: AtomicBool::new(false),
            hottest_warmed: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            clock_ms,
        })
    }

    /// Whose replica it is.
    #[must_use]
    pub fn identity(&self) -> &ReplicaIdentity {
        &self.identity
    }

    /// A reader of its rows.
    #[must_use]
    pub fn reader(&self) -> Reader {
        Reader::new(Arc::clone(&self.rows))
    }

    /// Its rows, for scans.
    #[must_use]
    pub fn rows(&self) -> &Arc<Rows> {
        &self.rows
    }

    /// Its store.
    #[must_use]
    pub fn store(&self) -> &ReplicaStore {
        &self.store
    }

    /// What it remembers of values that were not finite.
    #[must_use]
    pub fn offences(&self) -> &OffenceJournal {
        &self.offences
    }

    /// False while a restarted replica still replays what its rows hold already: it serves nothing then.
    #[must_use]
    pub fn ready(&self) -> bool {
        self.rows.ready() && !self.is_broken()
    }

    /// The last applied entry.
    #[must_use]
    pub fn applied(&self) -> Option<LogPosition> {
        self.small.lock().position
    }

    /// The replicated clock, in milliseconds since 1970.
    #[must_use]
    pub fn clock_ms(&self) -> u64 {
        self.clock_ms.load(Ordering::Acquire)
    }

    /// The step of a table whose rows live for so many steps: the highest clock of its pushes.
    #[must_use]
    pub fn table_step(&self, table: u32) -> u64 {
        self.small.lock().small.clocks.get(&table).copied().unwrap_or(0)
    }

    /// The last sequence number of a session that was applied or refused here; 0 when there is none.
    #[must_use]
    pub fn last_seq(&self, session: u64) -> u64 {
        self.small.lock().small.sessions.last(session)
    }

    /// What became of a push that was answered before, or whose session has expired; `None` when it is yet to be applied.
    #[must_use]
    pub fn recorded_outcome(&self, session: u64, seq: u64) -> Option<PushOutcome> {
        match self.small.lock().small.sessions.admit(session, seq) {
            Admission::Next | Admission::Answer(PushOutcome::OutOfOrder { .. }) => None,
            Admission::Answer(outcome) => Some(outcome),
        }
    }

    /// How far a job's steps are here; `None` when it made none.
    #[must_use]
    pub fn step_progress(&self, job: u64) -> Option<StepProgress> {
        self.small.lock().small.steps.progress(job)
    }

    /// Bytes of a row of a table in a pull's reply; `None` when there is no such table.
    #[must_use]
    pub fn row_bytes(&self, table: u32) -> Option<usize> {
        self.rows.schemas().get(&table).map(|schema| schema.dim() as usize * 4)
    }

    /// Reads rows: see [`Reader::pull`]. Answers the index that they reflect.
    ///
    /// # Errors
    /// [`ReadError`]; nothing was appended then.
    pub fn pull(
        &self,
        table: u32,
        keys: &[u8],
        exists: Option<&mut BytesMut>,
        rows: &mut BytesMut,
    ) -> Result<u64, ReadError> {
        let mut marks = Marks::exists();
        let info = self.reader().pull(table, keys, exists.is_some().then_some(&mut marks), rows)?;
        if let Some(exists) = exists {
            exists.extend_from_slice(marks.bytes());
        }
        Ok(info.index)
    }

    /// Checks a push at the door, as apply will: so that nothing bad is logged.
    ///
    /// # Errors
    /// [`PushRefusal`], naming the first thing found.
    pub fn check_push(&self, body: &PushBody<'_>) -> Result<(), PushRefusal> {
        validate_push(body, &self.rows.schemas(), &self.rows.scope())
    }

    /// What became of a scrub; `None` when its entry is not applied here yet, or forgotten (the last 16 are kept).
    #[must_use]
    pub fn scrub_result(&self, scrub_id: u64) -> Option<ScrubResult> {
        self.rows.scan_result(ScanId::Scrub(scrub_id))
    }

    /// Runs the scans that are pending to their end, on this thread.
    pub fn run_scans(&self) {
        while self.rows.run_scan(&mut || true) {}
    }

    /// Runs one of the scans that are pending, asking between its slices whether to go on. False when none is.
    pub fn run_scan(&self, go_on: &mut dyn FnMut() -> bool) -> bool {
        self.rows.run_scan(go_on)
    }

    /// Brings the rows that were used most before the last stop to memory, on this thread: once after every opening and install,
    /// as soon as the replica is ready. `go_on` is asked between batches.
    pub fn warm_hottest(&self, go_on: &mut dyn FnMut() -> bool) {
        if self.ready() && !self.hottest_warmed.swap(true, Ordering::AcqRel) {
            self.rows.warm_hottest(go_on);
        }
    }

    /// Brings rows to memory, as many as fit, and counts them: once after every opening and install, as soon as the replica is
    /// ready. Begins a scan, which is then among those that are pending; false when it is not the time.
    pub fn warm_up(&self) -> bool {
        if self.warmed.load(Ordering::Acquire) || !self.ready() {
            return false;
        }
        let _between_entries = self.applier.lock();
        if !self.ready() || self.warmed.swap(true, Ordering::AcqRel) {
            return false;
        }
        if self.rows.read().tables().values().all(Table::is_whole) {
            return false;
        }
        self.rows.begin_scan_now(ScanId::WarmUp, self.rows.applied(), Digest::default());
        true
    }

    /// The digest of the whole replica as of its applied index, taken beside everything else on this thread. `None` while
    /// the replica is not ready, or when too many scans run.
    #[must_use]
    pub fn digest(&self) -> Option<(u64, Digest)> {
        let id = ScanId::Local(self.local_scans.fetch_add(1, Ordering::Relaxed));
        {
            // Between two entries: no row is ahead of the applied index.
            let _between_entries = self.applier.lock();
            if !self.rows.ready() {
                return None;
            }
            self.rows.begin_scan_now(id, self.rows.applied(), Digest::default());
        }
        loop {
            match self.rows.scan_result(id) {
                Some(ScrubResult::Done { index, digest }) => return Some((index, digest)),
                Some(ScrubResult::Pending) => {
                    if !self.rows.run_scan(&mut || true) {
                        // Another thread is at it.
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                Some(ScrubResult::Skipped(_)) | None => return None,
            };
        }
    }

    pub(crate) fn lock_debts(&self) -> MutexGuard<'_, Debts> {
        self.debts.lock()
    }

    /// Between two entries, until the guard goes.
    pub(crate) fn lock_applier(&self) -> MutexGuard<'_, Applier> {
        self.applier.lock()
    }

    pub(crate) fn lock_small(&self) -> MutexGuard<'_, AppliedState> {
        self.small.lock()
    }

    /// The last index that the store holds entirely; 0 before the first flush.
    #[must_use]
    pub fn flushed_index(&self) -> u64 {
        self.flushed_position().map_or(0, |position| position.index)
    }

    /// Where the store's record ends.
    pub(crate) fn flushed_position(&self) -> Option<LogPosition> {
        self.mark.lock().position
    }

    pub(crate) fn set_mark(&self, mark: SnapshotMark) {
        *self.mark.lock() = mark;
    }

    /// A snapshot was installed: rows are on disk, and come to memory by another warm-up.
    pub(super) fn warm_up_again(&self) {
        self.hottest_warmed.store(false, Ordering::Release);
        self.warmed.store(false, Ordering::Release);
    }

    /// Waits while rows take more memory than the node has for them and only a flush can help: most of this replica's are dirty.
    /// Not for ever: a flush that cannot go on (its log is not durable) is somebody else's alarm.
    fn wait_for_room(&self) {
        const PAUSE: Duration = Duration::from_millis(2);
        const PATIENCE: Duration = if cfg!(test) { Duration::ZERO } else { Duration::from_secs(10) };
        if !self.rows.budget().is_exhausted() {
            self.waits_in_vain.store(false, Ordering::Relaxed);
            return;
        }
        // Once it was in vain, the entries behind are let in soon.
        let was_in_vain = self.waits_in_vain.load(Ordering::Relaxed);
        let patience = if was_in_vain { PATIENCE / 1000 } else { PATIENCE };
        let since = Instant::now();
        while self.rows.budget().is_exhausted() && self.is_mostly_dirty() && since.elapsed() < patience {
            std::thread::sleep(PAUSE);
        }
        if since.elapsed() >= patience && !PATIENCE.is_zero() && !was_in_vain {
            self.waits_in_vain.store(true, Ordering::Relaxed);
            let (used, limit) = (self.rows.budget().used(), self.rows.budget().limit());
            let shard = self.identity.shard;
            tracing::warn!(
                shard,
                used,
                limit,
                "rows take more memory than the budget: the flush does not keep up"
            );
        }
    }

    fn is_mostly_dirty(&self) -> bool {
        let set = self.rows.read();
        let dirty = |table: &Table| table.dirty_rows() + table.flushing_rows();
        let (dirty, all) = set.tables().values().fold((0, 0), |(d, a), t| (d + dirty(t), a + t.resident()));
        dirty > all / 2
    }

    /// The small state has another clock, or is another one.
    pub(super) fn set_clock(&self, state: &AppliedState) {
        self.clock_ms.store(state.small.clock_ms, Ordering::Release);
    }

    pub(super) fn break_down(&self) {
        self.broken.store(true, Ordering::Release);
    }

    fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    fn apply_entry(&self, entry: &CommittedEntry) -> Result<Bytes, Halt> {
        let index = entry.position.index;
        let mut applier = self.applier.lock();
        if self.is_broken() {
            let reason = "a snapshot install failed half-way; the replica must be rebuilt".to_owned();
            return Err(Halt { index, reason });
        }
        if let Some(last) = self.small.lock().position
            && last.index.checked_add(1) != Some(index)
        {
            let reason = format!("it was given after entry {}, out of turn", last.index);
            return Err(Halt { index, reason });
        }
        let answer = match &entry.content {
            EntryContent::Blank | EntryContent::Membership(_) => Bytes::new(),
            EntryContent::Command { command, time_ms } => {
                let clock_ms = self.clock_ms().max(*time_ms);
                let target = Target {
                    small: &self.small,
                    rows: &self.rows,
                    offences: &self.offences,
                    cuts: &self.awaited_cuts,
                    index,
                    term: entry.position.term,
                    time_ms: *time_ms,
                    clock_ms,
                };
                applier.command(&target, command)?
            }
        };
        let mut state = self.small.lock();
        match &entry.content {
            EntryContent::Blank => {}
            EntryContent::Membership(membership) => state.membership = membership.clone(),
            EntryContent::Command { time_ms, .. } => {
                state.small.clock_ms = state.small.clock_ms.max(*time_ms);
                self.set_clock(&state);
            }
        }
        state.position = Some(entry.position);
        self.rows.set_applied(index);
        Ok(answer)
    }
}

impl StateMachine for ShardMachine {
    fn recovered(&self) -> SnapshotMark {
        self.snapshot_mark()
    }

    fn apply(&self, entries: &[CommittedEntry]) -> Result<Vec<Bytes>, Halt> {
        let mut answers = Vec::with_capacity(entries.len());
        for entry in entries {
            self.wait_for_room();
            answers.push(self.apply_entry(entry)?);
        }
        let is_cold = !self.warmed.load(Ordering::Acquire) && self.rows.ready();
        if let Some(waker) = &self.scrub_waker
            && (is_cold || self.rows.has_scans())
        {
            waker.wake();
        }
        Ok(answers)
    }

    fn clock_ms(&self) -> u64 {
        self.clock_ms.load(Ordering::Acquire)
    }

    fn announced(&self, command: &Bytes) {
        if let Some(prefetches) = &self.prefetches {
            prefetches.hint(&self.rows, command);
        }
    }

    fn snapshot_mark(&self) -> SnapshotMark {
        self.mark.lock().clone()
    }

    fn link_snapshot(&self, directory: &std::path::Path) -> Result<SnapshotMark, SnapshotError> {
        self.link(directory)
    }

    fn install_snapshot(
        &self,
        mark: &SnapshotMark,
        directory: &std::path::Path,
    ) -> Result<(), SnapshotError> {
        self.install(mark, directory)
    }
}
