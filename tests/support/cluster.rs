//! A cluster of server processes that belongs to one test.

use std::collections::BTreeMap;
use std::time::Duration;

use evershard_proto::v1::admin_service_client::AdminServiceClient;
use evershard_proto::v1::{
    GetNodeStatusRequest, GetRoutingRequest, InitClusterRequest, NodeAddress, NodeStatus, ReplicaStatus,
    Routing, ScrubReply, ScrubRequest, TransferLeaderRequest,
};
use tempfile::TempDir;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};

use super::node::{Node, NodeSettings};
use super::proxy::Proxy;
use super::{eventually, ports};

/// What a test wants of its cluster.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) nodes: u64,
    pub(crate) shards: u32,
    pub(crate) replicas: u32,
    /// Flags for every server.
    pub(crate) server_args: Vec<String>,
    /// Everybody reaches each node through a proxy of its own.
    pub(crate) proxied: bool,
    /// What the cluster begins with, if not with the highest that the build knows.
    pub(crate) cluster_version: Option<u32>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            nodes: 3,
            shards: 4,
            replicas: 3,
            server_args: slow_elections(),
            proxied: false,
            cluster_version: None,
        }
    }
}

impl Options {
    pub(crate) fn arg(mut self, flag: &str, value: impl ToString) -> Self {
        match self.server_args.iter().position(|known| known == flag) {
            Some(at) => self.server_args[at + 1] = value.to_string(),
            None => self.server_args.extend([flag.to_owned(), value.to_string()]),
        }
        self
    }
}

/// Timers for tests that are not about failover or scrubs: no election happens because a small machine was busy, or its disk, and
/// nothing is scrubbed but what a test asks for.
fn slow_elections() -> Vec<String> {
    let timers = [
        ("--heartbeat-ms", "100"),
        ("--election-min-ms", "600"),
        ("--election-max-ms", "1200"),
        ("--disk-stall-ms", "20000"),
        ("--scrub-interval-seconds", "0"),
    ];
    timers.iter().flat_map(|(flag, value)| [(*flag).to_owned(), (*value).to_owned()]).collect()
}

/// A running cluster.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) options: Options,
    nodes: BTreeMap<u64, Node>,
    proxies: BTreeMap<u64, Proxy>,
    // Last: the processes end before their directory goes.
    dir: Option<TempDir>,
}

impl Cluster {
    /// Starts all nodes, creates the cluster and waits until every shard has a leader.
    pub(crate) async fn start(options: Options) -> Self {
        let mut cluster = Self::prepare(options).await;
        cluster.start_all();
        cluster.create().await;
        cluster.wait_ready().await;
        cluster
    }

    /// The usual cluster: three nodes, this many shards.
    pub(crate) async fn with_shards(shards: u32) -> Self {
        Self::start(Options { shards, ..Options::default() }).await
    }

    /// Everything but the processes.
    pub(crate) async fn prepare(options: Options) -> Self {
        let dir = tempfile::Builder::new().prefix("evershard-test-").tempdir().unwrap();
        let free = ports::free(usize::try_from(options.nodes).unwrap() * 3);
        let mut proxies = BTreeMap::new();
        let mut settings = Vec::new();
        for (id, free) in (1..=options.nodes).zip(free.chunks_exact(3)) {
            let (grpc_port, http_port, proxy_port) = (free[0], free[1], free[2]);
            let mut advertised = format!("http://127.0.0.1:{grpc_port}");
            if options.proxied {
                proxies.insert(id, Proxy::start(proxy_port, grpc_port).await);
                advertised = format!("http://127.0.0.1:{proxy_port}");
            }
            let server_args = options.server_args.clone();
            settings.push(NodeSettings {
                id,
                grpc_port,
                http_port,
                advertised,
                peers: String::new(),
                server_args,
            });
        }
        let peers: Vec<String> = settings.iter().map(|node| node.advertised.clone()).collect();
        let nodes = settings.into_iter().map(|mut settings| {
            settings.peers = peers.join(",");
            (settings.id, Node::new(settings, dir.path()))
        });
        Cluster { options, nodes: nodes.collect(), proxies, dir: Some(dir) }
    }

    pub(crate) fn start_all(&mut self) {
        for node in self.nodes.values_mut() {
            node.start(None);
        }
    }

    /// Creates the cluster id, the meta group and the shards.
    pub(crate) async fn create(&self) {
        let addresses = self
            .nodes
            .values()
            .map(|node| NodeAddress { id: node.settings.id, address: node.settings.advertised.clone() });
        let request = InitClusterRequest {
            nodes: addresses.collect(),
            shards: self.options.shards,
            replicas: self.options.replicas,
            cluster_version: self.options.cluster_version,
        };
        eventually("creating the cluster", || async {
            match self.admin(1).init_cluster(request.clone()).await {
                Ok(_) => Ok(()),
                Err(status) if status.code() == tonic::Code::AlreadyExists => Ok(()),
                Err(status) => Err(status.to_string()),
            }
        })
        .await;
    }

    pub(crate) fn node(&self, id: u64) -> &Node {
        &self.nodes[&id]
    }

    pub(crate) fn node_mut(&mut self, id: u64) -> &mut Node {
        self.nodes.get_mut(&id).unwrap_or_else(|| panic!("no node {id}"))
    }

    pub(crate) fn proxy(&self, id: u64) -> &Proxy {
        &self.proxies[&id]
    }

    pub(crate) fn ids(&self) -> Vec<u64> {
        self.nodes.keys().copied().collect()
    }

    pub(crate) fn shards(&self) -> std::ops::Range<u32> {
        0..self.options.shards
    }

    /// What a client is given.
    pub(crate) fn endpoints(&self) -> String {
        let addresses: Vec<&str> =
            self.nodes.values().map(|node| node.settings.advertised.as_str()).collect();
        addresses.join(",")
    }

    pub(crate) fn kill(&mut self, id: u64) {
        self.node_mut(id).kill();
    }

    pub(crate) fn restart(&mut self, id: u64) {
        self.node_mut(id).start(None);
    }

    pub(crate) fn kill_all(&mut self) {
        for node in self.nodes.values_mut() {
            node.kill();
        }
    }

    /// A node's services, past any proxy.
    pub(crate) fn channel(&self, id: u64) -> Channel {
        let endpoint = Endpoint::from_shared(self.node(id).address()).unwrap();
        endpoint.connect_timeout(Duration::from_secs(1)).timeout(Duration::from_secs(30)).connect_lazy()
    }

    pub(crate) fn admin(&self, id: u64) -> AdminServiceClient<Channel> {
        AdminServiceClient::new(self.channel(id)).max_decoding_message_size(64 << 20)
    }

    /// The cluster as a node knows it.
    pub(crate) async fn routing(&self, id: u64) -> Option<Routing> {
        let mut admin = self.admin(id);
        let reply = timeout(Duration::from_secs(5), admin.get_routing(GetRoutingRequest::default()))
            .await
            .ok()?
            .ok()?;
        Some(reply.into_inner())
    }

    /// What a node says of its replicas.
    pub(crate) async fn status(&self, id: u64) -> Option<NodeStatus> {
        let mut admin = self.admin(id);
        let ask = admin.get_node_status(GetNodeStatusRequest::default());
        Some(timeout(Duration::from_secs(5), ask).await.ok()?.ok()?.into_inner())
    }

    /// What a node says of its replica of a shard.
    pub(crate) async fn replica(&self, id: u64, shard: u32) -> Option<ReplicaStatus> {
        let status = self.status(id).await?;
        // The meta group has no shard number of its own: shards' groups start at 1.
        status.replicas.into_iter().find(|replica| replica.shard == shard && replica.group != 0)
    }

    /// The node that leads a shard, when one of the living says that it does.
    pub(crate) async fn leader_now(&self, shard: u32) -> Option<u64> {
        let mut best: Option<(u64, u64)> = None;
        for (id, node) in &self.nodes {
            if !node.is_running() {
                continue;
            }
            if let Some(replica) = self.replica(*id, shard).await
                && replica.role == "leader"
            {
                best = best.max(Some((replica.term, *id)));
            }
        }
        best.map(|(_, id)| id)
    }

    /// Waits for a leader of the shard.
    pub(crate) async fn leader_of(&self, shard: u32) -> u64 {
        eventually(&format!("a leader of shard {shard}"), || async {
            self.leader_now(shard).await.ok_or_else(|| "no node leads it".to_owned())
        })
        .await
    }

    /// Waits until the living nodes know a leader of every shard, and every replica of theirs is at work.
    pub(crate) async fn wait_ready(&self) {
        for shard in self.shards() {
            self.leader_of(shard).await;
        }
        for (id, _) in self.nodes.iter().filter(|(_, node)| node.is_running()) {
            eventually(&format!("node {id} ready"), || async {
                match self.status(*id).await {
                    Some(status) if status.ready => Ok(()),
                    Some(status) => Err(format!("{status:?}")),
                    None => Err(format!("no answer; its log:\n{}", self.node(*id).log_tail())),
                }
            })
            .await;
        }
    }

    /// Hands the leadership of a shard to a node.
    pub(crate) async fn transfer(&self, shard: u32, to_node: u64) {
        let request = TransferLeaderRequest { shard, to_node };
        eventually(&format!("node {to_node} leads shard {shard}"), || async {
            if self.leader_now(shard).await == Some(to_node) {
                return Ok(());
            }
            let asked = self.admin(to_node).transfer_leader(request).await;
            tokio::time::sleep(Duration::from_millis(200)).await;
            Err(format!("{asked:?}"))
        })
        .await;
    }

    /// Waits until every replica of every shard has applied what its leader had committed by now.
    pub(crate) async fn wait_caught_up(&self) {
        for shard in self.shards() {
            let leader = self.leader_of(shard).await;
            let target = match self.replica(leader, shard).await {
                Some(replica) => replica.committed,
                None => continue,
            };
            for id in self.ids() {
                eventually(&format!("shard {shard} on node {id} at {target}"), || async {
                    match self.replica(id, shard).await {
                        Some(replica) if replica.applied >= target => Ok(()),
                        other => Err(format!("{other:?}")),
                    }
                })
                .await;
            }
        }
    }

    /// Digests of every replica, as they are.
    pub(crate) async fn scrub(&self) -> Result<ScrubReply, String> {
        let mut problem = "no node runs".to_owned();
        for (id, _) in self.nodes.iter().filter(|(_, node)| node.is_running()) {
            match self.admin(*id).scrub(ScrubRequest::default()).await {
                Ok(reply) => return Ok(reply.into_inner()),
                Err(status) => problem = format!("node {id}: {status}"),
            }
        }
        Err(problem)
    }

    /// Fails the test unless all replicas of all shards have equal digests. Replicas that are still catching up are
    /// waited for; replicas that differ are not.
    pub(crate) async fn assert_replicas_equal(&self) {
        let replicas = usize::try_from(self.options.replicas).unwrap();
        eventually("a digest of every replica", || async {
            let reply = self.scrub().await?;
            assert_eq!(reply.shards.len(), self.shards().len(), "{reply:?}");
            for shard in &reply.shards {
                let mut digests: Vec<&str> =
                    shard.digests.iter().map(|digest| digest.digest.as_str()).collect();
                if digests.len() < replicas || digests.contains(&"") || !shard.problem.is_empty() {
                    return Err(format!("{shard:?}"));
                }
                digests.dedup();
                assert!(digests.len() == 1 && shard.equal, "replicas differ: {shard:?}");
            }
            Ok(())
        })
        .await;
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for node in self.nodes.values_mut() {
            node.kill();
        }
        if std::thread::panicking() {
            for node in self.nodes.values() {
                eprintln!("--- the end of {}:\n{}", node.log().display(), node.log_tail());
            }
            if let Some(dir) = self.dir.take() {
                eprintln!("--- kept: {}", dir.keep().display());
            }
        }
    }
}
