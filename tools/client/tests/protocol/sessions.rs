//! Sessions are renewed in time, as long as they are used, and no longer.

use std::sync::atomic::Ordering;
use std::time::Duration;

use evershard::{ClientOptions, Error};

use crate::fake_node::{FakeNode, begin, table};

#[tokio::test]
async fn a_session_is_renewed_at_a_third_of_its_lease_until_it_is_given_up() {
    let mut node = FakeNode::start().await;
    node.state.lease_seconds.store(1, Ordering::SeqCst);
    let options = ClientOptions { deadline: Duration::from_secs(2), ..ClientOptions::default() };
    let table = table(&[&node], 1, 1, options).await;
    let one = begin(&table, 1).await;
    let first = node.content(1).await;
    let error = one.wait().await.unwrap_err();
    assert!(matches!(error, Error::PartialPush(_)), "{error}");
    let renewed = std::mem::take(&mut *node.state.renewed.lock());
    assert!(renewed.len() >= 3 && renewed.iter().all(|s| *s == first.session), "{renewed:?}");

    drop(error);
    let two = begin(&table, 2).await;
    let second = node.content(1).await;
    assert_ne!(second.session, first.session);
    // A renewal of the first one may be on its way.
    tokio::time::sleep(Duration::from_millis(200)).await;
    node.state.renewed.lock().clear();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let renewed = node.state.renewed.lock().clone();
    assert!(renewed.len() >= 2 && renewed.iter().all(|s| *s == second.session), "{renewed:?}");
    second.apply(7);
    two.wait().await.unwrap();
}
