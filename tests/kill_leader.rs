//! kill -9 of shard leaders, again and again, under four pushing clients: nothing acknowledged is lost, nothing is applied
//! twice, replicas stay bit-identical, and every node reopens.

mod support;

use support::pusher::{Load, Pusher, finish_all, wait_progress};
use support::trainer::Trainer;
use support::{Cluster, Options, setting};

const DIM: usize = 8;
const CLIENTS: u64 = 4;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_leaders_lose_nothing_and_double_nothing() {
    let kills = setting("EVERSHARD_KILLS", 50);
    // The default timers: failover is what this is about.
    let options =
        Options { shards: 4, server_args: Vec::new(), ..Options::default() }.arg("--flush-interval-ms", 500);
    let mut cluster = Cluster::start(options).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("audit", DIM).await;
    let pushers: Vec<Pusher> = (0..CLIENTS)
        .map(|seed| Pusher::start(cluster.endpoints(), Load::small("audit", DIM), seed))
        .collect();
    wait_progress(&pushers, 1).await;

    for kill in 0..kills {
        let shard = u32::try_from(kill).unwrap() % cluster.options.shards;
        let victim = cluster.leader_of(shard).await;
        cluster.kill(victim);
        wait_progress(&pushers, 5).await;
        cluster.restart(victim);
        // A majority of every shard must be there before the next one goes.
        cluster.wait_ready().await;
        cluster.wait_caught_up().await;
        wait_progress(&pushers, 1).await;
    }

    let ledger = finish_all(pushers).await;
    eprintln!("{kills} kills, {} acknowledged pushes", ledger.pushes);
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
    cluster.assert_replicas_equal().await;

    cluster.kill_all();
    cluster.start_all();
    cluster.wait_ready().await;
    ledger.assert_matches(&table.pull(&ledger.ids()).await.unwrap(), DIM);
    cluster.assert_replicas_equal().await;
}
