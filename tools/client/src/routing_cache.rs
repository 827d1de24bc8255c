//! Where each key lives and who leads there, as this client last heard.
//!
//! Invariants:
//! - a refresh replaces the table only by one of the same cluster and of a version not older;
//! - a leader hint is used until it proves wrong, then dropped: the next try asks.
//!
//! Not here: sending.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::v1::admin_service_client::AdminServiceClient;
use evershard_proto::v1::{ErrorDetail, GetRoutingRequest, Routing};
use parking_lot::{Mutex, RwLock};

use crate::Error;
use crate::backoff::Backoff;
use crate::error::detail_of;
use crate::node_channel::{NodeChannels, passing};

/// One node may take this long to say what it knows.
const ASK_TIMEOUT: Duration = Duration::from_secs(1);

/// A shard, for sending to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shard {
    pub(crate) group: u64,
    pub(crate) range_start: u64,
    pub(crate) replicas: Vec<(u64, String)>,
}

/// The table of one version.
#[derive(Debug, Clone)]
pub(crate) struct RoutingTable {
    pub(crate) routing: Routing,
    /// Ascending by `range_start`; covers every key.
    pub(crate) shards: Vec<Shard>,
}

impl RoutingTable {
    fn new(routing: Routing) -> Result<Self, ErrorDetail> {
        let address =
            |node: u64| routing.nodes.iter().find(|n| n.id == node).map(|n| (node, n.address.clone()));
        let mut shards: Vec<Shard> = routing
            .shards
            .iter()
            .map(|s| Shard {
                group: s.group,
                range_start: s.range_start,
                replicas: s.replicas.iter().filter_map(|r| address(r.node)).collect(),
            })
            .collect();
        shards.sort_by_key(|s| s.range_start);
        if shards.first().is_none_or(|s| s.range_start != 0) {
            return Err(passing("the routing table does not cover every key".into()));
        }
        Ok(RoutingTable { routing, shards })
    }

    /// The position in `shards` of the owner of `key`.
    pub(crate) fn shard_of(&self, key: u64) -> usize {
        self.shards.partition_point(|s| s.range_start <= key) - 1
    }
}

/// The cache.
#[derive(Debug)]
pub(crate) struct RoutingCache {
    seeds: Vec<String>,
    channels: Arc<NodeChannels>,
    table: RwLock<Option<Arc<RoutingTable>>>,
    leaders: Mutex<HashMap<u64, String>>,
    turn: Mutex<HashMap<u64, usize>>,
    refreshing: tokio::sync::Mutex<Instant>,
    admin: Mutex<HashMap<String, tonic::transport::Channel>>,
}

impl RoutingCache {
    pub(crate) fn new(seeds: Vec<String>, channels: Arc<NodeChannels>) -> Self {
        RoutingCache {
            seeds,
            channels,
            table: RwLock::new(None),
            leaders: Mutex::default(),
            turn: Mutex::default(),
            refreshing: tokio::sync::Mutex::new(Instant::now()),
            admin: Mutex::default(),
        }
    }

    /// The table, asked for when there is none yet.
    pub(crate) async fn table(&self, deadline: Instant) -> Result<Arc<RoutingTable>, Error> {
        if let Some(table) = self.table.read().clone() {
            return Ok(table);
        }
        self.refresh_until(deadline).await
    }

    /// What is known now.
    pub(crate) fn known(&self) -> Option<Arc<RoutingTable>> {
        self.table.read().clone()
    }

    /// Asks until some node answers.
    pub(crate) async fn refresh_until(&self, deadline: Instant) -> Result<Arc<RoutingTable>, Error> {
        let started = Instant::now();
        let mut backoff = Backoff::default();
        loop {
            let last = match self.refresh().await {
                Ok(table) => return Ok(table),
                Err(error) => error,
            };
            let pause = backoff.pause(last.retry_after_ms);
            if Instant::now() + pause >= deadline {
                return Err(Error::Unavailable {
                    operation: "ask for the routing table".into(),
                    tried: self.addresses(),
                    last: last.message,
                    elapsed: started.elapsed(),
                });
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Asks the nodes in turn, once each. Callers that come while another asks take its answer.
    pub(crate) async fn refresh(&self) -> Result<Arc<RoutingTable>, ErrorDetail> {
        let asked_at = Instant::now();
        let mut refreshed = self.refreshing.lock().await;
        if *refreshed > asked_at
            && let Some(table) = self.known()
        {
            return Ok(table);
        }
        let mut last = passing("no address".into());
        for address in self.addresses() {
            match self.ask(&address).await {
                Ok(routing) => {
                    let table = self.adopt(routing)?;
                    *refreshed = Instant::now();
                    return Ok(table);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn ask(&self, address: &str) -> Result<Routing, ErrorDetail> {
        let mut client = AdminServiceClient::new(self.unary_channel(address)?);
        match tokio::time::timeout(ASK_TIMEOUT, client.get_routing(GetRoutingRequest {})).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => {
                let mut detail = detail_of(&status);
                detail.message = format!("{address}: {}", detail.message);
                Err(detail)
            }
            Err(_) => Err(passing(format!("{address}: no answer within {ASK_TIMEOUT:?}"))),
        }
    }

    fn adopt(&self, routing: Routing) -> Result<Arc<RoutingTable>, ErrorDetail> {
        let mut known = self.table.write();
        if let Some(old) = known.as_ref()
            && old.routing.cluster_id != routing.cluster_id
        {
            return Err(passing(format!(
                "the nodes belong to different clusters: {} and {}",
                old.routing.cluster_id, routing.cluster_id
            )));
        }
        let mut leaders = self.leaders.lock();
        for shard in &routing.shards {
            let node = routing.nodes.iter().find(|n| n.id == shard.leader_node && n.state != "down");
            if let Some(node) = node {
                leaders.insert(shard.group, node.address.clone());
            }
        }
        if let Some(old) = known.as_ref()
            && old.routing.version > routing.version
        {
            return Ok(old.clone());
        }
        let table = Arc::new(RoutingTable::new(routing)?);
        *known = Some(table.clone());
        Ok(table)
    }

    /// Nodes to ask: those of the table, then those the user gave.
    pub(crate) fn addresses(&self) -> Vec<String> {
        let mut all: Vec<String> =
            self.known().map_or(Vec::new(), |t| t.routing.nodes.iter().map(|n| n.address.clone()).collect());
        for seed in &self.seeds {
            if !all.contains(seed) {
                all.push(seed.clone());
            }
        }
        all
    }

    /// Where to send what is for `group`'s leader: the leader when known, else its replicas in turn.
    pub(crate) fn leader(&self, group: u64) -> Option<String> {
        if let Some(address) = self.leaders.lock().get(&group) {
            return Some(address.clone());
        }
        let table = self.known()?;
        let shard = table.shards.iter().find(|s| s.group == group)?;
        let mut turns = self.turn.lock();
        let turn = turns.entry(group).or_insert(0);
        *turn = turn.wrapping_add(1);
        shard.replicas.get(*turn % shard.replicas.len().max(1)).map(|(_, address)| address.clone())
    }

    /// What an answer said of the leader. `None`: the one at `wrong` is it not.
    pub(crate) fn hint(&self, group: u64, wrong: &str, leader: Option<&str>) {
        let mut leaders = self.leaders.lock();
        match leader.filter(|l| !l.is_empty() && *l != wrong) {
            Some(leader) => {
                leaders.insert(group, leader.to_string());
            }
            None => {
                if leaders.get(&group).is_some_and(|known| known == wrong) {
                    leaders.remove(&group);
                }
            }
        }
    }

    /// A channel for unary calls to a node.
    pub(crate) fn unary_channel(&self, address: &str) -> Result<tonic::transport::Channel, ErrorDetail> {
        let mut channels = self.admin.lock();
        if let Some(channel) = channels.get(address) {
            return Ok(channel.clone());
        }
        let channel = self.channels.endpoint(address)?.connect_lazy();
        channels.insert(address.to_string(), channel.clone());
        Ok(channel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evershard_proto::v1::ShardDescription;

    #[test]
    fn every_key_has_an_owner() {
        let shard = |group, range_start, range_end| ShardDescription {
            group,
            range_start,
            range_end,
            ..Default::default()
        };
        let routing = Routing {
            shards: vec![shard(2, 1 << 63, u64::MAX), shard(1, 0, (1 << 63) - 1)],
            ..Default::default()
        };
        let table = RoutingTable::new(routing).expect("covers all");
        let group = |key| table.shards[table.shard_of(key)].group;
        assert_eq!([0, (1 << 63) - 1, 1 << 63, u64::MAX].map(group), [1, 1, 2, 2]);
    }
}

/// A table of equal shards, for tests of other modules.
#[cfg(test)]
pub(crate) fn table_for_tests(shards: u64) -> RoutingTable {
    RoutingTable::new(crate::batch::tests::routing(shards)).expect("covers all")
}
