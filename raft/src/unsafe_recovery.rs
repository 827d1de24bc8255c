//! Making the last living replica of a group its only voter, when the majority is lost for good.
//!
//! Raft cannot do this: only a majority may change who votes. So it is done behind its back, in the log of a replica that does
//! not run: an entry that nobody agreed to makes it the sole voter, in a term above all that it has seen. Started again, it
//! elects itself. What only the lost replicas held is gone, and what this one held uncommitted counts from now on.
//!
//! Not here: deciding that the others are lost, and asking whether that is meant (`src/cluster/unsafe_recovery.rs`).

use std::collections::BTreeMap;
use std::io;

use evershard_storage::log::{Entry, GroupLog};

use crate::log_store::{decode_vote, durable, encode_vote};
use crate::membership_codec;
use crate::transport::codec::ENTRY_MEMBERSHIP;
use crate::type_config::{LeaderId, Membership, Peer, Vote};

/// Appends the entry that makes `replica` the only voter of its group; gives the entry's index. The group must not be open.
/// Durable when it returns.
///
/// # Errors
/// What the log said; `InvalidInput` when the group was never made, so that there is nothing to recover.
pub async fn make_sole_voter(log: &GroupLog, replica: u64, peer: Peer) -> io::Result<u64> {
    let state = log.state();
    let last = state
        .last
        .or(state.last_purged)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, format!("{} holds no log", log.key())))?;
    let voted = match log.vote() {
        Some(bytes) => {
            decode_vote(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?
        }
        None => Vote { leader_id: LeaderId { term: 0, node_id: 0 }, committed: false },
    };
    let term = last.term.max(voted.leader_id.term) + 1;
    let membership = Membership::new(vec![[replica].into()], BTreeMap::from([(replica, peer)]))
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error.to_string()))?;
    let entry = Entry {
        index: last.index + 1,
        term,
        leader: replica,
        kind: ENTRY_MEMBERSHIP,
        time_ms: 0,
        payload: membership_codec::encode(None, &membership),
    };
    let index = entry.index;
    // The vote first: no crash leaves an entry of a term that the replica has not seen.
    let vote = Vote { leader_id: LeaderId { term: term + 1, node_id: replica }, committed: false };
    durable(|callback| log.save_vote(encode_vote(&vote), callback)).await?;
    durable(|callback| log.append(vec![entry], callback)).await?;
    Ok(index)
}
