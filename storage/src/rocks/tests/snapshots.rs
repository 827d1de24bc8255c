//! Links and installs.

use std::fs;

use tempfile::TempDir;

use super::*;

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
