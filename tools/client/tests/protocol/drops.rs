//! Dropping a table when replies are lost, and finding one that a node has not heard of.

use std::sync::atomic::Ordering;

use evershard::{Client, ClientOptions, ErrorKind, TableDefinition, TableDescription};

use crate::fake_node::{FakeNode, TABLE, routing};

/// The name may belong to a new table by the time the drop is tried again: what was asked for is told by its number.
#[tokio::test]
async fn a_drop_whose_reply_is_lost_is_made_again_by_number() {
    let node = FakeNode::start().await;
    *node.state.routing.lock() = routing(&[&node], 1);
    node.state.drops_lost.store(2, Ordering::SeqCst);
    let client = Client::connect(&node.address, ClientOptions::default()).await.unwrap();
    client.drop_table("t").await.unwrap();
    assert_eq!(*node.state.drops.lock(), [0, 1, 1, 1], "asked once which it is, then always for that one");
}

/// A node that was just started may not have heard of a table that is there: whether there is one, the meta group says.
#[tokio::test]
async fn a_table_that_the_node_has_not_heard_of_yet_is_found() {
    let node = FakeNode::start().await;
    *node.state.routing.lock() = routing(&[&node], 1);
    let client = Client::connect(&node.address, ClientOptions::default()).await.unwrap();
    let finding = tokio::spawn({
        let client = client.clone();
        async move { client.table("t").await }
    });
    while node.state.drops.lock().is_empty() {
        tokio::task::yield_now().await;
    }
    let definition = TableDefinition { name: "t".into(), dim: 2, ..Default::default() };
    let table = TableDescription { number: TABLE, definition: Some(definition), definition_version: 0 };
    {
        let mut routing = node.state.routing.lock();
        routing.version += 1;
        routing.tables.push(table);
    }
    assert_eq!(finding.await.unwrap().unwrap().number(), TABLE);
    assert!(node.state.drops.lock().iter().all(|number| *number == 0), "nothing is dropped");
}

#[tokio::test]
async fn a_table_that_the_meta_group_does_not_know_is_unknown() {
    let node = FakeNode::start().await;
    *node.state.routing.lock() = routing(&[&node], 1);
    node.state.has_no_table.store(true, Ordering::SeqCst);
    let client = Client::connect(&node.address, ClientOptions::default()).await.unwrap();
    assert_eq!(client.table("t").await.unwrap_err().kind(), ErrorKind::UnknownTable);
    assert_eq!(*node.state.drops.lock(), [0]);
}
