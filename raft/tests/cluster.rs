//! Groups of three nodes over real sockets: replication, loss of a node, snapshots, transfer, doors, replacement.
//!
//! Not here: timing of failover, SIGKILL, damaged disks (the root package's tests), simulated time (`simulation.rs`).

mod support;

use std::time::Duration;

use bytes::Bytes;
use evershard_proto::v1::LaneFrame;
use evershard_proto::v1::raft_service_client::RaftServiceClient;
use evershard_raft::transport::{FrameKind, Lane};
use evershard_raft::{GroupError, NotServing, Peer, ProposeError, Role};
use support::adder::POISON;
use support::cluster::{Cluster, GROUP, command, eventually, padded, replica_id};
use tokio::net::TcpListener;
use tokio_stream::wrappers::ReceiverStream;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_apply_in_call_order_on_every_replica() {
    let cluster = Cluster::start(3, &[GROUP], |_| {}).await;
    let leader = cluster.wait_leader(GROUP).await;
    let group = cluster.group(leader, GROUP);
    let answers: Vec<_> = (1..=500).map(|n| group.propose(command(n)).expect("admitted")).collect();
    let mut expected = 0;
    for (answer, n) in answers.into_iter().zip(1..) {
        expected += n;
        let sum = answer.await.expect("applied");
        assert_eq!(u64::from_le_bytes(sum[..].try_into().expect("8 bytes")), expected, "in call order");
    }
    assert_eq!(cluster.converge(GROUP).await, expected);
    assert_eq!(group.status().role, Role::Leader);
    assert_eq!(group.status().members.voters.len(), 3);
    assert_eq!(group.status().in_flight_bytes, 0, "everything was given back");
    let index = group.read_index().await.expect("linearizable");
    assert!(index >= 500);

    let follower = cluster.nodes.keys().copied().find(|id| *id != leader).expect("three nodes");
    let refused = cluster.group(follower, GROUP).propose(command(1)).expect("admitted").await;
    let Err(ProposeError::NotLeader { leader: Some((replica, peer)) }) = refused else {
        panic!("a follower proposed: {refused:?}");
    };
    assert_eq!((replica, &peer), (replica_id(GROUP, leader), &cluster.peers[&leader]));
    let not_serving = cluster.group(follower, GROUP).serving_lease();
    assert!(matches!(not_serving, Err(NotServing::NotLeader { leader: Some(_) })), "{not_serving:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_leader_is_replaced_and_replays_when_it_returns() {
    let mut cluster = Cluster::start(3, &[GROUP], |_| {}).await;
    for n in 1..=50 {
        cluster.add(GROUP, n).await;
    }
    let first = cluster.wait_leader(GROUP).await;
    cluster.flush(first, GROUP).await;
    for n in 51..=60 {
        cluster.add(GROUP, n).await;
    }
    cluster.kill(first).await;
    let second = cluster.wait_leader(GROUP).await;
    assert_ne!(first, second);
    for n in 61..=100 {
        cluster.add(GROUP, n).await;
    }
    cluster.restart(first, &[GROUP]).await;
    assert_eq!(cluster.converge(GROUP).await, (1..=100).sum::<u64>());
    // Everyone at once: only the log and the flushed states are left.
    for id in 1..=3 {
        cluster.kill(id).await;
    }
    for id in 1..=3 {
        cluster.restart(id, &[GROUP]).await;
    }
    cluster.add(GROUP, 0).await;
    assert_eq!(cluster.converge(GROUP).await, (1..=100).sum::<u64>());
}

/// A state machine reads from disk ahead of apply only what it was told of: also of entries that an earlier process appended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_applied_was_announced_before() {
    let mut cluster = Cluster::start(3, &[GROUP], |_| {}).await;
    for n in 1..=50 {
        cluster.add(GROUP, n).await;
    }
    cluster.converge(GROUP).await;
    let surprises = |cluster: &Cluster| -> Vec<u64> {
        cluster.nodes.keys().flat_map(|id| cluster.adder(*id, GROUP).surprises()).collect()
    };
    assert!(surprises(&cluster).is_empty(), "as they came: {:?}", surprises(&cluster));
    for id in 1..=3 {
        cluster.kill(id).await;
    }
    // Nothing was flushed: everything is replayed.
    for id in 1..=3 {
        cluster.restart(id, &[GROUP]).await;
    }
    cluster.add(GROUP, 51).await;
    assert_eq!(cluster.converge(GROUP).await, (1..=51).sum::<u64>());
    assert!(surprises(&cluster).is_empty(), "replayed: {:?}", surprises(&cluster));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_behind_the_purged_log_catches_up_by_snapshot() {
    let mut cluster = Cluster::start(3, &[GROUP], |options| {
        options.limits.retain_log_bytes = 64 * 1024;
        options.limits.snapshot_chunk_bytes = 256 * 1024;
        options.limits.snapshot_links_kept = Duration::from_secs(2);
    })
    .await;
    let leader = cluster.wait_leader(GROUP).await;
    let sleeper = cluster.nodes.keys().copied().find(|id| *id != leader).expect("three nodes");
    cluster.add(GROUP, 1).await;
    cluster.kill(sleeper).await;
    let group = cluster.group(leader, GROUP);
    for _ in 0..40 {
        group.propose(padded(1, 64 * 1024)).expect("admitted").await.expect("applied");
    }
    let awake: Vec<u64> = cluster.nodes.keys().copied().collect();
    for id in awake {
        let applied = group.status().last_index;
        let handle = cluster.group(id, GROUP);
        eventually("applied and durable", || {
            let status = handle.status();
            (status.applied.map(|at| at.index) == applied && status.durable_index >= applied).then_some(())
        })
        .await;
        cluster.flush(id, GROUP).await;
        let purged = eventually("the log is purged", || handle.status().purged.filter(|at| *at > 20)).await;
        let kept = handle.log().bytes_since(purged);
        assert!(kept >= 64 * 1024, "only {kept} bytes of log were kept");
    }
    // Pushes go on while it catches up.
    let pushing = tokio::spawn(async move {
        for _ in 0..50 {
            group.propose(padded(1, 1024)).expect("admitted").await.expect("applied");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    cluster.restart(sleeper, &[GROUP]).await;
    pushing.await.expect("pushes");
    assert_eq!(cluster.converge(GROUP).await, 91);
    let caught_up = cluster.group(sleeper, GROUP).status();
    assert!(caught_up.purged.is_some_and(|at| at > 20), "it came by snapshot: {caught_up:?}");
    let folders = [
        cluster.data(leader).join(format!("outgoing/{GROUP}-{}", replica_id(GROUP, leader))),
        cluster.data(sleeper).join(format!("incoming/{GROUP}-{}", replica_id(GROUP, sleeper))),
    ];
    for folder in folders {
        eventually("snapshot folders are removed", || {
            let left = std::fs::read_dir(&folder).map(|entries| entries.count()).unwrap_or(0);
            (left == 0).then_some(())
        })
        .await;
    }
    // A snapshot that was installed survives a restart, with its membership.
    cluster.kill(sleeper).await;
    cluster.restart(sleeper, &[GROUP]).await;
    assert_eq!(cluster.converge(GROUP).await, 91);
    assert_eq!(cluster.group(sleeper, GROUP).members().voters.len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leadership_moves_on_request_and_on_clean_shutdown() {
    let mut cluster = Cluster::start(3, &[GROUP], |_| {}).await;
    cluster.add(GROUP, 1).await;
    let from = cluster.wait_leader(GROUP).await;
    let to = cluster.nodes.keys().copied().find(|id| *id != from).expect("three nodes");
    let mut watch = cluster.group(to, GROUP).watch();
    cluster
        .group(from, GROUP)
        .transfer_leader(replica_id(GROUP, to), Duration::from_secs(10))
        .await
        .expect("moves");
    assert!(cluster.group(from, GROUP).serving_lease().is_err());
    watch.wait_for(|leadership| leadership.is_self && leadership.is_ready).await.expect("leads");
    cluster.add(GROUP, 2).await;
    let again =
        cluster.group(from, GROUP).transfer_leader(replica_id(GROUP, to), Duration::from_secs(1)).await;
    assert!(matches!(again, Err(GroupError::NotLeader { .. })), "{again:?}");

    let leader = cluster.wait_leader(GROUP).await;
    cluster.shut_down(leader).await;
    let next = cluster.wait_leader(GROUP).await;
    assert_ne!(next, leader);
    assert_eq!(cluster.add(GROUP, 4).await, 7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_replica_keeps_its_vote_door_shut_for_a_lease() {
    let mut cluster = Cluster::start(3, &[GROUP], |_| {}).await;
    cluster.add(GROUP, 1).await;
    let leader = cluster.wait_leader(GROUP).await;
    let voter = cluster.nodes.keys().copied().find(|id| *id != leader).expect("three nodes");
    cluster.kill(voter).await;
    cluster.restart(voter, &[GROUP]).await;
    let replica = replica_id(GROUP, voter);
    let ask = |kind| lane_frame(replica, kind, vote_body(1_000_000, 999));
    let door_shut = 3;
    for kind in [FrameKind::Vote, FrameKind::PreVote] {
        let reply =
            exchange(&cluster.peers[&voter], "test-cluster", Lane::Control, ask(kind)).await.expect("reply");
        assert_eq!(reply.kind, FrameKind::Refused as u32);
        assert_eq!(reply.body[1], door_shut, "refused because it restarted");
    }
    assert!(cluster.group(voter, GROUP).status().term < 1_000_000);
    tokio::time::sleep(support::cluster::slow_timing().election_max).await;
    let reply = eventually_reply(&cluster.peers[&voter], || ask(FrameKind::PreVote)).await;
    assert_eq!(reply.kind, FrameKind::Reply as u32);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_and_damaged_frames_are_refused() {
    let cluster = Cluster::start(1, &[GROUP], |_| {}).await;
    let peer = &cluster.peers[&1];
    let replica = replica_id(GROUP, 1);
    let vote = || lane_frame(replica, FrameKind::PreVote, vote_body(9, 9));

    let other_cluster = exchange(peer, "another-cluster", Lane::Control, vote()).await.expect_err("refused");
    assert_eq!(other_cluster.code(), tonic::Code::FailedPrecondition, "{other_cluster}");
    let other_node = Peer { node: 77, ..peer.clone() };
    let wrong_node = exchange(&other_node, "test-cluster", Lane::Control, vote()).await.expect_err("refused");
    assert_eq!(wrong_node.code(), tonic::Code::FailedPrecondition, "{wrong_node}");

    let refusal = |reply: LaneFrame| {
        assert_eq!(reply.kind, FrameKind::Refused as u32);
        reply.body[1]
    };
    let (absent, unreadable) = (1, 2);
    let frame = LaneFrame { replica: 4711, ..vote() };
    let reply = exchange(peer, "test-cluster", Lane::Control, frame).await.expect("reply");
    assert_eq!(refusal(reply), absent, "no such replica");
    let frame = LaneFrame { group: 4711, ..vote() };
    let reply = exchange(peer, "test-cluster", Lane::Control, frame).await.expect("reply");
    assert_eq!(refusal(reply), absent, "the replica is of another group");
    let frame = LaneFrame { body_crc32: 1, ..vote() };
    let reply = exchange(peer, "test-cluster", Lane::Control, frame).await.expect("reply");
    assert_eq!(refusal(reply), unreadable, "a flipped bit");
    let frame = lane_frame(replica, FrameKind::Append, Bytes::from_static(&[9, 9, 9]));
    let reply = exchange(peer, "test-cluster", Lane::Log, frame).await.expect("reply");
    assert_eq!(refusal(reply), unreadable, "an unknown version");
    let frame = lane_frame(replica, FrameKind::SnapshotChunk, Bytes::from_static(&[1]));
    let reply = exchange(peer, "test-cluster", Lane::Snapshot, frame).await.expect("reply");
    assert_eq!(refusal(reply), unreadable, "cut short");
    assert_eq!(cluster.add(GROUP, 5).await, 5, "none of it did any harm");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_command_halts_its_group_only() {
    let cluster = Cluster::start(3, &[1, 2], |_| {}).await;
    cluster.add(1, 7).await;
    let leader = cluster.wait_leader(1).await;
    let outcome = cluster.group(leader, 1).propose(Bytes::from_static(POISON)).expect("admitted").await;
    let Err(ProposeError::Halted { reason }) = outcome else { panic!("{outcome:?}") };
    assert!(reason.contains("an unknown kind"), "{reason}");
    let group = cluster.group(leader, 1);
    assert!(matches!(group.propose(command(1)), Err(ProposeError::Halted { .. })));
    assert!(matches!(group.serving_lease(), Err(NotServing::Halted { .. })));
    eventually("it says so", || (group.status().role == Role::Stopped).then_some(())).await;
    assert!(group.status().halted.is_some());
    assert_eq!(cluster.adder(leader, 1).state().sum, 7, "what came before stands");
    assert_eq!(cluster.add(2, 3).await, 3, "the other group goes on");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_replica_is_replaced_by_a_new_one() {
    let mut cluster = Cluster::start(3, &[GROUP], |_| {}).await;
    for n in 1..=20 {
        cluster.add(GROUP, n).await;
    }
    let leader = cluster.wait_leader(GROUP).await;
    let lost = cluster.nodes.keys().copied().find(|id| *id != leader).expect("three nodes");
    cluster.kill(lost).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    cluster.start_node(4, listener, &[GROUP]).await;
    let (old, new) = (replica_id(GROUP, lost), replica_id(GROUP, 4));
    let group = cluster.group(leader, GROUP);
    for _ in 0..2 {
        // Asked twice: the second time there is nothing left to do.
        group
            .replace(Some(old), new, cluster.peers[&4].clone(), Duration::from_secs(20))
            .await
            .expect("replaced");
    }
    let members = group.members();
    assert!(members.voters.contains_key(&new) && !members.voters.contains_key(&old), "{members:?}");
    assert_eq!(members.peer(old), None);
    assert_eq!(cluster.add(GROUP, 1).await, 211);
    assert_eq!(cluster.converge(GROUP).await, 211);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_fit_is_refused_at_once() {
    let mut cluster = Cluster::start(3, &[GROUP], |options| options.limits.in_flight_bytes = 300_000).await;
    let leader = cluster.wait_leader(GROUP).await;
    let others: Vec<u64> = cluster.nodes.keys().copied().filter(|id| *id != leader).collect();
    for id in others {
        cluster.kill(id).await;
    }
    // Without a quorum nothing is answered: in flight adds up to the bound.
    let group = cluster.group(leader, GROUP);
    let mut held = Vec::new();
    let refused = loop {
        match group.propose(padded(1, 100_000)) {
            Ok(answer) => held.push(answer),
            Err(error) => break error,
        }
        assert!(held.len() < 10, "no bound");
    };
    assert!(matches!(refused, ProposeError::Exhausted { .. }), "{refused}");
    assert!(refused.is_retryable_here() && refused.is_not_proposed());
    let too_large = group.propose(padded(1, 100_000_000)).err().expect("refused");
    assert!(matches!(too_large, ProposeError::TooLarge { .. }), "{too_large}");
    // And its lease runs out.
    eventually("the lease runs out", || {
        matches!(group.serving_lease(), Err(NotServing::LeaseExpired { .. } | NotServing::NotLeader { .. }))
            .then_some(())
    })
    .await;
}

/// version 1, vote (term, replica, not committed), no last log id, no transfer.
fn vote_body(term: u64, replica: u64) -> Bytes {
    let mut body = vec![1u8];
    body.extend_from_slice(&term.to_le_bytes());
    body.extend_from_slice(&replica.to_le_bytes());
    body.extend_from_slice(&[0, 0, 0]);
    Bytes::from(body)
}

fn lane_frame(replica: u64, kind: FrameKind, body: Bytes) -> LaneFrame {
    let body_crc32 = crc32fast::hash(&body);
    LaneFrame { id: 1, group: GROUP, replica, kind: kind as u32, body, body_crc32 }
}

/// Sends one frame as a peer would, and waits for its answer.
async fn exchange(
    peer: &Peer,
    cluster: &str,
    lane: Lane,
    frame: LaneFrame,
) -> Result<LaneFrame, tonic::Status> {
    let mut client = RaftServiceClient::connect(peer.address.clone()).await.expect("connects");
    let (frames, queue) = tokio::sync::mpsc::channel(1);
    let mut request = tonic::Request::new(ReceiverStream::new(queue));
    let metadata = request.metadata_mut();
    metadata.insert("evershard-cluster", cluster.parse().expect("ascii"));
    metadata.insert("evershard-lane", lane.name().parse().expect("ascii"));
    metadata.insert("evershard-source-node", 99.into());
    metadata.insert("evershard-target-node", peer.node.into());
    let mut replies = client.lane(request).await?.into_inner();
    frames.send(frame).await.expect("open");
    Ok(replies.message().await?.expect("an answer"))
}

async fn eventually_reply(peer: &Peer, frame: impl Fn() -> LaneFrame) -> LaneFrame {
    for _ in 0..200 {
        let reply = exchange(peer, "test-cluster", Lane::Control, frame()).await.expect("reply");
        if reply.kind == FrameKind::Reply as u32 {
            return reply;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the door never opened");
}
