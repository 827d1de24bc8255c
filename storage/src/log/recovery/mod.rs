//! Opening a log: scan every segment, judge, replay, put the end in order, and write down what was lost.
//!
//! Invariants:
//! - Opening twice gives the same as opening once, wherever the first was interrupted.
//! - Nothing damaged is removed or overwritten: after new damage the log goes on in a new segment.
//! - The quarantines are durable before the floor names the new boot and before anybody sees the log.
//!
//! Not here: what the handles do afterwards.

mod replay;
pub(super) mod scan;
mod verdict;

use self::replay::Replay;
use self::scan::SegmentScan;
use self::verdict::{Verdict, judge};
use super::batch::Batch;
use super::floor::{Floor, FloorFound, FloorRecord};
use super::group_index::GroupIndex;
use super::record::RecordHeader;
use super::segment::{
    HeaderCheck, Position, SEGMENT_HEADER_BYTES, Segment, Space, file_name, is_spare_name, known_version,
    parse_file_name,
};
use super::{Durability, GroupKey, LogError, LogOptions, QuarantineCause};
use crate::disk::Disk;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::Arc;

/// An opened log, before it has a driver.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) groups: BTreeMap<GroupKey, GroupIndex>,
    pub(super) segments: Vec<(Arc<Segment>, u64)>,
    pub(super) active: Arc<Segment>,
    /// The end of the log, synced.
    pub(super) end: Position,
    /// How far the log is synced, as the next mark says it.
    pub(super) synced: Position,
    pub(super) floor: Floor,
    pub(super) is_fresh: bool,
    pub(super) damage: Vec<String>,
    pub(super) torn_bytes: u64,
    pub(super) is_boot_changed: bool,
}

/// The floor as far as it matters here.
struct Known {
    first: u64,
    synced: Position,
    is_boot_changed: bool,
    damage: Option<String>,
}

/// Opens or creates the log in `options.directory`.
pub(super) fn open(options: &LogOptions, disk: &dyn Disk) -> Result<Opened, LogError> {
    let directory = &options.directory;
    disk.create_dir_all(directory).map_err(LogError::io("create", directory))?;
    let names = disk.list(directory).map_err(LogError::io("list", directory))?;
    for name in names.iter().filter(|name| is_spare_name(name)) {
        let spare = directory.join(name);
        disk.remove_file(&spare).map_err(LogError::io("remove", &spare))?;
    }
    let mut numbers: Vec<u64> = names.iter().filter_map(|name| parse_file_name(name)).collect();
    numbers.sort_unstable();
    let found = Floor::read(disk, directory)?;
    let is_fresh = numbers.is_empty() && is_untouched(&found);
    if is_fresh && options.must_exist {
        return Err(LogError::Gone { path: directory.clone() });
    }
    if is_fresh {
        return create(options, disk);
    }
    let known = known(options, found, &numbers);
    let mut scans = BTreeMap::new();
    for &number in numbers.iter().filter(|&&number| number >= known.first) {
        scans.insert(number, scan_file(options, disk, number)?);
    }
    let mut verdict = judge(known.first, known.synced, &scans);
    verdict.damage.extend(known.damage.clone());
    let (mut groups, mut quarantined) = replay(&scans, &verdict);
    if !verdict.damage.is_empty() {
        let reason = verdict.damage.join("; ");
        quarantine_all(&mut groups, &mut quarantined, QuarantineCause::Damage, &reason);
    }
    if known.is_boot_changed {
        let reason = "the operating system restarted while the log was open with durability memory";
        quarantine_all(&mut groups, &mut quarantined, QuarantineCause::OsRestart, reason);
    }
    for (key, (cause, reason)) in &quarantined {
        if let Some(index) = groups.get_mut(key) {
            quarantine(index, *cause, reason);
        }
    }
    let torn_bytes = remove_leftovers(options, disk, &numbers, known.first, &scans, &verdict)?;
    let mut opened = go_on(options, disk, &known, verdict, &quarantined)?;
    for key in quarantined.keys() {
        if let Some(index) = groups.get_mut(key) {
            index.anchors.quarantine = Some(opened.active.number);
        }
    }
    opened.groups = groups;
    opened.torn_bytes = torn_bytes;
    opened.is_boot_changed = known.is_boot_changed;
    Ok(opened)
}

type Quarantines = BTreeMap<GroupKey, (QuarantineCause, String)>;

/// Whether nothing was ever written: the floor is made before the first segment.
fn is_untouched(found: &FloorFound) -> bool {
    match found {
        FloorFound::Missing => true,
        FloorFound::Unreadable => false,
        FloorFound::Good(floor) => floor.first_segment == 1 && floor.synced == Position::default(),
    }
}

fn create(options: &LogOptions, disk: &dyn Disk) -> Result<Opened, LogError> {
    if let Some(parent) = options.directory.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        disk.sync_dir(parent).map_err(LogError::io("sync", parent))?;
    }
    let floor = Floor::create(disk, &options.directory, floor_record(options, 1, Position::default()))?;
    let space = Space::foreground(options.segment_bytes);
    let active = Arc::new(Segment::create(disk, &options.directory, 1, Position::default(), None, &space)?);
    Ok(Opened {
        groups: BTreeMap::new(),
        segments: vec![(active.clone(), SEGMENT_HEADER_BYTES)],
        active,
        end: Position { segment: 1, offset: SEGMENT_HEADER_BYTES },
        synced: Position::default(),
        floor,
        is_fresh: true,
        damage: Vec::new(),
        torn_bytes: 0,
        is_boot_changed: false,
    })
}

fn known(options: &LogOptions, found: FloorFound, numbers: &[u64]) -> Known {
    match found {
        FloorFound::Good(floor) => Known {
            first: floor.first_segment,
            synced: floor.synced,
            is_boot_changed: floor.durability == Durability::Memory
                && !floor.is_clean
                && floor.boot_id != options.boot_id,
            damage: None,
        },
        FloorFound::Missing | FloorFound::Unreadable => Known {
            first: numbers.first().copied().unwrap_or(1),
            synced: Position::default(),
            is_boot_changed: false,
            damage: Some("the floor file is missing or unreadable".to_owned()),
        },
    }
}

fn floor_record(options: &LogOptions, first_segment: u64, synced: Position) -> FloorRecord {
    FloorRecord {
        first_segment,
        synced,
        durability: options.durability,
        is_clean: false,
        boot_id: options.boot_id.clone(),
    }
}

fn scan_file(options: &LogOptions, disk: &dyn Disk, number: u64) -> Result<SegmentScan, LogError> {
    let path = options.directory.join(file_name(number));
    // Room for what one batch may go beyond the end; the file's length is a fact, not a claim.
    let bytes = crate::disk::read_whole(disk, &path, u64::MAX).map_err(LogError::io("read", &path))?;
    let scan = scan::scan(number, &bytes);
    if let HeaderCheck::OtherVersion(found) = scan.header {
        return Err(LogError::UnsupportedVersion { path, found, known: known_version() });
    }
    Ok(scan)
}

fn replay(
    scans: &BTreeMap<u64, SegmentScan>,
    verdict: &Verdict,
) -> (BTreeMap<GroupKey, GroupIndex>, Quarantines) {
    let mut replay = Replay::default();
    for (&number, &end) in &verdict.ends {
        let records = scans.get(&number).map(|scan| scan.records.as_slice()).unwrap_or_default();
        for record in records.iter().take_while(|record| record.offset < end) {
            replay.take(number, record);
        }
    }
    let (groups, problems) = replay.finish();
    let quarantined = problems.into_iter().map(|(key, reason)| (key, (QuarantineCause::Damage, reason)));
    (groups, quarantined.collect())
}

fn quarantine_all(
    groups: &mut BTreeMap<GroupKey, GroupIndex>,
    quarantined: &mut Quarantines,
    cause: QuarantineCause,
    reason: &str,
) {
    // An operating system's restart can be forgiven; damage cannot, and takes its place.
    let is_news = |known: &Option<(QuarantineCause, String)>| match known {
        None => true,
        Some((known, _)) => cause == QuarantineCause::Damage && *known != QuarantineCause::Damage,
    };
    for (&key, _) in groups.iter().filter(|(_, index)| is_news(&index.quarantine)) {
        quarantined.entry(key).or_insert_with(|| (cause, reason.to_owned()));
    }
}

/// After damage nothing of the group can be used, so it holds no segment back.
fn quarantine(index: &mut GroupIndex, cause: QuarantineCause, reason: &str) {
    if cause == QuarantineCause::Damage {
        *index = GroupIndex::default();
    }
    index.quarantine = Some((cause, reason.to_owned()));
}

/// Removes segments before the first and behind the end, and cuts the torn tail. Returns the bytes cut.
fn remove_leftovers(
    options: &LogOptions,
    disk: &dyn Disk,
    numbers: &[u64],
    first: u64,
    scans: &BTreeMap<u64, SegmentScan>,
    verdict: &Verdict,
) -> Result<u64, LogError> {
    let directory = &options.directory;
    let mut torn_bytes = 0;
    let mut is_any_removed = false;
    for &number in numbers.iter().filter(|&&number| number < first || !verdict.ends.contains_key(&number)) {
        let path = directory.join(file_name(number));
        disk.remove_file(&path).map_err(LogError::io("remove", &path))?;
        is_any_removed = true;
        torn_bytes += scans.get(&number).map_or(0, |scan| scan.end - SEGMENT_HEADER_BYTES);
    }
    if is_any_removed {
        disk.sync_dir(directory).map_err(LogError::io("sync", directory))?;
    }
    let Some(end) = verdict.end else { return Ok(torn_bytes) };
    let Some(scan) = scans.get(&end.segment) else { return Ok(torn_bytes) };
    if verdict.damage.is_empty() {
        torn_bytes += scan.end.saturating_sub(end.offset);
    }
    Ok(torn_bytes)
}

/// Chooses where the log goes on, makes all before it durable, and writes the new quarantines down.
fn go_on(
    options: &LogOptions,
    disk: &dyn Disk,
    known: &Known,
    verdict: Verdict,
    quarantined: &Quarantines,
) -> Result<Opened, LogError> {
    let directory = &options.directory;
    let mut segments = Vec::new();
    for (&number, &end) in &verdict.ends {
        segments.push((Arc::new(Segment::open(disk, directory, number)?), end));
    }
    let last = segments.last().cloned();
    if let (Some((segment, end)), true) = (&last, verdict.damage.is_empty()) {
        // What was read may be in the page cache only; and the torn tail must be gone before anything follows it.
        cut(segment, *end)?;
    } else if let Some((segment, _)) = &last {
        segment.file.sync_all().map_err(LogError::io("sync", &segment.path))?;
    }
    let mut synced = verdict.end.unwrap_or_default();
    let reusable = last.filter(|(_, end)| verdict.damage.is_empty() && *end < options.segment_bytes);
    let space = Space::foreground(options.segment_bytes);
    let (active, mut offset) = match reusable {
        Some((segment, end)) => {
            match segment.reserve(end, &space) {
                Ok(()) => {}
                // The log is opened all the same: what comes next waits for space.
                Err(error) if error.is_disk_full() => {
                    tracing::warn!(%error, "the log's disk is full");
                }
                Err(error) => return Err(error),
            }
            (segment, end)
        }
        None => {
            let highest = verdict.ends.keys().next_back().copied().unwrap_or(0);
            // Consecutive, unless the last ones are lost: their numbers are not used again.
            let number = highest.max(known.synced.segment) + 1;
            let leftover = directory.join(file_name(number));
            if disk.exists(&leftover).map_err(LogError::io("look for", &leftover))? {
                disk.remove_file(&leftover).map_err(LogError::io("remove", &leftover))?;
            }
            let segment = Arc::new(Segment::create(disk, directory, number, synced, None, &space)?);
            segments.push((segment.clone(), SEGMENT_HEADER_BYTES));
            (segment, SEGMENT_HEADER_BYTES)
        }
    };
    if !quarantined.is_empty() || !verdict.damage.is_empty() {
        let start = Position { segment: active.number, offset };
        let mut batch = Batch::new(start, synced);
        for (key, (cause, reason)) in quarantined {
            batch.put_quarantine(*key, *cause, reason);
        }
        if !verdict.damage.is_empty() {
            batch.put(RecordHeader::settled(), Bytes::from(verdict.damage.join("\n")));
        }
        active.extend(offset + batch.bytes())?;
        let path = &active.path;
        active.file.write_all_vectored_at(&batch.slices(), offset).map_err(LogError::io("write", path))?;
        active.file.sync_data().map_err(LogError::io("sync", path))?;
        offset += batch.bytes();
        synced = Position { segment: active.number, offset };
    }
    if let Some((_, end)) = segments.last_mut() {
        *end = offset;
    }
    let first = segments.first().map_or(active.number, |(segment, _)| segment.number);
    let floor = Floor::replace(disk, directory, floor_record(options, first, synced))?;
    Ok(Opened {
        groups: BTreeMap::new(),
        segments,
        end: Position { segment: active.number, offset },
        active,
        synced,
        floor,
        is_fresh: false,
        damage: verdict.damage,
        torn_bytes: 0,
        is_boot_changed: false,
    })
}

/// Makes the file end here, and all of it durable.
fn cut(segment: &Segment, end: u64) -> Result<(), LogError> {
    let path = &segment.path;
    let length = segment.file.length().map_err(LogError::io("read", path))?;
    if length != end {
        segment.cut(end)?;
    }
    segment.file.sync_all().map_err(LogError::io("sync", path))
}
