//! Installing a received snapshot: the whole store is replaced, or nothing is.
//!
//! The received folder is a sender's links: `meta` and `rocks`. Its files are made durable, its RocksDB moves beside ours as the
//! next generation and is opened there; then one replacement of the meta record makes it count. A crash before that leaves the old
//! state and a folder that the next open removes; after it the new state, and the old folder is what the next open removes.
//!
//! Not here: receiving (the raft crate), checking each file's crc32 (it does that while receiving).

use std::fs;
use std::path::Path;
use std::sync::Arc;

use super::database::Database;
use super::durable;
use super::error::StoreError;
use super::meta_record::MetaRecord;
use super::state::FlushedState;
use super::store::{Current, ReplicaStore};
use crate::disk::RealDisk;
use crate::keyspace::ReplicaFile;

impl ReplicaStore {
    /// Replaces this store with what was received in `directory` (on the same file system), durably; takes RocksDB out of it.
    /// The record keeps our identity and takes the received state, which is answered. Runs begun before are superseded.
    ///
    /// # Errors
    /// [`StoreError::IdentityMismatch`] when it is of another cluster or group, [`StoreError::Refused`] when it is behind
    /// what is here, [`StoreError::Corrupt`] when it is not whole: the old state is still there.
    pub fn replace_with(&self, directory: &Path) -> Result<FlushedState, StoreError> {
        self.shared().watch(self.install(directory))
    }

    fn install(&self, directory: &Path) -> Result<FlushedState, StoreError> {
        let mut changes = self.changes()?;
        let ours = self.current.read().record.clone();
        let meta = directory.join(ReplicaFile::Meta.to_string());
        let received =
            MetaRecord::read(&RealDisk, directory)?.ok_or_else(|| StoreError::corrupt(&meta, "missing"))?;
        ours.identity.expect_same_group(&received.identity, &meta)?;
        let index = |state: &FlushedState| state.replay_from.map(|position| position.index);
        if index(&received.state) < index(&ours.state) {
            return Err(StoreError::Refused {
                what: format!(
                    "the snapshot ends at {:?}, the replica is at {:?} already",
                    index(&received.state),
                    index(&ours.state)
                ),
            });
        }

        let record = MetaRecord { identity: ours.identity, generation: ours.generation + 1, ..received };
        let rocks = directory.join(ReplicaFile::LinkedRocks.to_string());
        let place = self.rocks_path(record.generation);
        durable::remove_directory(&place)?;
        durable::sync_files_in(&rocks)?;
        fail::fail_point!("install::before_move");
        fs::rename(&rocks, &place).map_err(|source| StoreError::io(&rocks, source))?;
        let opened = durable::sync_directory(self.directory())
            .and_then(|()| Database::open(place.clone(), self.shared(), false, &record));
        let database = match opened {
            Ok(database) => Arc::new(database),
            Err(error) => {
                durable::remove_directory(&place)?;
                return Err(error);
            }
        };
        fail::fail_point!("install::before_swap");
        if let Err(error) = self.write_record(&mut changes, &record) {
            // Not when an fsync failed: then the new record may be the one that counts.
            if !matches!(error, StoreError::Sync { .. }) {
                database.retire();
            }
            return Err(error);
        }
        fail::fail_point!("install::after_swap");
        let state = record.state.clone();
        let old = std::mem::replace(&mut *self.current.write(), Current { record, database });
        old.database.retire();
        Ok(state)
    }
}
