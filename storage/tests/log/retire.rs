//! Old segments go when nobody needs them, and an idle group does not hold them.

use crate::model::{contents, entry, ok, open, open_with, options, segments};
use bytes::Bytes;
use evershard_storage::log::{Driver, GroupLog, Log};
use evershard_storage::testing::{Loss, SimDisk};
use std::sync::Arc;

/// Appends, and purges all but the last few.
fn churn(group: &GroupLog, from: u64, to: u64) {
    for index in from..to {
        group.append(vec![entry(index, 1, &[index as u8; 300])], ok());
        if let Some(id) = index.checked_sub(3).and_then(|index| group.entry_id(index)) {
            group.purge_through(id, ok());
        }
    }
}

#[test]
fn purged_segments_are_deleted() {
    let disk = SimDisk::new(1);
    let (log, _) = open(&disk, Driver::Inline).unwrap();
    let group = log.group(1, 10).unwrap();
    for index in 0..100 {
        group.append(vec![entry(index, 1, &[1; 300])], ok());
    }
    let before = segments(&disk).len();
    assert!(before > 8);
    group.purge_through(group.entry_id(49).unwrap(), ok());
    let half = segments(&disk).len();
    assert!(half <= before / 2 + 3, "{half} of {before}");
    group.purge_through(group.entry_id(99).unwrap(), ok());
    assert!(segments(&disk).len() <= 3);
    let state = group.state();
    drop((log, group));
    let (log, recovery) = open(&disk, Driver::Inline).unwrap();
    assert_eq!(recovery.groups[0].state, state);
    assert!(recovery.damage.is_empty());
    drop(log);
}

/// When the power was cut: before the idle group was idle, while the other was busy, not at all.
const BEFORE: u8 = 0;
const DURING: u8 = 1;
const AFTER: u8 = 2;

/// An idle group with entries, votes and all, and a busy one.
fn idle_and_busy(disk: &SimDisk, rounds: u64) -> Option<(Log, u8)> {
    let (log, _) = open_with(options(&Arc::default()), disk, Driver::Inline).ok()?;
    let idle = log.group(1, 10).ok()?;
    let busy = log.group(2, 20).ok()?;
    idle.append((0..9).map(|index| entry(index, 1, &[7; 100])).collect(), Box::new(|_| ()));
    idle.save_vote(Bytes::from_static(b"idle vote"), Box::new(|_| ()));
    idle.save_committed(Bytes::from_static(b"idle committed"));
    idle.purge_through(idle.entry_id(2)?, Box::new(|_| ()));
    idle.truncate_from(8, Box::new(|_| ()));
    idle.append(vec![entry(8, 2, b"replaced")], Box::new(|_| ()));
    if disk.is_off() {
        return Some((log, BEFORE));
    }
    for index in 0..rounds {
        busy.append(vec![entry(index, 1, &[index as u8; 300])], Box::new(|_| ()));
        if let Some(id) = index.checked_sub(3).and_then(|index| busy.entry_id(index)) {
            busy.purge_through(id, Box::new(|_| ()));
        }
        if disk.is_off() {
            return Some((log, DURING));
        }
    }
    Some((log, AFTER))
}

#[test]
fn an_idle_group_is_copied_forward() {
    let disk = SimDisk::new(1);
    let (log, _) = idle_and_busy(&disk, 300).unwrap();
    let stats = log.stats();
    assert!(stats.relocated_bytes > 0, "{stats:?}");
    assert!(stats.segments < 8, "{stats:?}");
    assert!(!segments(&disk)[0].ends_with("00000000000000000001.log"));
    let idle = log.group(1, 10).unwrap();
    let (state, entries) = (idle.state(), idle.read(0..100, u64::MAX).unwrap());
    assert_eq!(entries.len(), 6);
    drop((log, idle));
    let (log, recovery) = open(&disk, Driver::Inline).unwrap();
    assert!(recovery.damage.is_empty() && recovery.quarantined.is_empty());
    let idle = log.group(1, 10).unwrap();
    assert_eq!((idle.state(), idle.read(0..100, u64::MAX).unwrap()), (state, entries));
    assert_eq!(
        (idle.vote().unwrap(), idle.committed().unwrap()),
        ("idle vote".into(), "idle committed".into())
    );
    churn(&log.group(2, 20).unwrap(), 300, 500);
    idle.append(vec![entry(9, 3, b"awake")], ok());
    assert!(log.stats().segments < 8);
    drop((log, idle));
    let (log, recovery) = open(&disk, Driver::Inline).unwrap();
    assert!(recovery.quarantined.is_empty(), "{recovery:?}");
    assert_eq!(log.group(1, 10).unwrap().read(0..100, u64::MAX).unwrap().len(), 7);
}

#[test]
fn no_power_cut_while_copying_and_deleting_loses_the_idle_group() {
    let whole = SimDisk::new(1);
    let (log, _) = idle_and_busy(&whole, 100).unwrap();
    assert!(log.stats().relocated_bytes > 0);
    let expected = log.group(1, 10).unwrap().read(0..100, u64::MAX).unwrap();
    let end = whole.io_count();
    let mut cuts = 0;
    for cut_at in 1..end {
        let disk = SimDisk::new(cut_at);
        disk.cut_power_at(cut_at);
        match idle_and_busy(&disk, 100) {
            Some((_, DURING)) => cuts += 1,
            Some((_, AFTER)) => panic!("the power was not cut"),
            _ => continue,
        }
        for (number, loss) in [Loss::All, Loss::Nothing, Loss::Random, Loss::Random].into_iter().enumerate() {
            let disk = disk.fork(cut_at * 10 + number as u64);
            disk.power_cycle(loss);
            let (log, recovery) = open(&disk, Driver::Inline).unwrap();
            let context = format!("cut at {cut_at}, {loss:?}: {recovery:?}");
            assert!(recovery.damage.is_empty() && recovery.quarantined.is_empty(), "{context}");
            let found = contents(&log, &recovery);
            let idle = &found.values().next().unwrap();
            assert_eq!(idle.entries.values().cloned().collect::<Vec<_>>(), expected, "{context}");
            assert_eq!(idle.vote.as_ref().unwrap(), "idle vote", "{context}");
            let busy = log.group(2, 20).unwrap();
            let next = busy.state().last.map_or(0, |last| last.index + 1);
            churn(&busy, next, next + 60);
            assert_eq!(log.group(1, 10).unwrap().read(0..100, u64::MAX).unwrap(), expected, "{context}");
        }
    }
    assert!(cuts > 100);
}

#[test]
fn many_groups_share_segments_and_all_let_go() {
    let disk = SimDisk::new(1);
    let (log, _) = open(&disk, Driver::Inline).unwrap();
    let groups: Vec<GroupLog> = (0..64).map(|number| log.group(number, number + 1000).unwrap()).collect();
    for index in 0..30 {
        for group in &groups {
            group.append(vec![entry(index, 1, &[3; 50])], ok());
            if index % 10 == 9 && group.key().group % 2 == 0 {
                group.purge_through(group.entry_id(index - 1).unwrap(), ok());
            }
        }
    }
    let before = segments(&disk).len();
    for group in &groups {
        group.purge_through(group.entry_id(29).unwrap(), ok());
    }
    // What is left: five small records and one mark of each group, at most twice over, and two segments.
    let left = segments(&disk).len();
    assert!(left * 3 < before, "{left} of {before} segments");
    drop((log, groups));
    let (_, recovery) = open(&disk, Driver::Inline).unwrap();
    assert_eq!(recovery.groups.len(), 64);
    assert!(recovery.groups.iter().all(|group| group.state.last.unwrap().index == 29));
}

#[test]
fn a_segment_that_cannot_be_prepared_is_made_when_it_is_needed() {
    let disk = SimDisk::new(1);
    let fatal = Arc::default();
    let (log, _) = open_with(options(&fatal), &disk, Driver::Manual).unwrap();
    let group = log.group(1, 10).unwrap();
    group.append(vec![entry(0, 1, &[1; 900])], ok());
    log.pump();
    // The creation of the next one: no space.
    disk.fail_at(disk.io_count() + 1, 28);
    log.housekeep();
    for index in 1..20 {
        group.append(vec![entry(index, 1, &[1; 900])], ok());
        log.pump();
        log.housekeep();
    }
    assert_eq!(fatal.load(std::sync::atomic::Ordering::SeqCst), 0);
    assert!(segments(&disk).len() > 3);
    drop((log, group));
    disk.power_cycle(Loss::All);
    let (_, recovery) = open(&disk, Driver::Inline).unwrap();
    assert_eq!(recovery.groups[0].state.last.unwrap().index, 19);
}
