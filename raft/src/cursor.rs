//! Little-endian fields in and out of byte buffers, every read bounded by what is there.
//!
//! Invariant: a reader never panics and never takes memory by a length it has not checked against the bytes it holds.
//!
//! Not here: what the fields mean (`membership_codec`, `transport::codec`, `log_store`).

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::type_config::{LeaderId, LogId, Vote};

/// What was read is not what was written: cut short, of an unknown version, or nonsense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end inside a field.
    #[error("{what} is cut short")]
    Truncated {
        /// The field.
        what: &'static str,
    },
    /// A value that is never written.
    #[error("{what} is {value}")]
    Invalid {
        /// The field.
        what: &'static str,
        /// What it holds.
        value: u64,
    },
    /// Bytes are left over.
    #[error("{left} bytes after the end of {what}")]
    Trailing {
        /// The message.
        what: &'static str,
        /// How many.
        left: usize,
    },
}

/// Reads fields from the front of a buffer; payloads are slices of it.
pub(crate) struct Reader {
    bytes: Bytes,
}

impl Reader {
    pub(crate) fn new(bytes: Bytes) -> Self {
        Self { bytes }
    }

    fn need(&self, n: usize, what: &'static str) -> Result<(), DecodeError> {
        if self.bytes.len() < n { Err(DecodeError::Truncated { what }) } else { Ok(()) }
    }

    pub(crate) fn u8(&mut self, what: &'static str) -> Result<u8, DecodeError> {
        self.need(1, what)?;
        Ok(self.bytes.get_u8())
    }

    pub(crate) fn u16(&mut self, what: &'static str) -> Result<u16, DecodeError> {
        self.need(2, what)?;
        Ok(self.bytes.get_u16_le())
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, DecodeError> {
        self.need(4, what)?;
        Ok(self.bytes.get_u32_le())
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64, DecodeError> {
        self.need(8, what)?;
        Ok(self.bytes.get_u64_le())
    }

    pub(crate) fn flag(&mut self, what: &'static str) -> Result<bool, DecodeError> {
        match self.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(DecodeError::Invalid { what, value: u64::from(other) }),
        }
    }

    /// The version byte, which must be `expected`.
    pub(crate) fn version(&mut self, expected: u8, what: &'static str) -> Result<(), DecodeError> {
        match self.u8(what)? {
            found if found == expected => Ok(()),
            found => Err(DecodeError::Invalid { what, value: u64::from(found) }),
        }
    }

    /// The next `n` bytes, not copied.
    pub(crate) fn bytes(&mut self, n: usize, what: &'static str) -> Result<Bytes, DecodeError> {
        self.need(n, what)?;
        Ok(self.bytes.split_to(n))
    }

    /// A string with a u16 length.
    pub(crate) fn string(&mut self, what: &'static str) -> Result<String, DecodeError> {
        let length = usize::from(self.u16(what)?);
        let raw = self.bytes(length, what)?;
        match std::str::from_utf8(&raw) {
            Ok(text) => Ok(text.to_owned()),
            Err(error) => Err(DecodeError::Invalid { what, value: error.valid_up_to() as u64 }),
        }
    }

    /// A count of items of at least `item_bytes` each: never more than the bytes left can hold.
    pub(crate) fn count(&mut self, item_bytes: usize, what: &'static str) -> Result<usize, DecodeError> {
        let count = self.u32(what)?;
        let fits = (count as usize).checked_mul(item_bytes.max(1)).is_some_and(|n| n <= self.bytes.len());
        if fits { Ok(count as usize) } else { Err(DecodeError::Truncated { what }) }
    }

    pub(crate) fn log_id(&mut self, what: &'static str) -> Result<LogId, DecodeError> {
        let (term, node_id, index) = (self.u64(what)?, self.u64(what)?, self.u64(what)?);
        Ok(LogId::new(LeaderId { term, node_id }, index))
    }

    pub(crate) fn option_log_id(&mut self, what: &'static str) -> Result<Option<LogId>, DecodeError> {
        if self.flag(what)? { self.log_id(what).map(Some) } else { Ok(None) }
    }

    pub(crate) fn vote(&mut self, what: &'static str) -> Result<Vote, DecodeError> {
        let (term, node_id, committed) = (self.u64(what)?, self.u64(what)?, self.flag(what)?);
        Ok(Vote { leader_id: LeaderId { term, node_id }, committed })
    }

    /// Nothing may be left.
    pub(crate) fn end(self, what: &'static str) -> Result<(), DecodeError> {
        match self.bytes.len() {
            0 => Ok(()),
            left => Err(DecodeError::Trailing { what, left }),
        }
    }
}

/// What [`put_log_id`] writes.
pub(crate) const LOG_ID_BYTES: usize = 24;
/// What [`put_vote`] writes.
pub(crate) const VOTE_BYTES: usize = 17;

pub(crate) fn put_log_id(out: &mut BytesMut, log_id: &LogId) {
    let leader = log_id.committed_leader_id();
    out.put_u64_le(leader.term);
    out.put_u64_le(leader.node_id);
    out.put_u64_le(log_id.index());
}

pub(crate) fn put_option_log_id(out: &mut BytesMut, log_id: Option<&LogId>) {
    out.put_u8(u8::from(log_id.is_some()));
    if let Some(log_id) = log_id {
        put_log_id(out, log_id);
    }
}

pub(crate) fn put_vote(out: &mut BytesMut, vote: &Vote) {
    out.put_u64_le(vote.leader_id.term);
    out.put_u64_le(vote.leader_id.node_id);
    out.put_u8(u8::from(vote.committed));
}

/// Cuts at 65 535 bytes, on a character's edge: only addresses and reasons go this way.
pub(crate) fn put_string(out: &mut BytesMut, text: &str) {
    let mut end = text.len().min(usize::from(u16::MAX));
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let cut = text.get(..end).unwrap_or_default();
    out.put_u16_le(u16::try_from(cut.len()).unwrap_or(u16::MAX));
    out.put_slice(cut.as_bytes());
}
