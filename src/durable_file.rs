//! A small file that is always replaced as a whole: a magic, a version, a length, a crc32, and a body.
//!
//! ```text
//! magic 8 bytes | version u32 | body length u32 | crc32 of the body u32 | reserved u32 = 0 | body
//! ```
//!
//! Invariant: after [`write()`] returned, a crash at any moment leaves either the new file or a newer one; before it
//! returned, the old one or the new one. Never a mix: written beside, synced, renamed, and the directory synced.
//!
//! Not here: what the body means.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

const HEADER_BYTES: usize = 24;
/// A body is at most this long: a length read from disk never takes more memory than that.
const BODY_BYTES_MAX: u64 = 256 << 20;

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
}

/// Replaces `path`, durably.
///
/// # Errors
/// [`DurableFileError::Io`]; the old file is still there, or the new one is.
pub fn write(path: &Path, magic: [u8; 8], version: u32, body: &[u8]) -> Result<(), DurableFileError> {
    let io = |source| DurableFileError::Io { path: path.to_path_buf(), source };
    let part = path.with_extension("part");
    let mut header = Vec::with_capacity(HEADER_BYTES + body.len());
    header.extend_from_slice(&magic);
    header.extend_from_slice(&version.to_le_bytes());
    header.extend_from_slice(&(body.len() as u32).to_le_bytes());
    header.extend_from_slice(&crc32fast::hash(body).to_le_bytes());
    header.extend_from_slice(&0u32.to_le_bytes());
    header.extend_from_slice(body);
    let mut file = File::create(&part).map_err(io)?;
    file.write_all(&header).map_err(io)?;
    file.sync_all().map_err(io)?;
    fs::rename(&part, path).map_err(io)?;
    sync_directory(path.parent().unwrap_or(Path::new("."))).map_err(io)
}

/// Makes names in a directory durable.
///
/// # Errors
/// What the disk said.
pub fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Reads what [`write()`] wrote; `None` when there is no such file.
///
/// # Errors
/// [`DurableFileError::Corrupt`] names what does not fit.
pub fn read(path: &Path, magic: [u8; 8], version: u32) -> Result<Option<Vec<u8>>, DurableFileError> {
    let io = |source| DurableFileError::Io { path: path.to_path_buf(), source };
    let corrupt = |what: String| DurableFileError::Corrupt { path: path.to_path_buf(), what };
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io(error)),
    };
    let length = file.metadata().map_err(io)?.len();
    if length < HEADER_BYTES as u64 || length > BODY_BYTES_MAX {
        return Err(corrupt(format!("it has {length} bytes")));
    }
    let mut bytes = Vec::with_capacity(length as usize);
    file.read_to_end(&mut bytes).map_err(io)?;
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    if bytes.len() < HEADER_BYTES || bytes[..8] != magic {
        return Err(corrupt(format!("its magic is not {:?}", String::from_utf8_lossy(&magic))));
    }
    if word(8) != version {
        return Err(corrupt(format!("version {} where this build knows {version}", word(8))));
    }
    let body = &bytes[HEADER_BYTES..];
    if word(12) as usize != body.len() {
        return Err(corrupt(format!("{} bytes of body where {} were written", body.len(), word(12))));
    }
    if word(16) != crc32fast::hash(body) {
        return Err(corrupt("the checksum does not match".into()));
    }
    Ok(Some(body.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAGIC: [u8; 8] = *b"EVTESTS\0";

    #[test]
    fn round_trip_and_replacement() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("file");
        assert!(read(&path, MAGIC, 1).expect("absent is fine").is_none());
        write(&path, MAGIC, 1, b"one").expect("write");
        write(&path, MAGIC, 1, b"two").expect("write");
        assert_eq!(read(&path, MAGIC, 1).expect("read").as_deref(), Some(&b"two"[..]));
        assert!(read(&path, MAGIC, 2).is_err());
    }

    #[test]
    fn any_changed_byte_and_any_cut_is_noticed() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("file");
        write(&path, MAGIC, 1, b"some body").expect("write");
        let good = fs::read(&path).expect("read");
        for at in (0..good.len()).filter(|at| !(20..24).contains(at)) {
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
