//! Failures of RocksDB and of a full disk, and going on after them.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use super::*;

#[test]
fn after_a_failure_of_rocksdb_the_next_run_opens_it_anew() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let store = ReplicaStore::create(&folder.path().join("s"), &identity(1), &shared).unwrap();
    flush(&store, 1, &[(1, 1, 1.0)]);
    let failed = store.ingest(&mut store.changes().unwrap(), &[folder.path().join("not there")]);
    assert!(matches!(failed, Err(StoreError::Rocks { .. })), "{failed:?}");
    assert_eq!(rows(&store), [row(1, 1, 1, 1.0)], "reading goes on");
    flush(&store, 2, &[(1, 1, 2.0)]);
    assert_eq!((rows(&store), store.state()), (vec![row(1, 1, 2, 2.0)], state(2)));
}

/// A file system of 12 MiB, for as long as the value lives.
struct SmallDisk(TempDir);

impl SmallDisk {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=12m", "tmpfs"])
            .arg(folder.path())
            .status();
        assert!(mounted.unwrap().success(), "mount a tmpfs");
        Self(folder)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
#[ignore = "needs root, to mount a small file system"]
fn a_full_disk_is_told_and_flushes_go_on_when_there_is_space() {
    let (disk, shared) = (SmallDisk::new(), shared());
    let directory = disk.0.path().join("s");
    let store = ReplicaStore::create(&directory, &identity(1), &shared).unwrap();
    let attempt = |index: u64, rows: u64| {
        let mut run = store.begin_run()?;
        for key in 0..rows {
            run.put(1, key, header(index), &[index as f32; 64])?;
        }
        store.commit(run, index, state(index))
    };
    attempt(1, 100).unwrap();
    let (mut full, mut reached) = (0, 1);
    for round in 0..40_u64 {
        let ballast = disk.0.path().join("ballast");
        // From plenty of room for a run to none, a step smaller each round: every step of a commit hits the wall.
        let left = 2_000_000_u64.saturating_sub(round * 55_000);
        let free: u64 = 12 << 20;
        let used: u64 = walk(&directory);
        fs::write(&ballast, vec![1; (free - used).saturating_sub(left) as usize]).unwrap_or(());
        match attempt(reached + 1, 4000) {
            Ok(()) => reached += 1,
            Err(error) => {
                assert!(error.is_disk_full(), "{error}");
                full += 1;
            }
        }
        assert_eq!(store.state().replay_from.unwrap().index, reached);
        rows(&store);
        fs::remove_file(&ballast).unwrap();
        attempt(reached + 1, 50).unwrap();
        reached += 1;
    }
    assert!(full > 3 && reached > 44, "{full} {reached}");
    drop(store);
    let (store, found) = ReplicaStore::open(&directory, &identity(1), &shared).unwrap();
    assert_eq!(found.replay_from.unwrap().index, reached);
    assert!(rows(&store).iter().take(50).all(|(_, _, header, _)| header.version == reached));
}

fn walk(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| match entry.metadata().unwrap() {
            metadata if metadata.is_dir() => walk(&entry.path()),
            metadata => metadata.len().next_multiple_of(4096),
        })
        .sum()
}
