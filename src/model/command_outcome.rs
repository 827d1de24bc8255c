//! What became of a shard command other than a push: the answer of apply to the proposer.

use bytes::{BufMut, Bytes, BytesMut};

use super::OutcomeError;

/// What became of one command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandOutcome {
    /// Done, or done before.
    Done,
    /// The table exists with another definition.
    Conflict {
        /// Its number.
        table: u32,
    },
    /// The number belonged to a table that was dropped.
    Dropped {
        /// The number.
        table: u32,
    },
    /// The definition is not valid.
    Invalid {
        /// The table's number.
        table: u32,
    },
    /// The command does not decode.
    Malformed,
    /// A part of a step before which others are missing, or of a step that was cut otherwise.
    OutOfOrder,
    /// A cut that builds upon one that is too long ago.
    CutTooOld,
}

impl CommandOutcome {
    /// The answer of apply: code u8, table u32 little-endian.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let (code, table) = match *self {
            CommandOutcome::Done => (0, 0),
            CommandOutcome::Conflict { table } => (1, table),
            CommandOutcome::Dropped { table } => (2, table),
            CommandOutcome::Invalid { table } => (3, table),
            CommandOutcome::Malformed => (4, 0),
            CommandOutcome::OutOfOrder => (5, 0),
            CommandOutcome::CutTooOld => (6, 0),
        };
        let mut bytes = BytesMut::with_capacity(5);
        bytes.put_u8(code);
        bytes.put_u32_le(table);
        bytes.freeze()
    }

    /// Decodes what [`CommandOutcome::encode`] wrote.
    ///
    /// # Errors
    /// [`OutcomeError`] for anything else.
    pub fn decode(bytes: &[u8]) -> Result<Self, OutcomeError> {
        let error = OutcomeError::new(bytes);
        let &[code, a, b, c, d] = bytes else { return Err(error) };
        let table = u32::from_le_bytes([a, b, c, d]);
        match code {
            0 => Ok(CommandOutcome::Done),
            1 => Ok(CommandOutcome::Conflict { table }),
            2 => Ok(CommandOutcome::Dropped { table }),
            3 => Ok(CommandOutcome::Invalid { table }),
            4 => Ok(CommandOutcome::Malformed),
            5 => Ok(CommandOutcome::OutOfOrder),
            6 => Ok(CommandOutcome::CutTooOld),
            _ => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::CommandOutcome;

    #[test]
    fn round_trips() {
        for outcome in [
            CommandOutcome::Done,
            CommandOutcome::Conflict { table: 7 },
            CommandOutcome::CutTooOld,
            CommandOutcome::Dropped { table: u32::MAX },
            CommandOutcome::Invalid { table: 1 },
            CommandOutcome::Malformed,
            CommandOutcome::OutOfOrder,
        ] {
            assert_eq!(CommandOutcome::decode(&outcome.encode()), Ok(outcome));
        }
        assert!(CommandOutcome::decode(&[]).is_err());
        assert!(CommandOutcome::decode(&[9, 0, 0, 0, 0]).is_err());
    }
}
