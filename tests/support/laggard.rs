//! A follower that is away until what it lacks is no longer in anybody's log: it can only be sent a snapshot.

use super::{Cluster, eventually};

/// What a node has applied of each shard.
pub(crate) async fn applied(cluster: &Cluster, node: u64) -> Vec<u64> {
    let mut indexes = Vec::new();
    for shard in cluster.shards() {
        indexes.push(cluster.replica(node, shard).await.map_or(0, |replica| replica.applied));
    }
    indexes
}

/// Waits until no leader has in its log what a follower lacks.
pub(crate) async fn leave_behind(cluster: &Cluster, follower_applied: &[u64]) {
    eventually("every shard leaves its follower behind", || is_left_behind(cluster, follower_applied)).await;
}

/// Whether every shard's leader can send a follower nothing but a snapshot; else what is missing.
pub(crate) async fn is_left_behind(cluster: &Cluster, follower_applied: &[u64]) -> Result<(), String> {
    // What it had in its log when it was stopped, and had not applied: a message or two of each client.
    const UNAPPLIED: u64 = 16;
    for shard in cluster.shards() {
        let then = follower_applied[shard as usize];
        let leader = cluster.leader_now(shard).await.ok_or("no leader")?;
        let replica = cluster.replica(leader, shard).await.ok_or("no answer")?;
        if replica.purged <= then + UNAPPLIED {
            return Err(format!("shard {shard} from {then}: {replica:?}"));
        }
    }
    Ok(())
}
