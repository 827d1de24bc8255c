//! A membership as bytes: in the log, and with a state machine's durable state.
//!
//! Layout (version 1, little-endian): version u8 | log id (flag u8, then term, leader, index u64) |
//! configs u32, each: voters u32, each u64 | nodes u32, each: replica u64, node u64, address (u16 length, UTF-8).
//! In the log the log id is absent (the entry's own); with a state it says which entry set the membership.
//!
//! Invariants:
//! - it is a disk format: a change is a new version, and old versions stay readable;
//! - decoding what was encoded gives the same membership, joint ones included.
//!
//! Not here: who may change a membership (`membership`).

use std::collections::{BTreeMap, BTreeSet};

use bytes::{BufMut, Bytes, BytesMut};

use crate::cursor::{DecodeError, LOG_ID_BYTES, Reader, put_option_log_id, put_string};
use crate::type_config::{LogId, Membership, Peer, StoredMembership};

const VERSION: u8 = 1;

/// Encodes a membership set by the entry `log_id`, or of the entry that carries it when `None`.
pub(crate) fn encode(log_id: Option<&LogId>, membership: &Membership) -> Bytes {
    let mut out = BytesMut::with_capacity(64 + LOG_ID_BYTES);
    out.put_u8(VERSION);
    put_option_log_id(&mut out, log_id);
    let configs = membership.get_joint_config();
    out.put_u32_le(configs.len() as u32);
    for config in configs {
        out.put_u32_le(config.len() as u32);
        for replica in config {
            out.put_u64_le(*replica);
        }
    }
    let nodes: Vec<_> = membership.nodes().collect();
    out.put_u32_le(nodes.len() as u32);
    for (replica, peer) in nodes {
        out.put_u64_le(*replica);
        out.put_u64_le(peer.node);
        put_string(&mut out, &peer.address);
    }
    out.freeze()
}

/// Encodes a membership with the entry that set it.
#[cfg(test)]
pub(crate) fn encode_stored(stored: &StoredMembership) -> Bytes {
    encode(stored.log_id().as_ref(), stored.membership())
}

/// Decodes what [`encode`] wrote. No bytes at all are the empty membership: none was ever set.
pub(crate) fn decode(bytes: Bytes) -> Result<StoredMembership, DecodeError> {
    if bytes.is_empty() {
        return Ok(StoredMembership::default());
    }
    let mut reader = Reader::new(bytes);
    reader.version(VERSION, "membership version")?;
    let log_id = reader.option_log_id("membership log id")?;
    let mut configs = Vec::new();
    for _ in 0..reader.count(4, "membership configs")? {
        let mut voters = BTreeSet::new();
        for _ in 0..reader.count(8, "membership voters")? {
            voters.insert(reader.u64("membership voter")?);
        }
        configs.push(voters);
    }
    let mut nodes = BTreeMap::new();
    for _ in 0..reader.count(18, "membership nodes")? {
        let replica = reader.u64("membership replica")?;
        let node = reader.u64("membership node")?;
        let address = reader.string("membership address")?;
        nodes.insert(replica, Peer { node, address });
    }
    reader.end("membership")?;
    if configs.is_empty() && nodes.is_empty() {
        return Ok(StoredMembership::new(log_id, Membership::default()));
    }
    let voters = configs.iter().map(BTreeSet::len).sum::<usize>() as u64;
    let membership = Membership::new(configs, nodes)
        .map_err(|_| DecodeError::Invalid { what: "membership voters without a node", value: voters })?;
    Ok(StoredMembership::new(log_id, membership))
}

/// Who is in a membership, in the crate's own words.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Members {
    /// Replicas that vote (of both sides while a change is under way).
    pub voters: BTreeMap<u64, Peer>,
    /// Replicas that only receive.
    pub learners: BTreeMap<u64, Peer>,
    /// Whether a change of voters is under way.
    pub joint: bool,
}

impl Members {
    /// Reads the bytes that a state machine was given with [`crate::state_machine::EntryContent::Membership`].
    ///
    /// # Errors
    /// [`DecodeError`] when they are not such bytes.
    pub fn decode(bytes: Bytes) -> Result<Self, DecodeError> {
        decode(bytes).map(|stored| Self::of(stored.membership()))
    }

    pub(crate) fn of(membership: &Membership) -> Self {
        let voters: BTreeSet<u64> = membership.voter_ids().collect();
        let (voting, learning) = membership
            .nodes()
            .map(|(replica, peer)| (*replica, peer.clone()))
            .partition(|(replica, _)| voters.contains(replica));
        Self { voters: voting, learners: learning, joint: membership.get_joint_config().len() > 1 }
    }

    /// Where a replica is, voter or learner.
    #[must_use]
    pub fn peer(&self, replica: u64) -> Option<&Peer> {
        self.voters.get(&replica).or_else(|| self.learners.get(&replica))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::state_machine::LogPosition;
    use crate::type_config::to_log_id;

    fn peer() -> impl Strategy<Value = Peer> {
        (any::<u64>(), "[a-z0-9:/.]{0,40}").prop_map(|(node, address)| Peer { node, address })
    }

    proptest! {
        #[test]
        fn round_trips(
            position in proptest::option::of((any::<u64>(), any::<u64>(), any::<u64>())),
            nodes in proptest::collection::btree_map(any::<u64>(), peer(), 1..8),
            joint in any::<bool>(),
        ) {
            let voters: BTreeSet<u64> = nodes.keys().copied().collect();
            let mut configs = vec![voters.clone()];
            if joint {
                configs.push(voters.iter().copied().take(1).collect());
            }
            let membership = Membership::new(configs, nodes).expect("valid");
            let log_id = position.map(|(term, leader, index)| to_log_id(LogPosition { term, leader, index }));
            let stored = StoredMembership::new(log_id, membership);
            prop_assert_eq!(decode(encode_stored(&stored)).expect("decodes"), stored);
        }

        #[test]
        fn never_panics_on_noise(noise in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = decode(Bytes::from(noise));
        }
    }

    #[test]
    fn no_bytes_are_the_empty_membership() {
        assert_eq!(decode(Bytes::new()).expect("empty"), StoredMembership::default());
    }
}
