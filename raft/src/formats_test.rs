//! Golden files and fuzz tests of what this crate lays out: memberships, votes and positions in the log, frames between
//! nodes, snapshot messages.

use bytes::Bytes;
use evershard_formats::allocation::is_counting;
use evershard_formats::golden::golden;
use evershard_formats::{bytes_or_damaged, frugal};
use openraft::raft::{
    AppendEntriesRequest, StreamAppendError, StreamAppendResult, TransferLeaderRequest, VoteRequest,
    VoteResponse,
};
use proptest::prelude::*;

use crate::membership_codec;
use crate::snapshot::incoming::{Record, decode_manifest, encode_manifest, encode_record, read_journal};
use crate::snapshot::message::{self, Begin, Begun, Chunk, FileEntry, Finish, Forget, Kept};
use crate::state_machine::{LogPosition, SnapshotMark};
use crate::transport::codec::*;
use crate::type_config::{
    Command, LeaderId, LogId, Membership, Payload, Peer, RaftEntry, StoredMembership, Tokio, TypeConfig, Vote,
};

type C = TypeConfig<Tokio>;

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

#[test]
fn allocations_are_counted() {
    assert!(is_counting());
}

fn leader() -> LeaderId {
    LeaderId { term: 3, node_id: 2 }
}

fn vote() -> Vote {
    Vote { leader_id: leader(), committed: true }
}

fn log_id(index: u64) -> LogId {
    LogId::new(leader(), index)
}

/// A joint one, with a learner.
fn membership() -> Membership {
    let peer = |node: u64| Peer { node, address: format!("http://127.0.0.1:740{node}") };
    let nodes = [(11, peer(1)), (12, peer(2)), (13, peer(3)), (14, peer(3))];
    Membership::new(vec![[11, 12, 13].into(), [11, 12].into()], std::collections::BTreeMap::from(nodes))
        .expect("valid")
}

fn stored_membership() -> StoredMembership {
    StoredMembership::new(Some(log_id(5)), membership())
}

fn append() -> AppendEntriesRequest<C> {
    let command = Command { time_ms: 6, payload: Bytes::from_static(b"payload") };
    let payloads = [Payload::Blank, Payload::Normal(command), Payload::Membership(membership())];
    let entries = (8..).zip(payloads).map(|(index, payload)| RaftEntry { log_id: log_id(index), payload });
    AppendEntriesRequest {
        vote: vote(),
        prev_log_id: Some(log_id(7)),
        entries: entries.collect(),
        leader_commit: Some(log_id(6)),
    }
}

fn append_replies() -> [StreamAppendResult<C>; 3] {
    [
        Ok(Some(log_id(9))),
        Err(StreamAppendError::Conflict(log_id(4))),
        Err(StreamAppendError::HigherVote(vote())),
    ]
}

fn vote_request() -> VoteRequest<C> {
    let mut request = VoteRequest::<C>::new(vote(), Some(log_id(9)));
    request.leadership_transfer = true;
    request
}

fn begin() -> Begin {
    Begin {
        transfer: 7,
        vote: vote(),
        mark: SnapshotMark {
            position: Some(LogPosition { term: 3, leader: 2, index: 90 }),
            membership: Bytes::from_static(b"opaque"),
        },
        files: vec![FileEntry { name: "rocks/000012.sst".to_owned(), bytes: 12 }],
    }
}

fn chunk() -> Chunk {
    Chunk { transfer: 7, file: 1, offset: 9, crc32: 5, data: Bytes::from_static(b"abc") }
}

fn begun() -> Begun {
    Begun::Send(vec![Kept { bytes: 7, crc32: 8 }, Kept { bytes: 0, crc32: 0 }])
}

fn forget() -> Forget {
    Forget { transfer: 7, files: vec![3, 1] }
}

fn finish() -> Finish {
    Finish { transfer: 7, vote: vote(), crc32s: vec![1, 2] }
}

#[test]
fn version_1_of_what_is_in_the_log_stays_as_it_is() {
    let bytes = golden(CRATE, "membership-1.bin", &membership_codec::encode(Some(&log_id(5)), &membership()));
    assert_eq!(membership_codec::decode(bytes.into()), Ok(stored_membership()));
    let bytes = golden(CRATE, "vote-1.bin", &crate::log_store::encode_vote(&vote()));
    assert_eq!(crate::log_store::decode_vote(bytes.into()), Ok(vote()));
    let bytes = golden(CRATE, "committed-1.bin", &crate::log_store::encode_committed(&log_id(5)));
    assert_eq!(crate::log_store::decode_committed(bytes.into()), Ok(log_id(5)));
}

#[test]
fn version_1_of_the_frames_stays_as_it_is() {
    let bytes = golden(CRATE, "append-1.bin", &encode_append(&append()));
    let found = decode_append::<Tokio>(bytes.into()).expect("of version 1");
    assert_eq!(
        (found.vote, found.prev_log_id, found.leader_commit),
        (vote(), Some(log_id(7)), Some(log_id(6)))
    );
    assert_eq!(found.entries, append().entries);
    for (name, reply) in
        ["append-reply-1.bin", "append-conflict-1.bin", "append-vote-1.bin"].into_iter().zip(append_replies())
    {
        let bytes = golden(CRATE, name, &encode_append_reply::<Tokio>(&reply));
        assert_eq!(decode_append_reply::<Tokio>(bytes.into()), Ok(reply));
    }
    let bytes = golden(CRATE, "vote-request-1.bin", &encode_vote(&vote_request()));
    assert_eq!(decode_vote::<Tokio>(bytes.into()), Ok(vote_request()));
    let reply = VoteResponse::<C>::new(vote(), Some(log_id(9)), true);
    let bytes = golden(CRATE, "vote-reply-1.bin", &encode_vote_reply(&reply));
    assert_eq!(decode_vote_reply::<Tokio>(bytes.into()), Ok(reply));
    let transfer = TransferLeaderRequest::<C>::new(vote(), 12, Some(log_id(9)));
    let bytes = golden(CRATE, "transfer-1.bin", &encode_transfer(&transfer));
    assert_eq!(decode_transfer::<Tokio>(bytes.into()), Ok(transfer));
    let refusal = Refusal::Stopped("why".to_owned());
    let bytes = golden(CRATE, "refusal-1.bin", &refusal.encode());
    assert_eq!(Refusal::decode(bytes.into()), Ok(refusal));
}

fn record() -> Record {
    Record { file: 1, length: 3, offset: 9, crc32: 5 }
}

#[test]
fn version_1_of_what_a_receiver_keeps_stays_as_it_is() {
    let bytes = golden(CRATE, "snapshot-manifest-1.bin", &encode_manifest(&begin()));
    assert_eq!(decode_manifest(&bytes), Some(begin()));
    let bytes =
        golden(CRATE, "snapshot-journal-1.bin", &[encode_record(record()), encode_record(record())].concat());
    assert_eq!(read_journal(&bytes[..], 2), [record(), record()]);
    assert_eq!(read_journal(&bytes[..], 1), [], "of a file that there is not");
}

proptest! {
    #[test]
    fn fuzz_snapshot_receipt(bytes in bytes_or_damaged(receipts())) {
        frugal(bytes.len(), || decode_manifest(&bytes));
        let records = frugal(bytes.len() + 8192, || read_journal(&bytes[..], 2));
        // What is read is what was written, up to where it ends.
        let again: Vec<u8> = records.iter().flat_map(|record| encode_record(*record)).collect();
        prop_assert!(bytes.starts_with(&again));
    }
}

fn receipts() -> impl Strategy<Value = Vec<u8>> {
    proptest::sample::select(vec![encode_manifest(&begin()), encode_record(record()).repeat(3)])
}

fn valid() -> impl Strategy<Value = Vec<u8>> {
    let mut all: Vec<Bytes> = vec![
        membership_codec::encode(Some(&log_id(5)), &membership()),
        crate::log_store::encode_vote(&vote()),
        crate::log_store::encode_committed(&log_id(5)),
        encode_append(&append()),
        encode_vote(&vote_request()),
        encode_vote_reply(&VoteResponse::<C>::new(vote(), Some(log_id(9)), true)),
        encode_transfer(&TransferLeaderRequest::<C>::new(vote(), 12, Some(log_id(9)))),
        Refusal::Snapshot("why".to_owned()).encode(),
        begin().encode(),
        chunk().encode(),
        finish().encode(),
        message::encode_abort(7),
        begun().encode(),
        Begun::Unneeded(vote()).encode(),
        forget().encode(),
        message::encode_finished(&vote()),
    ];
    all.extend(append_replies().iter().map(encode_append_reply::<Tokio>));
    proptest::sample::select(all).prop_map(|bytes| bytes.to_vec())
}

proptest! {
    #[test]
    fn fuzz_log_payloads(bytes in bytes_or_damaged(valid())) {
        let bytes = Bytes::from(bytes);
        if let Ok(found) = frugal(bytes.len(), || membership_codec::decode(bytes.clone())) {
            // What is read as a membership can be written, and is the same then.
            let again = membership_codec::encode(found.log_id().as_ref(), found.membership());
            prop_assert_eq!(membership_codec::decode(again), Ok(found));
        }
        frugal(bytes.len(), || {
            let _ = crate::log_store::decode_vote(bytes.clone());
            let _ = crate::log_store::decode_committed(bytes.clone());
            for kind in 0..4 {
                let _ = payload_of(kind, 0, bytes.clone());
            }
        });
    }

    #[test]
    fn fuzz_frames(bytes in bytes_or_damaged(valid())) {
        let bytes = Bytes::from(bytes);
        frugal(bytes.len(), || {
            let _ = decode_append::<Tokio>(bytes.clone());
            let _ = decode_append_reply::<Tokio>(bytes.clone());
            let _ = decode_vote::<Tokio>(bytes.clone());
            let _ = decode_vote_reply::<Tokio>(bytes.clone());
            let _ = decode_transfer::<Tokio>(bytes.clone());
            let _ = decode_done(bytes.clone());
            let _ = Refusal::decode(bytes.clone());
        });
    }

    #[test]
    fn fuzz_snapshot_messages(bytes in bytes_or_damaged(valid())) {
        let bytes = Bytes::from(bytes);
        frugal(bytes.len(), || {
            if let Ok(begin) = Begin::decode(bytes.clone()) {
                // Nothing is ever written outside the folder it is joined to.
                let climbs = |file: &FileEntry| file.name.split('/').any(|part| part == "..") || file.name.starts_with('/');
                assert!(!begin.files.iter().any(climbs));
            }
            let _ = Chunk::decode(bytes.clone());
            let _ = Finish::decode(bytes.clone());
            let _ = message::decode_abort(bytes.clone());
            let _ = Begun::decode(bytes.clone());
            let _ = Forget::decode(bytes.clone());
            let _ = message::decode_finished(bytes.clone());
        });
    }
}

#[test]
fn version_2_of_the_snapshot_messages_stays_as_it_is() {
    let bytes = golden(CRATE, "snapshot-begin-2.bin", &begin().encode());
    assert_eq!(Begin::decode(bytes.into()), Ok(begin()));
    let bytes = golden(CRATE, "snapshot-begun-2.bin", &begun().encode());
    assert_eq!(Begun::decode(bytes.into()), Ok(begun()));
    let bytes = golden(CRATE, "snapshot-unneeded-2.bin", &Begun::Unneeded(vote()).encode());
    assert_eq!(Begun::decode(bytes.into()), Ok(Begun::Unneeded(vote())));
    let bytes = golden(CRATE, "snapshot-forget-2.bin", &forget().encode());
    assert_eq!(Forget::decode(bytes.into()), Ok(forget()));
    let bytes = golden(CRATE, "snapshot-chunk-2.bin", &chunk().encode());
    assert_eq!(Chunk::decode(bytes.into()), Ok(chunk()));
    let bytes = golden(CRATE, "snapshot-finish-2.bin", &finish().encode());
    assert_eq!(Finish::decode(bytes.into()), Ok(finish()));
    let bytes = golden(CRATE, "snapshot-finished-2.bin", &message::encode_finished(&vote()));
    assert_eq!(message::decode_finished(bytes.into()), Ok(vote()));
}
