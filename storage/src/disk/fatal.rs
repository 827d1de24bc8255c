//! What follows when a sync has failed: the process ends.
//!
//! After a failed fsync the pages may be gone although the next fsync succeeds, so nobody may ask again, and nothing that
//! was written before may be believed. Whoever uses the real disk outside of the log and the store (which are told what to do
//! by a [`FatalHandler`]) syncs through this module, so that no error on its way up can lose what it means.
//!
//! Not here: when something must be durable.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::durable_file::{WriteError, may_fail, write_durably};
use super::real_disk::RealDisk;

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
    if let Err(error) = may_fail(path).and_then(|()| file.sync_all()) {
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

/// Replaces the file at `path` on the real disk as [`write_durably`] does, or ends the process when a sync fails.
///
/// # Errors
/// What else the disk said: the old file is still there, or the new one is.
pub fn write_durably_or_stop(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    write_durably(&RealDisk, path, bytes).inspect_err(|error| {
        if error.failed_sync {
            stop_process(&error.path, &error.source);
        }
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

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
