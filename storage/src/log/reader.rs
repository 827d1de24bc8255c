//! Reading entries: from memory, else from the segments.
//!
//! Invariants:
//! - what comes from the disk has passed both checksums and is the entry that was asked for;
//! - what does not, spoils the group's log at once (`shared`): nobody goes on with a log that has a hole.
//!
//! Not here: which entries there are (`group_index`), recovery's scan.

use super::group::Group;
use super::group_index::{OnDisk, Source};
use super::record::{HEADER_BYTES, RecordHeader, RecordKind, Seed, record_bytes};
use super::segment::Segment;
use super::shared::Shared;
use super::{Entry, GroupKey};
use bytes::Bytes;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Neighbours in a segment are read together up to this.
const RUN_BYTES_MAX: u64 = 1 << 20;
/// How often a read that lost a race against a purge or a relocation looks again.
const ATTEMPTS: usize = 8;

/// The entries of `range` that exist, from its first one on: at least one, then while they fit `bytes_max`.
pub(super) fn read(
    shared: &Shared,
    group: &Arc<Group>,
    range: Range<u64>,
    bytes_max: u64,
) -> io::Result<Vec<Entry>> {
    for _attempt in 0..ATTEMPTS {
        let sources = {
            let index = group.lock();
            index.check_whole(group.key)?;
            index.sources(range.clone(), bytes_max)
        };
        let read = resolve(shared, group.key, sources).inspect_err(|error| note_damage(shared, group, error));
        if let Some(entries) = read? {
            return Ok(entries);
        }
    }
    Err(io::Error::new(
        io::ErrorKind::NotFound,
        format!("entries {}..{} of {} are in no segment", range.start, range.end, group.key),
    ))
}

/// Reads entries that are to be copied forward.
pub(super) fn read_for_relocation(
    shared: &Shared,
    group: &Arc<Group>,
    entries: &[OnDisk],
) -> io::Result<Vec<(OnDisk, Entry)>> {
    let sources = entries.iter().map(|&entry| Source::Disk(entry)).collect();
    let read = resolve(shared, group.key, sources).inspect_err(|error| note_damage(shared, group, error));
    let read = read?.ok_or(io::ErrorKind::NotFound)?;
    Ok(entries.iter().copied().zip(read).collect())
}

/// A file that is short, a disk that cannot read it, a checksum that does not fit: these bytes do not come back.
fn note_damage(shared: &Shared, group: &Arc<Group>, error: &io::Error) {
    if matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof) {
        shared.spoil(group, error.to_string(), None);
    }
}

/// `None` if a segment is gone: the sources are stale.
fn resolve(shared: &Shared, key: GroupKey, sources: Vec<Source>) -> io::Result<Option<Vec<Entry>>> {
    let mut entries = Vec::with_capacity(sources.len());
    let mut run: Vec<OnDisk> = Vec::new();
    for source in sources {
        match source {
            Source::Disk(entry) => {
                if !continues(&run, &entry) && !read_run(shared, key, &mut run, &mut entries)? {
                    return Ok(None);
                }
                run.push(entry);
            }
            Source::Memory(entry) => {
                if !read_run(shared, key, &mut run, &mut entries)? {
                    return Ok(None);
                }
                entries.push(entry);
            }
        }
    }
    Ok(read_run(shared, key, &mut run, &mut entries)?.then_some(entries))
}

/// Whether the entry lies right behind the run, and still fits it.
fn continues(run: &[OnDisk], entry: &OnDisk) -> bool {
    let (Some(first), Some(last)) = (run.first(), run.last()) else { return false };
    let end = last.position.offset + record_bytes(last.body_len as usize);
    last.position.segment == entry.position.segment
        && end == entry.position.offset
        && end + record_bytes(entry.body_len as usize) - first.position.offset <= RUN_BYTES_MAX
}

/// Reads neighbouring records with one read; false if their segment is gone.
fn read_run(
    shared: &Shared,
    key: GroupKey,
    run: &mut Vec<OnDisk>,
    entries: &mut Vec<Entry>,
) -> io::Result<bool> {
    let (Some(first), Some(last)) = (run.first(), run.last()) else { return Ok(true) };
    let Some(segment) = shared.segments.get(first.position.segment) else { return Ok(false) };
    let start = first.position.offset;
    // Without the last one's padding: a trimmed file may end before it.
    let end = last.position.offset + (HEADER_BYTES + last.body_len as usize) as u64;
    // The lengths come from our own index, which took them from checked headers.
    let mut buffer = vec![0; (end - start) as usize];
    segment.file.read_exact_at(&mut buffer, start).map_err(|error| {
        let what = format!("{} at offset {start}: {error}, reading entries of {key}", segment.path.display());
        // EIO: the disk has lost it.
        match error.raw_os_error() {
            Some(libc::EIO) => io::Error::new(io::ErrorKind::InvalidData, what),
            _ => io::Error::new(error.kind(), what),
        }
    })?;
    let buffer = Bytes::from(buffer);
    for wanted in run.drain(..) {
        entries.push(decode(key, &segment, &wanted, &buffer, start)?);
    }
    Ok(true)
}

fn decode(
    key: GroupKey,
    segment: &Arc<Segment>,
    wanted: &OnDisk,
    buffer: &Bytes,
    start: u64,
) -> io::Result<Entry> {
    let seed = Seed::of_segment(segment.number);
    let at = (wanted.position.offset - start) as usize;
    let corrupt = |what: &str| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!(
                "{} at offset {}: {what}, expected entry {} of {key}",
                segment.path.display(),
                wanted.position.offset,
                wanted.index
            ),
        )
    };
    let header = RecordHeader::decode(seed, &buffer[at..]).ok_or_else(|| corrupt("unreadable record"))?;
    if header.kind != RecordKind::Entry
        || header.key != key
        || header.index != wanted.index
        || header.body_len != wanted.body_len
    {
        return Err(corrupt("another record"));
    }
    let payload = buffer.slice(at + HEADER_BYTES..at + HEADER_BYTES + wanted.body_len as usize);
    if !header.is_body(seed, &payload) {
        return Err(corrupt("bad checksum"));
    }
    Ok(Entry {
        index: header.index,
        term: header.term,
        leader: header.leader,
        kind: header.entry_kind,
        time_ms: header.time_ms,
        payload,
    })
}
