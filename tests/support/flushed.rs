//! A shard whose rows are all on the disks of all its replicas: where damage and differences are made.

use super::ledger::Ledger;
use super::pusher::{Load, Pusher, wait_progress};
use super::trainer::{Table, Trainer};
use super::{Cluster, Options, eventually};

/// One shard over all nodes, led by node 1, with what was pushed to it.
pub(crate) struct FlushedShard {
    pub(crate) cluster: Cluster,
    pub(crate) table: Table,
    pub(crate) ledger: Ledger,
    dim: usize,
}

impl FlushedShard {
    pub(crate) async fn start(options: Options, dim: usize) -> Self {
        let cluster = Cluster::start(Options { shards: 1, ..options }.arg("--flush-interval-ms", 100)).await;
        let trainer = Trainer::connect(&cluster.endpoints()).await;
        let table = trainer.integers("audit", dim).await;
        let pusher = Pusher::start(cluster.endpoints(), Load::small("audit", dim), 1);
        wait_progress(std::slice::from_ref(&pusher), 40).await;
        let ledger = pusher.finish().await;
        cluster.transfer(0, 1).await;
        cluster.wait_caught_up().await;
        // Scrubs are in the log too: it may go on growing.
        let pushed = cluster.replica(1, 0).await.unwrap().committed;
        for id in cluster.ids() {
            eventually("what was pushed is flushed", || async {
                let replica = cluster.replica(id, 0).await.ok_or("no replica")?;
                if replica.flushed >= pushed { Ok(()) } else { Err(format!("{replica:?}")) }
            })
            .await;
        }
        Self { cluster, table, ledger, dim }
    }

    /// All rows, as a node's replica gives them.
    pub(crate) async fn assert_exact_on(&self, node: u64) {
        self.cluster.transfer(0, node).await;
        self.ledger.assert_matches(&self.table.pull(&self.ledger.ids()).await.unwrap(), self.dim);
    }
}
