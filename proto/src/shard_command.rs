//! The shard groups' other log entries, beside the push body: schema changes, scrubs, session expiry, steps.
//!
//! ```text
//! kind u8 | version u8 | reserved u16 = 0 | crc32 u32 of the body | body (protobuf or fixed, by kind)
//! ```
//!
//! Every command of a shard's log starts with (kind, version): [`KIND_PUSH`](crate::push_body::KIND_PUSH) is laid out in
//! `push_body.rs`. An unknown kind or version halts a replica, it is never skipped (design 14.13).

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;

use crate::v1;

/// A table is created, changed or dropped on this shard.
pub const KIND_SCHEMA: u8 = 2;
/// Every replica computes a digest as of this entry.
pub const KIND_SCRUB: u8 = 3;
/// Sessions end: (floor, live numbers below it).
pub const KIND_SESSIONS: u8 = 4;
/// A part of a job's step: the summed gradients of its contributors.
pub const KIND_STEP: u8 = 5;
/// The version of all of the above.
pub const SHARD_COMMAND_VERSION: u8 = 1;
/// Of a schema entry with a definition that was changed: builds that know no changes must halt, and not refuse it.
pub const SCHEMA_VERSION_CHANGED: u8 = 2;
/// Of a schema entry of a dense tensor, changed or not: builds that know none must halt, and not make a sparse table of it. (Not 3:
/// one flipped bit makes no version of another.)
pub const SCHEMA_VERSION_TENSOR: u8 = 4;
const HEADER_BYTES: usize = 8;
/// Job, step, part, of.
const STEP_HEAD_BYTES: usize = 24;

/// A decoded shard command other than a push.
#[derive(Debug, Clone, PartialEq)]
pub enum ShardCommand {
    /// The table's definition, or its drop.
    Schema {
        /// Number, definition, and how often that was changed.
        table: v1::TableDescription,
        /// The table and its rows go away; the number is never used again.
        dropped: bool,
    },
    /// Digest of the replica's state as of this entry.
    Scrub {
        /// Names the digest for whoever collects it.
        scrub_id: u64,
    },
    /// Any session below `floor` that is not in `live` has expired.
    Sessions {
        /// Numbers at or above are not touched.
        floor: u64,
        /// Numbers below the floor that live on, ascending.
        live: Vec<u64>,
    },
    /// One key range's part of a step: each is applied once, in order.
    Step {
        /// The job's permanent number.
        job: u64,
        /// Steps done before it.
        step: u64,
        /// Which part, from 0 on.
        part: u32,
        /// Of how many.
        of: u32,
        /// The sums, laid out as a push body ([`PushBody::parse_step`](crate::push_body::PushBody::parse_step)).
        body: Bytes,
    },
}

/// Why bytes are not a shard command.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShardCommandError {
    /// A kind or version this build does not know: the replica must halt, not skip.
    #[error("unknown shard command: kind {kind}, version {version}")]
    Unknown {
        /// First byte.
        kind: u8,
        /// Second byte.
        version: u8,
    },
    /// The bytes do not decode.
    #[error("malformed shard command of kind {kind}: {what}")]
    Malformed {
        /// First byte.
        kind: u8,
        /// What is wrong.
        what: String,
    },
}

impl ShardCommand {
    /// The bytes for the log.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut bytes = BytesMut::new();
        bytes.put_bytes(0, HEADER_BYTES);
        bytes[1] = SHARD_COMMAND_VERSION;
        match self {
            ShardCommand::Schema { table, dropped } => {
                bytes[0] = KIND_SCHEMA;
                bytes[1] = schema_version(table);
                bytes.put_u8(u8::from(*dropped));
                bytes.extend_from_slice(&table.encode_to_vec());
            }
            ShardCommand::Scrub { scrub_id } => {
                bytes[0] = KIND_SCRUB;
                bytes.put_u64_le(*scrub_id);
            }
            ShardCommand::Sessions { floor, live } => {
                bytes[0] = KIND_SESSIONS;
                bytes.put_u64_le(*floor);
                for number in live {
                    bytes.put_u64_le(*number);
                }
            }
            ShardCommand::Step { job, step, part, of, body } => {
                bytes[0] = KIND_STEP;
                bytes.reserve(STEP_HEAD_BYTES + body.len());
                bytes.put_u64_le(*job);
                bytes.put_u64_le(*step);
                bytes.put_u32_le(*part);
                bytes.put_u32_le(*of);
                bytes.extend_from_slice(body);
            }
        }
        let crc = crc32fast::hash(&bytes[HEADER_BYTES..]);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        bytes.freeze()
    }

    /// Decodes what [`ShardCommand::encode`] laid out.
    ///
    /// # Errors
    /// [`ShardCommandError::Unknown`] for a kind or version of another build, [`ShardCommandError::Malformed`] otherwise.
    pub fn decode(bytes: &[u8]) -> Result<Self, ShardCommandError> {
        let (kind, version) = match bytes {
            [kind, version, ..] => (*kind, *version),
            _ => {
                return Err(ShardCommandError::Malformed { kind: 0, what: "shorter than its header".into() });
            }
        };
        let is_known = version == SHARD_COMMAND_VERSION
            || (kind == KIND_SCHEMA && matches!(version, SCHEMA_VERSION_CHANGED | SCHEMA_VERSION_TENSOR));
        if !(KIND_SCHEMA..=KIND_STEP).contains(&kind) || !is_known {
            return Err(ShardCommandError::Unknown { kind, version });
        }
        let malformed = |what: &str| ShardCommandError::Malformed { kind, what: what.into() };
        if bytes.len() < HEADER_BYTES {
            return Err(malformed("shorter than its header"));
        }
        let (head, body) = bytes.split_at(HEADER_BYTES);
        if head[4..8] != crc32fast::hash(body).to_le_bytes() {
            return Err(malformed("checksum mismatch"));
        }
        let word = |at: usize| -> Option<u64> {
            body.get(at..at + 8).and_then(|raw| raw.try_into().ok()).map(u64::from_le_bytes)
        };
        match kind {
            KIND_SCHEMA => {
                let (dropped, rest) = body.split_first().ok_or_else(|| malformed("empty"))?;
                let mut table = v1::TableDescription::decode(rest).map_err(|e| malformed(&e.to_string()))?;
                // Fields that builds of the earlier versions do not see.
                if version == SHARD_COMMAND_VERSION {
                    table.definition_version = 0;
                }
                if version < SCHEMA_VERSION_TENSOR
                    && let Some(definition) = &mut table.definition
                {
                    definition.tensor = None;
                }
                Ok(ShardCommand::Schema { table, dropped: *dropped != 0 })
            }
            KIND_STEP => {
                if body.len() < STEP_HEAD_BYTES {
                    return Err(malformed("cut short"));
                }
                let (head, sums) = body.split_at(STEP_HEAD_BYTES);
                let (part, of) = (le_u32(head, 16), le_u32(head, 20));
                let (Some(job), Some(step)) = (word(0), word(8)) else { return Err(malformed("cut short")) };
                if part >= of || step == u64::MAX {
                    return Err(malformed("a part or a step beyond the last one"));
                }
                Ok(ShardCommand::Step { job, step, part, of, body: Bytes::copy_from_slice(sums) })
            }
            KIND_SCRUB => {
                Ok(ShardCommand::Scrub { scrub_id: word(0).ok_or_else(|| malformed("cut short"))? })
            }
            _ => {
                let floor = word(0).ok_or_else(|| malformed("cut short"))?;
                if body.len() % 8 != 0 {
                    return Err(malformed("not a whole number of sessions"));
                }
                let live = (1..body.len() / 8).filter_map(|i| word(i * 8)).collect();
                Ok(ShardCommand::Sessions { floor, live })
            }
        }
    }
}

/// The lowest version whose builds understand the entry.
fn schema_version(table: &v1::TableDescription) -> u8 {
    if table.definition.as_ref().is_some_and(|definition| definition.tensor.is_some()) {
        SCHEMA_VERSION_TENSOR
    } else if table.definition_version > 0 {
        SCHEMA_VERSION_CHANGED
    } else {
        SHARD_COMMAND_VERSION
    }
}

fn le_u32(bytes: &[u8], at: usize) -> u32 {
    let mut raw = [0; 4];
    raw.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(raw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn round_trips() {
        let table = v1::TableDescription {
            number: 9,
            definition: Some(v1::TableDefinition { name: "items".into(), dim: 16, ..Default::default() }),
            definition_version: 0,
        };
        let changed = v1::TableDescription { definition_version: 3, ..table.clone() };
        let mut tensor = changed.clone();
        tensor.definition.as_mut().expect("there").tensor = Some(v1::TensorDefinition::default());
        for command in [
            ShardCommand::Schema { table, dropped: false },
            ShardCommand::Schema { table: tensor, dropped: false },
            ShardCommand::Schema { table: changed, dropped: false },
            ShardCommand::Scrub { scrub_id: 5 },
            ShardCommand::Sessions { floor: 10, live: vec![2, 3] },
            ShardCommand::Sessions { floor: 0, live: vec![] },
            ShardCommand::Step { job: 1, step: 2, part: 3, of: 4, body: Bytes::from_static(b"sums") },
        ] {
            assert_eq!(ShardCommand::decode(&command.encode()).expect("our own bytes"), command);
        }
    }

    #[test]
    fn another_version_is_unknown_not_malformed() {
        let mut bytes = ShardCommand::Scrub { scrub_id: 5 }.encode().to_vec();
        bytes[1] = 2;
        assert_eq!(
            ShardCommand::decode(&bytes),
            Err(ShardCommandError::Unknown { kind: KIND_SCRUB, version: 2 })
        );
    }

    /// Builds that know no changes take the entry for the creation of another definition, and refuse it: so must everybody.
    #[test]
    fn a_definition_counts_as_changed_from_version_2_on() {
        let table = v1::TableDescription { number: 9, definition: None, definition_version: 3 };
        let mut bytes = ShardCommand::Schema { table: table.clone(), dropped: false }.encode().to_vec();
        assert_eq!(bytes[1], SCHEMA_VERSION_CHANGED);
        bytes[1] = SHARD_COMMAND_VERSION;
        let table = v1::TableDescription { definition_version: 0, ..table };
        assert_eq!(ShardCommand::decode(&bytes), Ok(ShardCommand::Schema { table, dropped: false }));
        bytes[1] = 3;
        assert!(matches!(ShardCommand::decode(&bytes), Err(ShardCommandError::Unknown { .. })));
    }

    /// Builds that know no tensors take the entry of an earlier version for a sparse table: so must everybody.
    #[test]
    fn a_table_is_a_tensor_from_version_4_on() {
        let tensor = Some(v1::TensorDefinition { shape: vec![4], ..Default::default() });
        let definition = v1::TableDefinition { name: "w".into(), dim: 4, tensor, ..Default::default() };
        let table =
            v1::TableDescription { number: 9, definition: Some(definition.clone()), definition_version: 0 };
        let mut bytes = ShardCommand::Schema { table: table.clone(), dropped: false }.encode().to_vec();
        assert_eq!(bytes[1], SCHEMA_VERSION_TENSOR);
        let plain = v1::TableDefinition { tensor: None, ..definition };
        let table = v1::TableDescription { definition: Some(plain), ..table };
        for version in [SHARD_COMMAND_VERSION, SCHEMA_VERSION_CHANGED] {
            bytes[1] = version;
            let expected = ShardCommand::Schema { table: table.clone(), dropped: false };
            assert_eq!(ShardCommand::decode(&bytes), Ok(expected));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_fail_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = ShardCommand::decode(&bytes);
        }
    }
}
