//! A replica's folder: what may be in it, and what of that counts.
//!
//! Invariant: the record comes first and goes last, so a folder with data and no record was never left by a crash.
//!
//! Not here: names (`keyspace`), the record itself (`meta_record`).

use std::fs;
use std::path::{Path, PathBuf};

use super::durable;
use super::error::StoreError;
use super::meta_record::MetaRecord;
use crate::disk::RealDisk;
use crate::keyspace::ReplicaFile;

/// Where RocksDB of a generation is.
pub(super) fn rocks_path(directory: &Path, generation: u64) -> PathBuf {
    directory.join(ReplicaFile::Rocks { generation }.to_string())
}

/// Reads a folder's record, or says what is there instead.
pub(super) fn find_record(directory: &Path) -> Result<MetaRecord, StoreError> {
    if let Some(record) = MetaRecord::read(&RealDisk, directory)? {
        return Ok(record);
    }
    let absent = || StoreError::Absent { path: directory.to_owned() };
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => return Err(absent()),
        Err(source) => return Err(StoreError::io(directory, source)),
    };
    for entry in entries {
        let name = entry.map_err(|source| StoreError::io(directory, source))?.file_name();
        if name.to_str().and_then(ReplicaFile::parse) != Some(ReplicaFile::MetaTemporary) {
            return Err(StoreError::corrupt(
                &directory.join(ReplicaFile::Meta.to_string()),
                format_args!("missing, though the folder has data ({})", name.to_string_lossy()),
            ));
        }
    }
    Err(absent())
}

/// Removes what a crash left: everything of ours that the record does not name. Leaves what it does not know.
pub(super) fn remove_leftovers(directory: &Path, generation: u64) -> Result<(), StoreError> {
    for entry in fs::read_dir(directory).map_err(|source| StoreError::io(directory, source))? {
        let entry = entry.map_err(|source| StoreError::io(directory, source))?;
        let path = entry.path();
        match entry.file_name().to_str().and_then(ReplicaFile::parse) {
            Some(ReplicaFile::MetaTemporary) => durable::remove_file(&path)?,
            Some(ReplicaFile::Runs | ReplicaFile::LinkedRocks) => durable::remove_directory(&path)?,
            Some(ReplicaFile::Rocks { generation: found }) if found != generation => {
                durable::remove_directory(&path)?;
            }
            Some(ReplicaFile::Meta | ReplicaFile::Rocks { .. }) | None => {}
        }
    }
    Ok(())
}
