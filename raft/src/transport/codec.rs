//! What travels in a lane frame's body, written by hand: little-endian, versioned, one layout per kind.
//!
//! AppendEntries is laid out once into one buffer (the only copy on the way out); on receive every payload is a slice
//! of the frame. No serde touches a payload.
//!
//! Invariants:
//! - decoding what was encoded gives the same message; decoding anything else is an error, never a panic;
//! - a kind or version of another build is an error that names it.
//!
//! Not here: framing, correlation and checksums (`peer_client`, `peer_service`), snapshot messages
//! (`snapshot::message`).

use bytes::{BufMut, Bytes, BytesMut};
use openraft::raft::{
    AppendEntriesRequest, StreamAppendError, StreamAppendResult, TransferLeaderRequest, VoteRequest,
    VoteResponse,
};

use crate::cursor::{
    DecodeError, LOG_ID_BYTES, Reader, VOTE_BYTES, put_log_id, put_option_log_id, put_string, put_vote,
};
use crate::membership_codec;
use crate::type_config::{Command, Membership, Payload, RaftEntry, Runtime, TypeConfig};

const VERSION: u8 = 1;
/// term, leader, index, kind, time, payload length.
const ENTRY_HEAD_BYTES: usize = LOG_ID_BYTES + 1 + 8 + 4;

/// What a frame asks for, or answers with. Numbers are on the wire: add, never change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum FrameKind {
    /// Entries, or none: a heartbeat.
    Append = 1,
    /// A request for a vote.
    Vote = 2,
    /// Would you vote?
    PreVote = 3,
    /// Leadership is being handed over.
    TransferLeader = 4,
    /// A snapshot begins: its mark and files.
    SnapshotBegin = 5,
    /// Bytes of one file of it.
    SnapshotChunk = 6,
    /// All was sent: verify and install.
    SnapshotFinish = 7,
    /// It will not be finished.
    SnapshotAbort = 8,
    /// What the receiver kept of some files is not what the sender has.
    SnapshotForget = 9,
    /// An answer, laid out by the kind that it answers.
    Reply = 128,
    /// A typed refusal.
    Refused = 129,
}

impl FrameKind {
    /// The kind with this number.
    #[must_use]
    pub fn of(number: u32) -> Option<Self> {
        Some(match number {
            1 => Self::Append,
            2 => Self::Vote,
            3 => Self::PreVote,
            4 => Self::TransferLeader,
            5 => Self::SnapshotBegin,
            6 => Self::SnapshotChunk,
            7 => Self::SnapshotFinish,
            8 => Self::SnapshotAbort,
            9 => Self::SnapshotForget,
            128 => Self::Reply,
            129 => Self::Refused,
            _ => return None,
        })
    }
}

/// Why a receiver did not do what a frame asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The replica is not on this node (any more).
    #[error("the replica is not here")]
    Absent,
    /// The frame is damaged, or of another version.
    #[error("the frame cannot be read: {0}")]
    Unreadable(String),
    /// The replica restarted less than one leader lease ago: it neither votes nor says how it would.
    #[error("the replica restarted less than one leader lease ago")]
    DoorShut,
    /// The replica has too much to do.
    #[error("the replica is busy")]
    Busy,
    /// The replica is stopped or halted.
    #[error("the replica is stopped: {0}")]
    Stopped(String),
    /// An earlier frame of the same stream was answered with a conflict or a higher vote.
    #[error("an earlier frame ended the stream")]
    Superseded,
    /// A snapshot could not be received.
    #[error("the snapshot is refused: {0}")]
    Snapshot(String),
    /// There is no room for a snapshot on the receiver's disk: worth trying again later.
    #[error("no room for the snapshot: {0}")]
    NoSpace(String),
    /// The disk of the replica's node is full: entries are taken when there is space again.
    #[error("the replica's log has no room: its disk is full")]
    NoRoom,
}

impl Refusal {
    pub(crate) fn encode(&self) -> Bytes {
        let (code, text) = match self {
            Self::Absent => (1, ""),
            Self::Unreadable(text) => (2, text.as_str()),
            Self::DoorShut => (3, ""),
            Self::Busy => (4, ""),
            Self::Stopped(text) => (5, text.as_str()),
            Self::Superseded => (6, ""),
            Self::Snapshot(text) => (7, text.as_str()),
            Self::NoSpace(text) => (8, text.as_str()),
            Self::NoRoom => (9, ""),
        };
        let mut out = BytesMut::with_capacity(4 + text.len());
        out.put_u8(VERSION);
        out.put_u8(code);
        put_string(&mut out, text);
        out.freeze()
    }

    pub(crate) fn decode(body: Bytes) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(body);
        reader.version(VERSION, "refusal version")?;
        let code = reader.u8("refusal code")?;
        let text = reader.string("refusal text")?;
        reader.end("refusal")?;
        Ok(match code {
            1 => Self::Absent,
            2 => Self::Unreadable(text),
            3 => Self::DoorShut,
            4 => Self::Busy,
            5 => Self::Stopped(text),
            6 => Self::Superseded,
            7 => Self::Snapshot(text),
            8 => Self::NoSpace(text),
            9 => Self::NoRoom,
            other => return Err(DecodeError::Invalid { what: "refusal code", value: u64::from(other) }),
        })
    }
}

/// An entry's kind on the wire and in the log.
pub(crate) const ENTRY_BLANK: u8 = 0;
pub(crate) const ENTRY_COMMAND: u8 = 1;
pub(crate) const ENTRY_MEMBERSHIP: u8 = 2;

/// An entry's payload as (kind, time, bytes).
pub(crate) fn payload_parts(payload: &Payload) -> (u8, u64, Bytes) {
    match payload {
        Payload::Blank => (ENTRY_BLANK, 0, Bytes::new()),
        Payload::Normal(command) => (ENTRY_COMMAND, command.time_ms, command.payload.clone()),
        Payload::Membership(membership) => (ENTRY_MEMBERSHIP, 0, membership_codec::encode(None, membership)),
    }
}

/// The reverse of [`payload_parts`].
pub(crate) fn payload_of(kind: u8, time_ms: u64, payload: Bytes) -> Result<Payload, DecodeError> {
    match kind {
        ENTRY_BLANK => Ok(Payload::Blank),
        ENTRY_COMMAND => Ok(Payload::Normal(Command { time_ms, payload })),
        ENTRY_MEMBERSHIP => {
            let membership: Membership = membership_codec::decode(payload)?.membership().clone();
            Ok(Payload::Membership(membership))
        }
        other => Err(DecodeError::Invalid { what: "entry kind", value: u64::from(other) }),
    }
}

/// About how many bytes [`encode_append`] writes: at most this many, but for memberships with long addresses.
pub(crate) fn append_bytes<RT: Runtime>(request: &AppendEntriesRequest<TypeConfig<RT>>) -> usize {
    let payloads: usize =
        request.entries.iter().map(|entry| ENTRY_HEAD_BYTES + payload_bytes(&entry.payload)).sum();
    1 + VOTE_BYTES + 2 * (1 + LOG_ID_BYTES) + 4 + payloads
}

/// Bytes of an entry's payload, about.
pub(crate) fn payload_bytes(payload: &Payload) -> usize {
    match payload {
        Payload::Blank => 0,
        Payload::Normal(command) => command.payload.len(),
        Payload::Membership(membership) => 64 + 64 * membership.nodes().count(),
    }
}

pub(crate) fn encode_append<RT: Runtime>(request: &AppendEntriesRequest<TypeConfig<RT>>) -> Bytes {
    let mut out = BytesMut::with_capacity(append_bytes(request));
    out.put_u8(VERSION);
    put_vote(&mut out, &request.vote);
    put_option_log_id(&mut out, request.prev_log_id.as_ref());
    put_option_log_id(&mut out, request.leader_commit.as_ref());
    out.put_u32_le(request.entries.len() as u32);
    for entry in &request.entries {
        let (kind, time_ms, payload) = payload_parts(&entry.payload);
        put_log_id(&mut out, &entry.log_id);
        out.put_u8(kind);
        out.put_u64_le(time_ms);
        out.put_u32_le(payload.len() as u32);
        out.put_slice(&payload);
    }
    out.freeze()
}

pub(crate) fn decode_append<RT: Runtime>(
    body: Bytes,
) -> Result<AppendEntriesRequest<TypeConfig<RT>>, DecodeError> {
    let mut reader = Reader::new(body);
    reader.version(VERSION, "append version")?;
    let vote = reader.vote("append vote")?;
    let prev_log_id = reader.option_log_id("append previous")?;
    let leader_commit = reader.option_log_id("append commit")?;
    let count = reader.count(ENTRY_HEAD_BYTES, "append entries")?;
    let mut entries = Vec::with_capacity(count);
    // openraft takes it for granted that entries follow each other; what comes from a wire is checked first.
    let mut expected = prev_log_id.as_ref().map_or(0, |previous| previous.index().saturating_add(1));
    for _ in 0..count {
        let log_id = reader.log_id("entry log id")?;
        let kind = reader.u8("entry kind")?;
        let time_ms = reader.u64("entry time")?;
        let length = reader.u32("entry length")? as usize;
        let payload = payload_of(kind, time_ms, reader.bytes(length, "entry payload")?)?;
        if log_id.index() != expected {
            return Err(DecodeError::Invalid { what: "entry index", value: log_id.index() });
        }
        expected = expected.saturating_add(1);
        entries.push(RaftEntry { log_id, payload });
    }
    reader.end("append")?;
    Ok(AppendEntriesRequest { vote, prev_log_id, entries, leader_commit })
}

pub(crate) fn encode_append_reply<RT: Runtime>(result: &StreamAppendResult<TypeConfig<RT>>) -> Bytes {
    let mut out = BytesMut::with_capacity(2 + 1 + LOG_ID_BYTES);
    out.put_u8(VERSION);
    match result {
        Ok(matching) => {
            out.put_u8(0);
            put_option_log_id(&mut out, matching.as_ref());
        }
        Err(StreamAppendError::Conflict(log_id)) => {
            out.put_u8(1);
            put_log_id(&mut out, log_id);
        }
        Err(StreamAppendError::HigherVote(vote)) => {
            out.put_u8(2);
            put_vote(&mut out, vote);
        }
    }
    out.freeze()
}

pub(crate) fn decode_append_reply<RT: Runtime>(
    body: Bytes,
) -> Result<StreamAppendResult<TypeConfig<RT>>, DecodeError> {
    let mut reader = Reader::new(body);
    reader.version(VERSION, "append reply version")?;
    let result = match reader.u8("append reply code")? {
        0 => Ok(reader.option_log_id("append reply matching")?),
        1 => Err(StreamAppendError::Conflict(reader.log_id("append reply conflict")?)),
        2 => Err(StreamAppendError::HigherVote(reader.vote("append reply vote")?)),
        other => return Err(DecodeError::Invalid { what: "append reply code", value: u64::from(other) }),
    };
    reader.end("append reply")?;
    Ok(result)
}

pub(crate) fn encode_vote<RT: Runtime>(request: &VoteRequest<TypeConfig<RT>>) -> Bytes {
    let mut out = BytesMut::with_capacity(64);
    out.put_u8(VERSION);
    put_vote(&mut out, &request.vote);
    put_option_log_id(&mut out, request.last_log_id.as_ref());
    out.put_u8(u8::from(request.leadership_transfer));
    out.freeze()
}

pub(crate) fn decode_vote<RT: Runtime>(body: Bytes) -> Result<VoteRequest<TypeConfig<RT>>, DecodeError> {
    let mut reader = Reader::new(body);
    reader.version(VERSION, "vote version")?;
    let vote = reader.vote("vote")?;
    let last_log_id = reader.option_log_id("vote last log id")?;
    let leadership_transfer = reader.flag("vote transfer")?;
    reader.end("vote")?;
    Ok(VoteRequest { vote, last_log_id, leadership_transfer })
}

pub(crate) fn encode_vote_reply<RT: Runtime>(reply: &VoteResponse<TypeConfig<RT>>) -> Bytes {
    let mut out = BytesMut::with_capacity(64);
    out.put_u8(VERSION);
    put_vote(&mut out, &reply.vote);
    out.put_u8(u8::from(reply.vote_granted));
    put_option_log_id(&mut out, reply.last_log_id.as_ref());
    out.freeze()
}

pub(crate) fn decode_vote_reply<RT: Runtime>(
    body: Bytes,
) -> Result<VoteResponse<TypeConfig<RT>>, DecodeError> {
    let mut reader = Reader::new(body);
    reader.version(VERSION, "vote reply version")?;
    let vote = reader.vote("vote reply")?;
    let vote_granted = reader.flag("vote reply granted")?;
    let last_log_id = reader.option_log_id("vote reply last log id")?;
    reader.end("vote reply")?;
    Ok(VoteResponse { vote, vote_granted, last_log_id })
}

pub(crate) fn encode_transfer<RT: Runtime>(request: &TransferLeaderRequest<TypeConfig<RT>>) -> Bytes {
    let mut out = BytesMut::with_capacity(64);
    out.put_u8(VERSION);
    put_vote(&mut out, request.from_leader());
    out.put_u64_le(*request.to_node_id());
    put_option_log_id(&mut out, request.last_log_id());
    out.freeze()
}

pub(crate) fn decode_transfer<RT: Runtime>(
    body: Bytes,
) -> Result<TransferLeaderRequest<TypeConfig<RT>>, DecodeError> {
    let mut reader = Reader::new(body);
    reader.version(VERSION, "transfer version")?;
    let from = reader.vote("transfer vote")?;
    let to = reader.u64("transfer target")?;
    let last_log_id = reader.option_log_id("transfer last log id")?;
    reader.end("transfer")?;
    Ok(TransferLeaderRequest::new(from, to, last_log_id))
}

/// An answer without content.
pub(crate) fn encode_done() -> Bytes {
    Bytes::from_static(&[VERSION])
}

pub(crate) fn decode_done(body: Bytes) -> Result<(), DecodeError> {
    let mut reader = Reader::new(body);
    reader.version(VERSION, "reply version")?;
    reader.end("reply")
}
