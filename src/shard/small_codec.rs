//! The small state as bytes, in a flush's record and in raft snapshots. A disk format: golden bytes in the tests. Its
//! checksum is that of the record around it.
//!
//! ```text
//! version u8 = 1 to 4 | clock_ms u64
//! sessions:  floor u64 | live: count u32, number u64 each, ascending
//!            count u32, each: number u64 | last u64 | results u8, each: code u8 (0 applied) | table u32 when code is not 0
//! schemas:   count u32, each: length u32 | TableDescription (protobuf)
//! dropped:   count u32, each: number u32 | index u64
//! steps:     count u32, each: job u64 | steps u64 | parts u32 | of u32 | index u64 (from version 2 on)
//! floors:    count u32, each: table u32 | index u64 (from version 3 on)
//! clocks:    count u32, each: table u32 | clock u64 (from version 3 on)
//! kept:      index u64 (version 4)
//! ```
//!
//! A state without steps and changed definitions is of version 1, and one where no table was cleared, none admits or evicts rows,
//! and no dense tensor was ever used, of version 2, as builds wrote it that knew none. It is of version 4 from the first cut on. All little-endian; everything in ascending order
//! of its numbers, so that equal states have
//! equal bytes. An empty input is the empty state (a replica before its first flush).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use evershard_proto::v1;
use prost::Message;

use super::small_state::SmallState;
use crate::model::{Refusal, Session, SessionTable, StepProgress, StepTable, TableSchema, refusal_kind};

const VERSION: u8 = 1;
/// With steps, or with definitions that were changed.
const VERSION_STEPS: u8 = 2;
/// With tables that were cleared, that admit or evict rows, or that are dense tensors, which earlier builds would take for
/// sparse tables.
const VERSION_NEWER_TABLES: u8 = 3;
/// Of a shard that was cut for a checkpoint: builds that know no cuts would forget what was removed since.
const VERSION_CUT: u8 = 4;

/// Bytes that are not a small state of a version this build knows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("small state: {what} at byte {at}")]
pub struct SmallStateError {
    /// What is wrong.
    what: String,
    /// Where.
    at: usize,
}

impl SmallState {
    /// Lays out the state.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let sessions = self.sessions.sorted();
        let mut bytes = BytesMut::with_capacity(64 + sessions.len() * 96);
        let version = self.version_needed(&sessions);
        bytes.put_u8(version);
        bytes.put_u64_le(self.clock_ms);
        bytes.put_u64_le(self.sessions.floor());
        bytes.put_u32_le(self.sessions.live().len() as u32);
        for number in self.sessions.live() {
            bytes.put_u64_le(number);
        }
        bytes.put_u32_le(sessions.len() as u32);
        for (number, session) in sessions {
            bytes.put_u64_le(number);
            bytes.put_u64_le(session.last);
            bytes.put_u8(session.results.len() as u8);
            for result in &session.results {
                match result {
                    None => bytes.put_u8(0),
                    Some(refusal) => {
                        bytes.put_u8(refusal.kind as u8);
                        bytes.put_u32_le(refusal.table);
                    }
                }
            }
        }
        bytes.put_u32_le(self.schemas.len() as u32);
        for schema in self.schemas.values() {
            let description = schema.description().encode_to_vec();
            bytes.put_u32_le(description.len() as u32);
            bytes.put_slice(&description);
        }
        bytes.put_u32_le(self.dropped.len() as u32);
        for (number, index) in &self.dropped {
            bytes.put_u32_le(*number);
            bytes.put_u64_le(*index);
        }
        if version >= VERSION_STEPS {
            bytes.put_u32_le(self.steps.iter().len() as u32);
            for (job, progress) in self.steps.iter() {
                bytes.put_u64_le(job);
                bytes.put_u64_le(progress.steps);
                bytes.put_u32_le(progress.parts);
                bytes.put_u32_le(progress.of);
                bytes.put_u64_le(progress.index);
            }
        }
        if version >= VERSION_NEWER_TABLES {
            for numbers in [&self.floors, &self.clocks] {
                bytes.put_u32_le(numbers.len() as u32);
                for (table, number) in numbers {
                    bytes.put_u32_le(*table);
                    bytes.put_u64_le(*number);
                }
            }
        }
        if let Some(index) = self.kept_above {
            bytes.put_u64_le(index);
        }
        bytes.freeze()
    }

    /// The lowest version whose builds lose nothing of it. Of version 1 they would lose steps, and the version of a definition
    /// that was changed; of version 2 the floors of cleared tables, the rules of a table for its rows, and what a dense tensor is.
    fn version_needed(&self, sessions: &[(u64, &Session)]) -> u8 {
        let is_refused =
            |result: &Option<Refusal>| result.is_some_and(|refusal| refusal.kind.is_of_tensors());
        if self.kept_above.is_some() {
            VERSION_CUT
        } else if self.needs_newer_builds()
            || !self.clocks.is_empty()
            || !self.floors.is_empty()
            || sessions.iter().any(|(_, session)| session.results.iter().any(is_refused))
        {
            VERSION_NEWER_TABLES
        } else if !self.steps.is_empty() || self.schemas.values().any(|schema| schema.version() > 0) {
            VERSION_STEPS
        } else {
            VERSION
        }
    }

    /// Reads what [`SmallState::encode`] laid out. Takes no memory by a declared length.
    ///
    /// # Errors
    /// [`SmallStateError`] saying what is wrong and where.
    pub fn decode(bytes: &[u8]) -> Result<Self, SmallStateError> {
        if bytes.is_empty() {
            return Ok(SmallState::default());
        }
        let mut reader = Reader { rest: bytes, all: bytes.len() };
        let version = reader.u8()?;
        if !(VERSION..=VERSION_CUT).contains(&version) {
            return Err(reader.error(format!("version {version} is of another build")));
        }
        let clock_ms = reader.u64()?;
        let sessions = reader.sessions()?;
        let mut schemas = BTreeMap::new();
        for _ in 0..reader.u32()? {
            let schema = reader.schema()?;
            schemas.insert(schema.number(), Arc::new(schema));
        }
        let mut dropped = BTreeMap::new();
        for _ in 0..reader.u32()? {
            dropped.insert(reader.u32()?, reader.u64()?);
        }
        let steps = if version >= VERSION_STEPS { reader.steps()? } else { StepTable::default() };
        let (mut floors, mut clocks) = (BTreeMap::new(), BTreeMap::new());
        if version >= VERSION_NEWER_TABLES {
            for numbers in [&mut floors, &mut clocks] {
                for _ in 0..reader.u32()? {
                    numbers.insert(reader.u32()?, reader.u64()?);
                }
            }
        }
        let kept_above = if version >= VERSION_CUT { Some(reader.u64()?) } else { None };
        if !reader.rest.is_empty() {
            return Err(reader.error("bytes after the end"));
        }
        let schemas = Arc::new(schemas);
        let state = SmallState { sessions, schemas, dropped, clock_ms, steps, floors, clocks, kept_above };
        let needed = state.version_needed(&state.sessions.sorted());
        if version != needed {
            return Err(reader.error(format!("version {version} of a state that version {needed} holds")));
        }
        Ok(state)
    }
}

struct Reader<'a> {
    rest: &'a [u8],
    all: usize,
}

impl<'a> Reader<'a> {
    fn error(&self, what: impl Into<String>) -> SmallStateError {
        SmallStateError { what: what.into(), at: self.all - self.rest.len() }
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], SmallStateError> {
        if self.rest.len() < count {
            return Err(self.error("cut short"));
        }
        let (taken, rest) = self.rest.split_at(count);
        self.rest = rest;
        Ok(taken)
    }

    fn u8(&mut self) -> Result<u8, SmallStateError> {
        Ok(self.take(1)?.get_u8())
    }

    fn u32(&mut self) -> Result<u32, SmallStateError> {
        Ok(self.take(4)?.get_u32_le())
    }

    fn u64(&mut self) -> Result<u64, SmallStateError> {
        Ok(self.take(8)?.get_u64_le())
    }

    fn sessions(&mut self) -> Result<SessionTable, SmallStateError> {
        let floor = self.u64()?;
        let mut live = Vec::new();
        for _ in 0..self.u32()? {
            live.push(self.u64()?);
        }
        let mut sessions = Vec::new();
        for _ in 0..self.u32()? {
            let number = self.u64()?;
            let last = self.u64()?;
            let mut results = VecDeque::new();
            for _ in 0..self.u8()? {
                results.push_back(self.result()?);
            }
            sessions.push((number, Session { last, results }));
        }
        Ok(SessionTable::restore(floor, live, sessions))
    }

    fn steps(&mut self) -> Result<StepTable, SmallStateError> {
        let mut jobs = BTreeMap::new();
        for _ in 0..self.u32()? {
            let job = self.u64()?;
            let (steps, parts, of) = (self.u64()?, self.u32()?, self.u32()?);
            jobs.insert(job, StepProgress { steps, parts, of, index: self.u64()? });
        }
        Ok(StepTable::restore(jobs))
    }

    fn result(&mut self) -> Result<Option<Refusal>, SmallStateError> {
        match self.u8()? {
            0 => Ok(None),
            code => {
                let kind =
                    refusal_kind(code).ok_or_else(|| self.error(format!("unknown result code {code}")))?;
                Ok(Some(Refusal { kind, table: self.u32()? }))
            }
        }
    }

    fn schema(&mut self) -> Result<TableSchema, SmallStateError> {
        let length = self.u32()? as usize;
        let description = v1::TableDescription::decode(self.take(length)?)
            .map_err(|error| self.error(format!("schema: {error}")))?;
        TableSchema::from_description(&description).map_err(|error| self.error(format!("schema: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::RefusalKind;
    use evershard_formats::golden::golden;
    use evershard_formats::{bytes_or_damaged, frugal};
    use proptest::prelude::*;

    fn sample() -> SmallState {
        let mut state = SmallState { clock_ms: 1_234_567, ..SmallState::default() };
        state.sessions.expire(5, &[3]);
        state.sessions.record(3, 1, None);
        state.sessions.record(3, 2, Some(Refusal { kind: RefusalKind::WrongDim, table: 9 }));
        state.sessions.record(u64::MAX, 1, None);
        let definition = v1::TableDefinition { name: "items".into(), dim: 2, ..Default::default() };
        let schema = TableSchema::new(9, &definition).expect("valid");
        Arc::make_mut(&mut state.schemas).insert(9, Arc::new(schema));
        state.dropped.insert(4, 77);
        state
    }

    fn sample_with_steps() -> SmallState {
        let mut state = sample();
        state.steps.record(3, 41, 0, 1, 70);
        state.steps.record(8, 5, 0, 3, 76);
        state
    }

    fn sample_with_tensor() -> SmallState {
        let mut state = sample_with_steps();
        let tensor = Some(v1::TensorDefinition { shape: vec![300, 100], dtype: 2 });
        let definition = v1::TableDefinition {
            name: "net.weight".into(),
            kind: v1::TableKind::Dense.into(),
            dim: 16_384,
            tensor,
            ..Default::default()
        };
        let schema = TableSchema::new(8, &definition).expect("valid");
        Arc::make_mut(&mut state.schemas).insert(8, Arc::new(schema));
        state
    }

    #[test]
    fn round_trips() {
        let mut changed = sample();
        let description = v1::TableDescription { definition_version: 3, ..changed.schemas[&9].description() };
        let schema = TableSchema::from_description(&description).expect("valid");
        Arc::make_mut(&mut changed.schemas).insert(9, Arc::new(schema));
        assert_eq!(
            changed.encode()[0],
            VERSION_STEPS,
            "builds that know no versions of definitions must not read it"
        );
        let cleared = SmallState { floors: [(9, 5), (2, u64::MAX)].into(), ..sample() };
        let mut refused = sample();
        refused.sessions.record(3, 3, Some(Refusal { kind: RefusalKind::OutOfRange, table: 8 }));
        assert_eq!(refused.encode()[0], VERSION_NEWER_TABLES, "the tensor may be dropped meanwhile");
        let (tensor, rules) = (sample_with_tensor(), sample_with_rules());
        let cut = SmallState { kept_above: Some(0), ..sample() };
        for state in [
            sample(),
            sample_with_steps(),
            rules,
            tensor,
            changed,
            refused,
            cleared,
            cut,
            SmallState::default(),
        ] {
            assert_eq!(SmallState::decode(&state.encode()), Ok(state));
        }
        assert_eq!(SmallState::decode(&[]), Ok(SmallState::default()));
    }

    #[test]
    fn golden_bytes_never_change() {
        let hex: String = sample().encode().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, GOLDEN);
    }

    const GOLDEN: &str = "0187d612000000000005000000000000000100000003000000000000000200000003000000000000000200\
        00000000000002000309000000ffffffffffffffff01000000000000000100010000000d000000080912090a056974656d731802\
        01000000040000004d00000000000000";

    #[test]
    fn every_truncation_and_extension_is_refused() {
        let bytes = sample().encode();
        for length in 1..bytes.len() {
            assert!(SmallState::decode(&bytes[..length]).is_err(), "{length}");
        }
        let mut longer = bytes.to_vec();
        longer.push(0);
        assert!(SmallState::decode(&longer).is_err());
        let mut newer = bytes.to_vec();
        newer[0] = 5;
        assert!(
            SmallState::decode(&newer).expect_err("another version").to_string().contains("another build")
        );
    }

    fn sample_with_rules() -> SmallState {
        let mut state = sample_with_steps();
        let eviction = Some(v1::Eviction { steps_to_live: 5, ..Default::default() });
        let admission = Some(v1::Admission { filter_freq: 3, admit_probability: 0.5, seed: 8 });
        let name = "users".to_owned();
        let definition = v1::TableDefinition { name, dim: 2, admission, eviction, ..Default::default() };
        let schema = TableSchema::new(10, &definition).expect("valid");
        Arc::make_mut(&mut state.schemas).insert(10, Arc::new(schema));
        state.clocks.insert(10, 99);
        state.floors.insert(9, 71);
        state
    }

    fn sample_with_cut() -> SmallState {
        SmallState { kept_above: Some(72), ..sample_with_rules() }
    }

    #[test]
    fn version_4_stays_as_it_is() {
        let bytes = golden(env!("CARGO_MANIFEST_DIR"), "small-state-4.bin", &sample_with_cut().encode());
        assert_eq!(SmallState::decode(&bytes), Ok(sample_with_cut()));
    }

    #[test]
    fn version_3_stays_as_it_is() {
        let bytes = golden(env!("CARGO_MANIFEST_DIR"), "small-state-3.bin", &sample_with_rules().encode());
        assert_eq!(SmallState::decode(&bytes), Ok(sample_with_rules()));
    }

    #[test]
    fn version_2_stays_as_it_is() {
        let bytes = golden(env!("CARGO_MANIFEST_DIR"), "small-state-2.bin", &sample_with_steps().encode());
        assert_eq!(SmallState::decode(&bytes), Ok(sample_with_steps()));
    }

    #[test]
    fn version_1_stays_as_it_is() {
        let bytes = golden(env!("CARGO_MANIFEST_DIR"), "small-state-1.bin", &sample().encode());
        assert_eq!(SmallState::decode(&bytes), Ok(sample()));
    }

    proptest! {
        #[test]
        fn fuzz_small_state(bytes in bytes_or_damaged(prop_oneof![
            Just(sample().encode().to_vec()),
            Just(sample_with_steps().encode().to_vec()),
            Just(sample_with_rules().encode().to_vec()),
            Just(sample_with_tensor().encode().to_vec()),
            Just(sample_with_cut().encode().to_vec()),
        ])) {
            if let Ok(state) = frugal(bytes.len(), || SmallState::decode(&bytes)) {
                // What is read as a state can be written, and is the same then.
                prop_assert_eq!(SmallState::decode(&state.encode()), Ok(state));
            }
        }
    }
}
