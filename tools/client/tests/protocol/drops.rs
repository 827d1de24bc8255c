//! Dropping a table when replies are lost.

use std::sync::atomic::Ordering;

use evershard::{Client, ClientOptions};

use crate::fake_node::{FakeNode, routing};

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
