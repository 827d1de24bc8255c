//! A full disk loses nothing and ends nothing: the log goes on with what it reserved, then waits, then goes on.

use crate::model::{count, entry, ok, open, open_with, options, segments};
use bytes::Bytes;
use evershard_storage::log::{Driver, GroupLog, Log, LogError, LogRoom};
use evershard_storage::testing::{Loss, SimDisk};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Appends entries of 300 bytes, and pumps.
fn append(log: &Log, group: &GroupLog, indexes: std::ops::Range<u64>, acknowledged: &Arc<AtomicU64>) {
    for index in indexes {
        group.append(vec![entry(index, 1, &[index as u8; 300])], count(acknowledged));
        log.pump();
        log.housekeep();
    }
}

fn last(log: &Log) -> Option<u64> {
    log.group(1, 10).unwrap().state().last.map(|last| last.index)
}

#[test]
fn what_is_accepted_on_a_full_disk_waits_and_is_written_when_there_is_space() {
    let disk = SimDisk::new(1);
    let fatal = Arc::default();
    let (log, _) = open_with(options(&fatal), &disk, Driver::Manual).unwrap();
    let group = log.group(1, 10).unwrap();
    let acknowledged = Arc::new(AtomicU64::new(0));
    append(&log, &group, 0..5, &acknowledged);
    assert_eq!((log.room(), acknowledged.load(Ordering::SeqCst)), (LogRoom::Ample, 5));

    disk.set_full(true);
    let mut next = 5;
    while group.has_room(300, false) {
        append(&log, &group, next..next + 1, &acknowledged);
        next += 1;
    }
    let LogRoom::Reserve { bytes } = log.room() else { panic!("{:?}", log.room()) };
    assert!(bytes > 1000 && group.has_room(300, true), "half of the reserve is not for everybody: {bytes}");
    assert_eq!(acknowledged.load(Ordering::SeqCst), next, "the other half is for what was accepted");
    append(&log, &group, next..40, &acknowledged);
    assert_eq!(log.room(), LogRoom::Out);
    assert!(!group.has_room(1, true));
    let written = acknowledged.load(Ordering::SeqCst);
    assert!((next + 1..40).contains(&written), "{written} of what was accepted, {next} before");
    assert_eq!(group.durable_index(), Some(written - 1));
    group.save_vote(Bytes::from_static(b"vote"), count(&acknowledged));
    group.save_committed(Bytes::from_static(b"committed"));
    for _ in 0..10 {
        log.pump();
        log.housekeep();
    }
    assert_eq!(acknowledged.load(Ordering::SeqCst), written);
    assert_eq!(fatal.load(Ordering::SeqCst), 0, "a full disk is no failure");

    disk.set_full(false);
    while log.pump() {}
    log.housekeep();
    assert_eq!((log.room(), acknowledged.load(Ordering::SeqCst)), (LogRoom::Ample, 41));
    drop((log, group));
    disk.power_cycle(Loss::All);
    let (log, recovery) = open(&disk, Driver::Inline).unwrap();
    assert!(recovery.damage.is_empty() && recovery.quarantined.is_empty(), "{recovery:?}");
    let group = log.group(1, 10).unwrap();
    assert_eq!((last(&log), group.vote().unwrap()), (Some(39), "vote".into()));
    assert_eq!(group.read(0..40, u64::MAX).unwrap().len(), 40);
}

/// Wherever the power goes while the disk is full, what was acknowledged is there, also when it is full at the next start.
#[test]
fn no_power_cut_on_a_full_disk_loses_what_was_acknowledged() {
    let mut is_over = false;
    let mut cut = 0;
    while !is_over {
        cut += 1;
        for loss in [Loss::All, Loss::Nothing, Loss::Random] {
            let disk = SimDisk::new(cut);
            let fatal = Arc::default();
            let (log, _) = open_with(options(&fatal), &disk, Driver::Manual).unwrap();
            let group = log.group(1, 10).unwrap();
            let acknowledged = Arc::new(AtomicU64::new(0));
            append(&log, &group, 0..5, &acknowledged);
            disk.set_full(true);
            disk.cut_power_at(disk.io_count() + cut);
            append(&log, &group, 5..40, &acknowledged);
            is_over = !disk.is_off();
            drop((log, group));
            disk.power_cycle(loss);
            let (log, recovery) = open(&disk, Driver::Manual).unwrap();
            assert!(recovery.damage.is_empty() && recovery.quarantined.is_empty(), "{cut}: {recovery:?}");
            let found = last(&log).map_or(0, |last| last + 1);
            let acknowledged = acknowledged.load(Ordering::SeqCst);
            assert!(found >= acknowledged, "cut at {cut}, {loss:?}: {found} of {acknowledged}");
            disk.set_full(false);
            let group = log.group(1, 10).unwrap();
            let more = Arc::new(AtomicU64::new(0));
            append(&log, &group, found..found + 20, &more);
            while log.pump() {}
            assert_eq!(more.load(Ordering::SeqCst), 20);
        }
    }
    assert!(cut > 40, "{cut}");
}

#[test]
fn a_log_opens_on_a_full_disk_or_says_that_it_is_full() {
    let disk = SimDisk::new(1);
    let (log, _) = open(&disk, Driver::Inline).unwrap();
    let group = log.group(1, 10).unwrap();
    group.append(vec![entry(0, 1, b"here")], ok());
    drop((log, group));
    disk.kill_process();
    disk.set_full(true);
    let before = segments(&disk);
    for _ in 0..3 {
        let (log, recovery) = open(&disk, Driver::Inline).unwrap();
        assert_eq!(recovery.groups.len(), 1);
        assert_eq!(log.group(1, 10).unwrap().read(0..9, u64::MAX).unwrap(), vec![entry(0, 1, b"here")]);
        log.housekeep();
        assert_eq!(
            log.room(),
            LogRoom::Reserve { bytes: 0 },
            "what was cut off at the end cannot be taken again"
        );
        drop(log);
        disk.kill_process();
    }
    assert_eq!(segments(&disk), before);
    let empty = SimDisk::new(1);
    empty.set_full(true);
    let error = open(&empty, Driver::Inline).unwrap_err();
    assert!(error.is_disk_full() && matches!(error, LogError::Io { .. }), "{error}");
    assert!(error.to_string().contains("/data/log"), "{error}");
}

#[test]
fn a_thread_that_waits_for_space_goes_on_by_itself_and_ends_when_it_is_told_to() {
    for is_freed in [true, false] {
        let disk = SimDisk::new(1);
        let (log, _) = open(&disk, Driver::Threaded).unwrap();
        let group = log.group(1, 10).unwrap();
        disk.set_full(true);
        let (acknowledged, refused) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        for index in 0..60 {
            let (acknowledged, refused) = (acknowledged.clone(), refused.clone());
            let told = move |result: std::io::Result<()>| {
                let counter = if result.is_ok() { acknowledged } else { refused };
                counter.fetch_add(1, Ordering::SeqCst);
            };
            group.append(vec![entry(index, 1, &[1; 300])], Box::new(told));
        }
        while log.room() != LogRoom::Out {
            std::thread::yield_now();
        }
        if is_freed {
            disk.set_full(false);
            assert!(group.wait_durable(59, std::time::Duration::from_secs(60)).unwrap());
        }
        log.close().unwrap();
        let told = (acknowledged.load(Ordering::SeqCst), refused.load(Ordering::SeqCst));
        assert_eq!(told.0 + told.1, 60, "everybody is told");
        assert_eq!(told.1 == 0, is_freed, "{told:?}");
        drop((log, group));
        disk.kill_process();
        let (log, _) = open(&disk, Driver::Inline).unwrap();
        assert!(last(&log).map_or(0, |last| last + 1) >= told.0);
    }
}
