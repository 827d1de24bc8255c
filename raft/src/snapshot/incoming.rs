//! The files of a snapshot that is being received, on disk, in a way that a restarted process can go on with.
//!
//! ```text
//! manifest            which transfer this is: "EVSHRECV", u32 version, u32 crc32 of the rest, the Begin it started with
//! chunks-<transfer>   one record a chunk, in the order they came: file u32, length u32, offset u64, crc32 u32, and the
//!                     record's own crc32; a length of zero: the file was forgotten
//! files/<name>        the bytes
//! ```
//!
//! Nothing of this is synced while chunks arrive, but for files that are whole. After a restart each recorded chunk is read
//! again and compared with its crc32: what a power cut tore or lost is simply not here, and is fetched again. A failed sync
//! ends the process.
//!
//! Invariants:
//! - the journal's name belongs to the manifest: records are never taken for those of another transfer's files;
//! - what [`Incoming::recover`] counts as here was read from the disk and agreed with its crc32.
//!
//! Not here: when a file may be kept for another transfer (`installer`).

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use evershard_proto::limits::MESSAGE_BYTES_MAX;
use evershard_storage::disk::{
    RealDisk, read_whole, sync_folder_or_stop, sync_or_stop, write_durably_or_stop,
};

use super::chunk_map::ChunkMap;
use super::message::{Begin, FileEntry};
use crate::state_machine::SnapshotError;

const MAGIC: &[u8; 8] = b"EVSHRECV";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 16;
/// More than a manifest of the most files with long names.
const MANIFEST_BYTES_MAX: u64 = 64 << 20;
const RECORD_BYTES: usize = 24;
const MANIFEST: &str = "manifest";
const FILES: &str = "files";
const JOURNAL_PREFIX: &str = "chunks-";

/// A chunk as the journal keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) file: u32,
    pub(crate) length: u32,
    pub(crate) offset: u64,
    pub(crate) crc32: u32,
}

/// One transfer on disk; see the module. Its methods block.
pub(crate) struct Incoming {
    folder: PathBuf,
    pub(crate) begin: Begin,
    /// In the order of the manifest's files.
    maps: Vec<ChunkMap>,
    journal: File,
}

impl Incoming {
    /// Starts a transfer in `folder`, in which files of an earlier one may be: `kept` says, for each file of `begin`, what
    /// number it had there and what is known of it. Everything else goes.
    pub(crate) fn start(
        folder: &Path,
        begin: Begin,
        earlier: Option<&Incoming>,
        kept: &[Option<usize>],
    ) -> Result<Self, SnapshotError> {
        let files = folder.join(FILES);
        make_folders(&files)?;
        let mut maps = vec![ChunkMap::default(); begin.files.len()];
        let journal_path = journal_path(folder, begin.transfer);
        let mut journal = OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(true)
            .open(&journal_path)
            .map_err(|source| io_error(&journal_path, source))?;
        if let Some(earlier) = earlier {
            let mut number_now = vec![None; earlier.maps.len()];
            for (now, then) in kept.iter().enumerate() {
                if let Some(then) = *then {
                    maps[now] = ChunkMap::starting_with(earlier.maps[then].front());
                    number_now[then] = Some(now as u32);
                }
            }
            earlier
                .copy_records(&number_now, &mut journal)
                .map_err(|source| io_error(&journal_path, source))?;
        }
        // From here on the earlier transfer is not known any more.
        let manifest = folder.join(MANIFEST);
        write_durably_or_stop(&manifest, &encode_manifest(&begin))
            .map_err(|error| io_error(&error.path, error.source))?;
        let started = Self { folder: folder.to_owned(), begin, maps, journal };
        started.remove_strangers()?;
        for number in 0..started.begin.files.len() {
            let path = started.path(number);
            if let Some(parent) = path.parent() {
                make_folders(parent)?;
            }
            if started.begin.files[number].bytes == 0 {
                sync_or_stop(&path, &create(&path)?);
            }
        }
        Ok(started)
    }

    /// What an earlier process left in `folder`, if that can be gone on with.
    pub(crate) fn recover(folder: &Path) -> Option<Self> {
        let begin = match read_whole(&RealDisk, &folder.join(MANIFEST), MANIFEST_BYTES_MAX) {
            Ok(bytes) => decode_manifest(&bytes)?,
            Err(_) => return None,
        };
        let path = journal_path(folder, begin.transfer);
        let records = read_journal(File::open(&path).ok()?, begin.files.len());
        let journal = OpenOptions::new().append(true).open(&path).ok()?;
        // A torn record at the end would hide those that are appended behind it.
        journal.set_len((records.len() * RECORD_BYTES) as u64).ok()?;
        let mut by_file: Vec<Vec<Record>> = vec![Vec::new(); begin.files.len()];
        for record in records {
            let of_file = &mut by_file[record.file as usize];
            if record.length == 0 { of_file.clear() } else { of_file.push(record) }
        }
        let mut found = Self { folder: folder.to_owned(), begin, maps: Vec::new(), journal };
        for (number, mut records) in by_file.into_iter().enumerate() {
            records.sort_by_key(|record| record.offset);
            let map = found.verify(number, &records);
            found.maps.push(map);
        }
        Some(found)
    }

    /// Reads a file's recorded chunks, up to the first that is not there or not what was received.
    fn verify(&self, number: usize, records: &[Record]) -> ChunkMap {
        let mut map = ChunkMap::default();
        let Ok(file) = File::open(self.path(number)) else { return map };
        let mut buffer = Vec::new();
        for record in records {
            let length = u64::from(record.length);
            if record.offset != map.front().bytes
                || record.length as usize > MESSAGE_BYTES_MAX
                || map.check(record.offset, length, self.begin.files[number].bytes).is_err()
            {
                break;
            }
            buffer.resize(record.length as usize, 0);
            if file.read_exact_at(&mut buffer, record.offset).is_err()
                || crc32fast::hash(&buffer) != record.crc32
            {
                break;
            }
            map.add(record.offset, length, record.crc32);
        }
        map
    }

    /// The folder that an install takes.
    pub(crate) fn files(&self) -> PathBuf {
        self.folder.join(FILES)
    }

    pub(crate) fn path(&self, number: usize) -> PathBuf {
        self.files().join(&self.begin.files[number].name)
    }

    pub(crate) fn entry(&self, number: usize) -> Option<&FileEntry> {
        self.begin.files.get(number)
    }

    pub(crate) fn map(&self, number: usize) -> &ChunkMap {
        &self.maps[number]
    }

    /// Bytes of the files that are here and may count.
    pub(crate) fn bytes_here(&self) -> u64 {
        self.maps.iter().map(|map| map.front().bytes).sum()
    }

    /// Writes a chunk that its map found right.
    pub(crate) fn write(
        &mut self,
        number: usize,
        offset: u64,
        data: &[u8],
        crc32: u32,
    ) -> Result<(), SnapshotError> {
        let path = self.path(number);
        let write = || {
            fail::fail_point!("snapshot::write", |_| Err(io::Error::from(io::ErrorKind::StorageFull)));
            let file = OpenOptions::new().create(true).write(true).truncate(false).open(&path)?;
            file.write_all_at(data, offset)?;
            Ok(file)
        };
        let file = write().map_err(|source| io_error(&path, source))?;
        let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
        self.record(Record { file: number as u32, length, offset, crc32 })?;
        self.maps[number].add(offset, u64::from(length), crc32);
        if self.maps[number].front().bytes == self.begin.files[number].bytes {
            let bytes = self.begin.files[number].bytes;
            // An earlier transfer's file may have been longer.
            file.set_len(bytes).map_err(|source| io_error(&path, source))?;
            sync_or_stop(&path, &file);
        }
        Ok(())
    }

    /// Forgets what is here of a file.
    pub(crate) fn forget(&mut self, number: usize) -> Result<(), SnapshotError> {
        self.record(Record { file: number as u32, length: 0, offset: 0, crc32: 0 })?;
        self.maps[number] = ChunkMap::default();
        Ok(())
    }

    /// Makes the files and their names durable. Files were synced when they were whole, but for one whose process was
    /// killed right then.
    pub(crate) fn sync(&self) -> Result<(), SnapshotError> {
        let mut folders = vec![self.files()];
        for number in 0..self.begin.files.len() {
            let path = self.path(number);
            let opened = File::open(&path).map_err(|source| io_error(&path, source))?;
            sync_or_stop(&path, &opened);
            if let Some(parent) = path.parent()
                && !folders.iter().any(|known| known == parent)
            {
                folders.push(parent.to_owned());
            }
        }
        for folder in &folders {
            sync_folder_or_stop(folder).map_err(|source| io_error(folder, source))?;
        }
        Ok(())
    }

    fn record(&mut self, record: Record) -> Result<(), SnapshotError> {
        let written = self.journal.write_all(&encode_record(record));
        written.map_err(|source| io_error(&journal_path(&self.folder, self.begin.transfer), source))
    }

    /// Writes the records of files that are kept, under their new numbers.
    fn copy_records(&self, number_now: &[Option<u32>], out: &mut File) -> io::Result<()> {
        let journal = File::open(journal_path(&self.folder, self.begin.transfer))?;
        let mut copied = Vec::new();
        for record in read_journal(journal, self.begin.files.len()) {
            let front = self.maps[record.file as usize].front().bytes;
            let is_kept = record.offset + u64::from(record.length) <= front;
            if let Some(file) = number_now[record.file as usize].filter(|_| is_kept) {
                copied.extend_from_slice(&encode_record(Record { file, ..record }));
            }
        }
        out.write_all(&copied)
    }

    /// Removes journals of other transfers and files that this one does not have.
    fn remove_strangers(&self) -> Result<(), SnapshotError> {
        let own_journal = journal_path(&self.folder, self.begin.transfer);
        for path in entries(&self.folder)? {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name != FILES && name != MANIFEST && path != own_journal {
                remove(&path)?;
            }
        }
        let own: std::collections::BTreeSet<PathBuf> =
            (0..self.begin.files.len()).map(|number| self.path(number)).collect();
        let mut folders = vec![self.files()];
        while let Some(folder) = folders.pop() {
            for path in entries(&folder)? {
                if path.is_dir() {
                    folders.push(path);
                } else if !own.contains(&path) {
                    remove(&path)?;
                }
            }
        }
        Ok(())
    }
}

pub(crate) fn encode_manifest(begin: &Begin) -> Vec<u8> {
    let body = begin.encode();
    let mut bytes = Vec::with_capacity(HEAD_BYTES + body.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&crc32fast::hash(&body).to_le_bytes());
    bytes.extend_from_slice(&body);
    bytes
}

/// `None`: damaged, or of another build. Then there is nothing to go on with, which is no loss.
pub(crate) fn decode_manifest(bytes: &[u8]) -> Option<Begin> {
    let (head, body) = bytes.split_at_checked(HEAD_BYTES)?;
    let is_ours = head[..8] == *MAGIC && head[8..12] == VERSION.to_le_bytes();
    if !is_ours || head[12..] != crc32fast::hash(body).to_le_bytes() {
        return None;
    }
    Begin::decode(Bytes::copy_from_slice(body)).ok()
}

pub(crate) fn encode_record(record: Record) -> [u8; RECORD_BYTES] {
    let mut bytes = [0; RECORD_BYTES];
    bytes[..4].copy_from_slice(&record.file.to_le_bytes());
    bytes[4..8].copy_from_slice(&record.length.to_le_bytes());
    bytes[8..16].copy_from_slice(&record.offset.to_le_bytes());
    bytes[16..20].copy_from_slice(&record.crc32.to_le_bytes());
    let own = crc32fast::hash(&bytes[..20]);
    bytes[20..].copy_from_slice(&own.to_le_bytes());
    bytes
}

/// The records up to the first that is torn, damaged, or of a file that there is not.
pub(crate) fn read_journal(journal: impl Read, files: usize) -> Vec<Record> {
    let mut reader = BufReader::new(journal);
    let mut records = Vec::new();
    let mut bytes = [0; RECORD_BYTES];
    while reader.read_exact(&mut bytes).is_ok() {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut offset = [0; 8];
        offset.copy_from_slice(&bytes[8..16]);
        let record = Record {
            file: u32_at(0),
            length: u32_at(4),
            offset: u64::from_le_bytes(offset),
            crc32: u32_at(16),
        };
        if u32_at(20) != crc32fast::hash(&bytes[..20]) || record.file as usize >= files {
            break;
        }
        records.push(record);
    }
    records
}

fn journal_path(folder: &Path, transfer: u64) -> PathBuf {
    folder.join(format!("{JOURNAL_PREFIX}{transfer:016x}"))
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, SnapshotError> {
    let read = || -> io::Result<Vec<PathBuf>> {
        fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect()
    };
    read().map_err(|source| io_error(folder, source))
}

fn remove(path: &Path) -> Result<(), SnapshotError> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    removed.map_err(|source| io_error(path, source))
}

fn create(path: &Path) -> Result<File, SnapshotError> {
    File::create(path).map_err(|source| io_error(path, source))
}

pub(crate) fn make_folders(path: &Path) -> Result<(), SnapshotError> {
    fs::create_dir_all(path).map_err(|source| io_error(path, source))
}

fn io_error(path: &Path, source: io::Error) -> SnapshotError {
    SnapshotError::Io { path: path.to_owned(), source }
}
