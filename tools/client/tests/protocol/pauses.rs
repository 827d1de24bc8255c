//! Who is refused with a pause to make makes it, and then asks for the same again.
//!
//! Pauses are looked at from below only: a slow machine makes them longer, and none shorter.

use std::time::{Duration, Instant};

use evershard::{Client, ClientOptions, ErrorKind, PushReceipt, definition};
use evershard_proto::v1::ErrorDetail;

use crate::fake_node::{FakeNode, begin, one_node, routing};

/// Longer than a client's own longest pause.
const ASKED: Duration = Duration::from_millis(300);

fn exhausted() -> ErrorDetail {
    let retry_after_ms = u32::try_from(ASKED.as_millis()).unwrap();
    ErrorDetail { kind: ErrorKind::Exhausted as i32, retry_after_ms, ..Default::default() }
}

/// Each request came so long after the one before; how many came.
fn assert_pauses(node: &FakeNode) -> usize {
    let asked_at = node.state.asked_at.lock().clone();
    for pair in asked_at.windows(2) {
        assert!(pair[1] - pair[0] >= ASKED, "{:?}", pair[1] - pair[0]);
    }
    asked_at.len()
}

#[tokio::test]
async fn a_push_comes_again_after_the_pause_under_its_number() {
    let (mut node, table) = one_node().await;
    let one = begin(&table, 7).await;
    let mut session = None;
    for _ in 0..3 {
        let push = node.content(1).await;
        assert_eq!(*session.get_or_insert(push.session), push.session);
        assert_eq!(push.ids, [7]);
        let refused = Instant::now();
        push.fail_with(ErrorKind::Exhausted, exhausted());
        let again = node.content(1).await;
        assert!(refused.elapsed() >= ASKED, "{:?}", refused.elapsed());
        again.fail_with(ErrorKind::Exhausted, ErrorDetail::default());
    }
    let push = node.content(1).await;
    assert_eq!((Some(push.session), push.ids.as_slice()), (session, [7].as_slice()));
    push.apply(5);
    assert_eq!(one.wait().await.unwrap(), PushReceipt { messages: 1, rows: 1 });
    // Nor does anything come twice, and the next number is the next.
    let two = begin(&table, 8).await;
    node.content(2).await.apply(6);
    two.wait().await.unwrap();
    node.silence().await;
}

#[tokio::test]
async fn what_was_sent_behind_a_refused_push_waits_with_it_and_keeps_its_place() {
    let (mut node, table) = one_node().await;
    let (one, two) = (begin(&table, 1).await, begin(&table, 2).await);
    let (c1, c2) = (node.content(1).await, node.content(2).await);
    let refused = Instant::now();
    c1.fail_with(ErrorKind::Exhausted, exhausted());
    c2.expect(1);
    // What comes while it waits is not even sent.
    while table.client().stats(false).retries == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let three = begin(&table, 3).await;
    for seq in 1..=3 {
        let push = node.content(seq).await;
        assert!(refused.elapsed() >= ASKED, "number {seq} after {:?}", refused.elapsed());
        push.apply(6 + seq);
    }
    for handle in [one, two, three] {
        handle.wait().await.unwrap();
    }
    node.silence().await;
}

#[tokio::test]
async fn a_push_that_is_refused_for_good_does_not_cut_the_pause_of_another_short() {
    let (mut node, table) = one_node().await;
    let (one, two) = (begin(&table, 1).await, begin(&table, 2).await);
    let (c1, c2) = (node.content(1).await, node.content(2).await);
    let refused = Instant::now();
    c1.fail_with(ErrorKind::Exhausted, exhausted());
    c2.fail(ErrorKind::UnknownTable);
    let c1 = node.content(1).await;
    assert!(refused.elapsed() >= ASKED, "{:?}", refused.elapsed());
    c1.apply(7);
    node.empty(2).await.fail(ErrorKind::Withdrawn);
    one.wait().await.unwrap();
    two.wait().await.unwrap_err();
}

#[tokio::test]
async fn a_pull_comes_again_after_the_pause() {
    let (node, table) = one_node().await;
    node.state.asked_at.lock().clear();
    node.state.refusals.lock().extend([exhausted(), exhausted()]);
    assert_eq!(table.pull_vec(&[1, 2]).await.unwrap(), [0.0, 0.0]);
    assert_eq!(assert_pauses(&node), 3);
}

#[tokio::test]
async fn a_single_call_comes_again_after_the_longest_pause_that_a_node_asked_for() {
    let (busy, other) = (FakeNode::start().await, FakeNode::start().await);
    for node in [&busy, &other] {
        *node.state.routing.lock() = routing(&[&busy, &other], 1);
    }
    let client = Client::connect(&busy.address, ClientOptions::default()).await.unwrap();
    for turn in 1..=2 {
        let told_nothing = ErrorDetail { kind: ErrorKind::NotLeader as i32, ..Default::default() };
        busy.state.refusals.lock().extend([exhausted(), exhausted()]);
        other.state.refusals.lock().extend([told_nothing.clone(), told_nothing]);
        for node in [&busy, &other] {
            node.state.asked_at.lock().clear();
        }
        client.create_table(definition::sparse("t", 1, definition::sgd(1.0))).await.unwrap();
        // The third time one of them makes it: the one that is asked first.
        let mut asked = [assert_pauses(&busy), assert_pauses(&other)];
        asked.sort_unstable();
        assert_eq!(asked, [2, 3], "turn {turn}");
    }
}
