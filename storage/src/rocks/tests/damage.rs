//! Folders of others, damaged ones, and what crashes leave.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use super::*;

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
    assert!(error.to_string().contains(&file), "it names the file: {error}");
}

/// RocksDB takes a MANIFEST that ends in the middle of a record for what a crash leaves, and forgets what stood behind.
#[test]
fn a_manifest_damaged_anywhere_is_noticed_or_does_no_harm() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let directory = folder.path().join("s");
    let store = ReplicaStore::create(&directory, &identity(1), &shared).unwrap();
    for index in 1..=3_u64 {
        // Keys of their own: RocksDB needs no sequence number for them.
        flush(&store, index, &[(1, index, 1.0)]);
    }
    let expected = rows(&store);
    drop(store);
    let rocks = directory.join("rocks-0000000000000001");
    let manifest = names(&rocks).into_iter().find(|name| name.starts_with("MANIFEST")).unwrap();
    let good = fs::read(rocks.join(&manifest)).unwrap();
    // Space is taken in advance.
    let used = good.iter().rposition(|&byte| byte != 0).unwrap() + 1;
    let kept = folder.path().join("kept");
    fs::rename(&directory, &kept).unwrap();
    let (mut noticed, mut harmless) = (0, 0);
    for at in (0..used).step_by(3).chain(used - 3..used) {
        let mut flipped = good.clone();
        flipped[at] ^= 0x10;
        for (what, bytes) in [("cut", &good[..at]), ("flipped", &flipped)] {
            copy_folder(&kept, &directory);
            fs::write(rocks.join(&manifest), bytes).unwrap();
            match ReplicaStore::open(&directory, &identity(1), &shared) {
                Ok((store, _)) => {
                    assert_eq!(rows(&store), expected, "{what} at {at} of {used}");
                    harmless += 1;
                }
                Err(error) => {
                    assert!(error.is_damage(), "{what} at {at} of {used}: {error}");
                    assert!(error.to_string().contains(&manifest), "{what} at {at} of {used}: {error}");
                    noticed += 1;
                }
            }
            fs::remove_dir_all(&directory).unwrap();
        }
    }
    println!("{noticed} noticed, {harmless} without harm");
    assert!(noticed > used / 3, "{noticed} noticed, {harmless} without harm");
}

/// As after an error of RocksDB, in a process that goes on.
#[test]
fn a_run_that_is_gone_when_rocksdb_is_opened_anew_is_noticed() {
    let (folder, shared) = (TempDir::new().unwrap(), shared());
    let directory = folder.path().join("s");
    let store = ReplicaStore::create(&directory, &identity(1), &shared).unwrap();
    for index in 1..=3_u64 {
        flush(&store, index, &[(1, index, 1.0)]);
    }
    store
        .ingest(&mut store.changes().unwrap(), &[folder.path().join("not there")])
        .expect_err("so that it is opened anew");
    let rocks = directory.join("rocks-0000000000000001");
    let manifest = names(&rocks).into_iter().find(|name| name.starts_with("MANIFEST")).unwrap();
    let bytes = fs::read(rocks.join(&manifest)).unwrap();
    let used = bytes.iter().rposition(|&byte| byte != 0).unwrap() + 1;
    fs::write(rocks.join(&manifest), &bytes[..used - 3]).unwrap();
    let Err(error) = store.begin_run() else { panic!("a run is missing, and it was opened") };
    assert!(error.is_damage() && error.to_string().contains(&manifest), "{error}");
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &to.join(entry.file_name()));
        } else {
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
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
