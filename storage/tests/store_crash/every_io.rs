//! Every system call of a flush and of an install that changes a file, RocksDB's own included: a kill there leaves a state that
//! replay completes exactly.
//!
//! What SIGKILL cannot show is a missing fsync: the page cache survives it. So the order of the syncs is checked, and each sync
//! fails once: then the process is told to end.

use std::path::{Path, PathBuf};
use std::process::Command;

use evershard_storage::rocks::ReplicaStore;

use crate::syscalls::{self, At, Call, Dirty, Ended};
use crate::{LAST, Memory, check, child_of, identity, prepare_install, run_child, shared};

/// Entries that one flush writes when it is looked at. Rows only: what RocksDB does is the same each time.
const ROWS: (u64, u64) = (20, 28);
/// Entry 66 of these clears a table: the run has a range of deletions, which RocksDB begins to compact at once.
const ROWS_AND_A_CLEARING: (u64, u64) = (52, 70);

/// A replica that has flushed twice, as far as an index: there are rows of both tables to be overwritten.
fn prepare_flush(folder: &Path, from: u64) {
    let (store, mut memory) = Memory::recover(&folder.join("replica"));
    for end in [from - 10, from] {
        (memory.applied + 1..=end).for_each(|index| memory.apply(index));
        memory.flush(&store);
    }
}

fn one_flush(folder: &Path, to: u64) -> Command {
    child_of(&format!("one flush to {to}"), folder, "none", 0)
}

/// As for an install: every system call is a place to die at, and replay makes of what is found what the log says.
#[test]
fn a_kill_at_every_io_of_a_flush_recovers_exactly() {
    kill_at_every_io_of_a_flush(ROWS);
}

#[test]
fn a_kill_at_every_io_of_a_flush_that_clears_a_table_recovers_exactly() {
    kill_at_every_io_of_a_flush(ROWS_AND_A_CLEARING);
}

fn kill_at_every_io_of_a_flush((from, to): (u64, u64)) {
    let (mut before, mut after) = (0, 0);
    for kill_at in 1.. {
        let folder = tempfile::tempdir().unwrap();
        let replica = folder.path().join("replica");
        prepare_flush(folder.path(), from);
        let replay_from = || {
            let (_, found) = ReplicaStore::open(&replica, &identity(1), &shared()).unwrap();
            found.replay_from
        };
        let old = replay_from();
        let call = match syscalls::run(one_flush(folder.path(), to), folder.path(), At::Kill(kill_at), |_| {})
        {
            Ok(Ended::Killed(call)) => call,
            Ok(Ended::Done { calls, .. }) => {
                println!(
                    "{calls} calls; replay from the old place after {before} of them, from the new one after {after}"
                );
                break;
            }
            Err(error) => return eprintln!("skipped: nobody may be traced here: {error}"),
        };
        check(&replica);
        let new = replay_from();
        if new == old {
            before += 1;
            // Calls of a compaction come as they like.
            assert!(
                after == 0 || to == ROWS_AND_A_CLEARING.1,
                "{call:?}, the {kill_at}. call: back to the old place"
            );
        } else {
            after += 1;
            assert_eq!(new.unwrap().index, to, "{call:?}, the {kill_at}. call");
        }
        // And it flushes on.
        assert!(!run_child("flush", folder.path(), "none", 0));
        assert_eq!(check(&replica), LAST, "{call:?}, the {kill_at}. call");
    }
    assert!(before > 20 && after > 1, "{before} {after}");
}

/// `complete_at` is durable before a row that it speaks of can be, and the run is before `replay_from` moves.
#[test]
fn a_flush_syncs_what_counts_before_it_counts() {
    let folder = tempfile::tempdir().unwrap();
    prepare_flush(folder.path(), ROWS.0);
    let replica = folder.path().join("replica");
    let rocks = replica.join("rocks-0000000000000001");
    let mut dirty = Dirty::default();
    let (mut records, mut ingested) = (0, 0);
    let child = one_flush(folder.path(), ROWS.1);
    let ended = syscalls::run(child, folder.path(), At::Nothing, |call| {
        match call {
            Call::Rename(_, to) if *to == replica.join("meta") => {
                records += 1;
                let lost: Vec<_> = dirty
                    .0
                    .iter()
                    .filter(|path| {
                        **path == replica.join("meta.tmp")
                            || (ingested > 0 && path.starts_with(&rocks) && !path.ends_with("LOCK"))
                    })
                    .collect();
                assert!(lost.is_empty(), "not synced when the {records}. record is there: {lost:?}");
            }
            // A run's file gets its name in the folder that counts.
            Call::Make(path) | Call::Rename(_, path)
                if path.starts_with(&rocks)
                    && path.extension().is_some_and(|extension| extension == "sst") =>
            {
                assert!(
                    records == 1 && !dirty.0.contains(&replica),
                    "complete_at is not durable before {path:?}"
                );
                let runs: Vec<_> =
                    dirty.0.iter().filter(|path| path.starts_with(replica.join("runs"))).collect();
                assert!(
                    runs.iter().all(|path| path.extension().is_none()),
                    "taken in and not synced: {runs:?}"
                );
                ingested += 1;
            }
            _ => {}
        }
        dirty.follow(call);
    });
    match ended {
        Ok(_) => assert!(records == 2 && ingested > 0 && !dirty.0.contains(&replica), "{records} {ingested}"),
        Err(error) => eprintln!("skipped: nobody may be traced here: {error}"),
    }
}

/// A failed sync is told from every other error, RocksDB's own syncs included, and ends the process: what is found then is
/// as after a crash.
#[cfg(target_arch = "x86_64")]
#[test]
fn every_failed_sync_of_a_flush_and_of_an_install_ends_the_process() {
    for task in ["one flush", "install"] {
        let mut failed = 0;
        for fail_at in 1.. {
            let folder = tempfile::tempdir().unwrap();
            let replica = folder.path().join("replica");
            let child = if task == "install" {
                prepare_install(folder.path());
                child_of(task, folder.path(), "none", 0)
            } else {
                prepare_flush(folder.path(), ROWS.0);
                one_flush(folder.path(), ROWS.1)
            };
            let mut count = 0;
            let mut call = None;
            let ended = syscalls::run(child, folder.path(), At::FailSync(fail_at), |seen| {
                if matches!(seen, Call::Sync(_)) {
                    count += 1;
                    if count == fail_at {
                        call = Some(seen.clone());
                    }
                }
            });
            let code = match ended {
                Ok(Ended::Done { code, .. }) => code,
                Ok(Ended::Killed(call)) => panic!("{call:?}"),
                Err(error) => return eprintln!("skipped: nobody may be traced here: {error}"),
            };
            let Some(call) = call else {
                assert_eq!(code, 0, "{task}: nothing failed");
                break;
            };
            assert_eq!(code, 74, "{task}: {call:?}, the {fail_at}. sync");
            failed += 1;
            // A MANIFEST that was written and not synced may name a run that RocksDB has taken back when it heard so: then the
            // replica is lost, and is told to be.
            let of_manifest =
                matches!(&call, Call::Sync(path) if path.to_string_lossy().contains("MANIFEST"));
            match ReplicaStore::open(&replica, &identity(1), &shared()) {
                Err(error) if of_manifest => {
                    assert!(error.is_damage() && error.to_string().contains("MANIFEST"), "{call:?}: {error}");
                }
                opened => {
                    drop(opened);
                    check(&replica);
                }
            }
        }
        println!("{task}: {failed} syncs");
        assert!(failed >= 5, "{task}: {failed}");
    }
}

/// Every system call that changes a file is a place to die at. What is found afterwards is the old state whole or the new one
/// whole, never damage, and the replica takes the snapshot when it is sent again.
#[test]
fn a_kill_at_every_io_of_an_install_leaves_the_old_state_or_the_new() {
    let (mut old, mut new) = (0, 0);
    for kill_at in 1.. {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        prepare_install(folder.path());
        let before = check(&path("replica"));
        let child = child_of("install", folder.path(), "none", 0);
        let call = match syscalls::run(child, folder.path(), At::Kill(kill_at), |_| {}) {
            Ok(Ended::Killed(call)) => call,
            Ok(Ended::Done { calls, .. }) => {
                assert_eq!(check(&path("replica")), 74);
                println!("{calls} calls; the old state after {old} of them, the new one after {new}");
                break;
            }
            Err(error) => return eprintln!("skipped: nobody may be traced here: {error}"),
        };
        match check(&path("replica")) {
            found if found == before => {
                old += 1;
                assert_eq!(new, 0, "{call:?}, the {kill_at}. call: back to the old state");
            }
            74 => new += 1,
            other => panic!("{call:?}, the {kill_at}. call: at {other}"),
        }
        let (sender, _) = ReplicaStore::open(&path("sender"), &identity(2), &shared()).unwrap();
        sender.link_to(&path("again")).unwrap();
        let (store, _) = Memory::recover(&path("replica"));
        store.replace_with(&path("again")).unwrap();
        drop(store);
        assert_eq!(check(&path("replica")), 74, "{call:?}, the {kill_at}. call");
    }
    assert!(old > 20 && new > 3, "{old} {new}");
}

/// What a power cut would take must not count: everything that was received is synced before the record that names it is
/// there, and the record before anything of the old state goes.
#[test]
fn an_install_syncs_what_counts_before_it_counts() {
    let folder = tempfile::tempdir().unwrap();
    prepare_install(folder.path());
    let replica = folder.path().join("replica");
    let entries = std::fs::read_dir(&replica).unwrap().map(|entry| entry.unwrap().path());
    let is_rocks = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with("rocks-");
    let [old] = <[PathBuf; 1]>::try_from(entries.filter(is_rocks).collect::<Vec<_>>()).expect("one RocksDB");
    let received = folder.path().join("links/rocks");
    let mut moved_to: Option<PathBuf> = None;
    let mut dirty = Dirty::default();
    // As it was received: nobody has synced anything.
    for place in ["links", "links/rocks"] {
        for entry in std::fs::read_dir(folder.path().join(place)).unwrap() {
            dirty.follow(&Call::Make(entry.unwrap().path()));
        }
    }
    let (mut swapped, mut is_durable) = (false, false);
    let mut removed_before = Vec::new();
    let child = child_of("install", folder.path(), "none", 0);
    let ended = syscalls::run(child, folder.path(), At::Nothing, |call| {
        if let Call::Rename(_, to) = call
            && *to == replica.join("meta")
        {
            let rocks = moved_to.as_ref().expect("what was received is in its place before the record");
            let lost: Vec<_> = dirty
                .0
                .iter()
                .filter(|path| path.starts_with(rocks) || **path == replica.join("meta.tmp"))
                .collect();
            assert!(lost.is_empty(), "not synced when the record is there: {lost:?}");
            swapped = true;
        }
        if let Call::Remove(path) = call
            && path.starts_with(&old)
            && !is_durable
        {
            removed_before.push(path.clone());
        }
        if let Call::Rename(from, to) = call
            && *from == received
        {
            assert_ne!(*to, old);
            moved_to = Some(to.clone());
        }
        dirty.follow(call);
        is_durable |= swapped && !dirty.0.contains(&replica);
    });
    match ended {
        Ok(_) => assert!(swapped && is_durable, "the record is durable"),
        Err(error) => return eprintln!("skipped: nobody may be traced here: {error}"),
    }
    // What RocksDB itself tidies up when the old state is opened is none of the install's.
    let sst = |path: &&PathBuf| path.extension().is_some_and(|extension| extension == "sst");
    assert_eq!(removed_before.iter().filter(sst).count(), 0, "{removed_before:?}");
}
