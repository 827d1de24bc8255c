//! The meta group's state on disk: one checksummed file, replaced as a whole, that is also its raft snapshot.
//!
//! Invariant: the file holds the state as of exactly one log position, with the membership as of there, and never one
//! beyond the locally durable log (the caller sees to it: design 14.2).

use std::path::Path;

use bytes::Bytes;
use evershard_proto::v1::MetaState;
use evershard_raft::state_machine::{LogPosition, SnapshotMark};
use prost::Message;

use crate::durable_file::{self, DurableFileError};

/// The file's name, in a replica's directory and in a snapshot.
pub(super) const FILE_NAME: &str = "meta-state";
const MAGIC: [u8; 8] = *b"EVMETAST";
/// Without dense tensors.
const VERSION_PLAIN: u32 = 1;
/// With them; laid out as version 1. Written only when there are any, so that a build that knows none reads all others, and does
/// not make sparse tables of them.
const VERSION: u32 = 2;
const HEADER_BYTES: usize = 32;

/// The meta group's file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum MetaRecordError {
    /// The file itself.
    #[error(transparent)]
    File(#[from] DurableFileError),
    /// The checksum holds, and yet the content does not decode.
    #[error("the meta group's state does not decode: {0}")]
    Malformed(String),
}

impl MetaRecordError {
    /// Whether what is on disk is not what was written.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            MetaRecordError::File(error) => matches!(error, DurableFileError::Corrupt { .. }),
            MetaRecordError::Malformed(_) => true,
        }
    }
}

/// A state and where in the log it stands.
#[derive(Debug, Clone, Default)]
pub(super) struct MetaRecord {
    pub(super) mark: SnapshotMark,
    pub(super) state: MetaState,
}

impl MetaRecord {
    pub(super) fn write(&self, directory: &Path) -> Result<(), MetaRecordError> {
        Ok(durable_file::write(&directory.join(FILE_NAME), MAGIC, self.version(), &self.encode())?)
    }

    fn version(&self) -> u32 {
        let definitions = self.state.tables.iter().filter_map(|table| table.definition.as_ref());
        let mut tensors = definitions.filter(|definition| definition.tensor.is_some());
        if tensors.next().is_some() { VERSION } else { VERSION_PLAIN }
    }

    fn encode(&self) -> Vec<u8> {
        let position = self.mark.position.unwrap_or_default();
        let mut body = Vec::new();
        body.extend_from_slice(&u32::from(self.mark.position.is_some()).to_le_bytes());
        body.extend_from_slice(&(self.mark.membership.len() as u32).to_le_bytes());
        for word in [position.term, position.leader, position.index] {
            body.extend_from_slice(&word.to_le_bytes());
        }
        body.extend_from_slice(&self.mark.membership);
        body.extend_from_slice(&self.state.encode_to_vec());
        body
    }

    /// `None` when there is no file.
    pub(super) fn read(directory: &Path) -> Result<Option<Self>, MetaRecordError> {
        let path = directory.join(FILE_NAME);
        let Some(body) = durable_file::read_from(&path, MAGIC, VERSION_PLAIN..=VERSION)? else {
            return Ok(None);
        };
        Self::decode(&body).map(Some)
    }

    fn decode(body: &[u8]) -> Result<Self, MetaRecordError> {
        if body.len() < HEADER_BYTES {
            return Err(MetaRecordError::Malformed("shorter than its header".into()));
        }
        let half = |at: usize| u32::from_le_bytes([body[at], body[at + 1], body[at + 2], body[at + 3]]);
        let word = |at: usize| u64::from(half(at)) | u64::from(half(at + 4)) << 32;
        let membership_end = HEADER_BYTES.saturating_add(half(4) as usize);
        let membership = body
            .get(HEADER_BYTES..membership_end)
            .ok_or_else(|| MetaRecordError::Malformed("the membership is cut short".into()))?;
        let position =
            (half(0) != 0).then(|| LogPosition { term: word(8), leader: word(16), index: word(24) });
        let state = MetaState::decode(&body[membership_end..])
            .map_err(|e| MetaRecordError::Malformed(e.to_string()))?;
        let mark = SnapshotMark { position, membership: Bytes::copy_from_slice(membership) };
        Ok(MetaRecord { mark, state })
    }
}

#[cfg(test)]
mod tests {
    use evershard_formats::golden::golden;
    use evershard_formats::{bytes_or_damaged, frugal};
    use evershard_proto::v1::{MetaTable, NodeAddress, TableDefinition, TensorDefinition};
    use proptest::prelude::*;

    use super::*;

    fn example() -> MetaRecord {
        let mark = SnapshotMark {
            position: Some(LogPosition { term: 1, leader: 2, index: 3 }),
            membership: Bytes::from_static(b"members"),
        };
        let nodes = vec![NodeAddress { id: 1, address: "http://a:1".into() }];
        MetaRecord { mark, state: MetaState { cluster_id: "c".into(), nodes, ..Default::default() } }
    }

    #[test]
    fn version_1_stays_as_it_is() {
        let bytes = golden(env!("CARGO_MANIFEST_DIR"), "meta-state-1.bin", &example().encode());
        let found = MetaRecord::decode(&bytes).expect("of version 1");
        assert_eq!((found.mark, found.state), (example().mark, example().state));
    }

    fn with_tensor() -> MetaRecord {
        let mut record = example();
        let tensor = Some(TensorDefinition { shape: vec![3, 5], dtype: 1 });
        let definition = TableDefinition { name: "w".into(), kind: 1, dim: 15, tensor, ..Default::default() };
        record.state.tables =
            vec![MetaTable { number: 4, definition: Some(definition), ..Default::default() }];
        record
    }

    #[test]
    fn version_2_stays_as_it_is_and_is_written_of_tensors_only() {
        let bytes = golden(env!("CARGO_MANIFEST_DIR"), "meta-state-2.bin", &with_tensor().encode());
        assert_eq!(MetaRecord::decode(&bytes).expect("of version 2").state, with_tensor().state);
        let directory = tempfile::tempdir().expect("tempdir");
        for (record, version) in [(with_tensor(), VERSION), (example(), VERSION_PLAIN)] {
            record.write(directory.path()).expect("written");
            let path = directory.path().join(FILE_NAME);
            assert!(durable_file::read(&path, MAGIC, version).is_ok());
            assert!(durable_file::read(&path, MAGIC, 3 - version).is_err());
            let read = MetaRecord::read(directory.path()).expect("readable").expect("there");
            assert_eq!(read.state, record.state);
        }
    }

    proptest! {
        /// The checksum is the file's; what it lets through is still not believed.
        #[test]
        fn fuzz_meta_state(bytes in bytes_or_damaged(prop_oneof![Just(example().encode()), Just(with_tensor().encode())])) {
            let _ = frugal(bytes.len(), || MetaRecord::decode(&bytes));
        }
    }
}
