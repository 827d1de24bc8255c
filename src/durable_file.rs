//! A small checksummed file that is always replaced as a whole: a magic, a version, a length, a crc32, and a body.
//!
//! ```text
//! magic 8 bytes | version u32 | body length u32 | crc32 of the body u32 | reserved u32 = 0 | body
//! ```
//!
//! Invariant: after [`write()`] returned, a crash at any moment leaves either the new file or a newer one; before it
//! returned, the old one or the new one. Never a mix.
//!
//! Not here: what the body means; replacing a file atomically (`evershard_storage::disk`).

use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use evershard_storage::disk::{RealDisk, read_whole, write_durably_or_stop};

const HEADER_BYTES: usize = 24;
/// A file is at most this long: what lies on a disk never takes more memory than that.
const BYTES_MAX: u64 = 256 << 20;

/// Why such a file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum DurableFileError {
    /// The disk said no.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the disk said.
        source: io::Error,
    },
    /// The file is damaged, or is another kind of file.
    #[error("{path} is damaged: {what}")]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The file is whole, and of another version: no damage, and nothing to repair.
    #[error(
        "{path} is of version {found}, this build reads version {known}; nothing was changed: start the build that wrote it"
    )]
    OtherVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// Ours.
        known: u32,
    },
}

/// Why bytes are not such a file.
#[derive(Debug, PartialEq, Eq)]
enum Unfit {
    Damaged(String),
    OtherVersion(u32),
}

/// Replaces `path`, durably.
///
/// # Errors
/// [`DurableFileError::Io`]; the old file is still there, or the new one is. A failed sync ends the process.
pub fn write(path: &Path, magic: [u8; 8], version: u32, body: &[u8]) -> Result<(), DurableFileError> {
    let io = |source| DurableFileError::Io { path: path.to_path_buf(), source };
    if body.len() as u64 > BYTES_MAX - HEADER_BYTES as u64 {
        // It would be written, and never read again.
        return Err(io(io::ErrorKind::FileTooLarge.into()));
    }
    let length = body.len() as u32;
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
    bytes.extend_from_slice(&magic);
    for word in [version, length, crc32fast::hash(body), 0] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.extend_from_slice(body);
    write_durably_or_stop(path, &bytes).map_err(|error| io(error.source))
}

/// Reads what [`write()`] wrote; `None` when there is no such file.
///
/// # Errors
/// [`DurableFileError::Corrupt`] names what does not fit; [`DurableFileError::OtherVersion`] when all else does.
pub fn read(path: &Path, magic: [u8; 8], version: u32) -> Result<Option<Vec<u8>>, DurableFileError> {
    read_from(path, magic, version..=version)
}

/// As [`read()`], of any of `versions`: for a body that tells them apart, or reads the older as the newer.
///
/// # Errors
/// As [`read()`].
pub fn read_from(
    path: &Path,
    magic: [u8; 8],
    versions: RangeInclusive<u32>,
) -> Result<Option<Vec<u8>>, DurableFileError> {
    let corrupt = |what: String| DurableFileError::Corrupt { path: path.to_path_buf(), what };
    match read_whole(&RealDisk, path, BYTES_MAX) {
        Ok(bytes) => body_of(bytes, magic, &versions).map(Some).map_err(|unfit| match unfit {
            Unfit::Damaged(what) => corrupt(what),
            Unfit::OtherVersion(found) => {
                DurableFileError::OtherVersion { path: path.to_path_buf(), found, known: *versions.end() }
            }
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // Longer than any that was written.
        Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(corrupt(error.to_string())),
        Err(source) => Err(DurableFileError::Io { path: path.to_path_buf(), source }),
    }
}

/// The body of a file's bytes, or what does not fit.
fn body_of(mut bytes: Vec<u8>, magic: [u8; 8], versions: &RangeInclusive<u32>) -> Result<Vec<u8>, Unfit> {
    let damaged = |what: String| Err(Unfit::Damaged(what));
    if bytes.len() < HEADER_BYTES {
        return damaged(format!("it has {} bytes, less than its header", bytes.len()));
    }
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    if bytes[..8] != magic {
        return damaged(format!("its magic is not {:?}", String::from_utf8_lossy(&magic)));
    }
    let body = &bytes[HEADER_BYTES..];
    if word(12) as usize != body.len() {
        return damaged(format!("{} bytes of body where {} were written", body.len(), word(12)));
    }
    if word(16) != crc32fast::hash(body) {
        return damaged("the checksum does not match".into());
    }
    if word(20) != 0 {
        return damaged("its reserved word is not zero".into());
    }
    if !versions.contains(&word(8)) {
        return Err(Unfit::OtherVersion(word(8)));
    }
    bytes.drain(..HEADER_BYTES);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use evershard_formats::golden::golden;
    use evershard_formats::{bytes_or_damaged, frugal};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn fuzz_durable_file(bytes in bytes_or_damaged(Just(example()))) {
            let is_as_written = bytes == example();
            let found = frugal(bytes.len(), || body_of(bytes.clone(), MAGIC, &(1..=1)));
            // The checksum of nothing is 0: a header cut off behind itself and zeroed holds an empty body, which no user takes.
            let is_empty = found.as_ref().is_ok_and(Vec::is_empty);
            prop_assert_eq!(found.is_ok(), is_as_written || is_empty, "{:?}", found);
        }
    }

    fn example() -> Vec<u8> {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("file");
        write(&path, MAGIC, 1, b"body").expect("write");
        fs::read(&path).expect("read")
    }

    #[test]
    fn the_header_stays_as_it_is() {
        let bytes = golden(env!("CARGO_MANIFEST_DIR"), "durable-file.bin", &example());
        assert_eq!(body_of(bytes, MAGIC, &(1..=1)), Ok(b"body".to_vec()));
    }

    const MAGIC: [u8; 8] = *b"EVTESTS\0";

    #[test]
    fn round_trip_and_replacement() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("file");
        assert!(read(&path, MAGIC, 1).expect("absent is fine").is_none());
        write(&path, MAGIC, 1, b"one").expect("write");
        write(&path, MAGIC, 1, b"two").expect("write");
        assert_eq!(read(&path, MAGIC, 1).expect("read").as_deref(), Some(&b"two"[..]));
        assert!(matches!(
            read(&path, MAGIC, 2),
            Err(DurableFileError::OtherVersion { found: 1, known: 2, .. })
        ));
    }

    #[test]
    fn the_format_is_as_it_was() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("file");
        write(&path, MAGIC, 1, b"body").expect("write");
        let golden = b"EVTESTS\0\x01\0\0\0\x04\0\0\0\xb2\x0b\xa8\xdb\0\0\0\0body";
        assert_eq!(fs::read(&path).expect("read"), golden);
    }

    #[test]
    fn any_changed_byte_and_any_cut_is_noticed() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("file");
        write(&path, MAGIC, 1, b"some body").expect("write");
        let good = fs::read(&path).expect("read");
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            fs::write(&path, &bad).expect("write");
            assert!(read(&path, MAGIC, 1).is_err(), "byte {at}");
        }
        for length in 0..good.len() {
            fs::write(&path, &good[..length]).expect("write");
            assert!(read(&path, MAGIC, 1).is_err(), "length {length}");
        }
    }
}
