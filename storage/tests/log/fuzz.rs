//! Whole logs under arbitrary damage: opening one never panics, and gives what was written or says what is lost.

use crate::model::{Model, ModelGroup, contents, entry, floor, ok, open, segments};
use bytes::Bytes;
use evershard_storage::log::{Driver, Entry, EntryId, LogError};
use evershard_storage::testing::SimDisk;
use proptest::prelude::*;

/// Three groups with entries, votes, a purge and a truncation, over some segments; the process was killed.
fn log() -> (SimDisk, Model) {
    let disk = SimDisk::new(1);
    let (log, _) = open(&disk, Driver::Inline).unwrap();
    for number in 1..4_u64 {
        let group = log.group(number, number * 10).unwrap();
        for index in 0..8 {
            group.append(vec![appended(number, index)], ok());
        }
        group.save_vote(Bytes::from(format!("vote {number}")), ok());
        if number == 2 {
            group.purge_through(EntryId { index: 1, term: 1, leader: 101 }, ok());
        }
        if number == 3 {
            group.truncate_from(6, ok());
        }
    }
    drop(log);
    disk.kill_process();
    let copy = disk.fork(2);
    let (log, recovery) = open(&copy, Driver::Inline).unwrap();
    let model = contents(&log, &recovery);
    assert!(segments(&disk).len() > 1 && model.len() == 3);
    (disk, model)
}

fn appended(group: u64, index: u64) -> Entry {
    entry(index, 1, &vec![index as u8; (group as usize * 97 + index as usize * 61) % 500])
}

/// Entries that were there once, each the one it was, without a hole (`contents` sees to that). A truncation or a purge at
/// the unproven end may be lost.
fn is_of(found: &ModelGroup, group: u64) -> bool {
    found.entries.iter().all(|(index, entry)| *index < 8 && *entry == appended(group, *index))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    #[test]
    fn fuzz_log(which in any::<prop::sample::Index>(), seed: u64, damage in prop::collection::vec(damage(), 1..4), is_floor_old: bool) {
        let (disk, model) = log();
        let disk = disk.fork(seed);
        let files = disk.files();
        let path = which.get(&files).clone();
        if is_floor_old {
            disk.edit(floor(), |bytes| bytes[4096..].fill(0));
        }
        disk.edit(&path, |bytes| damage.iter().for_each(|damage| damage.apply(bytes)));
        let (log, recovery) = match open(&disk, Driver::Inline) {
            Ok(opened) => opened,
            // Refused with the file's name, nothing changed.
            Err(error) => {
                prop_assert!(matches!(error, LogError::UnsupportedVersion { .. }), "{}", error);
                return Ok(());
            }
        };
        let found = contents(&log, &recovery);
        for (key, found) in &found {
            let written = &model[key];
            prop_assert!(is_of(found, key.group), "{:?}: {:?}, written {:?}", path, found, written);
            // With the newest floor, what is missing is told of.
            let is_noticed = !recovery.damage.is_empty() || !recovery.quarantined.is_empty();
            prop_assert!(is_floor_old || is_noticed || found == written, "{:?}: {:?}, written {:?}", path, found, written);
        }
        let is_noticed = |key| {
            !recovery.damage.is_empty() || recovery.quarantined.iter().any(|group| group.key == key)
        };
        for key in model.keys().filter(|key| !found.contains_key(key)) {
            prop_assert!(is_floor_old || is_noticed(*key), "{:?}: {} is gone", path, key);
        }
    }
}

fn damage() -> impl Strategy<Value = evershard_formats::damage::Damage> {
    evershard_formats::damage::damage()
}

/// Opening a log costs more than decoding a record: a quarter of the usual number.
fn cases() -> u32 {
    (ProptestConfig::default().cases / 4).max(1)
}
