//! One table's rows in a push body: where they lie, and what names them.
//!
//! Invariants:
//! - a section that [`PushBody`](super::PushBody) gives away was checked whole: its keys are as many as its rows, and each came;
//! - sections are found by lengths alone, so that walking over a body again costs nothing by the row.
//!
//! Not here: the header, and what a body as a whole must be (`push_body.rs`), ids as differences (`ids.rs`).

use super::ids::{self, Ids};
use super::{
    Encoding, FLAG_COUNTED, FLAG_IDS, Operation, PUSH_VERSION_CLEAR, PUSH_VERSION_COUNTED, PUSH_VERSION_IDS,
    PushBodyError, SECTION_BYTES, le_u32, le_u64,
};
use crate::key::key_of;
use crate::limits::DIM_MAX;

/// One table's rows in a push body, borrowed from it.
#[derive(Debug, Clone, Copy)]
pub struct Section<'a> {
    /// The table's permanent number.
    pub table: u32,
    /// What to do.
    pub operation: Operation,
    /// How the payload is encoded.
    pub encoding: Encoding,
    /// Values a row, as the client believes.
    pub dim: u32,
    /// Learning rate for this push only.
    pub lr: Option<f32>,
    count: usize,
    names: Names<'a>,
    /// Empty when each row is one.
    occurrences: &'a [u8],
    payload: &'a [u8],
}

/// What says which rows they are.
#[derive(Debug, Clone, Copy)]
enum Names<'a> {
    /// Keys as they are.
    Keys(&'a [u8]),
    /// Ids as differences.
    Ids(&'a [u8]),
    /// The keys of ids, computed before.
    KeysOfIds(&'a [u64]),
}

/// The keys of a section, in the order of its rows.
#[derive(Debug, Clone)]
pub struct Keys<'a> {
    table: u32,
    left: usize,
    names: NamesLeft<'a>,
}

#[derive(Debug, Clone)]
enum NamesLeft<'a> {
    Keys(std::slice::ChunksExact<'a, u8>),
    Ids(Ids<'a>),
    KeysOfIds(std::slice::Iter<'a, u64>),
}

impl Iterator for Keys<'_> {
    type Item = u64;

    #[inline]
    fn next(&mut self) -> Option<u64> {
        let key = match &mut self.names {
            NamesLeft::Keys(keys) => le_u64(keys.next()?, 0),
            NamesLeft::Ids(ids) => key_of(self.table, ids.next()?),
            NamesLeft::KeysOfIds(keys) => *keys.next()?,
        };
        self.left -= 1;
        Some(key)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Keys<'_> {}

impl<'a> Section<'a> {
    /// Rows in the section.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// The keys, in order. Those of ids are computed each time, unless the body was parsed with room for them.
    #[must_use]
    pub fn keys(&self) -> Keys<'a> {
        let names = match self.names {
            Names::Keys(bytes) => NamesLeft::Keys(bytes.chunks_exact(8)),
            Names::Ids(bytes) => NamesLeft::Ids(Ids::new(bytes)),
            Names::KeysOfIds(keys) => NamesLeft::KeysOfIds(keys.iter()),
        };
        Keys { table: self.table, left: self.count, names }
    }

    /// Whether it has ids in the place of keys.
    #[must_use]
    pub fn has_ids(&self) -> bool {
        matches!(self.names, Names::Ids(_) | Names::KeysOfIds(_))
    }

    /// The same with the keys of its ids, as they were computed; `None` without enough of them.
    pub(super) fn with_keys(self, keys: &mut &'a [u64]) -> Option<Self> {
        if !self.has_ids() {
            return Some(self);
        }
        let (own, rest) = keys.split_at_checked(self.count)?;
        *keys = rest;
        Some(Section { names: Names::KeysOfIds(own), ..self })
    }

    /// Whether it says how often each key came.
    #[must_use]
    pub fn is_counted(&self) -> bool {
        !self.occurrences.is_empty()
    }

    /// How often the `row`-th key came, as far as this row stands for it.
    #[must_use]
    pub fn occurrences(&self, row: usize) -> u32 {
        if self.occurrences.is_empty() { 1 } else { le_u32(self.occurrences, row * 4) }
    }

    /// All payload bytes: `count x encoding.row_bytes(dim)`.
    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// Payload bytes of the `row`-th row.
    #[must_use]
    pub fn row(&self, row: usize) -> &'a [u8] {
        let width = self.encoding.row_bytes(self.dim as usize);
        &self.payload[row * width..(row + 1) * width]
    }

    /// The section at an offset of a body, and where the next one begins. What its rows are is not looked at.
    pub(super) fn find(version: u8, bytes: &'a [u8], at: usize) -> Result<(Self, usize), PushBodyError> {
        let malformed = |what| PushBodyError::Malformed { at, what };
        let rest = bytes.get(at..).ok_or_else(|| malformed("section past the end"))?;
        if rest.len() < SECTION_BYTES {
            return Err(malformed("section head cut short"));
        }
        let (operation, encoding) = kinds_of(version, rest).map_err(malformed)?;
        let dim = le_u32(rest, 8);
        if dim > DIM_MAX {
            return Err(PushBodyError::TooLarge {
                what: "dim",
                actual: dim as usize,
                limit: DIM_MAX as usize,
            });
        }
        let count = le_u32(rest, 12) as usize;
        if version == PUSH_VERSION_CLEAR && (operation != Operation::Clear || count > 0) {
            return Err(malformed("rows in a body that clears a table"));
        }
        let lr = f32::from_bits(le_u32(rest, 16));
        let flags = flags_of(version, operation, rest).map_err(malformed)?;
        let mut end = SECTION_BYTES;
        let mut take = |length: Option<usize>, what| {
            let to = length.and_then(|length| end.checked_add(length)).ok_or("count overflows")?;
            let taken = rest.get(end..to).ok_or(what)?;
            end = to;
            Ok::<_, &'static str>(taken)
        };
        let names = if flags & FLAG_IDS == 0 {
            Names::Keys(take(count.checked_mul(8), "keys cut short").map_err(malformed)?)
        } else {
            Names::Ids(take(Some(le_u32(rest, 20) as usize), "ids cut short").map_err(malformed)?)
        };
        let occurrence_bytes = if flags & FLAG_COUNTED == 0 { Some(0) } else { count.checked_mul(4) };
        let occurrences = take(occurrence_bytes, "occurrences cut short").map_err(malformed)?;
        let row_bytes = if operation.has_values() { encoding.row_bytes(dim as usize) } else { 0 };
        let payload = take(count.checked_mul(row_bytes), "payload cut short").map_err(malformed)?;
        let section = Section {
            table: le_u32(rest, 0),
            operation,
            encoding,
            dim,
            lr: if lr.is_nan() { None } else { Some(lr) },
            count,
            names,
            occurrences,
            payload,
        };
        Ok((section, at + end))
    }

    /// Looks at what [`Section::find`] does not; gives the keys of ids.
    pub(super) fn check(&self, mut take_key: impl FnMut(u64)) -> Result<(), &'static str> {
        if let Names::Ids(bytes) = self.names {
            ids::read(bytes, self.count, |id| take_key(key_of(self.table, id)))?;
        }
        if self.occurrences.chunks_exact(4).any(|raw| raw == [0; 4]) {
            return Err("a key that never came");
        }
        Ok(())
    }
}

fn kinds_of(version: u8, head: &[u8]) -> Result<(Operation, Encoding), &'static str> {
    let operation = match head[4] {
        0 => Operation::Gradient,
        1 => Operation::Set,
        2 => Operation::Add,
        3 => Operation::Remove,
        4 if version == PUSH_VERSION_CLEAR => Operation::Clear,
        _ => return Err("unknown operation"),
    };
    let encoding = match head[5] {
        0 => Encoding::F32,
        1 => Encoding::Bf16,
        2 => Encoding::F16,
        3 => Encoding::Int8,
        _ => return Err("unknown encoding"),
    };
    Ok((operation, encoding))
}

/// What earlier versions do not know they do not look at.
fn flags_of(version: u8, operation: Operation, head: &[u8]) -> Result<u16, &'static str> {
    let known = match version {
        PUSH_VERSION_COUNTED => FLAG_COUNTED,
        PUSH_VERSION_IDS => FLAG_COUNTED | FLAG_IDS,
        _ => return Ok(0),
    };
    let flags = u16::from_le_bytes([head[6], head[7]]);
    if flags & !known != 0 || (flags & FLAG_COUNTED != 0 && operation != Operation::Gradient) {
        return Err("flags that mean nothing");
    }
    if version == PUSH_VERSION_IDS && flags & FLAG_IDS == 0 && le_u32(head, 20) != 0 {
        return Err("bytes of ids that are not there");
    }
    Ok(flags)
}
