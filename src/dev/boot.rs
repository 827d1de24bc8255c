//! From started processes to a cluster in which every shard has a leader.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use evershard_proto::v1::admin_service_client::AdminServiceClient;
use evershard_proto::v1::{GetRoutingRequest, InitClusterRequest, NodeAddress, Routing};
use tokio::time::{Instant, sleep, timeout};
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use super::DevError;
use super::layout::{Layout, Settings};

const POLL: Duration = Duration::from_millis(50);
const CALL_MAX: Duration = Duration::from_secs(10);

/// Creates the cluster when the directory never held one, then waits until every shard has a leader.
pub(crate) async fn boot(layout: Layout, mut settings: Settings, seconds: u64) -> Result<(), DevError> {
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let mut clients = Vec::new();
    for node in settings.node_ids() {
        clients.push(client(&settings.address(node))?);
    }
    if !settings.created {
        create(&mut clients[0], &settings, deadline, seconds).await?;
        settings.created = true;
        settings.save(&layout)?;
    }
    wait_for_leaders(&mut clients, &settings, deadline, seconds).await
}

fn client(address: &str) -> Result<AdminServiceClient<Channel>, DevError> {
    let endpoint = Endpoint::from_shared(address.to_owned())
        .map_err(|error| DevError::Invalid { what: format!("{address} is not an address: {error}") })?
        .connect_timeout(Duration::from_secs(1))
        .timeout(CALL_MAX);
    Ok(AdminServiceClient::new(endpoint.connect_lazy()))
}

async fn create(
    client: &mut AdminServiceClient<Channel>,
    settings: &Settings,
    deadline: Instant,
    seconds: u64,
) -> Result<(), DevError> {
    let request = InitClusterRequest {
        nodes: settings.node_ids().map(|id| NodeAddress { id, address: settings.address(id) }).collect(),
        shards: settings.shards,
        replicas: settings.replicas,
        cluster_version: None,
    };
    loop {
        // A reply may have been lost, here or in the start before: an existing cluster is what we want.
        if let Ok(routing) = client.get_routing(GetRoutingRequest::default()).await
            && !routing.get_ref().cluster_id.is_empty()
        {
            return Ok(());
        }
        let status = match client.init_cluster(request.clone()).await {
            Ok(_) => return Ok(()),
            Err(status) => status,
        };
        match status.code() {
            // Not up yet, or a reply lost: look again, then ask again.
            Code::Unavailable
            | Code::DeadlineExceeded
            | Code::Cancelled
            | Code::Unknown
            | Code::AlreadyExists => {}
            _ => return Err(DevError::Init { status: Box::new(status) }),
        }
        if Instant::now() >= deadline {
            return Err(DevError::NotReady { seconds, missing: format!("node 1 says: {status}") });
        }
        sleep(POLL).await;
    }
}

async fn wait_for_leaders(
    clients: &mut [AdminServiceClient<Channel>],
    settings: &Settings,
    deadline: Instant,
    seconds: u64,
) -> Result<(), DevError> {
    loop {
        let mut views = Vec::new();
        for client in clients.iter_mut() {
            if let Ok(Ok(reply)) =
                timeout(Duration::from_secs(2), client.get_routing(GetRoutingRequest::default())).await
            {
                views.push(reply.into_inner());
            }
        }
        let missing = match leaderless(&views, settings.shards) {
            Ok(()) => return Ok(()),
            Err(missing) => missing,
        };
        if Instant::now() >= deadline {
            return Err(DevError::NotReady { seconds, missing });
        }
        sleep(POLL).await;
    }
}

/// Says which of `shards` shards have no leader that any node knows of.
fn leaderless(views: &[Routing], shards: u32) -> Result<(), String> {
    if views.is_empty() {
        return Err("no node answers".to_owned());
    }
    let mut led: BTreeMap<u32, bool> = BTreeMap::new();
    for shard in views.iter().flat_map(|view| &view.shards) {
        *led.entry(shard.shard).or_default() |= shard.leader_node != 0;
    }
    if led.len() < shards as usize {
        return Err(format!("{} of {shards} shards exist", led.len()));
    }
    let without: BTreeSet<u32> = led.iter().filter(|(_, led)| !**led).map(|(shard, _)| *shard).collect();
    if without.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = without.iter().map(u32::to_string).collect();
    Err(format!("no leader for shards {}", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use evershard_proto::v1::ShardDescription;

    fn view(leaders: &[(u32, u64)]) -> Routing {
        let shards = leaders
            .iter()
            .map(|(shard, leader)| ShardDescription {
                shard: *shard,
                leader_node: *leader,
                ..Default::default()
            })
            .collect();
        Routing { shards, ..Default::default() }
    }

    #[test]
    fn ready_is_when_some_node_knows_the_leader_of_every_shard() {
        assert_eq!(leaderless(&[], 2), Err("no node answers".to_owned()));
        assert_eq!(leaderless(&[view(&[(0, 1)])], 2), Err("1 of 2 shards exist".to_owned()));
        assert_eq!(leaderless(&[view(&[(0, 1), (1, 0)])], 2), Err("no leader for shards 1".to_owned()));
        assert_eq!(leaderless(&[view(&[(0, 1), (1, 0)]), view(&[(0, 0), (1, 3)])], 2), Ok(()));
    }
}
