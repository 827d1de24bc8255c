//! Threads: pulls, digests and flushes beside apply.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::BytesMut;
use evershard_proto::key::key_of;
use evershard_proto::push_body::Operation;
use evershard_proto::v1::ErrorKind;
use evershard_raft::state_machine::StateMachine;

use super::harness::{Replica, apply, command, fingerprint, pull};
use super::script::{one, schema};
use crate::flush::{DurableIndex, Flusher};
use crate::model::KeyRange;

/// A log that is always durable.
struct Durable;

impl DurableIndex for Durable {
    fn wait_durable(&self, _: u64) -> bool {
        true
    }

    fn bytes_since(&self, _: u64) -> u64 {
        0
    }
}

/// Sets every column of row 7 and row 8 of table 3 to one number, which grows with the index.
fn set_both(index: u64) -> evershard_raft::state_machine::CommittedEntry {
    let row = [index as f32; 5];
    command(index, one(1, index - 1, 3, Operation::Set, &[(7, &row), (8, &row)]))
}

#[test]
fn a_pull_during_pushes_never_sees_half_a_row() {
    const LAST: u64 = 3_000;
    let replica = Replica::new(1, KeyRange::ALL);
    let machine = replica.machine();
    apply(machine, command(1, schema(3, false)));
    apply(machine, set_both(2));
    let stop = AtomicBool::new(false);
    let pulls = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let keys: Vec<u8> = [7, 8, 7].iter().flat_map(|id| key_of(3, *id).to_le_bytes()).collect();
                let reader = machine.reader();
                let mut seen = 0;
                while !stop.load(Ordering::Relaxed) {
                    let mut rows = BytesMut::new();
                    let info = reader.pull(3, &keys, None, &mut rows).expect("a pull");
                    let values: Vec<f32> = rows
                        .chunks_exact(4)
                        .map(|raw| f32::from_le_bytes(raw.try_into().expect("four")))
                        .collect();
                    for row in values.chunks_exact(5) {
                        assert!(row.iter().all(|value| *value == row[0]), "half a row: {row:?}");
                        assert!(
                            row[0] as u64 >= info.index,
                            "older than the answered index {}: {row:?}",
                            info.index
                        );
                    }
                    assert!(info.index >= seen, "the index went back");
                    seen = info.index;
                    pulls.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for index in 3..=LAST {
            apply(machine, set_both(index));
        }
        while pulls.load(Ordering::Relaxed) < 10 {
            std::thread::yield_now();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(pull(machine, 3, 8).0, vec![LAST as f32; 5]);
}

/// The runtime here has one thread: a removal that held it while a cycle runs would keep the very task from running that the
/// cycle waits for.
#[tokio::test]
async fn removing_a_replica_does_not_hold_the_runtime_while_it_is_flushed() {
    let replica = Replica::new(1, KeyRange::ALL);
    let flusher = Flusher::start(Duration::from_millis(1), 1 << 20).expect("a thread");
    let (began, mut has_begun) = tokio::sync::mpsc::unbounded_channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let (released, ended) = (parking_lot::Mutex::new(released), Arc::new(AtomicBool::new(false)));
    let has_ended = Arc::clone(&ended);
    let on_flushed = Arc::new(move || {
        let _ = began.send(());
        // Longer than anything here takes, unless the runtime is held.
        let outcome = released.lock().recv_timeout(Duration::from_secs(20));
        has_ended.store(outcome.is_ok(), Ordering::SeqCst);
    });
    let machine = Arc::clone(replica.machine());
    flusher.add(machine, Durable, on_flushed, Arc::new(|reason| panic!("failed: {reason}")));
    apply(replica.machine(), command(1, schema(3, false)));
    apply(replica.machine(), set_both(2));
    has_begun.recv().await.expect("a cycle runs");
    let other_task = async {
        tokio::task::yield_now().await;
        assert!(!ended.load(Ordering::SeqCst), "the cycle waits for this task");
        release.send(()).expect("it listens");
    };
    tokio::join!(flusher.remove(1, 1), other_task);
    assert!(ended.load(Ordering::SeqCst), "nobody let the cycle go on");
    assert!(has_begun.try_recv().is_err(), "it is not flushed any more");
    tokio::task::spawn_blocking(move || flusher.stop()).await.expect("it ends");
}

#[tokio::test]
async fn the_flusher_flushes_until_the_replica_is_removed() {
    let mut replica = Replica::new(1, KeyRange::ALL);
    let flushed = Arc::new(AtomicU64::new(0));
    let flusher = Flusher::start(Duration::from_millis(1), 1 << 20).expect("a thread");
    let (counted, machine) = (Arc::clone(&flushed), Arc::clone(replica.machine()));
    let on_flushed = Arc::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    flusher.add(machine, Durable, on_flushed, Arc::new(|reason| panic!("failed: {reason}")));
    apply(replica.machine(), command(1, schema(3, false)));
    for index in 2..500 {
        apply(replica.machine(), set_both(index));
    }
    while replica.machine().flushed_index() < 499 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(replica.machine().dirty_bytes(), 0);
    flusher.remove(1, 1).await;
    assert!(flushed.load(Ordering::Relaxed) > 0);
    apply(replica.machine(), set_both(500));
    flusher.stop();
    flusher.stop();
    let before = fingerprint(replica.machine());
    replica.crash();
    assert_eq!(replica.machine().recovered().position.expect("some").index, 499);
    apply(replica.machine(), set_both(500));
    assert_eq!(fingerprint(replica.machine()), before);
}

#[test]
fn pulls_that_cannot_be_answered_say_why() {
    let range = KeyRange { start: 0, end: key_of(3, 7).saturating_sub(1) };
    let replica = Replica::new(1, range);
    apply(replica.machine(), command(1, schema(3, false)));
    let reader = replica.machine().reader();
    let refused = |table: u32, keys: &[u8]| {
        let mut rows = BytesMut::from(&b"kept"[..]);
        let error = reader.pull(table, keys, None, &mut rows).expect_err("refused");
        assert_eq!(&rows[..], b"kept");
        (error.kind(), error.to_string())
    };
    assert_eq!(refused(9, &[]).0, ErrorKind::UnknownTable);
    assert_eq!(refused(3, &[1, 2, 3]).0, ErrorKind::LengthMismatch);
    let (kind, message) = refused(3, &key_of(3, 7).to_le_bytes());
    assert_eq!(kind, ErrorKind::WrongRange);
    assert!(message.contains("id 7"), "{message}");
    let many = vec![0; 8 * (evershard_proto::limits::PULL_REPLY_BYTES_MAX / 20 + 1)];
    assert_eq!(refused(3, &many).0, ErrorKind::TooLarge);
    let info = reader.pull(3, &[], None, &mut BytesMut::new()).expect("an empty pull");
    assert_eq!((info.index, info.dim), (1, 5));
}

#[test]
fn unseen_ids_are_computed_alike_everywhere_and_not_written() {
    let (first, second) = (Replica::new(1, KeyRange::ALL), Replica::new(2, KeyRange::ALL));
    for replica in [&first, &second] {
        apply(replica.machine(), command(1, schema(1, false)));
    }
    let keys: Vec<u8> = (0..1500u64).flat_map(|id| key_of(1, id).to_le_bytes()).collect();
    let read = |replica: &Replica| {
        let (mut rows, mut exists) = (BytesMut::new(), BytesMut::new());
        replica.machine().pull(1, &keys, Some(&mut exists), &mut rows).expect("a pull");
        (rows, exists)
    };
    let (rows, exists) = read(&first);
    assert_eq!((rows.len(), exists.len()), (1500 * 12, 1500));
    assert!(exists.iter().all(|exists| *exists == 0));
    assert_eq!(read(&second), (rows.clone(), exists.clone()));
    assert_eq!(read(&first), (rows, exists));
    assert_eq!(first.machine().status().tables[0].rows, 0);
}
