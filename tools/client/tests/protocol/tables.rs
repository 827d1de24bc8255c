//! Finding a table at a node that has not heard of it.

use std::sync::atomic::Ordering;

use evershard::{Client, ClientOptions, ErrorKind, Routing, TableDefinition, TableDescription};

use crate::fake_node::{FakeNode, TABLE, routing};

fn with_table(routing: Routing) -> Routing {
    let definition = TableDefinition { name: "t".into(), dim: 2, ..Default::default() };
    let table = TableDescription { number: TABLE, definition: Some(definition), definition_version: 0 };
    Routing { version: routing.version + 1, tables: vec![table], ..routing }
}

/// A node that was just started may not have heard of a table that is there: whether there is one, the meta group says.
#[tokio::test]
async fn a_table_that_the_node_has_not_heard_of_is_found() {
    let node = FakeNode::start().await;
    *node.state.routing.lock() = routing(&[&node], 1);
    *node.state.confirmed_routing.lock() = with_table(routing(&[&node], 1));
    let client = Client::connect(&node.address, ClientOptions::default()).await.unwrap();
    assert_eq!(client.table("t").await.unwrap().number(), TABLE);
    // What was heard once is not forgotten because the node still has not.
    assert_eq!(client.table("t").await.unwrap().number(), TABLE);
    assert_eq!(node.state.confirmed_asked.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_table_that_the_node_knows_takes_no_second_question() {
    let node = FakeNode::start().await;
    *node.state.routing.lock() = with_table(routing(&[&node], 1));
    let client = Client::connect(&node.address, ClientOptions::default()).await.unwrap();
    assert_eq!(client.table("t").await.unwrap().number(), TABLE);
    assert_eq!(node.state.confirmed_asked.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_table_that_the_meta_group_does_not_know_is_unknown() {
    let node = FakeNode::start().await;
    *node.state.routing.lock() = routing(&[&node], 1);
    *node.state.confirmed_routing.lock() = routing(&[&node], 1);
    let client = Client::connect(&node.address, ClientOptions::default()).await.unwrap();
    assert_eq!(client.table("t").await.unwrap_err().kind(), ErrorKind::UnknownTable);
    assert_eq!(node.state.confirmed_asked.load(Ordering::SeqCst), 1);
}
