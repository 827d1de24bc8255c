//! Round trips and noise for everything that travels on a lane.

use bytes::Bytes;
use openraft::raft::{
    AppendEntriesRequest, StreamAppendError, StreamAppendResult, TransferLeaderRequest, VoteRequest,
    VoteResponse,
};
use proptest::prelude::*;

use super::codec::*;
use crate::type_config::{
    Command, LeaderId, LogId, Membership, Payload, Peer, RaftEntry, Tokio, TypeConfig, Vote,
};

type C = TypeConfig<Tokio>;

fn log_id() -> impl Strategy<Value = LogId> {
    (any::<u64>(), any::<u64>(), 0..u64::MAX)
        .prop_map(|(term, node_id, index)| LogId::new(LeaderId { term, node_id }, index))
}

fn vote() -> impl Strategy<Value = Vote> {
    (any::<u64>(), any::<u64>(), any::<bool>())
        .prop_map(|(term, node_id, committed)| Vote { leader_id: LeaderId { term, node_id }, committed })
}

fn payload() -> impl Strategy<Value = Payload> {
    let command = (any::<u64>(), proptest::collection::vec(any::<u8>(), 0..600))
        .prop_map(|(time_ms, raw)| Payload::Normal(Command { time_ms, payload: Bytes::from(raw) }));
    let membership =
        proptest::collection::btree_map(any::<u64>(), "[a-z:/0-9]{0,30}", 1..5).prop_map(|nodes| {
            let voters = nodes.keys().copied().collect();
            let peers: std::collections::BTreeMap<u64, Peer> =
                nodes.into_iter().map(|(id, address)| (id, Peer { node: id / 2, address })).collect();
            Payload::Membership(Membership::new(vec![voters], peers).expect("valid"))
        });
    prop_oneof![Just(Payload::Blank), command, membership]
}

fn append() -> impl Strategy<Value = AppendEntriesRequest<C>> {
    let payloads = proptest::collection::vec(payload(), 0..8);
    let previous = proptest::option::of((any::<u64>(), any::<u64>(), 0..1_000_000u64));
    (vote(), previous, proptest::option::of(log_id()), payloads).prop_map(
        |(vote, previous, commit, payloads)| {
            let prev_log_id =
                previous.map(|(term, node_id, index)| LogId::new(LeaderId { term, node_id }, index));
            let first = prev_log_id.map_or(0, |id| id.index() + 1);
            let entries = (first..)
                .zip(payloads)
                .map(|(index, payload)| RaftEntry { log_id: LogId::new(vote.leader_id, index), payload })
                .collect();
            AppendEntriesRequest { vote, prev_log_id, entries, leader_commit: commit }
        },
    )
}

proptest! {
    #[test]
    fn append_round_trips(request in append()) {
        let body = encode_append(&request);
        let back = decode_append::<Tokio>(body).expect("decodes");
        prop_assert_eq!(back.vote, request.vote);
        prop_assert_eq!(back.prev_log_id, request.prev_log_id);
        prop_assert_eq!(back.leader_commit, request.leader_commit);
        prop_assert_eq!(back.entries, request.entries);
    }

    #[test]
    fn an_append_cut_short_is_an_error(request in append(), at in any::<proptest::sample::Index>()) {
        let body = encode_append(&request);
        let cut = body.slice(..at.index(body.len()));
        prop_assert!(decode_append::<Tokio>(cut).is_err());
    }

    #[test]
    fn append_replies_round_trip(matching in proptest::option::of(log_id()), id in log_id(), vote in vote()) {
        let answers: [StreamAppendResult<C>; 3] = [
            Ok(matching),
            Err(StreamAppendError::Conflict(id)),
            Err(StreamAppendError::HigherVote(vote)),
        ];
        for answer in answers {
            prop_assert_eq!(decode_append_reply::<Tokio>(encode_append_reply::<Tokio>(&answer)).expect("decodes"), answer);
        }
    }

    #[test]
    fn votes_and_transfers_round_trip(
        vote in vote(), last in proptest::option::of(log_id()), flag in any::<bool>(), to in any::<u64>(),
    ) {
        let mut request = VoteRequest::<C>::new(vote, last);
        request.leadership_transfer = flag;
        prop_assert_eq!(decode_vote::<Tokio>(encode_vote(&request)).expect("decodes"), request);
        let reply = VoteResponse::<C>::new(vote, last, flag);
        prop_assert_eq!(decode_vote_reply::<Tokio>(encode_vote_reply(&reply)).expect("decodes"), reply);
        let transfer = TransferLeaderRequest::<C>::new(vote, to, last);
        prop_assert_eq!(decode_transfer::<Tokio>(encode_transfer(&transfer)).expect("decodes"), transfer);
    }

    #[test]
    fn noise_is_an_error_and_never_a_panic(noise in proptest::collection::vec(any::<u8>(), 0..400), first in 0u8..3) {
        let mut noise = noise;
        if let Some(version) = noise.first_mut() {
            *version = first;
        }
        let body = Bytes::from(noise);
        let _ = decode_append::<Tokio>(body.clone());
        let _ = decode_append_reply::<Tokio>(body.clone());
        let _ = decode_vote::<Tokio>(body.clone());
        let _ = decode_vote_reply::<Tokio>(body.clone());
        let _ = decode_transfer::<Tokio>(body.clone());
        let _ = Refusal::decode(body.clone());
        let _ = crate::snapshot::message::Begin::decode(body.clone());
        let _ = crate::snapshot::message::Chunk::decode(body.clone());
        let _ = crate::snapshot::message::Finish::decode(body);
    }
}

#[test]
fn payloads_are_slices_of_the_frame() {
    let request = AppendEntriesRequest::<C> {
        vote: Vote::new_committed(1, 1),
        prev_log_id: None,
        entries: vec![RaftEntry {
            log_id: LogId::new(LeaderId { term: 1, node_id: 1 }, 0),
            payload: Payload::Normal(Command { time_ms: 5, payload: Bytes::from(vec![7; 1000]) }),
        }],
        leader_commit: None,
    };
    let body = encode_append(&request);
    assert!(body.len() <= append_bytes(&request), "laid out without growing");
    let frame = body.as_ptr_range();
    let back = decode_append::<Tokio>(body.clone()).expect("decodes");
    let Payload::Normal(command) = &back.entries[0].payload else { panic!("a command") };
    assert!(frame.contains(&command.payload.as_ptr()), "not copied");
}

#[test]
fn entries_that_do_not_follow_each_other_are_refused() {
    let leader = LeaderId { term: 1, node_id: 1 };
    let entry = |index| RaftEntry { log_id: LogId::new(leader, index), payload: Payload::Blank };
    let request = AppendEntriesRequest::<C> {
        vote: Vote::new_committed(1, 1),
        prev_log_id: Some(LogId::new(leader, 4)),
        entries: vec![entry(5), entry(7)],
        leader_commit: None,
    };
    assert!(decode_append::<Tokio>(encode_append(&request)).is_err());
}

#[test]
fn refusals_and_kinds_keep_their_numbers() {
    let refusals = [
        Refusal::Absent,
        Refusal::Unreadable("why".to_owned()),
        Refusal::DoorShut,
        Refusal::Busy,
        Refusal::Stopped("why".to_owned()),
        Refusal::Superseded,
        Refusal::Snapshot("why".to_owned()),
        Refusal::NoSpace("why".to_owned()),
        Refusal::NoRoom,
    ];
    for (refusal, code) in refusals.into_iter().zip(1u8..) {
        let body = refusal.encode();
        assert_eq!(body[1], code);
        assert_eq!(Refusal::decode(body).expect("decodes"), refusal);
    }
    for kind in [1, 2, 3, 4, 5, 6, 7, 8, 9, 128, 129] {
        assert_eq!(FrameKind::of(kind).expect("known") as u32, kind);
    }
    assert_eq!(FrameKind::of(10), None);
}
