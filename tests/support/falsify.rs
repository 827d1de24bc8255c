//! A replica whose disk says something else than its peers', with all checksums right: only comparing digests finds it.

use std::path::Path;

use evershard_storage::rocks::{ReplicaIdentity, ReplicaStore, RocksOptions, RocksShared};

use super::Cluster;

/// Changes a row of shard 0 on a node's disk, while the node is down: same key, same version, another value. Its rows must have
/// been flushed.
pub(crate) async fn falsify(cluster: &mut Cluster, node: u64, value: f32) {
    let replica = cluster.replica(node, 0).await.unwrap();
    let id = cluster.routing(node).await.unwrap().cluster_id;
    cluster.kill(node);
    let identity =
        ReplicaIdentity { cluster: id, node, group: replica.group, shard: 0, replica: replica.replica };
    let folder = format!("replicas/{}-{}", replica.group, replica.replica);
    change_a_row(&cluster.node(node).data().join(folder), &identity, value);
    cluster.restart(node);
    cluster.wait_ready().await;
    cluster.wait_caught_up().await;
}

fn change_a_row(folder: &Path, identity: &ReplicaIdentity, value: f32) {
    let shared = RocksShared::new(RocksOptions::default()).unwrap();
    let (store, state) = ReplicaStore::open(folder, identity, &shared).unwrap();
    let mut first = None;
    store
        .load_rows(|table, key, header, floats| {
            if first.is_none() && header.is_live() {
                first = Some((table, key, header, floats.to_vec()));
            }
        })
        .unwrap();
    let (table, key, header, mut floats) = first.expect("a row was flushed");
    floats[0] += value;
    let mut run = store.begin_run().unwrap();
    run.put(table, key, header, &floats).unwrap();
    store.commit(run, state.complete_at, state).unwrap();
}
