//! A client stays with the cluster it met first.

use evershard::{Client, ClientOptions, Error, ErrorKind};

use crate::fake_node::{FakeNode, routing};

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
