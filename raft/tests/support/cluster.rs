//! A cluster in one process over real sockets: nodes with their own folder, log, registry and server.
//!
//! Not here: processes and SIGKILL (the root package's tests). A node that is "killed" here stops without handing over,
//! without flushing and without telling anyone.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use evershard_raft::{
    ApplyThreads, Group, GroupRegistry, Peer, ProposeError, RaftOptions, RaftTiming, peer_service, tuned,
};
use evershard_storage::disk::RealDisk;
use evershard_storage::log::{Driver, Log, LogOptions};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::server::TcpIncoming;

use super::adder::Adder;

pub const GROUP: u64 = 1;

/// Slow enough for a loaded machine.
pub fn slow_timing() -> RaftTiming {
    RaftTiming {
        heartbeat: Duration::from_millis(100),
        election_min: Duration::from_millis(800),
        election_max: Duration::from_millis(1600),
        lease_margin: Duration::from_millis(100),
        ..RaftTiming::default()
    }
}

pub struct Cluster {
    pub folder: tempfile::TempDir,
    pub peers: BTreeMap<u64, Peer>,
    pub nodes: BTreeMap<u64, Node>,
    pub tune: fn(&mut RaftOptions),
}

pub struct Node {
    pub id: u64,
    pub registry: Arc<GroupRegistry>,
    pub log: Log,
    pub adders: BTreeMap<u64, Arc<Adder>>,
    stop_server: oneshot::Sender<()>,
    server: JoinHandle<()>,
}

/// A replica of group `g` on node `n` has id `100 g + n`.
pub fn replica_id(group: u64, node: u64) -> u64 {
    100 * group + node
}

pub async fn eventually<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    for _ in 0..1500 {
        if let Some(found) = check() {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("never happened: {what}");
}

impl Cluster {
    pub async fn start(nodes: u64, groups: &[u64], tune: fn(&mut RaftOptions)) -> Self {
        // RUST_LOG=info shows what happened when a test fails.
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_test_writer()
            .try_init();
        let folder = tempfile::tempdir().expect("tempdir");
        let mut cluster = Self { folder, peers: BTreeMap::new(), nodes: BTreeMap::new(), tune };
        for id in 1..=nodes {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
            cluster.start_node(id, listener, groups).await;
        }
        for group in groups {
            let members: BTreeMap<u64, Peer> =
                (1..=nodes).map(|id| (replica_id(*group, id), cluster.peers[&id].clone())).collect();
            cluster.group(1, *group).initialize(members).await.expect("initialise");
        }
        for group in groups {
            cluster.wait_leader(*group).await;
        }
        cluster
    }

    pub fn data(&self, id: u64) -> PathBuf {
        self.folder.path().join(format!("node-{id}"))
    }

    pub async fn start_node(&mut self, id: u64, listener: TcpListener, groups: &[u64]) {
        let address: SocketAddr = listener.local_addr().expect("address");
        self.peers.insert(id, Peer { node: id, address: format!("http://{address}") });
        let data = self.data(id);
        let mut options = RaftOptions::new("test-cluster", id, &data);
        options.timing = slow_timing();
        (self.tune)(&mut options);
        let log_options = LogOptions::new(data.join("log"));
        let (log, recovery) = tokio::task::spawn_blocking(move || {
            Log::open(log_options, Arc::new(RealDisk), Driver::Threaded).expect("log")
        })
        .await
        .expect("opens");
        assert!(recovery.quarantined.is_empty(), "{:?}", recovery.quarantined);
        let registry =
            GroupRegistry::new(options, ApplyThreads::start(2).expect("threads")).expect("registry");
        let (stop_server, stopped) = oneshot::channel::<()>();
        let service = peer_service(&registry);
        let server = tokio::spawn(async move {
            tuned(tonic::transport::Server::builder())
                .add_service(service)
                // The server's own setting does not reach connections that it is given.
                .serve_with_incoming_shutdown(TcpIncoming::from(listener).with_nodelay(Some(true)), async {
                    let _ = stopped.await;
                })
                .await
                .expect("serves");
        });
        let mut node = Node { id, registry, log, adders: BTreeMap::new(), stop_server, server };
        for group in groups {
            node.open(*group, &data).await;
        }
        self.nodes.insert(id, node);
    }

    /// Without handing over, flushing, or a word to anyone.
    pub async fn kill(&mut self, id: u64) {
        let node = self.nodes.remove(&id).expect("runs");
        node.server.abort();
        drop(node.stop_server);
        node.registry.stop().await;
        let log = node.log;
        tokio::task::spawn_blocking(move || log.close().expect("closes")).await.expect("joins");
    }

    /// In good order.
    pub async fn shut_down(&mut self, id: u64) {
        let node = self.nodes.remove(&id).expect("runs");
        node.registry.shutdown().await;
        let _ = node.stop_server.send(());
        node.server.abort();
        let log = node.log;
        tokio::task::spawn_blocking(move || log.close().expect("closes")).await.expect("joins");
    }

    pub async fn restart(&mut self, id: u64, groups: &[u64]) {
        let address = self.peers[&id].address.trim_start_matches("http://").to_owned();
        let mut attempts = 0;
        let listener = loop {
            match TcpListener::bind(&address).await {
                Ok(listener) => break listener,
                Err(error) if attempts == 100 => panic!("{address}: {error}"),
                Err(_) => {
                    attempts += 1;
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        };
        self.start_node(id, listener, groups).await;
    }

    pub fn group(&self, id: u64, group: u64) -> Group {
        self.nodes[&id].registry.group(group).expect("open")
    }

    pub fn adder(&self, id: u64, group: u64) -> &Arc<Adder> {
        &self.nodes[&id].adders[&group]
    }

    /// The node whose replica serves.
    pub async fn wait_leader(&self, group: u64) -> u64 {
        eventually("a leader that serves", || {
            self.nodes.keys().copied().find(|id| self.group(*id, group).serving_lease().is_ok())
        })
        .await
    }

    /// Proposes on whoever leads until it is answered.
    pub async fn add(&self, group: u64, delta: u64) -> u64 {
        for _ in 0..500 {
            let leader = self.wait_leader(group).await;
            let outcome = match self.group(leader, group).propose(command(delta)) {
                Ok(answer) => answer.await,
                Err(error) => Err(error),
            };
            match outcome {
                Ok(answer) => return u64::from_le_bytes(answer[..].try_into().expect("8 bytes")),
                Err(error) => {
                    let again = matches!(
                        error,
                        ProposeError::NotLeader { .. }
                            | ProposeError::Unavailable
                            | ProposeError::Exhausted { .. }
                    );
                    assert!(again, "{error}");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
        panic!("nobody took it");
    }

    /// Waits until all running replicas have applied the same, and returns the sum.
    pub async fn converge(&self, group: u64) -> u64 {
        eventually("all replicas agree", || {
            let states: Vec<_> = self.nodes.keys().map(|id| self.adder(*id, group).state()).collect();
            let last = self.nodes.keys().filter_map(|id| self.group(*id, group).status().last_index).max();
            let all = states
                .iter()
                .all(|state| state.position.map(|at| at.index) == last && state.digest == states[0].digest);
            all.then(|| states[0].sum)
        })
        .await
    }

    /// Flushes a replica's state machine and lets the group purge. A replica may apply what a quorum of others holds
    /// before its own log does, so this waits for its log.
    pub async fn flush(&self, id: u64, group: u64) {
        let (handle, adder) = (self.group(id, group), self.adder(id, group));
        eventually("the log holds what is applied", || {
            adder.flush(handle.status().durable_index).then_some(())
        })
        .await;
        handle.flushed();
    }
}

impl Node {
    pub async fn open(&mut self, group: u64, data: &Path) {
        let replica = replica_id(group, self.id);
        let adder = Adder::open(&data.join(format!("replicas/{group}-{replica}")), false, None);
        let log = self.log.group(group, replica).expect("log");
        self.registry.open(group, replica, Arc::clone(&adder) as _, log).await.expect("opens");
        self.adders.insert(group, adder);
    }
}

pub fn command(delta: u64) -> Bytes {
    Bytes::copy_from_slice(&delta.to_le_bytes())
}

/// A command that is `bytes` long and adds `delta`.
pub fn padded(delta: u64, bytes: usize) -> Bytes {
    let mut raw = vec![0u8; bytes.max(8)];
    raw[..8].copy_from_slice(&delta.to_le_bytes());
    Bytes::from(raw)
}
