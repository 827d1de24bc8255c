//! The shard groups' other log entries, beside the push body: schema changes, scrubs, session expiry, steps, evictions, cuts.
//!
//! ```text
//! kind u8 | version u8 | reserved u16 = 0 | crc32 u32 of the body | body (protobuf or fixed, by kind)
//! ```
//!
//! Every command of a shard's log starts with (kind, version): [`KIND_PUSH`](crate::push_body::KIND_PUSH) is laid out in
//! `push_body.rs`. An unknown kind or version halts a replica, it is never skipped (design 14.13).

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;

use crate::limits::EVICTED_ROWS_MAX;
use crate::push_body::PUSH_VERSION_COUNTED;
use crate::v1;

/// A table is created, changed or dropped on this shard.
pub const KIND_SCHEMA: u8 = 2;
/// Every replica computes a digest as of this entry.
pub const KIND_SCRUB: u8 = 3;
/// Sessions end: (floor, live numbers below it).
pub const KIND_SESSIONS: u8 = 4;
/// A part of a job's step: the summed gradients of its contributors.
pub const KIND_STEP: u8 = 5;
/// Rows go: (key, version) each.
pub const KIND_EVICT: u8 = 6;
/// The state as of this entry belongs to a checkpoint. In clusters of [`CLUSTER_VERSION_CUTS`] on.
pub const KIND_CUT: u8 = 7;
/// The cluster version from which on checkpoints are cut: every node's build knows the entry.
pub const CLUSTER_VERSION_CUTS: u32 = 3;
/// The version of all of the above.
pub const SHARD_COMMAND_VERSION: u8 = 1;
/// Of a schema entry with a definition that was changed: builds that know no changes must halt, and not refuse it.
pub const SCHEMA_VERSION_CHANGED: u8 = 2;
/// Of a schema entry whose table admits or evicts rows, or is a dense tensor, changed or not: builds that know no such must halt.
/// (Not 3: the checksum does not cover it, and one flipped bit makes no version of another.)
pub const SCHEMA_VERSION_RULES_OR_TENSOR: u8 = 4;
/// Of a step whose sums have occurrences.
pub const STEP_VERSION_COUNTED: u8 = 2;
const HEADER_BYTES: usize = 8;
/// Job, step, part, of.
const STEP_HEAD_BYTES: usize = 24;
/// Table, reserved, clock, step.
const EVICT_HEAD_BYTES: usize = 24;
/// Key, version.
const EVICTED_ROW_BYTES: usize = 16;

/// A row that goes if nothing changed it since its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct EvictedRow {
    /// Its key.
    pub key: u64,
    /// The last entry that had changed it when the leader looked.
    pub version: u64,
}

/// A decoded shard command other than a push.
#[expect(clippy::large_enum_variant, reason = "one at a time is decoded, and lives for a call")]
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
    /// The leader's decision that rows of a table go.
    Evict {
        /// The table's permanent number.
        table: u32,
        /// The replicated clock that it decided by, in milliseconds; the table's rules say the rest.
        clock_ms: u64,
        /// The table's step that it decided by.
        step: u64,
        /// At most [`EVICTED_ROWS_MAX`]; none to move the replicated clock on.
        rows: Vec<EvictedRow>,
    },
    /// The exact point at which the shard's state belongs to a checkpoint (design 4).
    Cut {
        /// Names the checkpoint for whoever writes the shard's part of it.
        checkpoint: u64,
        /// The cut that it builds upon: rows and removals of higher versions are written; 0: all rows.
        above: u64,
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
                if body.get(1) == Some(&PUSH_VERSION_COUNTED) {
                    bytes[1] = STEP_VERSION_COUNTED;
                }
                bytes.reserve(STEP_HEAD_BYTES + body.len());
                bytes.put_u64_le(*job);
                bytes.put_u64_le(*step);
                bytes.put_u32_le(*part);
                bytes.put_u32_le(*of);
                bytes.extend_from_slice(body);
            }
            ShardCommand::Evict { table, clock_ms, step, rows } => {
                bytes[0] = KIND_EVICT;
                bytes.reserve(EVICT_HEAD_BYTES + rows.len() * EVICTED_ROW_BYTES);
                bytes.put_u32_le(*table);
                bytes.put_u32_le(0);
                bytes.put_u64_le(*clock_ms);
                bytes.put_u64_le(*step);
                for row in rows {
                    bytes.put_u64_le(row.key);
                    bytes.put_u64_le(row.version);
                }
            }
            ShardCommand::Cut { checkpoint, above } => {
                bytes[0] = KIND_CUT;
                bytes.put_u64_le(*checkpoint);
                bytes.put_u64_le(*above);
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
        let is_known = match kind {
            KIND_SCHEMA => {
                matches!(
                    version,
                    SHARD_COMMAND_VERSION | SCHEMA_VERSION_CHANGED | SCHEMA_VERSION_RULES_OR_TENSOR
                )
            }
            KIND_STEP => matches!(version, SHARD_COMMAND_VERSION | STEP_VERSION_COUNTED),
            _ => version == SHARD_COMMAND_VERSION,
        };
        if !(KIND_SCHEMA..=KIND_CUT).contains(&kind) || !is_known {
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
                if version < SCHEMA_VERSION_RULES_OR_TENSOR
                    && let Some(definition) = &mut table.definition
                {
                    (definition.admission, definition.eviction) = (None, None);
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
            KIND_EVICT => {
                let (Some(clock_ms), Some(step)) = (word(8), word(16)) else {
                    return Err(malformed("cut short"));
                };
                let rows = &body[EVICT_HEAD_BYTES..];
                if !rows.len().is_multiple_of(EVICTED_ROW_BYTES) || le_u32(body, 4) != 0 {
                    return Err(malformed("not a whole number of rows"));
                }
                if rows.len() / EVICTED_ROW_BYTES > EVICTED_ROWS_MAX {
                    return Err(malformed("more rows than an entry may have"));
                }
                let pair = |at: usize| Some(EvictedRow { key: word(at)?, version: word(at + 8)? });
                let rows =
                    (EVICT_HEAD_BYTES..body.len()).step_by(EVICTED_ROW_BYTES).filter_map(pair).collect();
                Ok(ShardCommand::Evict { table: le_u32(body, 0), clock_ms, step, rows })
            }
            KIND_CUT => {
                let (Some(checkpoint), Some(above), 16) = (word(0), word(8), body.len()) else {
                    return Err(malformed("another length than a cut has"));
                };
                Ok(ShardCommand::Cut { checkpoint, above })
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
    let is_newer =
        |d: &v1::TableDefinition| d.admission.is_some() || d.eviction.is_some() || d.tensor.is_some();
    if table.definition.as_ref().is_some_and(is_newer) {
        SCHEMA_VERSION_RULES_OR_TENSOR
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
            ShardCommand::Evict { table: 3, clock_ms: 4, step: 5, rows: vec![] },
            ShardCommand::Cut { checkpoint: u64::MAX, above: 0 },
            ShardCommand::Cut { checkpoint: 1, above: 9 },
            ShardCommand::Evict {
                table: u32::MAX,
                clock_ms: u64::MAX,
                step: 0,
                rows: vec![EvictedRow { key: 0, version: 7 }, EvictedRow { key: u64::MAX, version: 0 }],
            },
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

    /// A build that would read it without the rules must not read it at all; and what such a build logged has none.
    #[test]
    fn a_table_has_rules_from_version_4_on() {
        let admission = Some(v1::Admission { filter_freq: 3, ..Default::default() });
        let definition =
            v1::TableDefinition { name: "items".into(), dim: 16, admission, ..Default::default() };
        let table = v1::TableDescription { number: 9, definition: Some(definition), definition_version: 0 };
        let mut bytes = ShardCommand::Schema { table, dropped: false }.encode().to_vec();
        assert_eq!(bytes[1], SCHEMA_VERSION_RULES_OR_TENSOR);
        bytes[1] = SCHEMA_VERSION_CHANGED;
        let Ok(ShardCommand::Schema { table, .. }) = ShardCommand::decode(&bytes) else { panic!("a schema") };
        assert_eq!(table.definition.expect("there").admission, None);
    }

    #[test]
    fn an_entry_evicts_a_bounded_number_of_rows() {
        let evict = |rows| ShardCommand::Evict {
            table: 1,
            clock_ms: 0,
            step: 0,
            rows: vec![EvictedRow { key: 1, version: 2 }; rows],
        };
        assert!(ShardCommand::decode(&evict(EVICTED_ROWS_MAX).encode()).is_ok());
        let too_many = ShardCommand::decode(&evict(EVICTED_ROWS_MAX + 1).encode());
        assert!(matches!(too_many, Err(ShardCommandError::Malformed { kind: KIND_EVICT, .. })));
        let mut short = evict(1).encode().to_vec();
        short.pop();
        let crc = crc32fast::hash(&short[HEADER_BYTES..]);
        short[4..8].copy_from_slice(&crc.to_le_bytes());
        assert!(matches!(ShardCommand::decode(&short), Err(ShardCommandError::Malformed { .. })));
    }

    /// Builds that know no tensors take the entry of an earlier version for a sparse table: so must everybody.
    #[test]
    fn a_table_is_a_tensor_from_version_4_on() {
        let tensor = Some(v1::TensorDefinition { shape: vec![4], ..Default::default() });
        let definition = v1::TableDefinition { name: "w".into(), dim: 4, tensor, ..Default::default() };
        let table =
            v1::TableDescription { number: 9, definition: Some(definition.clone()), definition_version: 0 };
        let mut bytes = ShardCommand::Schema { table: table.clone(), dropped: false }.encode().to_vec();
        assert_eq!(bytes[1], SCHEMA_VERSION_RULES_OR_TENSOR);
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
