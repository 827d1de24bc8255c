//! What became of a push: the answer of apply to the proposer, and what the session table remembers of it.
//!
//! Invariant: an outcome depends on the entry, the schemas and the sessions, never on rows (design 4, rule 6): replay
//! over a fuzzy flush gives the same outcomes.

use bytes::{BufMut, Bytes, BytesMut};
use evershard_proto::v1::{ErrorDetail, ErrorKind};

/// Why a message was refused, without the words: what the session table keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Refusal {
    /// The kind.
    pub kind: RefusalKind,
    /// The table it was about, 0 when about none.
    pub table: u32,
}

/// The kinds of [`Refusal`]. The numbers are a disk format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RefusalKind {
    /// The body does not parse.
    Malformed = 1,
    /// No such table on this shard.
    UnknownTable = 2,
    /// The section's dim is not the table's.
    WrongDim = 3,
    /// A key is outside the shard's range.
    WrongRange = 4,
    /// A value is not finite, or the sum of a key's gradients is not.
    NonFinite = 5,
    /// Gradients for a table without an optimizer.
    NoOptimizer = 6,
    /// An encoding that the operation or the body's version does not take.
    Encoding = 7,
    /// Two sections for one table.
    RepeatedTable = 8,
    /// A learning rate that is negative or infinite.
    LearningRate = 9,
    /// Sequence number 0: they start at 1.
    SeqZero = 10,
    /// An empty message: its client took the content back, and only the number is used up. Kept as a result of its own, so
    /// that a repetition is told from content that was applied.
    Withdrawn = 11,
    /// A block that the dense tensor does not have.
    OutOfRange = 12,
    /// What a dense tensor does not take: removals, and values beyond its end.
    NotOfTensor = 13,
}

impl RefusalKind {
    const ALL: [RefusalKind; 13] = [
        RefusalKind::Malformed,
        RefusalKind::UnknownTable,
        RefusalKind::WrongDim,
        RefusalKind::WrongRange,
        RefusalKind::NonFinite,
        RefusalKind::NoOptimizer,
        RefusalKind::Encoding,
        RefusalKind::RepeatedTable,
        RefusalKind::LearningRate,
        RefusalKind::SeqZero,
        RefusalKind::Withdrawn,
        RefusalKind::OutOfRange,
        RefusalKind::NotOfTensor,
    ];

    /// Whether builds that know no tensors know this kind.
    pub(crate) fn is_of_tensors(self) -> bool {
        matches!(self, RefusalKind::OutOfRange | RefusalKind::NotOfTensor)
    }

    /// How the refusal travels.
    #[must_use]
    pub fn error_kind(self) -> ErrorKind {
        match self {
            RefusalKind::Malformed => ErrorKind::Corrupt,
            RefusalKind::UnknownTable => ErrorKind::UnknownTable,
            RefusalKind::WrongDim => ErrorKind::WrongDim,
            RefusalKind::WrongRange => ErrorKind::WrongRange,
            RefusalKind::NonFinite => ErrorKind::NonFinite,
            RefusalKind::NoOptimizer => ErrorKind::NoOptimizer,
            RefusalKind::Withdrawn => ErrorKind::Withdrawn,
            RefusalKind::OutOfRange => ErrorKind::OutOfRange,
            RefusalKind::Encoding
            | RefusalKind::NotOfTensor
            | RefusalKind::RepeatedTable
            | RefusalKind::LearningRate
            | RefusalKind::SeqZero => ErrorKind::Invalid,
        }
    }

    fn describe(self) -> &'static str {
        match self {
            RefusalKind::Malformed => "the push body does not parse",
            RefusalKind::UnknownTable => "no such table",
            RefusalKind::WrongDim => "the push has another dim than the table",
            RefusalKind::WrongRange => "a key is outside the shard's range",
            RefusalKind::NonFinite => "a value is not finite",
            RefusalKind::NoOptimizer => "the table has no optimizer, so it takes no gradients",
            RefusalKind::Encoding => "the operation does not take this encoding",
            RefusalKind::RepeatedTable => "two sections of one message name the same table",
            RefusalKind::LearningRate => "the learning rate is negative or infinite",
            RefusalKind::SeqZero => "sequence numbers start at 1",
            RefusalKind::Withdrawn => "an empty message uses its number up",
            RefusalKind::OutOfRange => "the dense tensor does not have that block",
            RefusalKind::NotOfTensor => {
                "blocks of a dense tensor are not removed, and beyond its end they take zeros only"
            }
        }
    }
}

impl Refusal {
    /// How the refusal travels when only this much of it is left.
    #[must_use]
    pub fn detail(&self) -> ErrorDetail {
        let about = if self.table == 0 { String::new() } else { format!(" (table {})", self.table) };
        ErrorDetail {
            kind: self.kind.error_kind() as i32,
            message: format!("push refused: {}{about}; nothing was changed", self.kind.describe()),
            table: self.table,
            ..Default::default()
        }
    }
}

/// What became of one push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PushOutcome {
    /// It is applied, by the entry at `index`; 0 when that was an earlier entry and this one a repetition.
    Applied {
        /// Log index.
        index: u64,
    },
    /// Nothing was changed, now or at its first send; its sequence number is used up.
    Refused(Refusal),
    /// Nothing was changed and its sequence number is not used up: the ones before it must come first.
    OutOfOrder {
        /// The sequence number expected next.
        expected: u64,
    },
    /// The session ended: whether an unanswered push was applied is unknown.
    SessionExpired,
    /// Answered longer ago than results are kept.
    Forgotten {
        /// The last sequence number applied.
        last: u64,
    },
}

/// Bytes that are not an outcome.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a push outcome: {0} bytes, code {1}")]
pub struct OutcomeError(usize, u8);

impl OutcomeError {
    pub(super) fn new(bytes: &[u8]) -> Self {
        OutcomeError(bytes.len(), bytes.first().copied().unwrap_or(u8::MAX))
    }
}

const CODE_APPLIED: u8 = 0;
const CODE_OUT_OF_ORDER: u8 = 100;
const CODE_SESSION_EXPIRED: u8 = 101;
const CODE_FORGOTTEN: u8 = 102;
const BYTES: usize = 9;

impl PushOutcome {
    /// The answer of apply: code u8, detail u64 little-endian. Codes 1-99 are [`RefusalKind`]s.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let (code, detail) = match *self {
            PushOutcome::Applied { index } => (CODE_APPLIED, index),
            PushOutcome::Refused(refusal) => (refusal.kind as u8, u64::from(refusal.table)),
            PushOutcome::OutOfOrder { expected } => (CODE_OUT_OF_ORDER, expected),
            PushOutcome::SessionExpired => (CODE_SESSION_EXPIRED, 0),
            PushOutcome::Forgotten { last } => (CODE_FORGOTTEN, last),
        };
        let mut bytes = BytesMut::with_capacity(BYTES);
        bytes.put_u8(code);
        bytes.put_u64_le(detail);
        bytes.freeze()
    }

    /// Decodes what [`PushOutcome::encode`] wrote.
    ///
    /// # Errors
    /// [`OutcomeError`] for anything else.
    pub fn decode(bytes: &[u8]) -> Result<Self, OutcomeError> {
        let error = OutcomeError::new(bytes);
        let (code, detail) = match bytes.split_first() {
            Some((code, rest)) => (*code, <[u8; 8]>::try_from(rest).map_err(|_| error.clone())?),
            None => return Err(error),
        };
        let detail = u64::from_le_bytes(detail);
        Ok(match code {
            CODE_APPLIED => PushOutcome::Applied { index: detail },
            CODE_OUT_OF_ORDER => PushOutcome::OutOfOrder { expected: detail },
            CODE_SESSION_EXPIRED => PushOutcome::SessionExpired,
            CODE_FORGOTTEN => PushOutcome::Forgotten { last: detail },
            code => {
                let table = u32::try_from(detail).map_err(|_| error.clone())?;
                PushOutcome::Refused(Refusal { kind: refusal_kind(code).ok_or(error)?, table })
            }
        })
    }

    /// How the outcome travels when it is not `Applied`.
    #[must_use]
    pub fn detail(&self) -> Option<ErrorDetail> {
        match *self {
            PushOutcome::Applied { .. } => None,
            PushOutcome::Refused(refusal) => Some(refusal.detail()),
            PushOutcome::OutOfOrder { expected } => Some(ErrorDetail {
                kind: ErrorKind::OutOfOrder as i32,
                message: format!("push out of order: sequence number {expected} is expected next"),
                expected_seq: expected,
                ..Default::default()
            }),
            PushOutcome::SessionExpired => Some(ErrorDetail {
                kind: ErrorKind::SessionExpired as i32,
                message: "the session has expired; the outcome of its unacknowledged pushes is unknown"
                    .into(),
                ..Default::default()
            }),
            PushOutcome::Forgotten { last } => Some(ErrorDetail {
                kind: ErrorKind::Forgotten as i32,
                message: format!(
                    "this push was answered long ago (the session is at {last}); its result is not kept"
                ),
                ..Default::default()
            }),
        }
    }
}

/// The kind with this number.
pub(crate) fn refusal_kind(code: u8) -> Option<RefusalKind> {
    RefusalKind::ALL.into_iter().find(|kind| *kind as u8 == code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all() -> Vec<PushOutcome> {
        let mut all = vec![
            PushOutcome::Applied { index: 7 },
            PushOutcome::OutOfOrder { expected: u64::MAX },
            PushOutcome::SessionExpired,
            PushOutcome::Forgotten { last: 9 },
        ];
        all.extend(RefusalKind::ALL.map(|kind| PushOutcome::Refused(Refusal { kind, table: u32::MAX })));
        all
    }

    #[test]
    fn round_trips() {
        for outcome in all() {
            assert_eq!(PushOutcome::decode(&outcome.encode()), Ok(outcome));
        }
    }

    #[test]
    fn golden_codes_never_change() {
        let codes: Vec<u8> = all().iter().map(|outcome| outcome.encode()[0]).collect();
        assert_eq!(codes, [0, 100, 101, 102, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]);
    }

    #[test]
    fn everything_but_applied_has_a_detail() {
        for outcome in all() {
            assert_eq!(outcome.detail().is_none(), matches!(outcome, PushOutcome::Applied { .. }));
        }
    }

    proptest! {
        #[test]
        fn fuzz_outcomes(bytes in proptest::collection::vec(any::<u8>(), 0..12)) {
            if let Ok(outcome) = PushOutcome::decode(&bytes) {
                let _ = outcome.detail();
            }
            let _ = crate::model::CommandOutcome::decode(&bytes);
        }
    }
}
