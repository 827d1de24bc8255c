//! The floor: a small file beside the segments that says what must be there.
//!
//! It makes a lost tail, a lost first segment or a lost directory noticeable, and remembers under which boot of the
//! operating system the log was last open.
//!
//! ```text
//! two slots, at offset 0 and 4096, each:
//!  0 magic 8 bytes "EVSHFLR\0" | 8 version u32 | 12 crc u32 over all else | 16 serial u64 | 24 first_segment u64
//!  32 synced segment u64 | 40 synced offset u64 | 48 durability u8 (0 fsync, 1 memory) | 49 clean u8 | 50 boot_len u8
//!  51 zeros | 64 boot id, 64 bytes, zero padded
//! ```
//!
//! Invariants:
//! - It never claims more than is synced: it is written after the sync it speaks of.
//! - Slot 1 is written after every sync, and not synced itself (kill -9 leaves it, a power cut leaves an older one).
//!   Slot 0 is written only after slot 1 was synced: one of the two is always whole.
//! - `first_segment` is raised durably before a segment is removed.
//! - Opening a log needs no space for it.
//!
//! Not here: what follows from it (`recovery`).

use super::segment::Position;
use super::{Durability, LogError};
use crate::disk::{Disk, DiskFile};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const NAME: &str = "floor";
const MAGIC: &[u8; 8] = b"EVSHFLR\0";
const VERSION: u32 = 1;
const SLOT_BYTES: usize = 128;
const BOOT_ID_BYTES: usize = 64;
const SLOT_OFFSETS: [u64; 2] = [0, 4096];

/// What must be there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FloorRecord {
    /// Segments before this one are gone for good.
    pub(super) first_segment: u64,
    /// The log was synced up to here.
    pub(super) synced: Position,
    /// How appends were acknowledged.
    pub(super) durability: Durability,
    /// Closed in order: everything written was synced.
    pub(super) is_clean: bool,
    /// The boot of the operating system under which the log was open.
    pub(super) boot_id: String,
}

/// The open floor file.
#[derive(Debug)]
pub(super) struct Floor {
    path: PathBuf,
    file: Arc<dyn DiskFile>,
    serial: u64,
    record: FloorRecord,
}

/// What reading the floor found.
#[derive(Debug)]
pub(super) enum FloorFound {
    Missing,
    Unreadable,
    Good(FloorRecord),
}

impl Floor {
    /// Whether there is a floor file, and what it says.
    pub(super) fn read(disk: &dyn Disk, directory: &Path) -> Result<FloorFound, LogError> {
        let path = directory.join(NAME);
        if !disk.exists(&path).map_err(LogError::io("look for", &path))? {
            return Ok(FloorFound::Missing);
        }
        let file = disk.open(&path).map_err(LogError::io("open", &path))?;
        let length = file.length().map_err(LogError::io("read", &path))?;
        let mut newest: Option<(u64, FloorRecord)> = None;
        for offset in SLOT_OFFSETS {
            if length < offset + SLOT_BYTES as u64 {
                continue;
            }
            let mut slot = [0; SLOT_BYTES];
            file.read_exact_at(&mut slot, offset).map_err(LogError::io("read", &path))?;
            match decode(&slot) {
                Slot::Bad => {}
                Slot::OtherVersion(found) => {
                    return Err(LogError::UnsupportedVersion { path, found, known: VERSION });
                }
                Slot::Good(serial, record) => {
                    if newest.as_ref().is_none_or(|(newest, _)| serial > *newest) {
                        newest = Some((serial, record));
                    }
                }
            }
        }
        Ok(newest.map_or(FloorFound::Unreadable, |(_, record)| FloorFound::Good(record)))
    }

    /// Writes a whole new floor file, durably.
    pub(super) fn create(disk: &dyn Disk, directory: &Path, record: FloorRecord) -> Result<Self, LogError> {
        let path = directory.join(NAME);
        let mut bytes = vec![0; SLOT_OFFSETS[1] as usize + SLOT_BYTES];
        for (serial, offset) in (1_u64..).zip(SLOT_OFFSETS) {
            let start = offset as usize;
            bytes[start..start + SLOT_BYTES].copy_from_slice(&encode(serial, &record));
        }
        crate::disk::write_durably(disk, &path, &bytes)
            .map_err(|error| LogError::io("replace", &error.path)(error.source))?;
        let file = disk.open(&path).map_err(LogError::io("open", &path))?;
        Ok(Floor { path, file, serial: SLOT_OFFSETS.len() as u64, record })
    }

    /// Says it in the floor file there is, which takes no space; in a new one if there is none to be trusted.
    pub(super) fn replace(disk: &dyn Disk, directory: &Path, record: FloorRecord) -> Result<Self, LogError> {
        let path = directory.join(NAME);
        if !disk.exists(&path).map_err(LogError::io("look for", &path))? {
            return Floor::create(disk, directory, record);
        }
        let file = disk.open(&path).map_err(LogError::io("open", &path))?;
        let length = file.length().map_err(LogError::io("read", &path))?;
        let mut serials = [None; 2];
        for (serial, offset) in serials.iter_mut().zip(SLOT_OFFSETS) {
            let mut slot = [0; SLOT_BYTES];
            if length >= offset + SLOT_BYTES as u64 {
                file.read_exact_at(&mut slot, offset).map_err(LogError::io("read", &path))?;
                if let Slot::Good(found, _) = decode(&slot) {
                    *serial = Some(found);
                }
            }
        }
        let Some(serial) = serials.into_iter().flatten().max() else {
            return Floor::create(disk, directory, record);
        };
        let mut floor = Floor { path, file, serial, record };
        // While one slot is written the other one must be whole.
        let order = if serials[0].is_none() { [0, 1] } else { [1, 0] };
        floor.write_slots(order).map_err(LogError::io("sync", &directory.join(NAME)))?;
        Ok(floor)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Says how far the log is synced; fast, durable at leisure.
    pub(super) fn note_synced(&mut self, synced: Position) -> io::Result<()> {
        if synced <= self.record.synced {
            return Ok(());
        }
        self.record.synced = synced;
        self.write_slot(1)
    }

    /// Changes the floor durably.
    pub(super) fn change(&mut self, change: impl FnOnce(&mut FloorRecord)) -> io::Result<()> {
        change(&mut self.record);
        self.write_slots([1, 0])
    }

    fn write_slots(&mut self, order: [usize; 2]) -> io::Result<()> {
        for slot in order {
            self.write_slot(slot)?;
            self.file.sync_data()?;
        }
        Ok(())
    }

    fn write_slot(&mut self, slot: usize) -> io::Result<()> {
        self.serial += 1;
        self.file.write_all_at(&encode(self.serial, &self.record), SLOT_OFFSETS[slot])
    }
}

enum Slot {
    Bad,
    OtherVersion(u32),
    Good(u64, FloorRecord),
}

fn encode(serial: u64, record: &FloorRecord) -> [u8; SLOT_BYTES] {
    let mut bytes = [0; SLOT_BYTES];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    let numbers = [serial, record.first_segment, record.synced.segment, record.synced.offset];
    for (field, number) in bytes[16..48].chunks_exact_mut(8).zip(numbers) {
        field.copy_from_slice(&number.to_le_bytes());
    }
    bytes[48] = u8::from(record.durability == Durability::Memory);
    bytes[49] = u8::from(record.is_clean);
    let boot_id = &record.boot_id.as_bytes()[..record.boot_id.len().min(BOOT_ID_BYTES)];
    bytes[50] = boot_id.len() as u8;
    bytes[64..64 + boot_id.len()].copy_from_slice(boot_id);
    let crc = slot_crc(&bytes);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8; SLOT_BYTES]) -> Slot {
    let number = |offset: usize| {
        let mut number = [0; 8];
        number.copy_from_slice(&bytes[offset..offset + 8]);
        u64::from_le_bytes(number)
    };
    if !bytes.starts_with(MAGIC) || bytes[12..16] != slot_crc(bytes).to_le_bytes() {
        return Slot::Bad;
    }
    let version = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
    if version != VERSION {
        return Slot::OtherVersion(version);
    }
    let boot_len = usize::from(bytes[50]).min(BOOT_ID_BYTES);
    let record = FloorRecord {
        first_segment: number(24),
        synced: Position { segment: number(32), offset: number(40) },
        durability: if bytes[48] == 0 { Durability::Fsync } else { Durability::Memory },
        is_clean: bytes[49] != 0,
        boot_id: String::from_utf8_lossy(&bytes[64..64 + boot_len]).into_owned(),
    };
    Slot::Good(number(16), record)
}

fn slot_crc(bytes: &[u8; SLOT_BYTES]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bytes[..12]);
    hasher.update(&bytes[16..]);
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Loss, SimDisk};
    use evershard_formats::{bytes_or_damaged, frugal, one_bit};
    use proptest::prelude::*;

    proptest! {
        /// Whatever the floor's file holds: what it says was written, or it says nothing.
        #[test]
        fn fuzz_floor(bytes in bytes_or_damaged((0..9_u64).prop_map(file))) {
            let disk = SimDisk::new(1);
            let floor = disk.create(&Path::new("/log").join(NAME)).unwrap();
            floor.write_all_at(&bytes, 0).unwrap();
            let found = frugal(bytes.len(), || Floor::read(&disk, Path::new("/log")));
            if let Ok(FloorFound::Good(found)) = found {
                prop_assert!(found == record(100) || found == record(200), "{:?}", found);
            }
        }

        #[test]
        fn fuzz_floor_one_bit((valid, flipped) in one_bit((0..9_u64).prop_map(|serial| encode(serial, &record(100)).to_vec()))) {
            let read = |bytes: &[u8]| decode(bytes.first_chunk().unwrap());
            prop_assert!(matches!(read(&valid), Slot::Good(..)));
            prop_assert!(matches!(read(&flipped), Slot::Bad));
        }
    }

    fn file(serial: u64) -> Vec<u8> {
        let mut bytes = vec![0; SLOT_OFFSETS[1] as usize];
        bytes[..SLOT_BYTES].copy_from_slice(&encode(serial, &record(100)));
        bytes.extend_from_slice(&encode(serial + 1, &record(200)));
        bytes
    }

    fn record(offset: u64) -> FloorRecord {
        FloorRecord {
            first_segment: 1,
            synced: Position { segment: 2, offset },
            durability: Durability::Memory,
            is_clean: false,
            boot_id: "boot".to_owned(),
        }
    }

    fn read(disk: &SimDisk) -> FloorRecord {
        match Floor::read(disk, Path::new("/log")).unwrap() {
            FloorFound::Good(record) => record,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_newest_slot_wins_and_damage_falls_back() {
        let disk = SimDisk::new(1);
        let mut floor = Floor::create(&disk, Path::new("/log"), record(100)).unwrap();
        assert_eq!(read(&disk), record(100));
        floor.note_synced(Position { segment: 2, offset: 200 }).unwrap();
        assert_eq!(read(&disk), record(200));
        assert!(disk.flip_bit(floor.path(), 4096 * 8 + 300));
        assert_eq!(read(&disk), record(100));
        assert!(disk.flip_bit(floor.path(), 300));
        assert!(matches!(Floor::read(&disk, Path::new("/log")).unwrap(), FloorFound::Unreadable));
    }

    #[test]
    fn no_power_cut_leaves_it_unreadable_or_ahead() {
        for cut in 1..40 {
            for seed in 0..20 {
                let disk = SimDisk::new(seed);
                let mut floor = Floor::create(&disk, Path::new("/log"), record(100)).unwrap();
                disk.cut_power_at(disk.io_count() + cut);
                let mut durable = 100;
                for step in 1..=4 {
                    let synced = Position { segment: 2, offset: 100 + step };
                    if floor.note_synced(synced).is_err() {
                        break;
                    }
                    if floor.change(|floor| floor.first_segment = 1 + step).is_err() {
                        break;
                    }
                    durable = synced.offset;
                }
                disk.power_cycle(Loss::Random);
                let found = read(&disk);
                assert!(found.synced.offset >= durable, "{found:?}, {durable} was durable");
                assert!(found.first_segment <= found.synced.offset - 99);
            }
        }
    }
}
