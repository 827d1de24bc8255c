//! Kills a process at every step of a flush, a creation and an install, and looks at what the next one finds.
//!
//! The child applies a made-up log to two tables by the rules of replay (a row at or above an entry's index skips it),
//! flushes every few entries with a fuzzy run, and kills itself with SIGKILL at the n-th pass of a failpoint. The parent
//! opens the store, replays from `replay_from` to `complete_at` and compares with the log applied from nothing: every lost,
//! doubled or reordered change shows, because the changes do not commute.
//!
//! Here the steps are failpoints. Every system call, every order of syncs and every failed sync: `store_crash/every_io.rs`.
//!
//! Needs `--features failpoints`.

#[path = "store_crash/every_io.rs"]
mod every_io;
#[path = "store_crash/syscalls.rs"]
mod syscalls;

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use evershard_storage::rocks::{
    FlushedState, Position, ReplicaIdentity, ReplicaStore, RocksOptions, RocksShared, StoreError,
};
use evershard_storage::table::{FlushCursor, RowHeader, RowShape, Table};

const SHAPE: RowShape = RowShape::plain(1, 1);
const LAST: u64 = 130;
const NO_COMPACTION: &str = "STORE_CRASH_NO_COMPACTION";
const KEYS: u64 = 12;

const FLUSH_POINTS: [&str; 6] = [
    "flush::before_complete_at",
    "flush::before_ingest",
    "flush::before_meta",
    "flush::after_meta",
    "durable_file::before_rename",
    "durable_file::before_sync_folder",
];
const INSTALL_POINTS: [&str; 5] = [
    "install::before_move",
    "install::before_swap",
    "install::after_swap",
    "durable_file::before_rename",
    "durable_file::before_sync_folder",
];

/// A row that the tests compare: version, flags, floats. A tombstone has no floats that count.
type Rows = BTreeMap<(u32, u64), (u64, u32, Vec<u32>)>;

/// A replica's memory.
struct Memory {
    tables: [Table; 2],
    /// Table 1 was cleared and the next run must say so.
    drop_owed: bool,
    /// The last entry that cleared table 1.
    cleared_at: u64,
    applied: u64,
}

impl Memory {
    fn new() -> Self {
        Self { tables: [Table::new(SHAPE), Table::new(SHAPE)], drop_owed: false, cleared_at: 0, applied: 0 }
    }

    fn apply(&mut self, index: u64) {
        self.applied = index;
        if index.is_multiple_of(33) {
            self.tables[1] = Table::new(SHAPE);
            (self.drop_owed, self.cleared_at) = (true, index);
            return;
        }
        let key = (index * index + index / 5) % KEYS * 0x1111_1111_1111_1111;
        let table = &mut self.tables[usize::from(index.is_multiple_of(3))];
        let slot = match table.find_slot(key) {
            Some(slot) if table.row(slot).header().version >= index => return,
            Some(slot) => slot,
            None => table.insert(key),
        };
        let mut row = table.row_mut(slot);
        let (header, weights, state) = row.split_mut();
        if index.is_multiple_of(7) {
            *header = RowHeader { version: index, steps: 0, flags: RowHeader::TOMBSTONE };
            (weights[0], state[0]) = (0.0, 0.0);
        } else {
            *header = RowHeader { version: index, steps: header.steps + 1, flags: 0 };
            weights[0] = weights[0] * 3.0 + index as f32;
            state[0] += 1.0;
        }
    }

    fn rows(&self) -> Rows {
        let mut rows = Rows::new();
        for (number, table) in (0..).zip(&self.tables) {
            for slot in 0..table.slots() {
                if let Some((key, row)) = table.row_at(slot) {
                    let bits = row.floats().iter().map(|float| float.to_bits()).collect();
                    rows.insert((number, key), (row.header().version, row.header().flags, bits));
                }
            }
        }
        rows
    }

    /// Opens or makes the store and loads what it has.
    fn recover(directory: &Path) -> (ReplicaStore, Self) {
        let (store, state) = match ReplicaStore::open(directory, &identity(1), &shared()) {
            Ok(opened) => opened,
            Err(StoreError::Absent { .. }) => {
                (ReplicaStore::create(directory, &identity(1), &shared()).unwrap(), FlushedState::default())
            }
            Err(error) => panic!("{error}"),
        };
        let mut memory = Self::new();
        store
            .load_rows(|table, key, header, floats| {
                assert!(header.version <= state.complete_at, "{header:?} above {}", state.complete_at);
                assert!(memory.tables[table as usize].load(key, header, floats));
            })
            .unwrap();
        let replayed = state.replay_from.map_or(0, |position| position.index);
        assert_eq!(state.small_state, small_state(replayed));
        for index in replayed + 1..=state.complete_at {
            memory.apply(index);
        }
        memory.applied = state.complete_at;
        (store, memory)
    }

    fn flush(&mut self, store: &ReplicaStore) {
        let noted = self.applied;
        let drop_owed = std::mem::take(&mut self.drop_owed);
        let mut owed = Vec::new();
        for table in &mut self.tables {
            table.begin_flush();
            let (mut cursor, mut rows) = (FlushCursor::default(), Vec::new());
            while !cursor.is_done() {
                table.flush_keys(&mut cursor, 64, &mut rows);
            }
            rows.sort_unstable();
            owed.push(rows);
        }
        // Fuzzy: rows move on between the note and the copy.
        for index in noted + 1..=(noted + 4).min(LAST) {
            self.apply(index);
        }
        let mut run = store.begin_run().unwrap();
        if drop_owed {
            run.drop_table(1);
        }
        for ((number, table), rows) in (0..).zip(&self.tables).zip(&owed) {
            table.flush_rows(rows, |key, header, floats| run.put(number, key, header, floats).unwrap());
        }
        // A run without rows that were cleared meanwhile is not what the log says before it has cleared them; the versions in
        // the run see to themselves.
        let complete_at = self.cleared_at;
        let replay = FlushedState {
            replay_from: Some(Position { term: 1, leader: 1, index: noted }),
            complete_at: 0,
            membership: Bytes::new(),
            small_state: small_state(noted),
        };
        store.commit(run, complete_at, replay).unwrap();
        for table in &mut self.tables {
            table.commit_flush();
        }
    }
}

fn small_state(index: u64) -> Bytes {
    if index == 0 { Bytes::new() } else { Bytes::from(format!("as of {index}")) }
}

fn shared() -> RocksShared {
    let options = RocksOptions { block_cache_bytes: 1 << 20, ..RocksOptions::default() };
    // What compaction writes comes at any time: where calls are counted there is none.
    let level_0_files = if std::env::var(NO_COMPACTION).is_ok() { 100 } else { options.level_0_files };
    RocksShared::new(RocksOptions { level_0_files, ..options }).unwrap()
}

fn identity(replica: u64) -> ReplicaIdentity {
    ReplicaIdentity { cluster: "c".to_owned(), node: replica, group: 1, shard: 0, replica }
}

/// The log applied from nothing.
fn model(last: u64) -> Rows {
    let mut memory = Memory::new();
    (1..=last).for_each(|index| memory.apply(index));
    memory.rows()
}

fn check(directory: &Path) -> u64 {
    let (store, memory) = Memory::recover(directory);
    // Tombstones that replay is past may be forgotten at any time, and need not be.
    let replayed_to = store.state().replayed_to();
    let needed = |mut rows: Rows| {
        rows.retain(|_, (version, flags, _)| *flags & RowHeader::TOMBSTONE == 0 || *version > replayed_to);
        rows
    };
    assert_eq!(needed(memory.rows()), needed(model(memory.applied)), "at {}", memory.applied);
    let mut names: Vec<String> = std::fs::read_dir(store.directory())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names.len(), 3, "leftovers: {names:?}");
    memory.applied
}

fn child_of(task: &str, folder: &Path, point: &str, pass: u32) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["child", "--exact", "--ignored", "--nocapture"])
        .env("STORE_CRASH", format!("{task};{};{point};{pass}", folder.display()))
        .stdout(std::process::Stdio::null());
    if task.starts_with("one flush") {
        command.env(NO_COMPACTION, "1");
    }
    command
}

fn run_child(task: &str, folder: &Path, point: &str, pass: u32) -> bool {
    let status = child_of(task, folder, point, pass).status().unwrap();
    match status.signal() {
        Some(signal) => {
            assert_eq!(signal, libc::SIGKILL);
            true
        }
        None => {
            assert!(status.success());
            false
        }
    }
}

#[test]
#[ignore = "run by the other tests, in a process of its own"]
fn child() {
    let Ok(task) = std::env::var("STORE_CRASH") else { return };
    let parts: Vec<&str> = task.split(';').collect();
    let [task, folder, point, pass] = parts[..] else { panic!("{task}") };
    let (folder, pass) = (PathBuf::from(folder), pass.parse::<u32>().unwrap());
    if pass > 0 {
        let passed = AtomicU32::new(0);
        fail::cfg_callback(point, move || {
            if passed.fetch_add(1, Ordering::Relaxed) + 1 == pass {
                // SAFETY: raising a signal touches no memory of ours; this one ends the process.
                unsafe { libc::raise(libc::SIGKILL) };
            }
        })
        .unwrap();
    }
    match task {
        "flush" => {
            let (store, mut memory) = Memory::recover(&folder.join("replica"));
            while memory.applied < LAST {
                for index in memory.applied + 1..=(memory.applied + 9).min(LAST) {
                    memory.apply(index);
                }
                memory.flush(&store);
            }
            memory.flush(&store);
        }
        flush if flush.starts_with("one flush to ") => {
            let to: u64 = flush["one flush to ".len()..].parse().unwrap();
            let (store, mut memory) = Memory::recover(&folder.join("replica"));
            (memory.applied + 1..=to).for_each(|index| memory.apply(index));
            memory.flush(&store);
        }
        "install" => {
            let (store, _) = Memory::recover(&folder.join("replica"));
            store.replace_with(&folder.join("links")).unwrap();
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_kill_at_any_step_of_a_flush_recovers_exactly() {
    let mut kills = 0;
    for point in FLUSH_POINTS {
        for pass in [1, 2, 5] {
            let folder = tempfile::tempdir().unwrap();
            let replica = folder.path().join("replica");
            let mut reached = 0;
            // Killed again and again at the same step, as far as it gets.
            for _ in 0..2 {
                kills += u32::from(run_child("flush", folder.path(), point, pass));
                let applied = check(&replica);
                assert!(applied >= reached, "what was complete stays so");
                reached = applied;
            }
            assert!(!run_child("flush", folder.path(), point, 0));
            assert_eq!(check(&replica), LAST, "{point} {pass}");
        }
    }
    assert!(kills >= 30, "{kills}");
}

/// A replica, and what a sender that is ahead of it has linked.
fn prepare_install(folder: &Path) {
    let (store, mut memory) = Memory::recover(&folder.join("replica"));
    (1..=20).for_each(|index| memory.apply(index));
    memory.flush(&store);
    let sender = ReplicaStore::create(&folder.join("sender"), &identity(2), &shared()).unwrap();
    let mut memory = Memory::new();
    (1..=70).for_each(|index| memory.apply(index));
    memory.flush(&sender);
    sender.link_to(&folder.join("links")).unwrap();
}

#[test]
fn a_kill_at_any_step_of_an_install_leaves_the_old_state_or_the_new() {
    for point in INSTALL_POINTS {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        prepare_install(folder.path());
        let before = check(&path("replica"));
        assert!(run_child("install", folder.path(), point, 1), "{point} was not passed");
        let after = check(&path("replica"));
        let new = matches!(point, "install::after_swap" | "durable_file::before_sync_folder");
        assert_eq!(after > before, new, "{point}: {before} -> {after}");

        // The replica goes on either way, also with the snapshot sent again.
        let (sender, _) = ReplicaStore::open(&path("sender"), &identity(2), &shared()).unwrap();
        sender.link_to(&path("again")).unwrap();
        let (store, _) = Memory::recover(&path("replica"));
        store.replace_with(&path("again")).unwrap();
        drop(store);
        assert_eq!(check(&path("replica")), 74);
        assert!(!run_child("flush", folder.path(), point, 0));
        assert_eq!(check(&path("replica")), LAST);
    }
}
