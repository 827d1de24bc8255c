//! What a node holds for its clients is bounded: replies that nobody reads stop the node from taking more requests, a shard
//! that gets nothing done refuses what goes beyond its bound. Both end by themselves, and every push counts once.

#![cfg(feature = "failpoints")]

mod support;

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use evershard_proto::key::key_of;
use evershard_proto::v1::exchange_reply::Reply;
use evershard_proto::v1::exchange_request::Request;
use evershard_proto::v1::parameter_service_client::ParameterServiceClient;
use evershard_proto::v1::{Consistency, ErrorKind, ExchangeReply, ExchangeRequest, PullRequest, PushRequest};
use support::metrics::metric;
use support::pusher::{Load, Pusher, finish_all, wait_progress};
use support::trainer::Trainer;
use support::{Cluster, Options, PATIENCE, eventually, raw};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;
use tonic::{Code, Streaming};

const DIM: usize = 64;
const LEADER: u64 = 1;
const MIB: u64 = 1 << 20;
/// The least that either may be.
const STREAM_BYTES: u64 = 16 * MIB;
const GROUP_BYTES: u64 = 4 * MIB;

/// A server's settings that no flag has.
fn small_bounds(folder: &std::path::Path) -> Options {
    let config = folder.join("node.toml");
    let text = format!(
        "stream_in_flight_bytes = {STREAM_BYTES}\nnode_in_flight_bytes = {STREAM_BYTES}\ngroup_in_flight_bytes = {GROUP_BYTES}\n"
    );
    std::fs::write(&config, text).unwrap();
    // A test holds the disk: nobody hands over.
    Options { shards: 1, ..Options::default() }
        .arg("--config", config.display())
        .arg("--disk-stall-ms", 600_000)
}

/// A client's stream with nothing in between: what it does not read stays at the server.
struct Stream {
    requests: mpsc::Sender<ExchangeRequest>,
    replies: Streaming<ExchangeReply>,
}

impl Stream {
    async fn open(cluster: &Cluster, node: u64) -> Self {
        const WINDOW: u32 = 65_535;
        let endpoint = Endpoint::from_shared(cluster.node(node).address()).unwrap();
        let channel = endpoint
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .connect()
            .await
            .unwrap();
        let (requests, queue) = mpsc::channel(1024);
        let replies =
            ParameterServiceClient::new(channel).exchange(ReceiverStream::new(queue)).await.unwrap();
        Stream { requests, replies: replies.into_inner() }
    }

    async fn send(&self, id: u64, request: Request) {
        self.requests.send(ExchangeRequest { id, request: Some(request), recovery_epoch: 0 }).await.unwrap();
    }

    async fn next(&mut self) -> (u64, Reply) {
        let next = timeout(PATIENCE, self.replies.message()).await.expect("a reply");
        let reply: ExchangeReply = next.unwrap().expect("the stream goes on");
        (reply.id, reply.reply.expect("a reply of this version"))
    }
}

/// Twelve clients ask for far more than the node may hold and read nothing. Some go away in the end, the others read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_that_nobody_reads_do_not_pile_up_beyond_the_nodes_bound() {
    const STREAMS: u64 = 12;
    const PULLS: u64 = 24;
    /// Close to the largest reply that there is.
    const ROWS: u64 = 4000;
    let folder = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(small_bounds(folder.path())).await;
    cluster.transfer(0, LEADER).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("audit", DIM).await;
    let number = table.table.number();
    let load = Load { ids: 1024, rows_a_push: 64, ..Load::small("audit", DIM) };
    let pushers: Vec<Pusher> =
        (0..2).map(|seed| Pusher::start(cluster.endpoints(), load.clone(), seed)).collect();
    wait_progress(&pushers, 10).await;

    let group = raw::shard_of(&cluster, number, 0).await.group;
    let keys: Vec<u8> = (0..ROWS).flat_map(|id| key_of(number, id).to_le_bytes()).collect();
    let pull = PullRequest {
        group,
        table: number,
        consistency: Consistency::Leader.into(),
        keys: keys.into(),
        want_exists: false,
        newer_than: 0,
    };
    let pulled = || metric(&cluster, LEADER, "evershard_pull_rows_total");
    let before = pulled().await;
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        let stream = Stream::open(&cluster, LEADER).await;
        for id in 0..PULLS {
            stream.send(id, Request::Pull(pull.clone())).await;
        }
        streams.push(stream);
    }
    // What the node has read from its table it holds, or the transport has taken it: a reply or two a stream.
    let held = settled(&pulled).await - before;
    let held_bytes = held * DIM as f64 * 4.0;
    let taken_by_transport = (STREAMS * 2 * MIB) as f64;
    assert!(held_bytes <= STREAM_BYTES as f64 + taken_by_transport, "{held_bytes} bytes held");
    assert!(held_bytes >= STREAM_BYTES as f64 / 2.0, "the test asked for too little: {held_bytes} bytes");

    // Who leaves gives back what was held for him.
    let readers = streams.split_off(streams.len() / 2);
    drop(streams);
    let mut reading = JoinSet::new();
    for mut stream in readers {
        reading.spawn(async move {
            let mut answered = BTreeSet::new();
            for _ in 0..PULLS {
                let (id, reply) = stream.next().await;
                let Reply::Pull(rows) = reply else { panic!("{reply:?}") };
                assert_eq!(rows.rows.len() as u64, ROWS * DIM as u64 * 4);
                answered.insert(id);
            }
            assert_eq!(answered.len() as u64, PULLS);
        });
    }
    reading.join_all().await;
    wait_progress(&pushers, 10).await;
    let ledger = finish_all(pushers).await;
    cluster.wait_caught_up().await;
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
    cluster.assert_replicas_equal().await;
}

/// Eight clients fill what the node may hold and read nothing, while connections and processes are alive. Their streams end,
/// and one who came after all of them is served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_read_nothing_do_not_keep_others_out() {
    const STREAMS: usize = 8;
    const ROWS: u64 = 4000;
    let folder = tempfile::tempdir().unwrap();
    let options = small_bounds(folder.path());
    let config = folder.path().join("node.toml");
    let bounds = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, format!("{bounds}reply_patience_seconds = 2\n")).unwrap();
    let cluster = Cluster::start(options).await;
    cluster.transfer(0, LEADER).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("audit", DIM).await;
    let number = table.table.number();
    let group = raw::shard_of(&cluster, number, 0).await.group;
    let pull = |rows: u64| PullRequest {
        group,
        table: number,
        consistency: Consistency::Leader.into(),
        keys: (0..rows).flat_map(|id| key_of(number, id).to_le_bytes()).collect::<Vec<u8>>().into(),
        want_exists: false,
        newer_than: 0,
    };
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        let stream = Stream::open(&cluster, LEADER).await;
        for id in 0..24 {
            stream.send(id, Request::Pull(pull(ROWS))).await;
        }
        streams.push(stream);
    }
    settled(&|| metric(&cluster, LEADER, "evershard_pull_rows_total")).await;

    // A call of one that is neither on a stream nor in anybody's way is counted too: it waits for room, and gets it.
    let endpoint = Endpoint::from_shared(cluster.node(LEADER).address()).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let rows = eventually("a call is answered", || async {
        let mut client = ParameterServiceClient::new(channel.clone()).max_decoding_message_size(64 << 20);
        client.pull(pull(ROWS)).await.map_err(|status| status.to_string())
    })
    .await;
    assert_eq!(rows.into_inner().rows.len() as u64, ROWS * DIM as u64 * 4);
    eventually("all streams that are not read end", || async {
        let cut = metric(&cluster, LEADER, "evershard_streams_cut_total").await;
        if cut >= STREAMS as f64 { Ok(()) } else { Err(format!("{cut} streams")) }
    })
    .await;
    // Who comes back to his stream is told why it ended.
    let mut stream = streams.remove(0);
    let told = loop {
        match timeout(PATIENCE, stream.replies.message()).await.expect("the stream ends") {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ended without a word"),
            Err(status) => break status,
        }
    };
    assert_eq!(told.code(), Code::ResourceExhausted, "{told}");
}

/// The figure when it has stopped to change.
async fn settled<F: Future<Output = f64>>(ask: impl Fn() -> F) -> f64 {
    const LOOKS: u32 = 40;
    let (mut last, mut same) = (ask().await, 0);
    while same < LOOKS {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let now = ask().await;
        same = if now == last { same + 1 } else { 0 };
        last = now;
    }
    last
}

/// No disk answers, so nothing is applied: what is beyond the shard's bound is refused with a pause to make, what was taken
/// waits, and when the disks are back each counts once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_that_gets_nothing_done_refuses_what_goes_beyond_its_bound() {
    const STREAMS: usize = 8;
    const PUSHES: usize = 64;
    const ROWS: u64 = 512;
    let folder = tempfile::tempdir().unwrap();
    let hang = folder.path().join("hang");
    let held = format!("append::before_sync=hang@{}", hang.display());
    let mut cluster = Cluster::prepare(small_bounds(folder.path())).await;
    for id in cluster.ids() {
        cluster.node_mut(id).start(Some(&held));
    }
    cluster.create().await;
    cluster.wait_ready().await;
    cluster.transfer(0, LEADER).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("audit", DIM).await;
    let number = table.table.number();
    let group = raw::shard_of(&cluster, number, 0).await.group;
    let ids: Vec<u64> = (0..ROWS).collect();
    let ones = vec![1.0; ids.len() * DIM];
    let body_of = |session, seq| raw::body(session, seq, number, DIM as u32, &ids, &ones);
    // A session each, so that a refusal of one push is no gap before another.
    let mut bodies: Vec<Bytes> = Vec::new();
    for _ in 0..PUSHES {
        let session = raw::RawSession::open(&cluster).await.number;
        // The leader has heard of the session when it takes this.
        let first = body_of(session, 1);
        eventually("the first push of a session", || async {
            let pushed = raw::push(&cluster, LEADER, group, first.clone()).await;
            pushed.map_err(|status| status.to_string())
        })
        .await;
        bodies.push(body_of(session, 2));
    }
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        streams.push(Stream::open(&cluster, LEADER).await);
    }

    std::fs::write(&hang, "").unwrap();
    for (at, body) in bodies.iter().enumerate() {
        let push = PushRequest { group, body: body.clone() };
        streams[at % STREAMS].send(at as u64, Request::Push(push)).await;
    }
    let taken_max = usize::try_from(GROUP_BYTES).unwrap() / bodies[0].len();
    let mut refused = BTreeSet::new();
    let mut early = 0;
    while early + refused.len() < PUSHES - taken_max {
        let mut replies: Vec<_> = streams.iter_mut().map(|stream| Box::pin(stream.next())).collect();
        let (id, reply) = poll_fn(|context| {
            let ready = replies.iter_mut().find_map(|reply| match reply.as_mut().poll(context) {
                Poll::Ready(next) => Some(next),
                Poll::Pending => None,
            });
            ready.map_or(Poll::Pending, Poll::Ready)
        })
        .await;
        match reply {
            Reply::Error(error) => {
                assert_eq!(error.kind(), ErrorKind::Exhausted, "{error:?}");
                assert!(error.retry_after_ms > 0, "{error:?}");
                refused.insert(id);
            }
            // In the batch that was written when the disks stopped.
            _ => early += 1,
        }
    }
    assert!(!refused.is_empty(), "{early} pushes were applied on disks that hang");

    std::fs::remove_file(&hang).unwrap();
    let mut waiting = PUSHES - early - refused.len();
    while waiting > 0 {
        for stream in &mut streams {
            // Each stream in turn: one with nothing left to say is passed over.
            if let Ok(next) = timeout(Duration::from_millis(100), stream.next()).await {
                assert!(matches!(next.1, Reply::Push(_)), "{next:?}");
                waiting -= 1;
            }
        }
    }
    for id in &refused {
        let body = &bodies[*id as usize];
        eventually("a refused push is taken", || async {
            let pushed = raw::push(&cluster, LEADER, group, body.clone()).await;
            pushed.map_err(|status| status.to_string())
        })
        .await;
    }
    // What was refused left nothing behind, what waited was applied once.
    let rows = table.pull(&ids).await.unwrap();
    assert!(rows.iter().all(|value| *value == -2.0 * PUSHES as f32), "{:?}", &rows[..4]);
    cluster.wait_caught_up().await;
    cluster.assert_replicas_equal().await;
}
