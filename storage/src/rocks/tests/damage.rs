//! Folders of others, damaged ones, and what crashes leave.

use std::fs;

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
                // Refused, and named; nobody can tell it from a newer build's.
                Err(StoreError::OtherVersion { path, .. }) if (8..12).contains(&at) => assert_eq!(path, meta),
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
