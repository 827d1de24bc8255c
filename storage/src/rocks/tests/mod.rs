//! The store from outside: round trips, order, overwrites; what all tests share.

mod damage;
mod full_disk;
mod snapshots;

use std::fs;
use std::path::Path;

use bytes::Bytes;
use tempfile::TempDir;

use super::*;
use crate::table::RowHeader;

fn shared() -> RocksShared {
    RocksShared::new(RocksOptions { block_cache_bytes: 4 << 20, ..RocksOptions::default() }).unwrap()
}

fn identity(replica: u64) -> ReplicaIdentity {
    ReplicaIdentity { cluster: "c1".to_owned(), node: replica + 10, group: 2, shard: 3, replica }
}

fn header(version: u64) -> RowHeader {
    RowHeader { version, steps: version as u32, flags: 0 }
}

fn tombstone(version: u64) -> RowHeader {
    RowHeader { version, steps: 0, flags: RowHeader::TOMBSTONE }
}

fn state(index: u64) -> FlushedState {
    FlushedState {
        replay_from: Some(Position { term: 1, leader: 2, index }),
        complete_at: index,
        membership: Bytes::from(format!("members {index}")),
        small_state: Bytes::from(format!("state {index}")),
    }
}

type Row = (u32, u64, RowHeader, Vec<f32>);

/// A field of an identity, and how to make it another.
type Change = (&'static str, fn(&mut ReplicaIdentity));

fn rows(store: &ReplicaStore) -> Vec<Row> {
    let mut rows = Vec::new();
    store.load_rows(|table, key, header, floats| rows.push((table, key, header, floats.to_vec()))).unwrap();
    rows
}

fn flush(store: &ReplicaStore, index: u64, rows: &[(u32, u64, f32)]) {
    let mut run = store.begin_run().unwrap();
    for &(table, key, float) in rows {
        run.put(table, key, header(index), &[float, -float]).unwrap();
    }
    store.commit(run, index, state(index)).unwrap();
}

fn row(table: u32, key: u64, version: u64, float: f32) -> Row {
    (table, key, header(version), vec![float, -float])
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn rows_and_state_come_back_after_reopening() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let directory = folder.path().join("2-1");
    let store = ReplicaStore::create(&directory, &identity(1), &shared).unwrap();
    assert_eq!(store.state(), FlushedState::default());
    flush(&store, 5, &[(1, 0, 1.0), (1, u64::MAX, 2.0), (7, 3, 3.0)]);
    drop(store);
    let (store, found) = ReplicaStore::open(&directory, &identity(1), &shared).unwrap();
    assert_eq!(found, state(5));
    assert_eq!(rows(&store), [row(1, 0, 5, 1.0), row(1, u64::MAX, 5, 2.0), row(7, 3, 5, 3.0)]);
    assert!(store.metrics().disk_bytes > 0);
    assert_eq!(names(&directory.join("runs")), [""; 0]);

    let mut found = Vec::new();
    store
        .get_many(1, &[u64::MAX, 5, 0], |position, row| {
            found.push((position, row.map(|(header, floats)| (header, floats.to_vec()))));
        })
        .unwrap();
    assert_eq!(
        found,
        [(0, Some((header(5), vec![2.0, -2.0]))), (1, None), (2, Some((header(5), vec![1.0, -1.0])))]
    );
}

#[test]
fn later_runs_win_and_tombstones_stay() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let store = ReplicaStore::create(&folder.path().join("s"), &identity(1), &shared).unwrap();
    flush(&store, 1, &[(1, 1, 1.0), (1, 2, 1.0), (1, 3, 1.0)]);
    let mut run = store.begin_run().unwrap();
    run.put(1, 1, header(2), &[2.0, -2.0]).unwrap();
    run.put(1, 2, tombstone(2), &[9.0, 9.0]).unwrap();
    assert_eq!((run.rows(), run.version_max(), run.is_empty()), (2, 2, false));
    store.commit(run, 2, state(2)).unwrap();
    assert_eq!(rows(&store), [row(1, 1, 2, 2.0), (1, 2, tombstone(2), vec![]), row(1, 3, 1, 1.0)]);
}

#[test]
fn many_runs_of_many_files_stay_right_through_compaction() {
    let (folder, mut options) = (TempDir::new().unwrap(), RocksOptions::default());
    options.run_file_bytes_max = 16 << 10;
    options.file_bytes = 32 << 10;
    let shared = RocksShared::new(options).unwrap();
    let store = ReplicaStore::create(&folder.path().join("s"), &identity(1), &shared).unwrap();
    let keys = 2000_u64;
    for version in 1..=20 {
        let mut run = store.begin_run().unwrap();
        if version == 10 {
            run.drop_table(1);
        }
        for key in (0..keys).filter(|key| key % version == 0) {
            run.put(1, key, header(version), &[version as f32; 16]).unwrap();
        }
        store.commit(run, version, state(version)).unwrap();
    }
    let expected: Vec<Row> = (0..keys)
        .filter_map(|key| {
            let version = (10..=20).rev().find(|version| key % version == 0)?;
            Some((1, key, header(version), vec![version as f32; 16]))
        })
        .collect();
    assert_eq!(rows(&store), expected);
}

#[test]
fn rows_below_their_tables_floor_are_forgotten_by_compaction() {
    let (folder, mut options) = (TempDir::new().unwrap(), RocksOptions::default());
    options.run_file_bytes_max = 16 << 10;
    options.file_bytes = 32 << 10;
    let shared = RocksShared::new(options).unwrap();
    let store = ReplicaStore::create(&folder.path().join("s"), &identity(1), &shared).unwrap();
    store.set_floors(&[(1, 10), (3, 5)].into());
    for version in 1..=40 {
        let mut run = store.begin_run().unwrap();
        for table in [1, 2] {
            // The same keys again and again at the end, so that files are compacted.
            for key in (0..2000_u64).filter(|key| version > 20 || key % 20 == version) {
                run.put(table, key, header(version), &[version as f32; 16]).unwrap();
            }
            run.put(table, 5000 + version, header(version), &[0.0; 16]).unwrap();
        }
        store.commit(run, version, state(version)).unwrap();
    }
    let lone = |table| rows(&store).into_iter().filter(move |row| row.0 == table && row.1 > 5000);
    // Compaction runs when it likes; what is not below a floor stays.
    assert_eq!(lone(2).count(), 40);
    assert!(lone(1).filter(|row| row.2.version >= 10).count() == 31);
    for _ in 0..500 {
        if lone(1).all(|row| row.2.version >= 10) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    panic!("still there: {:?}", lone(1).map(|row| row.2.version).collect::<Vec<_>>());
}

/// What a checkpoint's delta must say was removed, compaction keeps, although no replay needs it.
#[test]
fn tombstones_that_a_checkpoint_needs_are_kept_and_others_are_forgotten() {
    let (folder, mut options) = (TempDir::new().unwrap(), RocksOptions::default());
    options.run_file_bytes_max = 16 << 10;
    options.file_bytes = 32 << 10;
    let shared = RocksShared::new(options).unwrap();
    let store = ReplicaStore::create(&folder.path().join("s"), &identity(1), &shared).unwrap();
    let tombstone = |version| RowHeader { version, steps: 0, flags: RowHeader::TOMBSTONE };
    let flush_all = |versions: std::ops::RangeInclusive<u64>| {
        for version in versions {
            let mut run = store.begin_run().unwrap();
            // The same keys again and again, so that files are compacted.
            for key in 0..2000_u64 {
                run.put(1, key, header(version), &[version as f32; 16]).unwrap();
            }
            run.put(1, 5000 + version, tombstone(version), &[]).unwrap();
            store.commit(run, version, state(version)).unwrap();
        }
    };
    let versions = || -> Vec<u64> {
        rows(&store).iter().filter(|row| row.2.is_tombstone()).map(|row| row.2.version).collect()
    };
    flush_all(1..=20);
    // Nobody has said yet what is needed: after an opening compaction may be first.
    assert_eq!(versions(), (1..=20).collect::<Vec<_>>());
    store.set_kept_above(Some(10));
    flush_all(21..=40);
    for _ in 0..500 {
        let versions = versions();
        assert!(versions.ends_with(&(11..=40).collect::<Vec<_>>()), "{versions:?}");
        if versions.len() == 30 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    panic!("still there: {:?}", versions());
}

#[test]
fn a_dropped_table_goes_and_its_rows_of_the_same_run_stay() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let store = ReplicaStore::create(&folder.path().join("s"), &identity(1), &shared).unwrap();
    flush(&store, 1, &[(1, 1, 1.0), (2, 0, 1.0), (2, u64::MAX, 1.0), (3, 1, 1.0)]);
    let mut run = store.begin_run().unwrap();
    run.put(2, 7, header(2), &[2.0, -2.0]).unwrap();
    run.drop_table(2);
    store.commit(run, 2, state(2)).unwrap();
    assert_eq!(rows(&store), [row(1, 1, 1, 1.0), row(2, 7, 2, 2.0), row(3, 1, 1, 1.0)]);
    let mut run = store.begin_run().unwrap();
    run.drop_table(3);
    store.commit(run, 3, state(3)).unwrap();
    assert_eq!(rows(&store), [row(1, 1, 1, 1.0), row(2, 7, 2, 2.0)]);
}

#[test]
fn deleting_a_table_removes_its_rows_only_and_may_be_repeated() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let directory = folder.path().join("s");
    let store = ReplicaStore::create(&directory, &identity(1), &shared).unwrap();
    for index in 1..6 {
        flush(&store, index, &[(1, index, 1.0), (u32::MAX, 0, 1.0), (u32::MAX, u64::MAX, 1.0)]);
    }
    flush(&store, 6, &[(u32::MAX, 1, 1.0)]);
    store.delete_table(u32::MAX).unwrap();
    store.delete_table(u32::MAX).unwrap();
    drop(store);
    let (store, found) = ReplicaStore::open(&directory, &identity(1), &shared).unwrap();
    assert_eq!(found, state(6));
    let left: Vec<(u32, u64)> = rows(&store).into_iter().map(|(table, key, ..)| (table, key)).collect();
    assert_eq!(left, [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5)]);
}

#[test]
fn rows_out_of_order_and_positions_going_back_are_refused() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let store = ReplicaStore::create(&folder.path().join("s"), &identity(1), &shared).unwrap();
    flush(&store, 9, &[(1, 1, 1.0)]);
    let mut run = store.begin_run().unwrap();
    run.put(1, 5, header(1), &[]).unwrap();
    for (table, key) in [(1, 5), (1, 4), (0, 9)] {
        assert!(matches!(run.put(table, key, header(1), &[]), Err(StoreError::Refused { .. })));
    }
    run.put(2, 0, header(1), &[]).unwrap();
    assert!(matches!(store.commit(run, 1, state(8)), Err(StoreError::Refused { .. })));
    assert_eq!((store.state(), rows(&store)), (state(9), vec![row(1, 1, 9, 1.0)]));
}

#[test]
fn complete_at_covers_the_run_and_never_falls() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let store = ReplicaStore::create(&folder.path().join("s"), &identity(1), &shared).unwrap();
    let mut run = store.begin_run().unwrap();
    run.put(1, 1, header(30), &[1.0]).unwrap();
    store.commit(run, 20, state(10)).unwrap();
    assert_eq!(store.state(), FlushedState { complete_at: 30, ..state(10) });
    flush(&store, 11, &[]);
    assert_eq!(store.state(), FlushedState { complete_at: 30, ..state(11) });
}

#[test]
fn a_run_that_is_dropped_leaves_nothing() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let directory = folder.path().join("s");
    let store = ReplicaStore::create(&directory, &identity(1), &shared).unwrap();
    let mut run = store.begin_run().unwrap();
    run.put(1, 1, header(1), &[1.0]).unwrap();
    assert_eq!(names(&directory.join("runs")).len(), 1);
    drop(run);
    assert_eq!(names(&directory.join("runs")), [""; 0]);
    assert_eq!(rows(&store), []);
}

#[test]
fn compaction_forgets_the_tombstones_that_replay_is_past() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let store = ReplicaStore::create(&folder.path().join("s"), &identity(1), &shared).unwrap();
    store.set_kept_above(None);
    flush(&store, 1, &[(1, 1, 1.0), (1, 2, 1.0), (1, 3, 1.0)]);
    let mut run = store.begin_run().unwrap();
    run.put(1, 1, tombstone(2), &[0.0, 0.0]).unwrap();
    run.put(1, 2, tombstone(9), &[0.0, 0.0]).unwrap();
    store.commit(run, 9, state(2)).unwrap();
    // Enough runs over the whole range for a compaction; the row under the first tombstone must not come back.
    let expected = [(1, 2, tombstone(9), vec![]), row(1, 3, 1, 1.0)];
    for version in 10..200 {
        let mut run = store.begin_run().unwrap();
        run.put(1, 0, header(version), &[7.0, -7.0]).unwrap();
        run.put(1, 9, header(version), &[7.0, -7.0]).unwrap();
        store.commit(run, version, state(2)).unwrap();
        let found: Vec<Row> = rows(&store).into_iter().filter(|row| (1..=3).contains(&row.1)).collect();
        if found == expected {
            assert!(store.metrics().compacted_bytes > 0);
            return;
        }
        assert_eq!(found, [&[(1, 1, tombstone(2), vec![])][..], &expected[..]].concat());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    panic!("the old tombstone is still there after two hundred runs");
}

#[test]
fn a_scan_sees_what_was_committed_before_it_opened() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let store = ReplicaStore::create(&folder.path().join("s"), &identity(1), &shared).unwrap();
    assert!(!store.has_rows(1).unwrap());
    flush(&store, 1, &[(1, 1, 1.0), (1, 2, 1.0)]);
    assert!(store.has_rows(1).unwrap() && !store.has_rows(0).unwrap() && !store.has_rows(2).unwrap());
    let mut seen = Vec::new();
    let opened = || flush(&store, 2, &[(1, 1, 2.0), (1, 3, 2.0)]);
    store
        .scan_rows(opened, |_, key, header, _| {
            seen.push((key, header.version));
            std::ops::ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(seen, [(1, 1), (2, 1)]);
    seen.clear();
    store
        .scan_rows(
            || (),
            |_, key, header, _| {
                seen.push((key, header.version));
                std::ops::ControlFlow::Break(())
            },
        )
        .unwrap();
    assert_eq!(seen, [(1, 2)]);
}
