//! What the log does while it runs, and after an orderly restart.

use crate::model::{Model, contents, count, entry, ok, open, open_with, options, segments};
use crate::script::{Run, steps};
use bytes::Bytes;
use evershard_storage::disk::Disk;
use evershard_storage::log::{Driver, EntryId, LogError, LogOptions};
use evershard_storage::testing::{Loss, SimDisk};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

#[test]
fn everything_is_there_after_a_restart() {
    let disk = SimDisk::new(1);
    let mut model = Model::new();
    for seed in 0..6 {
        let mut run = Run::open(&disk, Driver::Inline, model.clone()).unwrap();
        run.play(&steps(seed, 80));
        run.log.close().unwrap();
        model = run.model().clone();
        let (log, recovery) = open(&disk, Driver::Inline).unwrap();
        assert_eq!(contents(&log, &recovery), model);
        assert!(recovery.quarantined.is_empty() && recovery.damage.is_empty() && !recovery.fresh);
        assert_eq!(recovery.torn_bytes, 0);
    }
}

#[test]
fn a_fresh_log_says_so_and_a_used_one_does_not() {
    let disk = SimDisk::new(1);
    assert!(open(&disk, Driver::Inline).unwrap().1.fresh);
    let (log, _) = open(&disk, Driver::Inline).unwrap();
    log.group(1, 1).unwrap();
    drop(log);
    assert!(!open(&disk, Driver::Inline).unwrap().1.fresh);
}

#[test]
fn a_log_that_must_exist_is_not_made_up() {
    let disk = SimDisk::new(1);
    let must_exist = || LogOptions { must_exist: true, ..options(&Arc::default()) };
    for _ in 0..2 {
        let refused = open_with(must_exist(), &disk, Driver::Inline);
        assert!(matches!(refused, Err(LogError::Gone { .. })));
        assert!(segments(&disk).is_empty());
    }
    drop(open(&disk, Driver::Inline).unwrap());
    assert!(!open_with(must_exist(), &disk, Driver::Inline).unwrap().1.fresh);
}

#[test]
fn appended_entries_are_readable_before_they_are_durable() {
    let disk = SimDisk::new(1);
    let (log, _) = open(&disk, Driver::Manual).unwrap();
    let group = log.group(1, 10).unwrap();
    let acknowledged = Arc::new(AtomicU64::new(0));
    let entries: Vec<_> = (0..20).map(|index| entry(index, 1, &[index as u8; 500])).collect();
    group.append(entries.clone(), count(&acknowledged));
    assert_eq!(group.durable_index(), None);
    assert!(group.read_cached(0..20, u64::MAX).is_some());
    assert_eq!(group.read(0..20, u64::MAX).unwrap(), entries);
    assert_eq!(group.read(3..20, 0).unwrap(), entries[3..4]);
    assert_eq!(group.read(3..20, 1500).unwrap(), entries[3..6]);
    assert!(log.queued_bytes() >= 20 * 500);
    assert!(log.pump());
    assert_eq!(acknowledged.load(Ordering::SeqCst), 1);
    assert_eq!((group.durable_index(), log.queued_bytes()), (Some(19), 0));
    // The cache holds 2000 bytes: the older ones come from the disk now.
    assert!(group.read_cached(0..20, u64::MAX).is_none() && group.read_cached(19..20, u64::MAX).is_some());
    assert_eq!(group.read(0..20, u64::MAX).unwrap(), entries);
    assert_eq!(group.read(18..40, u64::MAX).unwrap(), entries[18..]);
    assert!(group.read(20..40, u64::MAX).unwrap().is_empty());
    assert!(log.stats().cached_bytes <= 2000);
}

#[test]
fn the_durable_index_follows_truncations() {
    let disk = SimDisk::new(1);
    let (log, _) = open(&disk, Driver::Manual).unwrap();
    let group = log.group(1, 10).unwrap();
    let changes = group.durable_changes();
    group.append((0..10).map(|index| entry(index, 1, b"old")).collect(), ok());
    log.pump();
    assert_eq!(group.durable_index(), Some(9));
    group.append((10..12).map(|index| entry(index, 1, b"old")).collect(), ok());
    group.truncate_from(6, ok());
    assert_eq!(group.durable_index(), Some(5));
    group.append((6..8).map(|index| entry(index, 2, b"new")).collect(), ok());
    assert_eq!(group.durable_index(), Some(5));
    assert_eq!(group.read(5..9, u64::MAX).unwrap().last().unwrap().payload, "new");
    log.pump();
    assert_eq!((group.durable_index(), *changes.borrow()), (Some(7), Some(7)));
    assert_eq!(group.state().last, Some(EntryId { index: 7, term: 2, leader: 102 }));
}

#[test]
fn a_batch_is_one_write_and_one_sync_for_all_groups_and_acknowledges_in_order() {
    let disk = SimDisk::new(1);
    let (log, _) = open(&disk, Driver::Manual).unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    for number in 0..10_u64 {
        let group = log.group(number, number).unwrap();
        let order = order.clone();
        group.append(
            vec![entry(0, 1, b"x")],
            Box::new(move |result| {
                result.unwrap();
                order.lock().unwrap().push(number);
            }),
        );
    }
    let before = (log.stats().syncs, log.stats().batches);
    assert!(log.pump());
    assert!(!log.pump());
    assert_eq!((log.stats().syncs, log.stats().batches), (before.0 + 1, before.1 + 1));
    assert_eq!(*order.lock().unwrap(), (0..10).collect::<Vec<_>>());
}

#[test]
fn refused_calls_change_nothing() {
    let disk = SimDisk::new(1);
    let (log, _) = open(&disk, Driver::Inline).unwrap();
    let group = log.group(1, 10).unwrap();
    let errors = Arc::new(AtomicU64::new(0));
    let error = || -> evershard_storage::log::DurableCallback {
        let errors = errors.clone();
        Box::new(move |result| {
            assert!(result.is_err());
            errors.fetch_add(1, Ordering::SeqCst);
        })
    };
    group.append(vec![entry(0, 1, b"a"), entry(1, 1, b"b")], ok());
    let state = group.state();
    group.append(vec![entry(3, 1, b"gap")], error());
    group.append(vec![entry(1, 2, b"overlap")], error());
    group.append(vec![entry(2, 1, b"c"), entry(4, 1, b"gap inside")], error());
    assert_eq!(group.state(), state);
    assert!(log.group(1, 10).is_ok());
    group.destroy(ok());
    group.save_vote(Bytes::from_static(b"late"), error());
    assert_eq!(errors.load(Ordering::SeqCst), 4);
    let small = LogOptions { segment_bytes: 10, ..options(&Arc::default()) };
    assert!(matches!(
        open_with(small, &disk, Driver::Inline),
        Err(LogError::InvalidOption { field: "segment_bytes", .. })
    ));
}

#[test]
fn a_snapshot_beyond_the_end_empties_the_log() {
    let disk = SimDisk::new(1);
    let (log, _) = open(&disk, Driver::Inline).unwrap();
    let group = log.group(1, 10).unwrap();
    group.append(vec![entry(0, 1, b"a"), entry(1, 1, b"b")], ok());
    let id = EntryId { index: 41, term: 6, leader: 2 };
    group.purge_through(id, ok());
    assert_eq!((group.state().first, group.state().last, group.durable_index()), (42, Some(id), Some(41)));
    group.append(vec![entry(42, 6, b"after")], ok());
    assert_eq!(group.bytes_since(41), 72);
    assert_eq!(group.bytes_since(42), 0);
    log.close().unwrap();
    let (log, recovery) = open(&disk, Driver::Inline).unwrap();
    let group = log.group(1, 10).unwrap();
    assert_eq!(recovery.groups[0].state, group.state());
    assert_eq!((group.state().last_purged, group.state().durable_index), (Some(id), Some(42)));
    assert_eq!(group.read(0..100, u64::MAX).unwrap(), vec![entry(42, 6, b"after")]);
}

#[test]
fn the_first_failed_sync_stops_the_log() {
    for durability_io in 0..2 {
        let disk = SimDisk::new(1);
        let fatal = Arc::new(AtomicU64::new(0));
        let (log, _) = open_with(options(&fatal), &disk, Driver::Manual).unwrap();
        let group = log.group(1, 10).unwrap();
        group.append(vec![entry(0, 1, b"a")], ok());
        log.pump();
        let acknowledged = Arc::new(AtomicU64::new(0));
        group.append(vec![entry(1, 1, b"b")], count(&acknowledged));
        disk.fail_at(disk.io_count() + 1 + durability_io, 5);
        log.pump();
        // The disk is well again, but nobody may believe it.
        group.append(vec![entry(2, 1, b"c")], count(&acknowledged));
        group.save_vote(Bytes::from_static(b"vote"), count(&acknowledged));
        log.pump();
        assert_eq!((acknowledged.load(Ordering::SeqCst), fatal.load(Ordering::SeqCst)), (0, 1));
        assert!(log.close().is_err());
        assert!(group.wait_durable(1, std::time::Duration::from_secs(60)).is_err());
        drop((log, group));
        disk.power_cycle(Loss::All);
        let (log, recovery) = open(&disk, Driver::Inline).unwrap();
        assert!(recovery.quarantined.is_empty());
        assert_eq!(log.group(1, 10).unwrap().read(0..9, u64::MAX).unwrap(), vec![entry(0, 1, b"a")]);
    }
}

#[test]
fn a_callback_may_use_the_log() {
    let disk = SimDisk::new(1);
    let (log, _) = open(&disk, Driver::Inline).unwrap();
    let group = log.group(1, 10).unwrap();
    let other = group.clone();
    group.append(
        vec![entry(0, 1, b"a")],
        Box::new(move |result| {
            result.unwrap();
            other.append(vec![entry(1, 1, b"b")], ok());
        }),
    );
    assert_eq!(group.durable_index(), Some(1));
}

#[test]
fn a_forgotten_group_is_gone_and_its_segments_too() {
    let disk = SimDisk::new(1);
    let (log, _) = open(&disk, Driver::Inline).unwrap();
    let group = log.group(1, 10).unwrap();
    let stays = log.group(2, 20).unwrap();
    for index in 0..40 {
        group.append(vec![entry(index, 1, &[1; 400])], ok());
    }
    assert!(segments(&disk).len() > 3);
    stays.save_vote(Bytes::from_static(b"vote"), ok());
    log.forget(group.key()).unwrap();
    log.close().unwrap();
    let (log, recovery) = open(&disk, Driver::Inline).unwrap();
    assert_eq!(recovery.groups.iter().map(|group| group.key).collect::<Vec<_>>(), vec![stays.key()]);
    assert_eq!(log.group(2, 20).unwrap().vote().unwrap(), "vote");
}

#[test]
fn two_processes_cannot_share_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let disk: Arc<dyn Disk> = Arc::new(evershard_storage::disk::RealDisk);
    let options = LogOptions { directory: directory.path().join("log"), ..options(&Arc::default()) };
    let (log, _) = evershard_storage::log::Log::open(options.clone(), disk.clone(), Driver::Inline).unwrap();
    let second = evershard_storage::log::Log::open(options.clone(), disk.clone(), Driver::Inline);
    assert!(matches!(second, Err(LogError::Io { action: "lock", .. })));
    drop(log);
    assert!(evershard_storage::log::Log::open(options, disk, Driver::Inline).is_ok());
    assert!(Path::new(directory.path()).exists());
}

/// One operation a batch.
fn one_by_one(disk: &SimDisk) -> evershard_storage::log::Log {
    let options = LogOptions { batch_bytes_max: 1, cache_bytes: 1000, ..options(&Arc::default()) };
    open_with(options, disk, Driver::Manual).unwrap().0
}

#[test]
fn an_append_that_was_truncated_meanwhile_makes_nothing_durable() {
    let log = one_by_one(&SimDisk::new(1));
    let group = log.group(1, 10).unwrap();
    log.pump();
    group.append((0..3).map(|index| entry(index, 1, b"old")).collect(), ok());
    group.truncate_from(1, ok());
    group.append((1..3).map(|index| entry(index, 2, b"new")).collect(), ok());
    let mut seen = Vec::new();
    while log.pump() {
        seen.push(group.durable_index());
    }
    assert_eq!(seen, [Some(0), Some(0), Some(2)]);
    assert_eq!(group.read(0..9, u64::MAX).unwrap()[2].payload, "new");
}

#[test]
fn what_is_not_durable_stays_in_memory() {
    let log = one_by_one(&SimDisk::new(1));
    let group = log.group(1, 10).unwrap();
    let entries: Vec<_> = (0..20).map(|index| entry(index, 1, &[index as u8; 300])).collect();
    entries.iter().for_each(|entry| group.append(vec![entry.clone()], ok()));
    while log.pump() {
        let durable = group.durable_index().map_or(0, |durable| durable + 1);
        assert!(group.read_cached(durable..20, u64::MAX).is_some());
        assert_eq!(group.read(0..20, u64::MAX).unwrap(), entries);
    }
    assert!(group.read_cached(0..20, u64::MAX).is_none());
}
