//! Numbers in order, to whoever leads, and never further ahead than a server remembers.

use evershard::{ClientOptions, ErrorKind};
use evershard_proto::v1::ErrorDetail;
use futures_util::future::join_all;

use crate::fake_node::{FakeNode, begin, one_node, routing, table};

#[tokio::test]
async fn an_out_of_order_that_is_old_news_does_not_end_the_session() {
    let (mut node, table) = one_node().await;
    let (one, two) = (begin(&table, 1).await, begin(&table, 2).await);
    let (c1, c2) = (node.content(1).await, node.content(2).await);
    let session = c1.session;
    // The door refused number 2 before number 1 was let in, and the answer came late.
    c1.apply(7);
    one.wait().await.unwrap();
    c2.expect(1);
    let c2 = node.content(2).await;
    assert_eq!(c2.session, session);
    c2.apply(8);
    two.wait().await.unwrap();
}

#[tokio::test]
async fn a_server_that_lost_what_was_acknowledged_ends_the_session() {
    let (mut node, table) = one_node().await;
    let one = begin(&table, 1).await;
    let c1 = node.content(1).await;
    let session = c1.session;
    c1.apply(7);
    one.wait().await.unwrap();
    let two = begin(&table, 2).await;
    node.content(2).await.expect(1);
    let error = two.wait().await.unwrap_err();
    assert!(error.to_string().contains("expects number 1"), "{error}");
    let three = begin(&table, 3).await;
    let c3 = node.content(1).await;
    assert_ne!(c3.session, session);
    c3.apply(7);
    three.wait().await.unwrap();
}

#[tokio::test]
async fn a_hint_moves_everything_to_the_new_leader_under_its_old_numbers() {
    let (mut old, mut new) = (FakeNode::start().await, FakeNode::start().await);
    let table = table(&[&old, &new], 1, 1, ClientOptions::default()).await;
    let handles = [begin(&table, 1).await, begin(&table, 2).await, begin(&table, 3).await];
    let (c1, _c2, _c3) = (old.content(1).await, old.content(2).await, old.content(3).await);
    let session = c1.session;
    let leader_address = new.address.clone();
    c1.fail_with(ErrorKind::NotLeader, ErrorDetail { leader_address, ..Default::default() });
    for seq in 1..=3 {
        let push = new.content(seq).await;
        assert_eq!((push.session, push.ids.as_slice()), (session, [seq].as_slice()));
        push.apply(6 + seq);
    }
    for receipt in join_all(handles.map(evershard::PushHandle::wait)).await {
        receipt.unwrap();
    }
    old.silence().await;
}

#[tokio::test]
async fn a_leader_that_is_cut_off_and_names_itself_is_left() {
    let (mut old, mut new) = (FakeNode::start().await, FakeNode::start().await);
    let table = table(&[&old, &new], 1, 1, ClientOptions::default()).await;
    *new.state.routing.lock() = routing(&[&old, &new], 2);
    let one = begin(&table, 1).await;
    old.content(1).await.fail(ErrorKind::Unavailable);
    new.content(1).await.apply(7);
    one.wait().await.unwrap();
    old.silence().await;
}

#[tokio::test]
async fn numbers_run_no_further_ahead_than_results_are_kept() {
    let (mut node, table) = one_node().await;
    let mut handles = vec![begin(&table, 1).await];
    let c1 = node.content(1).await;
    for id in 2..=64 {
        handles.push(begin(&table, id).await);
        node.content(id).await.apply(id);
    }
    // Were 65 applied, the result of 1 would not be kept.
    for id in 65..=66 {
        handles.push(begin(&table, id).await);
    }
    node.silence().await;
    c1.apply(1);
    for id in 65..=66 {
        node.content(id).await.apply(id);
    }
    for receipt in join_all(handles.into_iter().map(evershard::PushHandle::wait)).await {
        receipt.unwrap();
    }
}
