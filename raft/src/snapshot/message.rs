//! What sender and receiver of a snapshot tell each other; bodies of the snapshot lane's frames.
//!
//! A transfer: Begin (mark, file names and sizes) → Begun (how much of each file is here already, and its crc32; or that the
//! snapshot is not needed) → Forget (what is here and is not the sender's; seldom) → Chunk* (file, offset, bytes and their
//! crc32) → Finish (crc32 of every file) → the receiver's vote.
//!
//! Invariant: a file name is a relative path of ordinary components, so that nothing is written outside the folder; no two
//! files have one name.
//!
//! Not here: reading and writing files (`stream`, `installer`).

use std::collections::BTreeSet;
use std::path::{Component, Path};

use bytes::{BufMut, Bytes, BytesMut};

use crate::cursor::{DecodeError, Reader, put_log_id, put_string, put_vote};
use crate::state_machine::SnapshotMark;
use crate::type_config::{Vote, to_log_id, to_position};

const VERSION: u8 = 2;
/// A chunk's fields before its data.
const CHUNK_HEAD_BYTES: usize = 1 + 8 + 4 + 8 + 4 + 4;
/// Files of one snapshot.
const FILES_MAX: usize = 64 * 1024;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileEntry {
    pub(crate) name: String,
    pub(crate) bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Begin {
    pub(crate) transfer: u64,
    pub(crate) vote: Vote,
    pub(crate) mark: SnapshotMark,
    pub(crate) files: Vec<FileEntry>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) transfer: u64,
    pub(crate) file: u32,
    pub(crate) offset: u64,
    /// Of the data, taken when it was read: it covers the sender's memory and the receiver's as well as the wire.
    pub(crate) crc32: u32,
    pub(crate) data: Bytes,
}

/// The first bytes of a file that the receiver has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Kept {
    pub(crate) bytes: u64,
    /// Of these bytes.
    pub(crate) crc32: u32,
}

/// The answer to Begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Begun {
    /// Send what is missing: one entry a file, in Begin's order.
    Send(Vec<Kept>),
    /// The receiver has applied all of it already; its vote.
    Unneeded(Vote),
}

/// What the receiver kept of these files is not what the sender has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Forget {
    pub(crate) transfer: u64,
    pub(crate) files: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finish {
    pub(crate) transfer: u64,
    pub(crate) vote: Vote,
    pub(crate) crc32s: Vec<u32>,
}

impl Begin {
    pub(crate) fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(256 + 64 * self.files.len());
        out.put_u8(VERSION);
        out.put_u64_le(self.transfer);
        put_vote(&mut out, &self.vote);
        out.put_u8(u8::from(self.mark.position.is_some()));
        if let Some(position) = self.mark.position {
            put_log_id(&mut out, &to_log_id(position));
        }
        out.put_u32_le(self.mark.membership.len() as u32);
        out.put_slice(&self.mark.membership);
        out.put_u32_le(self.files.len() as u32);
        for file in &self.files {
            put_string(&mut out, &file.name);
            out.put_u64_le(file.bytes);
        }
        out.freeze()
    }

    pub(crate) fn decode(body: Bytes) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        reader.version(VERSION, "snapshot begin version")?;
        let transfer = reader.u64("snapshot transfer")?;
        let vote = reader.vote("snapshot vote")?;
        let position = reader.option_log_id("snapshot position")?.as_ref().map(to_position);
        let length = reader.u32("snapshot membership length")? as usize;
        let membership = reader.bytes(length, "snapshot membership")?;
        let count = reader.count(10, "snapshot files")?;
        if count > FILES_MAX {
            return Err(DecodeError::Invalid { what: "snapshot files", value: count as u64 });
        }
        let mut files = Vec::with_capacity(count);
        let mut names = BTreeSet::new();
        for _ in 0..count {
            let name = reader.string("snapshot file name")?;
            if !is_inside(&name) || !names.insert(name.clone()) {
                return Err(DecodeError::Invalid { what: "snapshot file name", value: name.len() as u64 });
            }
            files.push(FileEntry { name, bytes: reader.u64("snapshot file size")? });
        }
        reader.end("snapshot begin")?;
        Ok(Self { transfer, vote, mark: SnapshotMark { position, membership }, files })
    }
}

impl Chunk {
    pub(crate) fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(CHUNK_HEAD_BYTES + self.data.len());
        out.put_u8(VERSION);
        out.put_u64_le(self.transfer);
        out.put_u32_le(self.file);
        out.put_u64_le(self.offset);
        out.put_u32_le(self.crc32);
        out.put_u32_le(self.data.len() as u32);
        out.put_slice(&self.data);
        out.freeze()
    }

    pub(crate) fn decode(body: Bytes) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        reader.version(VERSION, "snapshot chunk version")?;
        let transfer = reader.u64("snapshot transfer")?;
        let file = reader.u32("snapshot file")?;
        let offset = reader.u64("snapshot offset")?;
        let crc32 = reader.u32("snapshot chunk crc32")?;
        let length = reader.u32("snapshot chunk length")? as usize;
        let data = reader.bytes(length, "snapshot chunk")?;
        reader.end("snapshot chunk")?;
        Ok(Self { transfer, file, offset, crc32, data })
    }
}

impl Begun {
    pub(crate) fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(32);
        out.put_u8(VERSION);
        match self {
            Self::Send(kept) => {
                out.put_u8(0);
                out.put_u32_le(kept.len() as u32);
                for file in kept {
                    out.put_u64_le(file.bytes);
                    out.put_u32_le(file.crc32);
                }
            }
            Self::Unneeded(vote) => {
                out.put_u8(1);
                put_vote(&mut out, vote);
            }
        }
        out.freeze()
    }

    pub(crate) fn decode(body: Bytes) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        reader.version(VERSION, "snapshot begun version")?;
        let begun = match reader.u8("snapshot begun kind")? {
            0 => {
                let count = reader.count(12, "snapshot begun files")?;
                let mut kept = Vec::with_capacity(count);
                for _ in 0..count {
                    let (bytes, crc32) =
                        (reader.u64("snapshot kept bytes")?, reader.u32("snapshot kept crc32")?);
                    kept.push(Kept { bytes, crc32 });
                }
                Self::Send(kept)
            }
            1 => Self::Unneeded(reader.vote("snapshot begun vote")?),
            other => {
                return Err(DecodeError::Invalid { what: "snapshot begun kind", value: u64::from(other) });
            }
        };
        reader.end("snapshot begun")?;
        Ok(begun)
    }
}

impl Forget {
    pub(crate) fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(16 + 4 * self.files.len());
        out.put_u8(VERSION);
        out.put_u64_le(self.transfer);
        out.put_u32_le(self.files.len() as u32);
        for file in &self.files {
            out.put_u32_le(*file);
        }
        out.freeze()
    }

    pub(crate) fn decode(body: Bytes) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        reader.version(VERSION, "snapshot forget version")?;
        let transfer = reader.u64("snapshot transfer")?;
        let count = reader.count(4, "snapshot forgotten files")?;
        let mut files = Vec::with_capacity(count);
        for _ in 0..count {
            files.push(reader.u32("snapshot forgotten file")?);
        }
        reader.end("snapshot forget")?;
        Ok(Self { transfer, files })
    }
}

impl Finish {
    pub(crate) fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(64 + 4 * self.crc32s.len());
        out.put_u8(VERSION);
        out.put_u64_le(self.transfer);
        put_vote(&mut out, &self.vote);
        out.put_u32_le(self.crc32s.len() as u32);
        for crc32 in &self.crc32s {
            out.put_u32_le(*crc32);
        }
        out.freeze()
    }

    pub(crate) fn decode(body: Bytes) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        reader.version(VERSION, "snapshot finish version")?;
        let transfer = reader.u64("snapshot transfer")?;
        let vote = reader.vote("snapshot vote")?;
        let mut crc32s = Vec::new();
        for _ in 0..reader.count(4, "snapshot checksums")? {
            crc32s.push(reader.u32("snapshot checksum")?);
        }
        reader.end("snapshot finish")?;
        Ok(Self { transfer, vote, crc32s })
    }
}

pub(crate) fn encode_abort(transfer: u64) -> Bytes {
    let mut out = BytesMut::with_capacity(9);
    out.put_u8(VERSION);
    out.put_u64_le(transfer);
    out.freeze()
}

pub(crate) fn decode_abort(body: Bytes) -> Result<u64, DecodeError> {
    let mut reader = Reader::new(body);
    reader.version(VERSION, "snapshot abort version")?;
    let transfer = reader.u64("snapshot transfer")?;
    reader.end("snapshot abort")?;
    Ok(transfer)
}

/// The answer to Finish: the receiver's vote, higher than the sender's when the sender no longer leads.
pub(crate) fn encode_finished(vote: &Vote) -> Bytes {
    let mut out = BytesMut::with_capacity(18);
    out.put_u8(VERSION);
    put_vote(&mut out, vote);
    out.freeze()
}

pub(crate) fn decode_finished(body: Bytes) -> Result<Vote, DecodeError> {
    let mut reader = Reader::new(body);
    reader.version(VERSION, "snapshot finished version")?;
    let vote = reader.vote("snapshot finished vote")?;
    reader.end("snapshot finished")?;
    Ok(vote)
}

/// Whether a file name stays inside the folder it is joined to.
fn is_inside(name: &str) -> bool {
    let path = Path::new(name);
    !name.is_empty()
        && !name.contains('\0')
        && path.components().count() > 0
        && path.components().all(|part| matches!(part, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::state_machine::LogPosition;
    use crate::type_config::LeaderId;

    fn begin(name: &str) -> Begin {
        Begin {
            transfer: 7,
            vote: Vote { leader_id: LeaderId { term: 3, node_id: 2 }, committed: true },
            mark: SnapshotMark {
                position: Some(LogPosition { term: 3, leader: 2, index: 90 }),
                membership: Bytes::from_static(b"opaque"),
            },
            files: vec![FileEntry { name: name.to_owned(), bytes: 12 }],
        }
    }

    #[test]
    fn messages_round_trip() {
        let first = begin("rocks/000012.sst");
        assert_eq!(Begin::decode(first.encode()).expect("begin"), first);
        let chunk = Chunk { transfer: 7, file: 0, offset: 9, crc32: 5, data: Bytes::from_static(b"abc") };
        assert_eq!(Chunk::decode(chunk.encode()).expect("chunk"), chunk);
        let finish = Finish { transfer: 7, vote: first.vote, crc32s: vec![1, 2] };
        assert_eq!(Finish::decode(finish.encode()).expect("finish"), finish);
        assert_eq!(decode_abort(encode_abort(7)).expect("abort"), 7);
        assert_eq!(decode_finished(encode_finished(&first.vote)).expect("finished"), first.vote);
        let kept = vec![Kept { bytes: 7, crc32: 8 }, Kept::default()];
        for begun in [Begun::Send(kept), Begun::Unneeded(first.vote)] {
            assert_eq!(Begun::decode(begun.encode()).expect("begun"), begun);
        }
        let forget = Forget { transfer: 7, files: vec![3, 1] };
        assert_eq!(Forget::decode(forget.encode()).expect("forget"), forget);
    }

    proptest! {
        #[test]
        fn noise_is_refused_without_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            for version in [None, Some(VERSION)] {
                if let (Some(version), Some(first)) = (version, bytes.first_mut()) {
                    *first = version;
                }
                let body = Bytes::copy_from_slice(&bytes);
                let _ = (Begin::decode(body.clone()), Begun::decode(body.clone()), Chunk::decode(body.clone()));
                let _ = (Forget::decode(body.clone()), Finish::decode(body.clone()), decode_abort(body.clone()));
                let _ = decode_finished(body);
            }
        }
    }

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        for name in ["", "/etc/passwd", "../meta", "rocks/../../meta", "./meta", "a\0b"] {
            assert!(Begin::decode(begin(name).encode()).is_err(), "{name:?}");
        }
        let mut twice = begin("meta");
        twice.files.push(twice.files[0].clone());
        assert!(Begin::decode(twice.encode()).is_err(), "one name twice");
    }
}
