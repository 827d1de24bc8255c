//! What a push that failed in part can still become: a retry sends the rest, and is acknowledged only when all is applied.

use std::time::Duration;

use evershard::{ClientOptions, Error, ErrorKind, PartialPush, PushHandle, PushOptions, Table};
use tokio::time::timeout;

use crate::fake_node::{FakeNode, table};

/// Three rows of it fill a message.
const WIDE: u32 = 16 * 1024;

fn short() -> ClientOptions {
    ClientOptions {
        deadline: Duration::from_millis(600),
        attempt_timeout: Duration::from_secs(60),
        ..ClientOptions::default()
    }
}

async fn begin(table: &Table, ids: std::ops::Range<u64>) -> PushHandle {
    let ids: Vec<u64> = ids.collect();
    let values = vec![1.0; ids.len() * table.dim()];
    table.push_begin(&ids, &values, PushOptions::default()).await.unwrap()
}

async fn partial(handle: PushHandle) -> PartialPush {
    let waited = timeout(Duration::from_secs(5), handle.wait()).await.expect("a hang");
    match waited {
        Err(Error::PartialPush(partial)) => *partial,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_retry_sends_what_was_never_sent_after_what_was() {
    let mut node = FakeNode::start().await;
    let table = table(&[&node], 1, WIDE, ClientOptions { pushes_in_flight: 1, ..short() }).await;
    let handle = begin(&table, 0..6).await;
    let c1 = node.content(1).await;
    let (session, first) = (c1.session, c1.ids.clone());
    let error = partial(handle).await;
    assert_eq!((error.unknown.len(), error.unsent.len()), (6, 3));
    assert!(error.applied.is_empty() && error.refused.is_empty());
    let retried = tokio::spawn(error.retry().expect("it can be retried").wait());
    node.silence().await;
    c1.apply(7);
    let c2 = node.content(2).await;
    let mut all = [first, c2.ids.clone()].concat();
    all.sort_unstable();
    assert_eq!((c2.session, all), (session, (0..6).collect()));
    assert!(!retried.is_finished(), "acknowledged with a half of it unsent");
    c2.apply(8);
    assert_eq!(retried.await.unwrap().unwrap().messages, 2);
}

#[tokio::test]
async fn a_retry_can_be_retried_until_all_of_it_is_applied() {
    let mut node = FakeNode::start().await;
    let table = table(&[&node], 1, WIDE, ClientOptions { pushes_in_flight: 1, ..short() }).await;
    let handle = begin(&table, 0..6).await;
    let c1 = node.content(1).await;
    let error = partial(handle).await;
    c1.apply(7);
    let error = partial(error.retry().expect("it can be retried")).await;
    assert_eq!((error.applied.len(), error.unknown.len(), error.unsent.len()), (3, 3, 0));
    node.content(2).await.apply(8);
    error.retry().expect("it can be retried").wait().await.unwrap();
}

#[tokio::test]
async fn a_retry_is_no_success_when_a_part_of_the_push_is_lost() {
    let mut node = FakeNode::start().await;
    let table = table(&[&node], 1, WIDE, short()).await;
    let handle = begin(&table, 0..6).await;
    let (c1, c2) = (node.content(1).await, node.content(2).await);
    let lost = c1.ids.clone();
    c1.fail(ErrorKind::Forgotten);
    let error = partial(handle).await;
    assert_eq!((error.unknown.len(), error.unsent.len()), (6, 0));
    c2.apply(8);
    let error = partial(error.retry().expect("one message can still be applied")).await;
    assert_eq!((error.applied.len(), error.unknown.clone()), (3, lost));
    assert!(error.cause.contains("Forgotten") && error.retry().is_none(), "{error:?}");
}

#[tokio::test]
async fn a_push_of_which_nothing_was_sent_is_unavailable() {
    let mut node = FakeNode::start().await;
    let options = ClientOptions { pushes_in_flight: 1, ..short() };
    let table = table(&[&node], 1, WIDE, options).await;
    let _first = begin(&table, 0..1).await;
    let _c1 = node.content(1).await;
    let error = begin(&table, 1..2).await.wait().await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
}

#[tokio::test]
async fn a_shard_that_does_not_answer_holds_no_push_beyond_its_deadline() {
    let mut node = FakeNode::start().await;
    let options = ClientOptions { push_bytes_in_flight: 4 << 20, ..short() };
    let table = table(&[&node], 1, WIDE, options).await;
    // 22 messages: one more than the bytes in flight allow.
    let begun = timeout(Duration::from_secs(5), begin(&table, 0..66)).await.expect("a hang");
    let error = partial(begun).await;
    assert_eq!((error.unknown.len(), error.unsent.len()), (66, 3));
    for seq in 1..=21 {
        node.content(seq).await;
    }
    // What is parked holds no bytes up.
    let next = timeout(Duration::from_secs(5), begin(&table, 66..67)).await.expect("a hang");
    node.content(22).await.apply(7);
    next.wait().await.unwrap();
}
