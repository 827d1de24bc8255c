//! `Durability::Memory`: what survives the process, and what does not survive the operating system.

use crate::model::{contents, count, entry, ok, open_with, options, segments};
use crate::script::{Run, steps};
use bytes::Bytes;
use evershard_storage::log::{Driver, Durability, GroupKey, LogError, LogOptions, QuarantineCause};
use evershard_storage::testing::{Loss, SimDisk};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

fn memory(boot: &str) -> LogOptions {
    LogOptions { durability: Durability::Memory, boot_id: boot.to_owned(), ..options(&Arc::default()) }
}

const KEY: GroupKey = GroupKey { group: 1, replica: 10 };

#[test]
fn appends_are_acknowledged_before_the_sync_which_follows() {
    let disk = SimDisk::new(1);
    let (log, _) = open_with(memory("a"), &disk, Driver::Manual).unwrap();
    let group = log.group(1, 10).unwrap();
    let acknowledged = Arc::new(AtomicU64::new(0));
    group.append(vec![entry(0, 1, b"a")], count(&acknowledged));
    log.pump();
    assert_eq!((acknowledged.load(Ordering::SeqCst), log.stats().syncs), (1, 0));
    log.housekeep();
    assert_eq!(log.stats().syncs, 1);
    disk.power_cycle(Loss::All);
    let (_, recovery) = open_with(memory("a"), &disk, Driver::Manual).unwrap();
    assert_eq!(recovery.groups[0].state.last.unwrap().index, 0);
}

#[test]
fn killing_the_process_loses_nothing() {
    for seed in 0..10 {
        let disk = SimDisk::new(seed);
        let durability = |options: &mut LogOptions| options.durability = Durability::Memory;
        let mut run = Run::open_with(durability, &disk, Driver::Manual, Default::default()).unwrap();
        run.play(&steps(seed, 150));
        while run.log.pump() {}
        let model = run.model().clone();
        drop(run);
        disk.kill_process();
        let (log, recovery) = open_with(memory("boot-1"), &disk, Driver::Inline).unwrap();
        assert!(recovery.quarantined.is_empty() && recovery.damage.is_empty() && !recovery.boot_changed);
        assert_eq!(contents(&log, &recovery), model);
    }
}

#[test]
fn after_a_restart_of_the_system_replicas_neither_vote_nor_serve() {
    for loss in [Loss::All, Loss::Random, Loss::Nothing] {
        let disk = SimDisk::new(7);
        let (log, _) = open_with(memory("a"), &disk, Driver::Manual).unwrap();
        let group = log.group(1, 10).unwrap();
        group.save_vote(Bytes::from_static(b"vote"), ok());
        log.pump();
        log.housekeep();
        group.append((0..5).map(|index| entry(index, 1, &[1; 600])).collect(), ok());
        log.pump();
        drop((log, group));
        disk.power_cycle(loss);
        // Also when the setting was changed meanwhile, and at every later start.
        let fsync = LogOptions { durability: Durability::Fsync, ..memory("b") };
        for (options, boot_changed) in [(fsync, true), (memory("b"), false), (memory("b"), false)] {
            let (log, recovery) = open_with(options, &disk, Driver::Inline).unwrap();
            assert_eq!(recovery.boot_changed, boot_changed);
            assert!(recovery.damage.is_empty());
            assert_eq!((recovery.groups.len(), recovery.quarantined.len()), (0, 1));
            assert_eq!(recovery.quarantined[0].cause, QuarantineCause::OsRestart);
            assert!(matches!(log.group(1, 10), Err(LogError::Quarantined { key: KEY, .. })));
        }
        // An operator with nothing better releases it: what the disk kept is there.
        let (log, _) = open_with(memory("b"), &disk, Driver::Inline).unwrap();
        log.release(KEY).unwrap();
        assert_eq!(log.group(1, 10).unwrap().vote().unwrap(), "vote");
        drop(log);
        let (log, recovery) = open_with(memory("b"), &disk, Driver::Inline).unwrap();
        assert_eq!((recovery.groups.len(), recovery.quarantined.len()), (1, 0));
        let read = log.group(1, 10).unwrap().read(0..9, u64::MAX).unwrap();
        assert!(loss != Loss::Nothing || read.len() == 5);
    }
}

/// What an operator may release is not what is damaged, whichever came first.
#[test]
fn damage_found_after_a_restart_of_the_system_cannot_be_released() {
    let disk = SimDisk::new(7);
    let (log, _) = open_with(memory("a"), &disk, Driver::Inline).unwrap();
    let group = log.group(1, 10).unwrap();
    group.append((0..3).map(|index| entry(index, 1, b"a payload of its own")).collect(), ok());
    drop((log, group));
    disk.power_cycle(Loss::Nothing);
    let (log, recovery) = open_with(memory("b"), &disk, Driver::Inline).unwrap();
    assert_eq!(recovery.quarantined[0].cause, QuarantineCause::OsRestart);
    drop(log);
    disk.kill_process();
    let path = segments(&disk)[0].clone();
    let bytes = disk.contents(&path).unwrap();
    let at = bytes.windows(7).position(|window| window == b"payload").unwrap();
    disk.flip_bit(&path, at * 8);
    for _ in 0..2 {
        let (log, recovery) = open_with(memory("b"), &disk, Driver::Inline).unwrap();
        assert_eq!(recovery.quarantined.len(), 1);
        assert_eq!(recovery.quarantined[0].cause, QuarantineCause::Damage, "{:?}", recovery.quarantined);
        assert!(log.release(KEY).is_err());
        drop(log);
        disk.kill_process();
    }
}

#[test]
fn an_orderly_restart_of_the_system_is_fine() {
    let disk = SimDisk::new(7);
    let (log, _) = open_with(memory("a"), &disk, Driver::Manual).unwrap();
    let group = log.group(1, 10).unwrap();
    group.append(vec![entry(0, 1, b"a")], ok());
    log.close().unwrap();
    disk.power_cycle(Loss::All);
    let (_, recovery) = open_with(memory("b"), &disk, Driver::Manual).unwrap();
    assert!(!recovery.boot_changed && recovery.quarantined.is_empty());
    assert_eq!(recovery.groups[0].state.durable_index, Some(0));
}

#[test]
fn with_fsync_another_boot_means_nothing() {
    let disk = SimDisk::new(7);
    let fsync = |boot: &str| LogOptions { durability: Durability::Fsync, ..memory(boot) };
    let (log, _) = open_with(fsync("a"), &disk, Driver::Inline).unwrap();
    log.group(1, 10).unwrap().append(vec![entry(0, 1, b"a")], ok());
    drop(log);
    disk.power_cycle(Loss::All);
    let (_, recovery) = open_with(fsync("b"), &disk, Driver::Inline).unwrap();
    assert!(!recovery.boot_changed && recovery.quarantined.is_empty());
    assert_eq!(recovery.groups.len(), 1);
}

#[test]
fn what_recovery_found_is_durable_afterwards() {
    let disk = SimDisk::new(7);
    let (log, _) = open_with(memory("a"), &disk, Driver::Manual).unwrap();
    let group = log.group(1, 10).unwrap();
    group.append(vec![entry(0, 1, b"in the page cache only")], ok());
    log.pump();
    drop((log, group));
    disk.kill_process();
    let fsync = || LogOptions { durability: Durability::Fsync, ..memory("a") };
    let (log, recovery) = open_with(fsync(), &disk, Driver::Manual).unwrap();
    assert_eq!(recovery.groups[0].state.durable_index, Some(0));
    drop(log);
    disk.power_cycle(Loss::All);
    let (_, recovery) = open_with(fsync(), &disk, Driver::Manual).unwrap();
    assert_eq!(recovery.groups[0].state.durable_index, Some(0));
}

#[test]
fn several_torn_batches_are_a_torn_tail() {
    let mut lost = 0;
    for seed in 0..200 {
        let disk = SimDisk::new(seed);
        let (log, _) = open_with(memory("a"), &disk, Driver::Manual).unwrap();
        let group = log.group(1, 10).unwrap();
        let entries: Vec<_> = (0..6).map(|index| entry(index, 1, &[index as u8 + 1; 350])).collect();
        for entry in &entries {
            group.append(vec![entry.clone()], ok());
            log.pump();
        }
        drop((log, group));
        disk.power_cycle(Loss::Random);
        let (log, recovery) = open_with(memory("a"), &disk, Driver::Inline).unwrap();
        assert!(recovery.damage.is_empty() && recovery.quarantined.is_empty(), "seed {seed}: {recovery:?}");
        let found = log.group(1, 10).unwrap().read(0..9, u64::MAX).unwrap();
        assert_eq!(found, entries[..found.len()], "seed {seed}");
        lost += entries.len() - found.len();
    }
    assert!(lost > 100);
}
