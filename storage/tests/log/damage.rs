//! Bits flip, files shrink and vanish: it is noticed, and only those it concerns are quarantined.

use crate::model::{DIRECTORY, Model, ModelGroup, contents, entry, floor, ok, open, segments};
use crate::script::{Run, Step, steps};
use bytes::Bytes;
use evershard_storage::log::{Driver, GroupKey, Log, LogError, QuarantineCause, Recovery};
use evershard_storage::testing::SimDisk;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A small log of several segments, and the models after each of its operations. The process was killed.
fn small_log() -> (SimDisk, Vec<Model>) {
    let disk = SimDisk::new(1);
    let mut run =
        Run::open_with(|options| options.segment_bytes = 1024, &disk, Driver::Inline, Model::new()).unwrap();
    let mut steps = steps(3, 30);
    for (_, step) in &mut steps {
        // Small, for every bit is tried.
        if let Step::Append { sizes, .. } = step {
            sizes.iter_mut().for_each(|size| *size %= 30);
        }
    }
    run.play(&steps);
    let models = run.models.clone();
    drop(run);
    disk.kill_process();
    assert!((3..10).contains(&segments(&disk).len()), "{:?}", segments(&disk));
    assert!(models.last().unwrap().len() >= 2);
    (disk, models)
}

fn quarantined(recovery: &Recovery) -> BTreeSet<GroupKey> {
    recovery.quarantined.iter().map(|group| group.key).collect()
}

/// What was found is right, or its absence was noticed. Without notice it must be one of `allowed`.
fn check(disk: &SimDisk, allowed: &[Model], context: &str) -> bool {
    let (log, recovery) = open(disk, Driver::Inline).unwrap_or_else(|error| panic!("{context}: {error}"));
    let found = contents(&log, &recovery);
    let noticed = quarantined(&recovery);
    let is_noticed = !noticed.is_empty() || !recovery.damage.is_empty();
    let fits = allowed.iter().any(|model| {
        let is_right = |key: &GroupKey| {
            noticed.contains(key)
                || found.get(key) == model.get(key)
                || (allowed.len() > 2 && is_part(found.get(key), model.get(key)))
        };
        found.keys().chain(model.keys()).all(is_right) || (found.is_empty() && !recovery.damage.is_empty())
    });
    assert!(fits, "{context}: found {found:?}, quarantined {noticed:?}, damage {:?}", recovery.damage);
    for key in &noticed {
        assert!(matches!(log.group(key.group, key.replica), Err(LogError::Quarantined { .. })), "{context}");
    }
    drop(log);
    disk.kill_process();
    let (log, again) = open(disk, Driver::Inline).unwrap();
    assert_eq!(quarantined(&again), noticed, "{context}: a quarantine must last");
    assert!(again.damage.is_empty(), "{context}: told twice: {:?}", again.damage);
    assert_eq!(contents(&log, &again), found, "{context}");
    is_noticed
}

/// Whether only the last entries are missing: of an append whose end was cut off the first ones stay.
fn is_part(found: Option<&ModelGroup>, model: Option<&ModelGroup>) -> bool {
    let (Some(found), Some(model)) = (found, model) else { return false };
    let whole = ModelGroup { entries: found.entries.clone(), ..model.clone() };
    *found == whole && found.entries.iter().zip(&model.entries).all(|(found, model)| found == model)
}

/// The segments that have records; the last one may be prepared only.
fn begun(disk: &SimDisk) -> Vec<PathBuf> {
    let has_records =
        |path: &PathBuf| disk.contents(path).unwrap().iter().rposition(|&byte| byte != 0) > Some(32);
    segments(disk).into_iter().filter(has_records).collect()
}

/// The floor as a power cut would leave it: only its durable slot.
fn forget_fast_floor(disk: &SimDisk) {
    disk.edit(floor(), |bytes| bytes[4096..].fill(0));
}

#[test]
fn every_flipped_bit_is_noticed_or_harmless() {
    let (disk, models) = small_log();
    let last = models.last().unwrap();
    let mut harmless = 0_u64;
    for path in disk.files() {
        let length = disk.contents(&path).unwrap().len();
        // A spare holds nothing.
        let Some(last_used) = disk.contents(&path).unwrap().iter().rposition(|&byte| byte != 0) else {
            continue;
        };
        let used = last_used + 1;
        for bit in 0..(used + 8).min(length) * 8 {
            let disk = disk.fork(bit as u64);
            disk.flip_bit(&path, bit);
            let is_noticed =
                check(&disk, std::slice::from_ref(last), &format!("{} bit {bit}", path.display()));
            harmless += u64::from(!is_noticed);
        }
    }
    assert!(harmless > 0, "padding and one of the floor's two slots can do no harm");
}

#[test]
fn every_flipped_bit_is_noticed_with_an_old_floor_too_except_in_the_last_batch() {
    let (disk, models) = small_log();
    forget_fast_floor(&disk);
    let path = segments(&disk).pop().unwrap();
    let used = disk.contents(&path).unwrap().iter().rposition(|&byte| byte != 0).unwrap() + 1;
    for bit in 0..used * 8 {
        let disk = disk.fork(bit as u64);
        disk.flip_bit(&path, bit);
        check(&disk, &models[models.len() - 2..], &format!("{} bit {bit}", path.display()));
    }
}

#[test]
fn every_cut_of_a_segment_is_noticed_or_harmless() {
    let (disk, models) = small_log();
    let begun = begun(&disk);
    for path in segments(&disk) {
        let used = disk.contents(&path).unwrap().iter().rposition(|&byte| byte != 0).unwrap() + 1;
        for length in 0..used {
            for is_floor_old in [false, true] {
                let disk = disk.fork(length as u64);
                if is_floor_old {
                    forget_fast_floor(&disk);
                }
                disk.edit(&path, |bytes| bytes.truncate(length));
                // Nothing but the floor proves the last records of the last segment that has any.
                let is_last = begun.last() == Some(&path);
                let allowed = if is_floor_old && is_last { models.len() } else { 1 };
                let context = format!("{} cut to {length}, old floor {is_floor_old}", path.display());
                check(&disk, &models[models.len() - allowed..], &context);
            }
        }
    }
}

#[test]
fn every_lost_file_is_noticed() {
    let (disk, models) = small_log();
    let mut files = begun(&disk);
    files.push(floor().to_owned());
    for path in files {
        let disk = disk.fork(1);
        disk.lose_file(&path);
        let is_noticed = check(&disk, &models[models.len() - 1..], &format!("{} lost", path.display()));
        assert!(is_noticed, "{}", path.display());
    }
    for path in disk.files() {
        disk.lose_file(&path);
    }
    assert!(open(&disk, Driver::Inline).unwrap().1.fresh);
}

#[test]
fn losing_all_segments_is_noticed() {
    let (disk, _) = small_log();
    for path in segments(&disk) {
        disk.lose_file(&path);
    }
    let (_, recovery) = open(&disk, Driver::Inline).unwrap();
    assert!(!recovery.fresh && !recovery.damage.is_empty() && recovery.groups.is_empty());
}

/// Two groups with three entries each, interleaved, and where the payload of an entry of group 1 is.
fn two_groups() -> (SimDisk, PathBuf, [usize; 3]) {
    let disk = SimDisk::new(1);
    let (log, _) = open(&disk, Driver::Inline).unwrap();
    let groups = [log.group(1, 10).unwrap(), log.group(2, 20).unwrap()];
    for index in 0..3 {
        for group in &groups {
            let payload = format!("group {} entry {index} payload", group.key().group);
            group.append(vec![entry(index, 1, payload.as_bytes())], ok());
        }
    }
    groups[0].save_vote(Bytes::from_static(b"vote"), ok());
    drop((log, groups));
    disk.kill_process();
    let path = segments(&disk)[0].clone();
    let bytes = disk.contents(&path).unwrap();
    let find = |index: u64| {
        let text = format!("group 1 entry {index} payload");
        bytes.windows(text.len()).position(|window| window == text.as_bytes()).unwrap()
    };
    let positions = [find(0), find(1), find(2)];
    (disk, path, positions)
}

fn with_log(disk: &SimDisk, act: impl FnOnce(&Log)) {
    let (log, _) = open(disk, Driver::Inline).unwrap();
    act(&log);
    drop(log);
    disk.kill_process();
}

#[test]
fn a_bad_entry_concerns_its_group_only() {
    let (disk, path, positions) = two_groups();
    disk.flip_bit(&path, positions[1] * 8);
    let (log, recovery) = open(&disk, Driver::Inline).unwrap();
    assert_eq!(quarantined(&recovery), BTreeSet::from([GroupKey { group: 1, replica: 10 }]));
    assert!(recovery.damage.is_empty());
    assert_eq!(recovery.quarantined[0].cause, QuarantineCause::Damage);
    assert!(
        recovery.quarantined[0].reason.contains("entry 1 in segment 00000000000000000001.log"),
        "{:?}",
        recovery.quarantined
    );
    assert_eq!(log.group(2, 20).unwrap().read(0..9, u64::MAX).unwrap().len(), 3);
    // The replica comes back under a new id, and the old one is forgotten.
    log.group(1, 11).unwrap().save_vote(Bytes::from_static(b"new"), ok());
    log.forget(GroupKey { group: 1, replica: 10 }).unwrap();
    drop(log);
    disk.kill_process();
    let (_, recovery) = open(&disk, Driver::Inline).unwrap();
    assert!(recovery.quarantined.is_empty() && recovery.damage.is_empty());
    assert_eq!(recovery.groups.len(), 2);
}

#[test]
fn damage_to_what_is_purged_truncated_or_replaced_hurts_nobody() {
    let (disk, path, positions) = two_groups();
    with_log(&disk, |log| {
        let group = log.group(1, 10).unwrap();
        group.purge_through(group.entry_id(0).unwrap(), ok());
        group.truncate_from(2, ok());
        group.append(vec![entry(2, 2, b"replaced")], ok());
    });
    disk.flip_bit(&path, positions[0] * 8);
    disk.flip_bit(&path, positions[2] * 8);
    let (log, recovery) = open(&disk, Driver::Inline).unwrap();
    assert!(recovery.quarantined.is_empty(), "{recovery:?}");
    assert_eq!(log.group(1, 10).unwrap().read(0..9, u64::MAX).unwrap()[1].payload, "replaced");
    drop(log);
    disk.flip_bit(&path, positions[1] * 8);
    assert_eq!(open(&disk, Driver::Inline).unwrap().1.quarantined.len(), 1);
}

#[test]
fn unreadable_ownership_quarantines_everybody_once() {
    let (disk, path, positions) = two_groups();
    // The header before the payload.
    disk.flip_bit(&path, (positions[1] - 40) * 8);
    let (log, recovery) = open(&disk, Driver::Inline).unwrap();
    assert_eq!(quarantined(&recovery).len(), 2);
    assert_eq!(recovery.damage.len(), 1);
    // New replicas are not punished for it at the next start.
    log.group(3, 30).unwrap().append(vec![entry(0, 1, b"new")], ok());
    log.forget(GroupKey { group: 1, replica: 10 }).unwrap();
    drop(log);
    disk.kill_process();
    let (log, recovery) = open(&disk, Driver::Inline).unwrap();
    assert_eq!(quarantined(&recovery), BTreeSet::from([GroupKey { group: 2, replica: 20 }]));
    assert!(recovery.damage.is_empty());
    assert_eq!(recovery.groups.len(), 1);
    drop(log);
    // But new damage is new.
    let path = segments(&disk)[0].clone();
    let bytes = disk.contents(&path).unwrap();
    let payload = bytes.windows(3).position(|window| window == b"new").unwrap();
    disk.flip_bit(&path, (payload - 40) * 8);
    let (_, recovery) = open(&disk, Driver::Inline).unwrap();
    assert_eq!((recovery.damage.len(), recovery.quarantined.len()), (1, 2));
}

#[test]
fn a_damaged_entry_is_found_when_it_is_read() {
    let (disk, path, positions) = two_groups();
    let (log, _) = open(&disk, Driver::Inline).unwrap();
    let group = log.group(1, 10).unwrap();
    disk.flip_bit(&path, positions[1] * 8);
    assert_eq!(group.read(0..1, u64::MAX).unwrap().len(), 1);
    let error = group.read(1..2, u64::MAX).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
    assert!(error.to_string().contains("group 1 replica 10"), "{error}");
    // At once, and for good.
    assert!(matches!(log.group(1, 10), Err(LogError::Quarantined { .. })));
    let damaged = log.damaged();
    assert_eq!(damaged.len(), 1);
    assert!(
        damaged[0].0 == group.key() && damaged[0].1.contains("00000000000000000001.log at offset"),
        "{damaged:?}"
    );
    let told = Arc::new(AtomicU64::new(0));
    let refused = |told: &Arc<AtomicU64>| -> evershard_storage::log::DurableCallback {
        let told = told.clone();
        Box::new(move |result| {
            assert_eq!(result.unwrap_err().kind(), std::io::ErrorKind::InvalidData);
            told.fetch_add(1, Ordering::SeqCst);
        })
    };
    group.save_vote(Bytes::from_static(b"for its rival"), refused(&told));
    group.append(vec![entry(2, 1, b"more")], refused(&told));
    group.truncate_from(0, refused(&told));
    assert_eq!(told.load(Ordering::SeqCst), 3, "it neither votes nor takes anything");
    assert!(group.read(0..1, u64::MAX).is_err() && group.read_cached(0..1, u64::MAX).is_none());
    // The other group has nothing to do with it.
    let other = log.group(2, 20).unwrap();
    assert_eq!(other.read(0..9, u64::MAX).unwrap().len(), 3);
    other.append(vec![entry(3, 1, b"more")], ok());
    drop((log, group, other));
    disk.kill_process();
    let (log, recovery) = open(&disk, Driver::Inline).unwrap();
    assert_eq!(quarantined(&recovery), BTreeSet::from([GroupKey { group: 1, replica: 10 }]));
    assert!(recovery.quarantined[0].reason.contains("bad checksum"), "{:?}", recovery.quarantined);
    assert!(recovery.damage.is_empty(), "it is known whose it is: {:?}", recovery.damage);
    log.forget(GroupKey { group: 1, replica: 10 }).unwrap();
    assert!(log.damaged().is_empty());
}

/// One bad entry of a group that does not move holds neither its group back nor the log.
#[test]
fn a_damaged_entry_of_an_idle_group_pins_no_segment() {
    let disk = SimDisk::new(1);
    let (log, _) = open(&disk, Driver::Inline).unwrap();
    let idle = log.group(1, 10).unwrap();
    idle.append(vec![entry(0, 1, b"an idle one"), entry(1, 1, b"and another")], ok());
    let path = segments(&disk)[0].clone();
    let bytes = disk.contents(&path).unwrap();
    let at = bytes.windows(7).position(|window| window == b"an idle").unwrap();
    let busy = log.group(2, 20).unwrap();
    let mut is_flipped = false;
    for index in 0..200 {
        busy.append(vec![entry(index, 1, &[index as u8; 300])], ok());
        if let Some(id) = index.checked_sub(3).and_then(|index| busy.entry_id(index)) {
            busy.purge_through(id, ok());
        }
        if !is_flipped {
            is_flipped = disk.flip_bit(&path, at * 8);
        }
    }
    assert!(is_flipped);
    assert_eq!(log.damaged().len(), 1, "copying it forward met the damage");
    assert!(matches!(log.group(1, 10), Err(LogError::Quarantined { .. })));
    assert!(disk.contents(&path).is_none() && segments(&disk).len() < 8, "{:?}", segments(&disk));
    drop((log, idle, busy));
    disk.kill_process();
    let (log, recovery) = open(&disk, Driver::Inline).unwrap();
    assert_eq!(quarantined(&recovery), BTreeSet::from([GroupKey { group: 1, replica: 10 }]));
    assert!(recovery.damage.is_empty(), "{:?}", recovery.damage);
    assert_eq!(log.group(2, 20).unwrap().read(0..1000, u64::MAX).unwrap().len(), 3);
}

/// An operator, or a check of another kind, may say that a group is damaged.
#[test]
fn a_group_can_be_quarantined_by_name() {
    let (disk, _, _) = two_groups();
    let (log, _) = open(&disk, Driver::Inline).unwrap();
    log.quarantine(GroupKey { group: 1, replica: 10 }, "found elsewhere").unwrap();
    assert!(matches!(log.group(1, 10), Err(LogError::Quarantined { .. })));
    drop(log);
    let (_, recovery) = open(&disk, Driver::Inline).unwrap();
    assert_eq!(recovery.quarantined[0].reason, "found elsewhere");
}

#[test]
fn another_format_version_is_refused_not_repaired() {
    let (disk, path, _) = two_groups();
    disk.edit(&path, |bytes| {
        bytes[8] = 2;
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&bytes[..12]);
        hasher.update(&bytes[16..32]);
        bytes[12..16].copy_from_slice(&hasher.finalize().to_le_bytes());
    });
    let error = open(&disk, Driver::Inline).unwrap_err();
    assert!(matches!(error, LogError::UnsupportedVersion { found: 2, known: 1, .. }), "{error}");
    assert!(error.to_string().contains(DIRECTORY), "{error}");
    assert!(disk.contents(Path::new(&path)).is_some());
}

#[test]
fn what_was_cut_off_does_not_come_back_behind_what_follows() {
    let disk = SimDisk::new(1);
    let (log, _) = open(&disk, Driver::Manual).unwrap();
    let group = log.group(1, 10).unwrap();
    log.pump();
    group.append(vec![entry(0, 1, &[b'a'; 200]), entry(1, 1, b"revived?")], ok());
    log.pump();
    drop((log, group));
    disk.kill_process();
    // The batch is torn in its first entry only, and nothing proves that it was synced.
    forget_fast_floor(&disk);
    let path = segments(&disk)[0].clone();
    let bytes = disk.contents(&path).unwrap();
    let payload = bytes.windows(8).position(|window| window == b"aaaaaaaa").unwrap();
    disk.flip_bit(&path, payload * 8);
    let (log, recovery) = open(&disk, Driver::Inline).unwrap();
    assert_eq!((recovery.damage.len(), recovery.torn_bytes), (0, 264 + 72));
    // The new batch, a mark and an entry, ends exactly where the old second entry began.
    let group = log.group(1, 10).unwrap();
    group.append(vec![entry(0, 2, &[b'b'; 200 - 64])], ok());
    drop((log, group));
    disk.kill_process();
    let (log, recovery) = open(&disk, Driver::Inline).unwrap();
    assert!(recovery.damage.is_empty() && recovery.quarantined.is_empty());
    assert_eq!(log.group(1, 10).unwrap().state().last.unwrap().index, 0);
}
