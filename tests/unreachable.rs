//! A client that reaches nobody gets an error within its deadline that names what it tried: never a hang; and one that reaches a node
//! which the others do not reach hears from them what there is.

mod support;

use std::time::Duration;

use evershard::{Client, ClientOptions, Error, ErrorKind};
use evershard_proto::v1::GetRoutingRequest;
use support::ledger::Ledger;
use support::proxy::Mode;
use support::trainer::Trainer;
use support::{Cluster, Options, PATIENCE, eventually, ports};
use tokio::net::TcpListener;
use tokio::time::timeout;

const DIM: usize = 4;

fn short() -> ClientOptions {
    ClientOptions { deadline: Duration::from_secs(2), ..ClientOptions::default() }
}

/// The error of a connect that must not hang.
async fn connect_error(addresses: &str) -> Error {
    let connecting = timeout(PATIENCE, Client::connect(addresses, short()));
    connecting.await.expect("a hang").expect_err("connected to nobody")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_is_none_or_where_nobody_answers_is_named() {
    for none in ["", " , ", "http://", "ftp://127.0.0.1:7400", "http://127.0.0.1", "127.0.0.1:port"] {
        let error = connect_error(none).await;
        assert_eq!(error.kind(), ErrorKind::Invalid, "{none:?}: {error}");
        assert!(
            error.to_string().contains(none.trim().trim_end_matches('/')) || none.trim() == ",",
            "{error}"
        );
    }
    let closed = format!("http://127.0.0.1:{}", ports::free(1)[0]);
    // It takes connections and never says a word.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = format!("http://{}", silent.local_addr().unwrap());
    let unknown = "http://no-such-host.invalid:7400".to_owned();
    for address in [closed, silent, unknown] {
        let error = connect_error(&address).await;
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        assert!(error.is_retryable() && error.to_string().contains(&address), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn options_that_make_no_sense_are_named() {
    let options = ClientOptions { pushes_in_flight: 0, ..ClientOptions::default() };
    let error = Client::connect("http://127.0.0.1:1", options).await.expect_err("no pushes in flight");
    assert!(error.to_string().contains("pushes_in_flight"), "{error}");
}

/// All replicas are down: bounded retries, then an error that says what is known; sent again when they are back, the push
/// counts once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_is_down_is_an_error_and_the_push_can_be_retried() {
    let mut cluster = Cluster::with_shards(2).await;
    let trainer = Trainer::with(&cluster.endpoints(), short()).await;
    let table = trainer.integers("audit", DIM).await;
    let ids: Vec<u64> = (0..64).collect();
    let ones = vec![1.0; ids.len() * DIM];
    let mut ledger = Ledger::default();
    for _ in 0..3 {
        timeout(PATIENCE, table.push(&ids, &ones)).await.expect("a hang").unwrap();
        ledger.acknowledge(&ids, &vec![1; ids.len()]);
    }

    cluster.kill_all();
    let pulled = timeout(PATIENCE, table.pull(&ids)).await.expect("a hang").expect_err("nobody is there");
    assert!(matches!(pulled, Error::Unavailable { .. }), "{pulled}");
    assert!(pulled.to_string().contains("http://127.0.0.1:"), "{pulled}");
    let pushed =
        timeout(PATIENCE, table.push(&ids, &ones)).await.expect("a hang").expect_err("nobody is there");
    let Error::PartialPush(partial) = pushed else { panic!("{pushed}") };
    let mut unknown = partial.unknown.clone();
    unknown.sort_unstable();
    assert_eq!((unknown, partial.applied.len(), partial.refused.len()), (ids.clone(), 0, 0));

    cluster.start_all();
    cluster.wait_ready().await;
    let retry = partial.retry().expect("a push of unknown outcome can be retried");
    assert!(partial.retry().is_none(), "retried twice");
    timeout(PATIENCE, retry.wait()).await.expect("a hang").unwrap();
    ledger.acknowledge(&ids, &vec![1; ids.len()]);
    table.push(&ids, &ones).await.unwrap();
    ledger.acknowledge(&ids, &vec![1; ids.len()]);
    ledger.assert_matches(&table.pull(&ids).await.unwrap(), DIM);
    cluster.assert_replicas_equal().await;
}

/// A push that is given up: its outcome stays unknown, and is never doubled; the client's next pushes count.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_given_up_is_applied_once_or_not_at_all() {
    let mut cluster = Cluster::with_shards(1).await;
    let trainer = Trainer::with(&cluster.endpoints(), short()).await;
    let table = trainer.integers("audit", DIM).await;
    table.push(&[7], &[1.0; DIM]).await.unwrap();
    cluster.kill_all();
    let error = timeout(PATIENCE, table.push(&[7], &[16.0; DIM])).await.expect("a hang").expect_err("down");
    drop(error);
    cluster.start_all();
    cluster.wait_ready().await;
    table.push(&[7], &[1.0; DIM]).await.unwrap();
    let row = table.pull(&[7]).await.unwrap();
    assert!(row == [-2.0; DIM] || row == [-18.0; DIM], "{row:?}");
    cluster.assert_replicas_equal().await;
}

/// It goes on to say what it knew: a table that was created since is there all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_is_found_although_the_node_that_is_asked_first_has_not_heard_of_it() {
    let cluster = Cluster::start(Options { shards: 1, proxied: true, ..Options::default() }).await;
    let leader = eventually("a leader of the meta group", || async {
        let known = cluster.routing(1).await.map_or(0, |routing| routing.meta_leader_node);
        if known == 0 { Err("none is known".to_owned()) } else { Ok(known) }
    })
    .await;
    cluster.transfer(0, leader).await;
    let behind = leader % 3 + 1;
    cluster.proxy(behind).set(Mode::Cut);
    let creator = Trainer::connect(&cluster.node(leader).address()).await;
    creator.integers("later", DIM).await;

    let ask = async |node: u64, confirmed: bool| {
        let reply = cluster.admin(node).get_routing(GetRoutingRequest { confirmed }).await;
        reply.map(|routing| routing.into_inner().tables.len())
    };
    assert_eq!(ask(behind, false).await.unwrap(), 0, "it has not heard of it");
    assert!(ask(behind, true).await.is_err(), "it does not lead the meta group");
    assert_eq!(ask(leader, true).await.unwrap(), 1);
    let first = format!("{},{}", cluster.node(behind).address(), cluster.node(leader).address());
    let client = Client::connect(&first, ClientOptions::default()).await.unwrap();
    assert_eq!(client.table("later").await.unwrap().name(), "later");
    assert_eq!(client.table("never").await.unwrap_err().kind(), ErrorKind::UnknownTable);
}
