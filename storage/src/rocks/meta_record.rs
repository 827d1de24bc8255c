//! The meta record: one small file that says whose store this is, how far it reaches and which RocksDB folder counts.
//!
//! It is the one pointer of a replica's store: replacing it is the step that makes a flush cycle or an installed snapshot
//! count. Little-endian:
//!
//! ```text
//! [8]  "EVSHMETA"
//! u32  version: 3 when the small state is of its version 3, since there may be rows that are none, counting records, notes, or
//!      dense tensors; else 2
//! u32  crc32 of everything behind this field
//! u64  length of the rest
//! u32  the version again (version 1: not there): a flipped bit in the one above is damage, and no other version
//! u64  sequence: RocksDB's sequence number is at least this (version 1: not there)
//! u64  generation: RocksDB is in rocks-<generation>
//! u64  node   u64 group   u32 shard   u64 replica
//! u32+ cluster
//! u64  complete_at
//! u8   1 when replay_from is there, else 0
//! u64  replay_from: term   u64 leader   u64 index      (zeros when not there)
//! u32+ membership
//! u32+ small state
//! ```
//!
//! Version 3 is laid out as version 2. It says that the small state's own version, its first byte, is 3 or higher: a build that
//! does not know that refuses the whole, and does not take the small state for damaged.
//!
//! Not here: when it is written (`store`, `install`).

use std::io;
use std::path::Path;

use bytes::Bytes;

use super::error::StoreError;
use super::state::{FlushedState, Position, ReplicaIdentity};
use crate::codec::{DecodeError, Reader};
use crate::disk::{Disk, read_whole, write_durably};
use crate::keyspace::ReplicaFile;

const MAGIC: &[u8; 8] = b"EVSHMETA";
const VERSION: u32 = 3;
/// With a small state that every build of this version reads.
const VERSION_2: u32 = 2;
/// The small state's version from which on it is not.
const SMALL_STATE_ROW_RULES: u8 = 3;
/// Without a sequence.
const VERSION_1: u32 = 1;
const HEAD_BYTES: usize = 8 + 4 + 4 + 8;
/// More than any small state; a longer file is not ours, and is not read into memory.
const BYTES_MAX: u64 = 2 << 30;

/// What the file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MetaRecord {
    pub(super) identity: ReplicaIdentity,
    pub(super) generation: u64,
    /// What RocksDB's sequence number had reached when the last run was in. Each run raises it, so a RocksDB that has
    /// forgotten a run (a MANIFEST that lost its end, which RocksDB takes for a crash) is behind it.
    pub(super) sequence: u64,
    pub(super) state: FlushedState,
}

/// Why bytes are not such a record.
#[derive(Debug, PartialEq, Eq)]
enum Unfit {
    Damaged(String),
    OtherVersion(u32),
}

impl MetaRecord {
    /// Replaces the record in a folder, durably.
    pub(super) fn write(&self, disk: &dyn Disk, directory: &Path) -> Result<(), StoreError> {
        let path = directory.join(ReplicaFile::Meta.to_string());
        let bytes = self.encode().ok_or_else(|| StoreError::Refused {
            what: format!("the small state does not fit a meta record of {BYTES_MAX} bytes"),
        })?;
        write_durably(disk, &path, &bytes).map_err(StoreError::from)
    }

    /// Reads the record in a folder; `None` when the file is not there.
    pub(super) fn read(disk: &dyn Disk, directory: &Path) -> Result<Option<Self>, StoreError> {
        let path = directory.join(ReplicaFile::Meta.to_string());
        let bytes = match read_whole(disk, &path, BYTES_MAX) {
            Ok(bytes) => bytes,
            Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) if source.kind() == io::ErrorKind::InvalidData => {
                return Err(StoreError::corrupt(&path, source));
            }
            Err(source) => return Err(StoreError::io(&path, source)),
        };
        Self::decode(&bytes).map(Some).map_err(|unfit| match unfit {
            Unfit::Damaged(what) => StoreError::corrupt(&path, what),
            Unfit::OtherVersion(found) => StoreError::OtherVersion { path, found, known: VERSION },
        })
    }

    fn encode(&self) -> Option<Vec<u8>> {
        let mut bytes = Vec::with_capacity(256 + self.state.membership.len() + self.state.small_state.len());
        let is_new = self.state.small_state.first().is_some_and(|version| *version >= SMALL_STATE_ROW_RULES);
        let version = if is_new { VERSION } else { VERSION_2 };
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&version.to_le_bytes());
        // Checksum and length, filled in at the end.
        bytes.extend_from_slice(&[0; 12]);
        bytes.extend_from_slice(&version.to_le_bytes());
        bytes.extend_from_slice(&self.sequence.to_le_bytes());
        bytes.extend_from_slice(&self.generation.to_le_bytes());
        bytes.extend_from_slice(&self.identity.node.to_le_bytes());
        bytes.extend_from_slice(&self.identity.group.to_le_bytes());
        bytes.extend_from_slice(&self.identity.shard.to_le_bytes());
        bytes.extend_from_slice(&self.identity.replica.to_le_bytes());
        put_block(&mut bytes, self.identity.cluster.as_bytes())?;
        bytes.extend_from_slice(&self.state.complete_at.to_le_bytes());
        bytes.push(u8::from(self.state.replay_from.is_some()));
        let position = self.state.replay_from.unwrap_or_default();
        for number in [position.term, position.leader, position.index] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        put_block(&mut bytes, &self.state.membership)?;
        put_block(&mut bytes, &self.state.small_state)?;
        let length = (bytes.len() - HEAD_BYTES) as u64;
        bytes[16..24].copy_from_slice(&length.to_le_bytes());
        let crc = crc32fast::hash(&bytes[16..]);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        (bytes.len() as u64 <= BYTES_MAX).then_some(bytes)
    }

    fn decode(bytes: &[u8]) -> Result<Self, Unfit> {
        let text = |error: DecodeError| Unfit::Damaged(error.to_string());
        let damaged = |what: String| Err(Unfit::Damaged(what));
        if bytes.len() as u64 > BYTES_MAX {
            return damaged(format!("longer than {BYTES_MAX} bytes"));
        }
        let mut reader = Reader::new(bytes);
        if reader.bytes("magic", MAGIC.len()).map_err(text)? != MAGIC {
            return damaged("not a meta record (magic)".to_owned());
        }
        let version = reader.u32("version").map_err(text)?;
        let crc = reader.u32("crc").map_err(text)?;
        if crc != crc32fast::hash(reader.rest()) {
            return damaged("checksum does not match".to_owned());
        }
        let length = reader.u64("length").map_err(text)?;
        if length != reader.rest().len() as u64 {
            return damaged(format!("length {length}, {} bytes are there", reader.rest().len()));
        }
        if version != VERSION_1 {
            let again = reader.u32("version").map_err(text)?;
            if again != version {
                return damaged(format!("version {version} in front, {again} behind"));
            }
            // Whole, and still not ours: not damage.
            if version != VERSION && version != VERSION_2 {
                return Err(Unfit::OtherVersion(version));
            }
        }
        Self::decode_body(version, reader).map_err(text)
    }

    fn decode_body(version: u32, mut reader: Reader<'_>) -> Result<Self, DecodeError> {
        let sequence = if version == VERSION_1 { 0 } else { reader.u64("sequence")? };
        let generation = reader.u64("generation")?;
        let node = reader.u64("node")?;
        let group = reader.u64("group")?;
        let shard = reader.u32("shard")?;
        let replica = reader.u64("replica")?;
        let cluster = std::str::from_utf8(reader.block("cluster")?)
            .map_err(|_| DecodeError::Invalid { field: "cluster" })?
            .to_owned();
        let complete_at = reader.u64("complete_at")?;
        let replayed = match reader.u8("replay_from")? {
            0 => false,
            1 => true,
            _ => return Err(DecodeError::Invalid { field: "replay_from" }),
        };
        let position = Position {
            term: reader.u64("term")?,
            leader: reader.u64("leader")?,
            index: reader.u64("index")?,
        };
        let membership = Bytes::copy_from_slice(reader.block("membership")?);
        let small_state = Bytes::copy_from_slice(reader.block("small_state")?);
        reader.finish()?;
        Ok(Self {
            identity: ReplicaIdentity { cluster, node, group, shard, replica },
            generation,
            sequence,
            state: FlushedState {
                replay_from: replayed.then_some(position),
                complete_at,
                membership,
                small_state,
            },
        })
    }
}

fn put_block(bytes: &mut Vec<u8>, block: &[u8]) -> Option<()> {
    bytes.extend_from_slice(&u32::try_from(block.len()).ok()?.to_le_bytes());
    bytes.extend_from_slice(block);
    Some(())
}

#[cfg(test)]
mod tests {
    use evershard_formats::{bytes_or_damaged, damaged, frugal};
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{Loss, SimDisk};

    fn example() -> MetaRecord {
        MetaRecord {
            identity: ReplicaIdentity {
                cluster: "0b8e".to_owned(),
                node: 1,
                group: 2,
                shard: 3,
                replica: 0x0405,
            },
            generation: 7,
            sequence: 12,
            state: FlushedState {
                replay_from: Some(Position { term: 8, leader: 9, index: 10 }),
                complete_at: 11,
                membership: Bytes::from_static(b"members"),
                small_state: Bytes::from_static(&[0, 255, 1]),
            },
        }
    }

    /// Never change this file: stores in the field are read with it. A new layout gets a new version and a new file.
    const GOLDEN: &[u8] = include_bytes!("golden/meta-2.bin");
    /// The same with a small state of version 3.
    const GOLDEN_3: &[u8] = include_bytes!("golden/meta-3.bin");
    /// What builds before the sequence wrote.
    const GOLDEN_1: &[u8] = include_bytes!("golden/meta-1.bin");

    #[test]
    fn the_layout_stays_as_it_is() {
        assert_eq!(example().encode().as_deref(), Some(GOLDEN));
        assert_eq!(MetaRecord::decode(GOLDEN), Ok(example()));
        let mut newer = example();
        newer.state.small_state = Bytes::from_static(&[3, 255, 1]);
        assert_eq!(newer.encode().as_deref(), Some(GOLDEN_3));
        assert_eq!(MetaRecord::decode(GOLDEN_3), Ok(newer));
        assert_eq!(MetaRecord::decode(GOLDEN_1), Ok(MetaRecord { sequence: 0, ..example() }));
    }

    #[test]
    fn another_version_is_no_damage() {
        let mut newer = GOLDEN.to_vec();
        (newer[8], newer[HEAD_BYTES]) = (4, 4);
        let crc = crc32fast::hash(&newer[16..]);
        newer[12..16].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(MetaRecord::decode(&newer), Err(Unfit::OtherVersion(4)));
        let directory = Path::new("/replica");
        let disk = SimDisk::new(1);
        disk.create_dir_all(directory).unwrap();
        disk.create(&directory.join("meta")).unwrap().write_all_at(&newer, 0).unwrap();
        let error = MetaRecord::read(&disk, directory).unwrap_err();
        assert!(matches!(error, StoreError::OtherVersion { found: 4, known: 3, .. }), "{error}");
        assert!(!error.is_damage(), "an older build must not have it rebuilt");
    }

    /// Builds that know version 1 alone compare the checksum first, then the version: to them it is no damage either.
    #[test]
    fn the_checksum_is_where_it_was_in_version_1() {
        for bytes in [GOLDEN, GOLDEN_1] {
            assert_eq!(bytes[12..16], crc32fast::hash(&bytes[16..]).to_le_bytes());
        }
    }

    #[test]
    fn damage_to_any_byte_is_noticed() {
        let is_damage = |bytes: &[u8]| matches!(MetaRecord::decode(bytes), Err(Unfit::Damaged(_)));
        for golden in [GOLDEN, GOLDEN_1, GOLDEN_3] {
            for at in 0..golden.len() {
                for flip in [1, 2, 3, 0x80, 0xff] {
                    let mut bytes = golden.to_vec();
                    bytes[at] ^= flip;
                    assert!(is_damage(&bytes), "byte {at} ^ {flip}");
                }
                assert!(is_damage(&golden[..at]), "cut at {at}");
            }
        }
        assert!(MetaRecord::decode(&[GOLDEN, &[0]].concat()).is_err());
    }

    #[test]
    fn a_power_cut_at_any_io_leaves_the_old_record_or_the_new() {
        let directory = Path::new("/replica");
        let new = MetaRecord { generation: 8, ..example() };
        let (mut old_seen, mut new_seen) = (0, 0);
        for (seed, loss) in
            (0..6).flat_map(|seed| [Loss::All, Loss::Nothing, Loss::Random].map(|loss| (seed, loss)))
        {
            for io in 1.. {
                let disk = SimDisk::new(seed);
                disk.create_dir_all(directory).unwrap();
                example().write(&disk, directory).unwrap();
                disk.cut_power_at(disk.io_count() + io);
                let written = new.write(&disk, directory);
                let reached = disk.is_off();
                disk.power_cycle(loss);
                let found = MetaRecord::read(&disk, directory).unwrap().unwrap();
                assert!(found == new || (found == example() && written.is_err()), "I/O {io}, {loss:?}");
                *(if found == new { &mut new_seen } else { &mut old_seen }) += 1;
                if !reached {
                    assert!(written.is_ok());
                    break;
                }
            }
        }
        assert!(old_seen > 0 && new_seen > 0);
    }

    #[test]
    fn a_failed_sync_is_told_from_other_failures() {
        let directory = Path::new("/replica");
        for io in 1.. {
            let disk = SimDisk::new(1);
            disk.create_dir_all(directory).unwrap();
            example().write(&disk, directory).unwrap();
            disk.fail_at(disk.io_count() + io, libc::ENOSPC);
            let new = MetaRecord { generation: 8, ..example() };
            match new.write(&disk, directory) {
                Ok(()) => {
                    assert!(io > 4, "{io}");
                    break;
                }
                Err(StoreError::Sync { .. }) => {}
                Err(error) => {
                    assert!(error.is_disk_full(), "{error}");
                    assert_eq!(MetaRecord::read(&disk, directory).unwrap(), Some(example()));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn records_round_trip(
            cluster: String, node: u64, group: u64, shard: u32, replica: u64, generation: u64, sequence: u64, complete_at: u64,
            position: Option<(u64, u64, u64)>, membership: Vec<u8>, small_state: Vec<u8>,
        ) {
            let record = MetaRecord {
                identity: ReplicaIdentity { cluster, node, group, shard, replica },
                generation,
                sequence,
                state: FlushedState {
                    replay_from: position.map(|(term, leader, index)| Position { term, leader, index }),
                    complete_at,
                    membership: membership.into(),
                    small_state: small_state.into(),
                },
            };
            let bytes = record.encode().unwrap();
            prop_assert_eq!(MetaRecord::decode(&bytes), Ok(record));
        }

        /// With its checksum damage is noticed; and without it no length is believed.
        #[test]
        fn fuzz_meta_record(
            bytes in bytes_or_damaged(Just(GOLDEN.to_vec())), body in damaged(Just(GOLDEN[HEAD_BYTES..].to_vec())),
        ) {
            let found = frugal(bytes.len(), || MetaRecord::decode(&bytes));
            prop_assert_eq!(found.is_ok(), bytes == GOLDEN);
            for version in [VERSION_1, VERSION_2, VERSION] {
                let _ = frugal(body.len(), || MetaRecord::decode_body(version, Reader::new(&body)));
            }
        }
    }
}
