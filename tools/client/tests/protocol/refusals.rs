//! A refused message uses its number up with an empty body, and only the answer to that settles it: answers are judged by the
//! body they answer, whatever copies are under way.

use evershard::{Error, ErrorKind, PushHandle, PushReceipt};

use crate::fake_node::{begin, one_node};

async fn refused(handle: PushHandle) -> ErrorKind {
    match handle.wait().await {
        Err(Error::Refused(refusal)) => refusal.kind,
        other => panic!("{other:?}"),
    }
}

async fn applied(handle: PushHandle) {
    assert_eq!(handle.wait().await.unwrap(), PushReceipt { messages: 1, rows: 1 });
}

async fn unknown(handle: PushHandle) -> (Vec<u64>, bool) {
    match handle.wait().await {
        Err(Error::PartialPush(partial)) if partial.applied.is_empty() && partial.refused.is_empty() => {
            (partial.unknown.clone(), partial.retry().is_some())
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn an_emptied_number_is_used_up_and_the_next_message_goes_on() {
    let (mut node, table) = one_node().await;
    let (one, two) = (begin(&table, 1).await, begin(&table, 2).await);
    let (c1, c2) = (node.content(1).await, node.content(2).await);
    let session = c1.session;
    c1.fail(ErrorKind::UnknownTable);
    c2.expect(1);
    let (n1, c2) = (node.empty(1).await, node.content(2).await);
    n1.fail(ErrorKind::Withdrawn);
    c2.apply(7);
    assert_eq!(refused(one).await, ErrorKind::UnknownTable);
    applied(two).await;
    let three = begin(&table, 3).await;
    let c3 = node.content(3).await;
    assert_eq!(c3.session, session);
    c3.apply(8);
    applied(three).await;
}

#[tokio::test]
async fn a_second_refusal_of_the_content_is_no_record_of_the_empty_body() {
    let (mut node, table) = one_node().await;
    let (one, two) = (begin(&table, 1).await, begin(&table, 2).await);
    let (c1, c2) = (node.content(1).await, node.content(2).await);
    let session = c1.session;
    c1.fail(ErrorKind::UnknownTable);
    let (n1, c2_again) = (node.empty(1).await, node.content(2).await);
    c2.fail(ErrorKind::UnknownTable);
    let (n1_again, n2) = (node.empty(1).await, node.empty(2).await);
    c2_again.fail(ErrorKind::UnknownTable);
    n1.fail(ErrorKind::Withdrawn);
    n1_again.fail(ErrorKind::Withdrawn);
    assert_eq!(refused(one).await, ErrorKind::UnknownTable);
    // Number 2 is still open: it must come until it is used up.
    n2.fail(ErrorKind::Unavailable);
    node.empty(2).await.fail(ErrorKind::Withdrawn);
    assert_eq!(refused(two).await, ErrorKind::UnknownTable);
    let three = begin(&table, 3).await;
    let c3 = node.content(3).await;
    assert_eq!(c3.session, session);
    c3.apply(7);
    applied(three).await;
}

#[tokio::test]
async fn an_empty_body_sent_twice_does_not_make_a_refused_push_an_applied_one() {
    let (mut node, table) = one_node().await;
    let one = begin(&table, 1).await;
    node.content(1).await.fail(ErrorKind::Unavailable);
    node.content(1).await.fail(ErrorKind::UnknownTable);
    node.empty(1).await.fail(ErrorKind::Unavailable);
    node.empty(1).await.fail(ErrorKind::Withdrawn);
    assert_eq!(refused(one).await, ErrorKind::UnknownTable);
}

#[tokio::test]
async fn an_empty_body_answered_as_applied_says_that_the_content_was() {
    let (mut node, table) = one_node().await;
    let one = begin(&table, 1).await;
    // Applied, its answer lost; then the table was dropped.
    node.content(1).await.fail(ErrorKind::Unavailable);
    node.content(1).await.fail(ErrorKind::UnknownTable);
    node.empty(1).await.apply(0);
    applied(one).await;
}

#[tokio::test]
async fn a_copy_that_was_applied_is_heard_after_the_refusal_of_another() {
    let (mut node, table) = one_node().await;
    let (one, two) = (begin(&table, 1).await, begin(&table, 2).await);
    let (c1, c2) = (node.content(1).await, node.content(2).await);
    c1.fail(ErrorKind::Unavailable);
    let (c1, c2_again) = (node.content(1).await, node.content(2).await);
    c2_again.fail(ErrorKind::UnknownTable);
    let (c1_again, n2) = (node.content(1).await, node.empty(2).await);
    c1.apply(6);
    c2.apply(7);
    applied(one).await;
    applied(two).await;
    c1_again.apply(0);
    n2.apply(0);
    node.silence().await;
}

#[tokio::test]
async fn the_logs_own_record_of_the_content_settles_the_empty_body() {
    let (mut node, table) = one_node().await;
    let one = begin(&table, 1).await;
    node.content(1).await.fail(ErrorKind::NoOptimizer);
    node.empty(1).await.fail(ErrorKind::NoOptimizer);
    assert_eq!(refused(one).await, ErrorKind::NoOptimizer);
    node.silence().await;
}

#[tokio::test]
async fn content_that_nobody_took_back_and_is_withdrawn_is_unknown() {
    let (mut node, table) = one_node().await;
    let one = begin(&table, 1).await;
    node.content(1).await.fail(ErrorKind::Withdrawn);
    assert_eq!(unknown(one).await, (vec![1], false));
}

#[tokio::test]
async fn a_result_that_is_not_kept_is_unknown_and_the_session_goes_on() {
    let (mut node, table) = one_node().await;
    let (one, two) = (begin(&table, 1).await, begin(&table, 2).await);
    let (c1, c2) = (node.content(1).await, node.content(2).await);
    let session = c1.session;
    c1.fail(ErrorKind::Forgotten);
    assert_eq!(unknown(one).await, (vec![1], false));
    c2.apply(7);
    applied(two).await;
    let three = begin(&table, 3).await;
    let c3 = node.content(3).await;
    assert_eq!(c3.session, session);
    c3.apply(8);
    applied(three).await;
}

#[tokio::test]
async fn a_message_that_no_server_finds_whole_is_taken_back_in_the_end() {
    let (mut node, table) = one_node().await;
    let one = begin(&table, 1).await;
    for _ in 0..8 {
        node.content(1).await.fail(ErrorKind::Corrupt);
    }
    node.empty(1).await.fail(ErrorKind::Withdrawn);
    assert_eq!(refused(one).await, ErrorKind::Corrupt);
    let two = begin(&table, 2).await;
    node.content(2).await.apply(7);
    applied(two).await;
}

#[tokio::test]
async fn a_number_that_nobody_takes_ends_the_session() {
    let (mut node, table) = one_node().await;
    let (one, two) = (begin(&table, 1).await, begin(&table, 2).await);
    let (c1, c2) = (node.content(1).await, node.content(2).await);
    let session = c1.session;
    c1.fail(ErrorKind::UnknownTable);
    c2.expect(1);
    for _ in 0..8 {
        node.empty(1).await.fail(ErrorKind::Internal);
        node.content(2).await.expect(1);
    }
    // The only copy of its content was refused.
    assert_eq!(refused(one).await, ErrorKind::UnknownTable);
    assert_eq!(unknown(two).await, (vec![2], false));
    let three = begin(&table, 3).await;
    let c3 = node.content(1).await;
    assert_ne!(c3.session, session);
    c3.apply(7);
    applied(three).await;
}
