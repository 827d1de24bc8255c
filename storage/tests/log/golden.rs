//! The format on disk, held still: the bytes of a small log, and that they are still understood.
//!
//! If this fails the format has changed: that needs a new version number, and code that reads the old one.

use crate::model::{DIRECTORY, entry, floor, ok, open, segments};
use bytes::Bytes;
use evershard_storage::disk::Disk;
use evershard_storage::log::{Driver, EntryId};
use evershard_storage::testing::SimDisk;
use std::path::Path;

const SEGMENT: &str = include_str!("golden_segment.hex");
const FLOOR: &str = include_str!("golden_floor.hex");

fn write(disk: &SimDisk) {
    let (log, _) = open(disk, Driver::Manual).unwrap();
    let group = log.group(1, 10).unwrap();
    group.append((0..4).map(|index| entry(index, 1, format!("payload {index}").as_bytes())).collect(), ok());
    log.pump();
    group.save_vote(Bytes::from_static(b"vote"), ok());
    group.save_committed(Bytes::from_static(b"committed"));
    group.truncate_from(3, ok());
    group.purge_through(EntryId { index: 0, term: 1, leader: 101 }, ok());
    let gone = log.group(2, 20).unwrap();
    gone.destroy(ok());
    log.pump();
    log.close().unwrap();
}

/// The first KiB, and what else is not zero.
fn hex(bytes: &[u8]) -> String {
    let used = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1).next_multiple_of(16);
    let line = |line: &[u8]| line.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + "\n";
    bytes[..used.max(1024).min(bytes.len())].chunks(16).map(line).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

#[test]
fn the_bytes_are_the_same() {
    let disk = SimDisk::new(1);
    write(&disk);
    assert_eq!(segments(&disk).len(), 1);
    let segment = hex(&disk.contents(&segments(&disk)[0]).unwrap());
    let floor = hex(&disk.contents(floor()).unwrap());
    if std::env::var_os("EVERSHARD_BLESS").is_some() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/log");
        std::fs::write(directory.join("golden_segment.hex"), &segment).unwrap();
        std::fs::write(directory.join("golden_floor.hex"), &floor).unwrap();
        return;
    }
    assert_eq!(segment, SEGMENT);
    assert_eq!(floor, FLOOR);
}

#[test]
fn the_golden_bytes_are_understood() {
    let disk = SimDisk::new(1);
    for (name, hex) in [("00000000000000000001.log", SEGMENT), ("floor", FLOOR)] {
        let file = disk.create(&Path::new(DIRECTORY).join(name)).unwrap();
        file.write_all_at(&bytes(hex), 0).unwrap();
    }
    let (log, recovery) = open(&disk, Driver::Manual).unwrap();
    assert!(recovery.quarantined.is_empty() && recovery.damage.is_empty(), "{recovery:?}");
    assert_eq!(recovery.groups.len(), 1);
    let group = log.group(1, 10).unwrap();
    assert_eq!(
        group.read(0..9, u64::MAX).unwrap(),
        vec![entry(1, 1, b"payload 1"), entry(2, 1, b"payload 2")]
    );
    assert_eq!((group.vote().unwrap(), group.committed().unwrap()), ("vote".into(), "committed".into()));
    assert_eq!(group.state().last_purged, Some(EntryId { index: 0, term: 1, leader: 101 }));
}
