//! The routing table: what a client must know to send each key to its leader.
//!
//! Not here: who decides it (`meta/`), and how clients cache it (the client).

use std::collections::HashMap;

use evershard_proto::v1::{
    GroupPlacement, MetaState, NodeDescription, ReplicaDescription, Routing, ShardDescription,
};

use crate::meta::state::{META_SHARD, description};

/// Who leads a group, as this node knows: group -> node.
pub type Leaders = HashMap<u64, u64>;

/// The table as of `state`, with the leaders this node knows of. `up` says which nodes it hears of.
#[must_use]
pub fn routing_table(state: &MetaState, leaders: &Leaders, up: impl Fn(u64) -> bool) -> Routing {
    let describe = |node: &evershard_proto::v1::NodeAddress| NodeDescription {
        id: node.id,
        address: node.address.clone(),
        state: if up(node.id) { "up" } else { "down" }.into(),
    };
    Routing {
        cluster_id: state.cluster_id.clone(),
        version: state.version,
        nodes: state.nodes.iter().map(describe).collect(),
        shards: state.groups.iter().filter(|g| g.shard != META_SHARD).map(|g| shard(g, leaders)).collect(),
        tables: state.tables.iter().filter(|t| t.active).map(description).collect(),
        software_version: env!("CARGO_PKG_VERSION").into(),
        meta_leader_node: leaders.get(&0).copied().unwrap_or(0),
        // Its node's own: not in the state.
        recovery_epoch: 0,
        cluster_version: state.cluster_version,
    }
}

fn shard(group: &GroupPlacement, leaders: &Leaders) -> ShardDescription {
    let replicas =
        group.replicas.iter().map(|r| ReplicaDescription { replica: r.replica, node: r.node }).collect();
    ShardDescription {
        shard: group.shard,
        group: group.group,
        range_start: group.range_start,
        range_end: group.range_end,
        replicas,
        leader_node: leaders.get(&group.group).copied().unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::state::{apply, plan_cluster};
    use evershard_proto::v1::{MetaCommand, NodeAddress, meta_command::Command};

    #[test]
    fn shards_come_with_leaders_and_the_meta_group_is_not_among_them() {
        let nodes = (1..=3).map(|id| NodeAddress { id, address: format!("http://n{id}:1") }).collect();
        let mut state = MetaState::default();
        let init = Command::Init(plan_cluster("c".into(), nodes, 2, 3));
        apply(&mut state, MetaCommand { command: Some(init) });
        let table = routing_table(&state, &Leaders::from([(0, 1), (2, 3)]), |node| node != 2);
        assert_eq!(table.meta_leader_node, 1);
        assert_eq!(table.shards.iter().map(|s| s.leader_node).collect::<Vec<_>>(), vec![0, 3]);
        assert_eq!(
            table.nodes.iter().map(|n| n.state.as_str()).collect::<Vec<_>>(),
            vec!["up", "down", "up"]
        );
    }
}
