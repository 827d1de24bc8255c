//! The store from outside: round trips, order, overwrites, links and installs, identity, damage.

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
fn later_runs_win_tombstones_stay_and_removals_go() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let store = ReplicaStore::create(&folder.path().join("s"), &identity(1), &shared).unwrap();
    flush(&store, 1, &[(1, 1, 1.0), (1, 2, 1.0), (1, 3, 1.0)]);
    let mut run = store.begin_run().unwrap();
    run.put(1, 1, header(2), &[2.0, -2.0]).unwrap();
    run.put(1, 2, tombstone(2), &[9.0, 9.0]).unwrap();
    assert_eq!((run.rows(), run.version_max(), run.is_empty()), (2, 2, false));
    store.commit(run, 2, state(2)).unwrap();
    assert_eq!(rows(&store), [row(1, 1, 2, 2.0), (1, 2, tombstone(2), vec![]), row(1, 3, 1, 1.0)]);
    let mut run = store.begin_run().unwrap();
    run.remove(1, 2).unwrap();
    store.commit(run, 3, state(3)).unwrap();
    assert_eq!(rows(&store), [row(1, 1, 2, 2.0), row(1, 3, 1, 1.0)]);
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
fn links_are_a_consistent_copy_and_removing_them_touches_nothing() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let store = ReplicaStore::create(&folder.path().join("s"), &identity(1), &shared).unwrap();
    flush(&store, 1, &[(1, 1, 1.0)]);
    let links = folder.path().join("links");
    assert_eq!(store.link_to(&links).unwrap(), state(1));
    assert!(
        matches!(store.link_to(&links), Err(StoreError::Io { .. })),
        "a folder that is there is left alone"
    );
    flush(&store, 2, &[(1, 1, 2.0)]);
    let again = folder.path().join("again");
    assert_eq!(store.link_to(&again).unwrap(), state(2));
    fs::remove_dir_all(&again).unwrap();
    assert_eq!(rows(&store), [row(1, 1, 2, 2.0)]);

    let other = ReplicaStore::create(&folder.path().join("other"), &identity(2), &shared).unwrap();
    assert_eq!(other.replace_with(&links).unwrap(), state(1));
    assert_eq!(rows(&other), [row(1, 1, 1, 1.0)]);
}

#[test]
fn an_install_replaces_everything_and_keeps_our_identity() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let sender = ReplicaStore::create(&folder.path().join("sender"), &identity(1), &shared).unwrap();
    flush(&sender, 20, &[(1, 1, 1.0), (1, 2, 2.0)]);
    let directory = folder.path().join("receiver");
    let receiver = ReplicaStore::create(&directory, &identity(2), &shared).unwrap();
    flush(&receiver, 3, &[(1, 9, 9.0)]);
    for round in 1..4 {
        flush(&sender, 20 + round, &[(1, 3, round as f32)]);
        let links = folder.path().join(format!("links-{round}"));
        sender.link_to(&links).unwrap();
        let mut stale = receiver.begin_run().unwrap();
        stale.put(1, 8, header(1), &[]).unwrap();
        assert_eq!(receiver.replace_with(&links).unwrap(), state(20 + round));
        assert!(matches!(receiver.commit(stale, 1, state(90)), Err(StoreError::Superseded)));
        let expected = [row(1, 1, 20, 1.0), row(1, 2, 20, 2.0), row(1, 3, 20 + round, round as f32)];
        assert_eq!(rows(&receiver), expected);
        assert_eq!(receiver.identity(), identity(2));
        assert_eq!(names(&directory), ["meta", &format!("rocks-{:016x}", round + 1), "runs"]);
    }
    flush(&receiver, 30, &[(1, 4, 4.0)]);
    drop(receiver);
    let (receiver, found) = ReplicaStore::open(&directory, &identity(2), &shared).unwrap();
    assert_eq!(found, state(30));
    assert_eq!(rows(&receiver).len(), 4);
    assert_eq!(rows(&sender).len(), 3, "what the receiver does to linked files is its own");
}

#[test]
fn a_reader_keeps_what_it_reads_through_an_install() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let sender = ReplicaStore::create(&folder.path().join("sender"), &identity(1), &shared).unwrap();
    flush(&sender, 20, &[(1, 1, 1.0)]);
    sender.link_to(&folder.path().join("links")).unwrap();
    let receiver = ReplicaStore::create(&folder.path().join("receiver"), &identity(2), &shared).unwrap();
    flush(&receiver, 3, &[(1, 7, 7.0), (1, 8, 8.0)]);
    let mut seen = Vec::new();
    receiver
        .load_rows(|_, key, _, _| {
            if seen.is_empty() {
                receiver.replace_with(&folder.path().join("links")).unwrap();
            }
            seen.push(key);
        })
        .unwrap();
    assert_eq!(seen, [7, 8]);
    assert_eq!(rows(&receiver), [row(1, 1, 20, 1.0)]);
    assert_eq!(names(receiver.directory()), ["meta", "rocks-0000000000000002", "runs"]);
}

#[test]
fn snapshots_of_others_or_of_the_past_or_damaged_are_refused_and_nothing_changes() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let path = |name: &str| folder.path().join(name);
    let ours = ReplicaStore::create(&path("ours"), &identity(2), &shared).unwrap();
    flush(&ours, 5, &[(1, 7, 7.0)]);

    let change: [Change; 3] = [
        ("cluster", |identity| identity.cluster = "c2".to_owned()),
        ("group", |identity| identity.group = 99),
        ("shard", |identity| identity.shard = 99),
    ];
    for (field, change) in change {
        let mut other = identity(1);
        change(&mut other);
        let sender = ReplicaStore::create(&path(field), &other, &shared).unwrap();
        flush(&sender, 9, &[(1, 1, 1.0)]);
        let links = path(&format!("{field}-links"));
        sender.link_to(&links).unwrap();
        match ours.replace_with(&links) {
            Err(StoreError::IdentityMismatch { field: found, .. }) => assert_eq!(found, field),
            other => panic!("{other:?}"),
        }
    }

    let sender = ReplicaStore::create(&path("sender"), &identity(1), &shared).unwrap();
    flush(&sender, 4, &[(1, 1, 1.0)]);
    sender.link_to(&path("past")).unwrap();
    assert!(matches!(ours.replace_with(&path("past")), Err(StoreError::Refused { .. })));

    flush(&sender, 6, &[(1, 1, 1.0)]);
    for damage in ["CURRENT", "MANIFEST", ".sst"] {
        let links = path(damage);
        sender.link_to(&links).unwrap();
        let victim = names(&links.join("rocks")).into_iter().find(|name| name.contains(damage)).unwrap();
        fs::remove_file(links.join("rocks").join(victim)).unwrap();
        let error = ours.replace_with(&links).unwrap_err();
        assert!(matches!(error, StoreError::Corrupt { .. } | StoreError::Rocks { .. }), "{damage}: {error}");
    }
    assert!(matches!(ours.replace_with(&path("nowhere")), Err(StoreError::Corrupt { .. })));

    assert_eq!((ours.state(), rows(&ours)), (state(5), vec![row(1, 7, 5, 7.0)]));
    assert_eq!(names(ours.directory()), ["meta", "rocks-0000000000000001", "runs"]);
    flush(&ours, 6, &[(1, 7, 8.0)]);
}

#[test]
fn only_the_identity_written_in_it_opens_a_store() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let directory = folder.path().join("s");
    drop(ReplicaStore::create(&directory, &identity(1), &shared).unwrap());
    let change: [Change; 5] = [
        ("cluster", |identity| identity.cluster.push('x')),
        ("node", |identity| identity.node += 1),
        ("group", |identity| identity.group += 1),
        ("shard", |identity| identity.shard += 1),
        ("replica", |identity| identity.replica += 1),
    ];
    for (field, change) in change {
        let mut expected = identity(1);
        change(&mut expected);
        match ReplicaStore::open(&directory, &expected, &shared) {
            Err(StoreError::IdentityMismatch { field: found, .. }) => assert_eq!(found, field),
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(
        ReplicaStore::create(&directory, &identity(1), &shared),
        Err(StoreError::Exists { .. })
    ));
}

#[test]
fn a_folder_without_a_replica_is_told_from_one_that_lost_its_record() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let directory = folder.path().join("s");
    let open = || ReplicaStore::open(&directory, &identity(1), &shared);
    assert!(matches!(open(), Err(StoreError::Absent { .. })));
    fs::create_dir(&directory).unwrap();
    assert!(matches!(open(), Err(StoreError::Absent { .. })));
    fs::write(directory.join("meta.tmp"), "half").unwrap();
    assert!(matches!(open(), Err(StoreError::Absent { .. })));
    let store = ReplicaStore::create(&directory, &identity(1), &shared).unwrap();
    flush(&store, 1, &[(1, 1, 1.0)]);
    drop(store);

    fs::rename(directory.join("meta"), folder.path().join("kept")).unwrap();
    for result in [open().map(drop), ReplicaStore::create(&directory, &identity(1), &shared).map(drop)] {
        match result {
            Err(StoreError::Corrupt { path, .. }) => assert_eq!(path, directory.join("meta")),
            other => panic!("{other:?}"),
        }
    }
    fs::rename(folder.path().join("kept"), directory.join("meta")).unwrap();
    drop(open().unwrap());
    fs::remove_dir_all(directory.join("rocks-0000000000000001")).unwrap();
    assert!(matches!(open(), Err(StoreError::Corrupt { .. })), "rows that were flushed are not made up");
}

#[test]
fn a_record_damaged_at_any_byte_is_corrupt_and_named() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let directory = folder.path().join("s");
    let store = ReplicaStore::create(&directory, &identity(1), &shared).unwrap();
    flush(&store, 1, &[(1, 1, 1.0)]);
    drop(store);
    let meta = directory.join("meta");
    let good = fs::read(&meta).unwrap();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        for bytes in [bad.as_slice(), &good[..at]] {
            fs::write(&meta, bytes).unwrap();
            match ReplicaStore::open(&directory, &identity(1), &shared) {
                Err(StoreError::Corrupt { path, .. }) => assert_eq!(path, meta),
                other => panic!("byte {at}: {other:?}"),
            }
        }
    }
    fs::write(&meta, &good).unwrap();
    let (store, found) = ReplicaStore::open(&directory, &identity(1), &shared).unwrap();
    assert_eq!((found, rows(&store)), (state(1), vec![row(1, 1, 1, 1.0)]));
}

#[test]
fn a_flipped_byte_in_a_row_is_corrupt_not_another_row() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let directory = folder.path().join("s");
    let store = ReplicaStore::create(&directory, &identity(1), &shared).unwrap();
    flush(&store, 1, &[(1, 1, 1.0)]);
    drop(store);
    let rocks = directory.join("rocks-0000000000000001");
    let file = names(&rocks).into_iter().find(|name| name.ends_with(".sst")).unwrap();
    let mut bytes = fs::read(rocks.join(&file)).unwrap();
    bytes[20] ^= 1;
    fs::write(rocks.join(&file), bytes).unwrap();
    // A cache of its own: the shared one still has the block as it was.
    let (store, _) = ReplicaStore::open(&directory, &identity(1), &self::shared()).unwrap();
    let error = store.load_rows(|_, _, _, _| {}).unwrap_err();
    assert!(matches!(&error, StoreError::Corrupt { path, .. } if *path == rocks), "{error}");
}

#[test]
fn leftovers_of_crashes_are_removed_and_strangers_are_left_alone() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let directory = folder.path().join("s");
    let store = ReplicaStore::create(&directory, &identity(1), &shared).unwrap();
    flush(&store, 1, &[(1, 1, 1.0)]);
    drop(store);
    fs::write(directory.join("meta.tmp"), "half").unwrap();
    fs::write(directory.join("runs/0000000000000001-0.sst"), "half").unwrap();
    fs::create_dir(directory.join("rocks-0000000000000002")).unwrap();
    fs::write(directory.join("rocks-0000000000000002/CURRENT"), "x").unwrap();
    fs::write(directory.join("note"), "of an operator").unwrap();
    let (store, _) = ReplicaStore::open(&directory, &identity(1), &shared).unwrap();
    assert_eq!(names(&directory), ["meta", "note", "rocks-0000000000000001", "runs"]);
    assert_eq!(names(&directory.join("runs")), [""; 0]);
    assert_eq!(rows(&store), [row(1, 1, 1, 1.0)]);
}

#[test]
fn links_taken_during_commits_fit_their_record() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let store = ReplicaStore::create(&folder.path().join("s"), &identity(1), &shared).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for index in 1..=30 {
                flush(&store, index, &[(1, 1, index as f32)]);
            }
        });
        for round in 0..8 {
            let links = folder.path().join(format!("links-{round}"));
            let linked = store.link_to(&links).unwrap();
            let copy =
                ReplicaStore::create(&folder.path().join(format!("copy-{round}")), &identity(2), &shared);
            let copy = copy.unwrap();
            copy.replace_with(&links).unwrap();
            let version = rows(&copy).first().map(|(_, _, header, _)| header.version);
            assert_eq!(version, linked.replay_from.map(|position| position.index));
        }
    });
}
