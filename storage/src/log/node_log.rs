//! The node's log: opening, groups, closing.
//!
//! Not here: what a group can do (`group_log`), the order of things on disk (`writer`, `recovery`).

use super::chores::{Chores, sync_written};
use super::group::Group;
use super::group_index::GroupIndex;
use super::queue::{Action, Queue};
use super::recovery::{self, Opened};
use super::room::{LogRoom, Room};
use super::segment_set::SegmentSet;
use super::shared::{Counters, Progress, Shared};
use super::stall::Stall;
use super::writer::Writer;
use super::{Driver, GroupKey, GroupLog, GroupLogState, LogError, LogOptions, QuarantineCause};
use crate::disk::{DirectoryLock, Disk};
use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The writer's thread waits at most this long for something urgent; then it writes what is not.
const IDLE_WAIT: Duration = Duration::from_secs(1);
/// Between two tries to write on a full disk.
const FULL_PAUSE: Duration = Duration::from_millis(100);

/// A healthy group found when the log was opened.
#[derive(Debug, Clone)]
pub struct RecoveredGroup {
    /// Whose log it is.
    pub key: GroupKey,
    /// What it holds.
    pub state: GroupLogState,
    /// The vote, if one was saved.
    pub vote: Option<Bytes>,
    /// The commit position, if one was saved.
    pub committed: Option<Bytes>,
}

/// A group that must neither vote nor serve.
#[derive(Debug, Clone)]
pub struct QuarantinedGroup {
    /// Whose log it is.
    pub key: GroupKey,
    /// What happened.
    pub cause: QuarantineCause,
    /// The same in words.
    pub reason: String,
}

/// What opening found.
#[derive(Debug, Clone, Default)]
pub struct Recovery {
    /// The log was created just now. See [`LogOptions::must_exist`].
    pub fresh: bool,
    /// The healthy groups.
    pub groups: Vec<RecoveredGroup>,
    /// Groups that neither vote nor serve, until forgotten or released. A replica directory whose group is in neither
    /// list has lost its log too.
    pub quarantined: Vec<QuarantinedGroup>,
    /// New damage that hides whose records it hit, in words: every group known by then is in `quarantined`.
    pub damage: Vec<String>,
    /// Bytes of a torn tail that were cut; nothing in it was acknowledged.
    pub torn_bytes: u64,
    /// The log was open with `Durability::Memory` when the operating system went down: every group is quarantined.
    pub boot_changed: bool,
}

/// Counters and sizes at a moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogStats {
    /// Segments there are.
    pub segments: u64,
    /// Their bytes.
    pub disk_bytes: u64,
    /// Bytes of records that a recovery would need.
    pub live_bytes: u64,
    /// Entries in memory.
    pub cached_bytes: u64,
    /// Waiting for the writer, or being written.
    pub queued_bytes: u64,
    /// Batches written since the log was opened.
    pub batches: u64,
    /// Bytes written since then.
    pub written_bytes: u64,
    /// Syncs since then.
    pub syncs: u64,
    /// Payload bytes copied forward since then.
    pub relocated_bytes: u64,
}

/// The node-wide log; a cheap handle. Dropping the last one without `close` abandons what is queued, as a crash would.
#[derive(Debug, Clone)]
pub struct Log {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    _lock: DirectoryLock,
}

impl Log {
    /// Opens or creates the log, and starts its threads if the driver has some.
    pub fn open(
        options: LogOptions,
        disk: Arc<dyn Disk>,
        driver: Driver,
    ) -> Result<(Log, Recovery), LogError> {
        options.validate()?;
        let directory = &options.directory;
        disk.create_dir_all(directory).map_err(LogError::io("create", directory))?;
        let lock = disk.lock(&directory.join("lock")).map_err(LogError::io("lock", directory))?;
        let opened = recovery::open(&options, &*disk)?;
        let recovery = report(&opened);
        let shared = Arc::new(share(options, disk, driver, opened));
        shared.chores.request_spare();
        let inner = Inner { shared, threads: Mutex::default(), _lock: lock };
        let log = Log { inner: Arc::new(inner) };
        if driver == Driver::Threaded {
            log.start()?;
        }
        Ok((log, recovery))
    }

    fn start(&self) -> Result<(), LogError> {
        let mut threads = self.inner.threads.lock();
        let shared = self.inner.shared.clone();
        threads.push(spawn("log-writer", &self.inner.shared, move || write_until_stopped(&shared))?);
        let shared = self.inner.shared.clone();
        threads.push(spawn("log-chores", &self.inner.shared, move || shared.chores.run(&shared))?);
        Ok(())
    }

    /// Creates or opens the log of a replica.
    pub fn group(&self, group: u64, replica: u64) -> Result<GroupLog, LogError> {
        let key = GroupKey { group, replica };
        let shared = &self.inner.shared;
        let mut groups = shared.groups.write();
        if let Some(known) = groups.get(&key) {
            let index = known.lock();
            if let Some((_, reason)) = &index.quarantine {
                return Err(LogError::Quarantined { key, reason: reason.clone() });
            }
            if index.is_destroyed {
                return Err(LogError::Destroyed { key });
            }
            drop(index);
            return Ok(GroupLog::new(shared.clone(), known.clone()));
        }
        if let Some(reason) = shared.queue.stopped() {
            return Err(LogError::Stopped { reason: reason.to_string() });
        }
        let created = Arc::new(Group::new(key, GroupIndex::default()));
        groups.insert(key, created.clone());
        let index = created.lock();
        let refused = shared.queue(&created, Action::Create, None);
        drop(index);
        drop(groups);
        refused.answer();
        shared.drive();
        Ok(GroupLog::new(shared.clone(), created))
    }

    /// Forgets a group, quarantined or not; blocks until that is durable (with `Driver::Manual`, until pumped).
    pub fn forget(&self, key: GroupKey) -> io::Result<()> {
        let Some(group) = self.inner.shared.groups.read().get(&key).cloned() else { return Ok(()) };
        self.settle(|done| GroupLog::new(self.inner.shared.clone(), group).destroy(done))
    }

    /// Quarantines a group that turned out to be damaged while running; durable when it returns. Its handles refuse
    /// everything from now on. Damage that a read meets is noticed by itself: see [`Log::damaged`].
    pub fn quarantine(&self, key: GroupKey, reason: &str) -> io::Result<()> {
        let shared = &self.inner.shared;
        let Some(group) = shared.groups.read().get(&key).cloned() else {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("no {key} in the log")));
        };
        self.settle(|done| {
            shared.spoil(&group, reason.to_owned(), Some(done));
            shared.drive();
        })
    }

    /// Groups whose logs were found damaged since the log was opened (a bad checksum on a read, a file cut short), with
    /// what was found; until they are forgotten. Their handles refuse everything: the caller replaces the replicas.
    pub fn damaged(&self) -> Vec<(GroupKey, String)> {
        let damaged = self.inner.shared.damaged.lock();
        damaged.iter().map(|(key, reason)| (*key, reason.clone())).collect()
    }

    /// Lifts a quarantine after an operator has decided that this replica's data is the best there is. Only where the
    /// data is whole (`QuarantineCause::OsRestart`).
    pub fn release(&self, key: GroupKey) -> io::Result<()> {
        let shared = &self.inner.shared;
        let Some(group) = shared.groups.read().get(&key).cloned() else {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("no {key} in the log")));
        };
        self.settle(|done| {
            let mut index = group.lock();
            match index.quarantine {
                None => done(Ok(())),
                Some((QuarantineCause::Damage, _)) => {
                    drop(index);
                    done(Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        format!("the log of {key} is not whole"),
                    )));
                }
                Some((QuarantineCause::OsRestart, _)) => {
                    index.quarantine = None;
                    let refused = shared.queue(&group, Action::Release, Some(done));
                    drop(index);
                    refused.answer();
                    shared.drive();
                }
            }
        })
    }

    /// Runs an operation and waits for its callback.
    fn settle(&self, operation: impl FnOnce(super::DurableCallback)) -> io::Result<()> {
        let (sender, receiver) = mpsc::channel();
        operation(Box::new(move |result| {
            // The receiver waits below; if it is gone nobody asks any more.
            let _unasked = sender.send(result);
        }));
        if self.inner.shared.driver == Driver::Manual {
            while self.pump() {}
        }
        receiver.recv().unwrap_or_else(|_| Err(self.inner.shared.stopped_error()))
    }

    /// Bytes waiting for the writer or being written.
    pub fn queued_bytes(&self) -> u64 {
        self.inner.shared.queue.bytes()
    }

    /// Counters and sizes at this moment.
    pub fn stats(&self) -> LogStats {
        let shared = &self.inner.shared;
        let (segments, disk_bytes) = shared.segments.totals();
        let groups: Vec<Arc<Group>> = shared.groups.read().values().cloned().collect();
        LogStats {
            segments,
            disk_bytes,
            live_bytes: groups.iter().map(|group| group.lock().live_bytes()).sum(),
            cached_bytes: shared.cached_bytes.load(Ordering::Relaxed),
            queued_bytes: shared.queue.bytes(),
            batches: shared.counters.batches.load(Ordering::Relaxed),
            written_bytes: shared.counters.written_bytes.load(Ordering::Relaxed),
            syncs: shared.counters.syncs.load(Ordering::Relaxed),
            relocated_bytes: shared.counters.relocated_bytes.load(Ordering::Relaxed),
        }
    }

    /// How long the write or sync in progress has taken; zero when there is none. A leader on a hung disk must go.
    pub fn stalled_for(&self) -> Duration {
        self.inner.shared.stall.stalled_for()
    }

    /// How long writing and syncing has taken since the log was opened, without what is in progress: it grows when the disk has
    /// taken something.
    pub fn disk_time(&self) -> Duration {
        self.inner.shared.stall.disk_time()
    }

    /// What room there is on the disk.
    pub fn room(&self) -> LogRoom {
        self.inner.shared.log_room()
    }

    /// `Driver::Manual`: commits one batch; false if nothing was queued, or the disk is full.
    pub fn pump(&self) -> bool {
        self.inner.shared.pump_with(&mut self.inner.shared.writer.lock())
    }

    /// `Driver::Manual`: does the background work that is due. It may queue copies for the next `pump`.
    pub fn housekeep(&self) {
        self.inner.shared.chores.run_all(&self.inner.shared);
    }

    /// Writes out and syncs what is queued, says in the floor that all is in order, joins the threads. Idempotent.
    pub fn close(&self) -> Result<(), LogError> {
        let shared = &self.inner.shared;
        shared.queue.stop("closed");
        self.inner.join_writer();
        while self.pump() {}
        shared.chores.stop();
        self.inner.join_all();
        sync_written(shared);
        shared.wake_all();
        if shared.has_failed() {
            let reason = shared.queue.stopped().as_deref().unwrap_or("failed").to_owned();
            return Err(LogError::Stopped { reason });
        }
        let synced = shared.progress.lock().synced;
        let mut floor = shared.floor.lock();
        let result = floor.change(|floor| {
            floor.synced = floor.synced.max(synced);
            floor.is_clean = true;
        });
        result.map_err(LogError::io("write", floor.path()))
    }
}

impl Inner {
    fn join_writer(&self) {
        let writer = {
            let mut threads = self.threads.lock();
            if threads.is_empty() { None } else { Some(threads.remove(0)) }
        };
        join(writer);
    }

    fn join_all(&self) {
        let threads = std::mem::take(&mut *self.threads.lock());
        threads.into_iter().for_each(|thread| join(Some(thread)));
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.shared.queue.stopped().is_none() {
            // Abandoned: what is queued is answered with an error.
            self.shared.is_failed.store(true, Ordering::SeqCst);
            self.shared.queue.stop("abandoned");
        }
        self.shared.chores.stop();
        self.join_all();
        self.shared.wake_all();
    }
}

fn join(thread: Option<JoinHandle<()>>) {
    // A callback that drops the last handle runs on the writer's own thread.
    if let Some(thread) = thread.filter(|thread| thread.thread().id() != thread::current().id())
        && thread.join().is_err()
    {
        tracing::error!("a thread of the log panicked");
    }
}

fn write_until_stopped(shared: &Shared) {
    loop {
        let operations =
            shared.queue.wait_and_take(shared.room.batch_bytes(shared.options.batch_bytes_max), IDLE_WAIT);
        if !operations.is_empty() {
            let is_one = operations.len() == 1;
            if shared.writer.lock().commit(shared, operations) || !is_one {
                continue;
            }
            if shared.queue.stopped().is_some() {
                return shared.refuse_queued();
            }
            thread::sleep(FULL_PAUSE);
        } else if shared.queue.stopped().is_some() {
            return;
        }
    }
}

fn spawn(
    name: &str,
    shared: &Shared,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, LogError> {
    let builder = thread::Builder::new().name(name.to_owned());
    builder.spawn(run).map_err(LogError::io("start the threads of", &shared.options.directory))
}

fn report(opened: &Opened) -> Recovery {
    let mut recovery = Recovery {
        fresh: opened.is_fresh,
        damage: opened.damage.clone(),
        torn_bytes: opened.torn_bytes,
        boot_changed: opened.is_boot_changed,
        ..Recovery::default()
    };
    for (&key, index) in &opened.groups {
        match &index.quarantine {
            Some((cause, reason)) => {
                recovery.quarantined.push(QuarantinedGroup { key, cause: *cause, reason: reason.clone() });
            }
            None => recovery.groups.push(RecoveredGroup {
                key,
                state: index.state(),
                vote: index.vote.clone(),
                committed: index.committed.clone(),
            }),
        }
    }
    recovery
}

fn share(options: LogOptions, disk: Arc<dyn Disk>, driver: Driver, opened: Opened) -> Shared {
    let segments = SegmentSet::default();
    for (segment, bytes) in opened.segments {
        segments.insert(segment, bytes);
    }
    let groups =
        opened.groups.into_iter().map(|(key, index)| (key, Arc::new(Group::new(key, index)))).collect();
    let progress = Progress { active: opened.active.clone(), written: opened.end, synced: opened.synced };
    let room = Room::default();
    room.set_left(opened.active.reserved().saturating_sub(opened.end.offset));
    Shared {
        queue: Queue::new(options.queue_bytes_max),
        options,
        disk,
        driver,
        groups: RwLock::new(groups),
        segments,
        progress: Mutex::new(progress),
        floor: Mutex::new(opened.floor),
        writer: Mutex::new(Writer::new(opened.active, opened.end.offset)),
        chores: Chores::default(),
        cached_bytes: AtomicU64::new(0),
        counters: Counters::default(),
        stall: Stall::default(),
        room,
        damaged: Mutex::default(),
        is_failed: AtomicBool::new(false),
    }
}
