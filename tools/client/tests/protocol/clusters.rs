//! A client stays with the cluster it met first.

use evershard::{Client, ClientOptions, Error, ErrorKind, definition};

use crate::fake_node::{FakeNode, begin, routing};

#[tokio::test]
async fn a_hung_node_keeps_nobody_from_asking_the_next() {
    let hung = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut node = FakeNode::start().await;
    *node.state.routing.lock() = routing(&[&node], 1);
    let seeds = format!("http://{},{}", hung.local_addr().unwrap(), node.address);
    let client = Client::connect(&seeds, ClientOptions::default()).await.unwrap();
    let table = client.create_table(definition::sparse("t", 1, definition::sgd(1.0))).await.unwrap();
    let handle = begin(&table, 5).await;
    node.content(1).await.apply(1);
    handle.wait().await.unwrap();
}

#[tokio::test]
async fn a_node_of_another_cluster_is_not_believed() {
    let (ours, other) = (FakeNode::start().await, FakeNode::start().await);
    *ours.state.routing.lock() = routing(&[&ours], 1);
    *other.state.routing.lock() = routing(&[&ours], 1);
    let addresses = format!("{},{}", ours.address, other.address);
    let client = Client::connect(&addresses, ClientOptions::default()).await.unwrap();

    other.state.routing.lock().cluster_id = "another".into();
    client.routing().await.expect("one of ours is left");

    // All were set up anew, under the same addresses.
    ours.state.routing.lock().cluster_id = "another".into();
    let error = client.routing().await.expect_err("none of ours is left");
    let Error::Refused(refusal) = &error else { panic!("{error:?}") };
    assert_eq!(refusal.kind, ErrorKind::WrongCluster);
    assert!(error.to_string().contains("another"), "{error}");
}
