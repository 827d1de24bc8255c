//! A segment file: its name, its header, and a position in the log.
//!
//! ```text
//! offset  0  magic    8 bytes  "EVSHLOG\0"
//!         8  version  u32
//!        12  crc      u32      over all of the header but itself
//!        16  number   u64      unique in this log, never reused
//!        24  proven   u64      offset in the segment before this one that was synced when this one was made
//!        32  records
//! ```
//!
//! Invariants:
//! - Segment numbers of a log are consecutive. The first record of a segment is a mark that says where the one
//!   before it ends.
//! - The header and the name are durable before the first record is written.
//!
//! Not here: records.

use super::LogError;
use crate::disk::{Disk, DiskFile};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a segment before its first record.
pub(super) const SEGMENT_HEADER_BYTES: u64 = 32;
const HEADER_LEN: usize = SEGMENT_HEADER_BYTES as usize;
const MAGIC: &[u8; 8] = b"EVSHLOG\0";
const VERSION: u32 = 1;
const SUFFIX: &str = ".log";
const SPARE_PREFIX: &str = "spare-";

/// A position in the log, or how far it is synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Position {
    pub(super) segment: u64,
    pub(super) offset: u64,
}

/// An open segment.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) number: u64,
    pub(super) path: PathBuf,
    pub(super) file: Arc<dyn DiskFile>,
    /// Up to here the file has space, so that a write below it finds the disk never full.
    reserved: AtomicU64,
    /// Up to here it was written once, if only with zeros.
    filled: u64,
}

/// What a segment's header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeaderCheck {
    /// Intact; the offset in the segment before that was synced when this one was made.
    Good(u64),
    /// Never finished, or damaged.
    Bad,
    /// Intact, but of another format version.
    OtherVersion(u32),
}

/// How a segment's space is reserved.
///
/// Syncing a write into blocks that were written before costs a third of syncing one into blocks that are only
/// allocated (0.13 against 0.31 ms for 64 KiB, and the 99th percentile a sixth: the file system's journal stays out of
/// it). So a segment is made of an old one that is not needed any more, else its first `filled` bytes are written as
/// zeros; what follows is allocated only.
pub(super) struct Space<'a> {
    /// Bytes of the segment.
    pub(super) bytes: u64,
    /// Bytes to write as zeros.
    pub(super) filled: u64,
    /// Whether somebody waits for the segment: then it is taken as far as it is.
    pub(super) is_urgent: &'a dyn Fn() -> bool,
}

/// Zeros written at a time.
const FILL_BYTES: usize = 1 << 20;
/// Zeros written where somebody waits anyway: when a log is opened, or a segment was not prepared in time.
const FOREGROUND_FILL_BYTES: u64 = 4 << 20;

impl Space<'_> {
    /// For a segment that is needed now.
    pub(super) fn foreground(bytes: u64) -> Self {
        Space { bytes, filled: FOREGROUND_FILL_BYTES.min(bytes), is_urgent: &|| false }
    }
}

impl Segment {
    /// Creates the file, or makes it of a spare one, reserves its space, and makes header and name durable.
    /// `synced` is how far the log is synced by now.
    pub(super) fn create(
        disk: &dyn Disk,
        directory: &Path,
        number: u64,
        synced: Position,
        spare: Option<Segment>,
        space: &Space<'_>,
    ) -> Result<Self, LogError> {
        let path = directory.join(file_name(number));
        let mut segment = match spare {
            Some(spare) => {
                disk.rename(&spare.path, &path).map_err(LogError::io("rename", &spare.path))?;
                Segment { number, path, ..spare }
            }
            None => {
                let file = disk.create(&path).map_err(LogError::io("create", &path))?;
                Segment { number, path, file, reserved: AtomicU64::new(0), filled: 0 }
            }
        };
        let made = segment.make(disk, directory, synced, space);
        if let Err(error) = &made
            && error.is_disk_full()
        {
            // The name is needed for the next try.
            let _absent = disk.remove_file(&segment.path);
        }
        made.map(|()| segment)
    }

    fn make(
        &mut self,
        disk: &dyn Disk,
        directory: &Path,
        synced: Position,
        space: &Space<'_>,
    ) -> Result<(), LogError> {
        let number = self.number;
        let segment = self;
        let length = segment.file.length().map_err(LogError::io("read", &segment.path))?;
        segment.filled = segment.filled.min(length);
        segment.reserve(segment.filled, space)?;
        let proven = if synced.segment + 1 == number { synced.offset } else { 0 };
        let header = encode_header(number, proven);
        segment.file.write_all_at(&header, 0).map_err(LogError::io("write", &segment.path))?;
        segment.file.sync_all().map_err(LogError::io("sync", &segment.path))?;
        disk.sync_dir(directory).map_err(LogError::io("sync the directory of", &segment.path))
    }

    /// Takes space from the disk for a segment to come, without a word in it.
    pub(super) fn create_spare(disk: &dyn Disk, directory: &Path, bytes: u64) -> Result<Self, LogError> {
        // Numbers of segments begin with 1.
        let path = directory.join(spare_name(0));
        let file = disk.create(&path).map_err(LogError::io("create", &path))?;
        let spare = Segment { number: 0, path, file, reserved: AtomicU64::new(0), filled: 0 };
        if let Err(error) = spare.extend(bytes) {
            let _absent = disk.remove_file(&spare.path);
            return Err(error);
        }
        Ok(spare)
    }

    /// Makes of a segment that is not needed any more a spare with this name, written up to `filled` before.
    pub(super) fn into_spare(self, path: PathBuf, filled: u64) -> Self {
        Segment { path, filled, ..self }
    }

    /// Up to here the file has space.
    pub(super) fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Takes space from the disk up to `end`.
    pub(super) fn extend(&self, end: u64) -> Result<(), LogError> {
        if end > self.reserved() {
            self.file.allocate(end).map_err(LogError::io("reserve space in", &self.path))?;
            self.reserved.store(end, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Gives back what lies behind `end`.
    pub(super) fn cut(&self, end: u64) -> Result<(), LogError> {
        self.file.set_length(end).map_err(LogError::io("cut", &self.path))?;
        self.reserved.store(end, Ordering::Relaxed);
        Ok(())
    }

    /// Takes the space first, then writes zeros into it behind `written`.
    pub(super) fn reserve(&self, written: u64, space: &Space<'_>) -> Result<(), LogError> {
        self.extend(space.bytes.max(SEGMENT_HEADER_BYTES))?;
        let filled = written.saturating_add(space.filled).min(space.bytes);
        let zeros = vec![0; FILL_BYTES.min(filled.saturating_sub(written) as usize)];
        let mut offset = written;
        while offset < filled && !(space.is_urgent)() {
            let bytes = zeros.len().min((filled - offset) as usize);
            self.file
                .write_all_at(&zeros[..bytes], offset)
                .map_err(LogError::io("write zeros into", &self.path))?;
            // A little at a time, so that the writer's syncs find no long queue.
            self.file.sync_data().map_err(LogError::io("sync", &self.path))?;
            offset += bytes as u64;
        }
        Ok(())
    }

    pub(super) fn open(disk: &dyn Disk, directory: &Path, number: u64) -> Result<Self, LogError> {
        let path = directory.join(file_name(number));
        let file = disk.open(&path).map_err(LogError::io("open", &path))?;
        // What it has beyond its end goes when the log is opened, and is taken anew.
        Ok(Segment { number, path, file, reserved: AtomicU64::new(0), filled: 0 })
    }
}

/// The name of a segment that is not needed any more and waits to become another.
pub(super) fn spare_name(number: u64) -> String {
    format!("{SPARE_PREFIX}{number:020}")
}

/// Whether a file is a spare segment; they are removed when the log is opened.
pub(super) fn is_spare_name(name: &str) -> bool {
    name.starts_with(SPARE_PREFIX)
}

/// `00000000000000000017.log`.
pub(super) fn file_name(number: u64) -> String {
    format!("{number:020}{SUFFIX}")
}

/// The number in a segment's name; `None` for other files.
pub(super) fn parse_file_name(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(SUFFIX)?;
    let number = digits.parse().ok()?;
    (file_name(number) == name).then_some(number)
}

pub(super) fn encode_header(number: u64, proven: u64) -> [u8; HEADER_LEN] {
    let mut bytes = [0; HEADER_LEN];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[16..24].copy_from_slice(&number.to_le_bytes());
    bytes[24..].copy_from_slice(&proven.to_le_bytes());
    let crc = header_crc(&bytes);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// Looks at the first bytes of a segment file of this number.
pub(super) fn check_header(bytes: &[u8], number: u64) -> HeaderCheck {
    let Some(header) = bytes.first_chunk::<HEADER_LEN>() else { return HeaderCheck::Bad };
    let number_at = |offset: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&header[offset..offset + 8]);
        u64::from_le_bytes(bytes)
    };
    let version = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
    if !header.starts_with(MAGIC) || header[12..16] != header_crc(header).to_le_bytes() {
        return HeaderCheck::Bad;
    }
    match version {
        VERSION if number_at(16) == number => HeaderCheck::Good(number_at(24)),
        VERSION => HeaderCheck::Bad,
        other => HeaderCheck::OtherVersion(other),
    }
}

/// The version this program writes.
pub(super) fn known_version() -> u32 {
    VERSION
}

fn header_crc(bytes: &[u8; HEADER_LEN]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bytes[..12]);
    hasher.update(&bytes[16..]);
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_and_parse() {
        assert_eq!(file_name(17), "00000000000000000017.log");
        for number in [0, 1, 17, u64::MAX] {
            assert_eq!(parse_file_name(&file_name(number)), Some(number));
        }
        assert!(file_name(9) < file_name(10));
        for other in ["floor", "17.log", "00000000000000000017.log.tmp", "+0000000000000000017.log"] {
            assert_eq!(parse_file_name(other), None);
        }
    }

    #[test]
    fn headers_tell_damage_from_versions() {
        let header = encode_header(5, 77);
        assert_eq!(check_header(&header, 5), HeaderCheck::Good(77));
        assert_eq!(check_header(&header, 6), HeaderCheck::Bad);
        assert_eq!(check_header(&header[..31], 5), HeaderCheck::Bad);
        assert_eq!(check_header(&[0; HEADER_LEN], 5), HeaderCheck::Bad);
        for bit in 0..header.len() * 8 {
            let mut flipped = header;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(check_header(&flipped, 5), HeaderCheck::Bad, "bit {bit}");
        }
        let mut newer = header;
        newer[8] = 2;
        let crc = header_crc(&newer);
        newer[12..16].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(check_header(&newer, 5), HeaderCheck::OtherVersion(2));
    }
}
