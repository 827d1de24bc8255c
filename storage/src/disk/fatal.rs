//! What follows when a sync has failed: the process ends.
//!
//! After a failed fsync the pages may be gone although the next fsync succeeds, so nobody may ask again, and nothing that
//! was written before may be believed. Whoever uses the real disk outside of the log and the store (which are told what to do
//! by a [`FatalHandler`]) syncs through this module, so that no error on its way up can lose what it means.
//!
//! Not here: when something must be durable.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use super::durable_file::{parent, temporary_name};

/// Told which file or folder could not be made durable, and why; production ends the process ([`stop_process`]).
pub type FatalHandler = Arc<dyn Fn(&Path, &io::Error) + Send + Sync>;

/// Says what failed and ends the process at once, with status 74 (`EX_IOERR`).
pub fn stop_process(path: &Path, error: &io::Error) {
    tracing::error!(path = %path.display(), %error, "what was written cannot be made durable: stopping the node");
    eprintln!("evershard: fatal: cannot write or sync {}: {error}; stopping the node", path.display());
    std::process::exit(74);
}

/// Makes a file's content (or a folder's names) durable, or ends the process.
pub fn sync_or_stop(path: &Path, file: &File) {
    if let Err(error) = sync(path, file) {
        stop_process(path, &error);
    }
}

/// Makes the names in a folder durable, or ends the process.
///
/// # Errors
/// When the folder cannot be opened.
pub fn sync_folder_or_stop(path: &Path) -> io::Result<()> {
    sync_or_stop(path, &File::open(path)?);
    Ok(())
}

/// Replaces the file at `path` as [`super::write_durably`] does, or ends the process when a sync fails.
///
/// # Errors
/// What else the disk said: the old file is still there, or the new one is.
pub fn write_durably_or_stop(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = temporary_name(path)?;
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    sync_or_stop(&temporary, &file);
    fs::rename(&temporary, path)?;
    sync_folder_or_stop(parent(path)?)
}

/// The crash tests name a part of the path of what shall fail.
fn sync(path: &Path, file: &File) -> io::Result<()> {
    fail::fail_point!("disk::sync_error", |part| match part {
        Some(part) if path.to_string_lossy().contains(&part) => Err(io::Error::from_raw_os_error(5)),
        _ => file.sync_all(),
    });
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        // What a crash has left of an earlier try.
        fs::write(directory.path().join("file.tmp"), b"longer than what comes").unwrap();
        for bytes in [&b"one"[..], b"second"] {
            write_durably_or_stop(&path, bytes).unwrap();
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        assert!(write_durably_or_stop(Path::new("/"), b"").is_err());
    }
}
