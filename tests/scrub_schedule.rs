//! Scrubs that nobody asks for: what differs or is damaged is found, told, and (unless the node is told not to) rebuilt, while no
//! request is made.

mod support;

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use support::falsify::falsify;
use support::flushed::FlushedShard;
use support::metrics::metric;
use support::{Options, eventually};

/// So that a store has many blocks: the first and the last one of a file that was just ingested are in RocksDB's cache.
const DIM: usize = 256;
const VICTIM: u64 = 3;

struct Run(FlushedShard);

impl Run {
    /// Scrubbed every second.
    async fn start(repair: bool) -> Self {
        let options = Options::default().arg("--scrub-interval-seconds", 1).arg("--scrub-repair", repair);
        Self(FlushedShard::start(options, DIM).await)
    }

    async fn replica_of_the_victim(&self) -> u64 {
        self.0.cluster.replica(VICTIM, 0).await.unwrap().replica
    }

    /// Over all nodes: which of them led the meta group is nobody's business.
    async fn scrubs(&self, result: &str) -> f64 {
        let name = format!("evershard_scrubs_total{{result=\"{result}\"}}");
        let mut sum = 0.0;
        for id in self.0.cluster.ids() {
            sum += metric(&self.0.cluster, id, &name).await;
        }
        sum
    }

    async fn wait_scrubs(&self, result: &str, more: f64) {
        let target = self.scrubs(result).await + more;
        eventually(result, || async {
            let now = self.scrubs(result).await;
            if now >= target { Ok(()) } else { Err(format!("{now} of {target}")) }
        })
        .await;
    }

    async fn wait_rebuilt(&self, before: u64) {
        eventually("the victim has a new replica that votes", || async {
            let replica = self.0.cluster.replica(VICTIM, 0).await.ok_or("none")?;
            let is_new = replica.replica != before && replica.role == "follower";
            if is_new { Ok(()) } else { Err(format!("{replica:?}")) }
        })
        .await;
    }

    fn somebody_told(&self, what: &str) -> bool {
        self.0.cluster.ids().iter().any(|id| self.0.cluster.node(*id).log_contains(what))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_differs_is_rebuilt_though_nobody_asks() {
    let mut run = Run::start(true).await;
    let before = run.replica_of_the_victim().await;
    falsify(&mut run.0.cluster, VICTIM, 1.0).await;
    run.wait_rebuilt(before).await;
    assert!(run.scrubs("quarantined").await >= 1.0);
    assert!(run.somebody_told("scrubbed: replicas differ"));
    assert!(
        run.0.cluster.node(VICTIM).log_contains("replica quarantined"),
        "{}",
        run.0.cluster.node(VICTIM).log_tail()
    );
    run.wait_scrubs("equal", 2.0).await;
    assert!(run.somebody_told("scrubbed: all replicas are equal"));
    let mut ended = 0.0f64;
    for id in run.0.cluster.ids() {
        ended = ended.max(metric(&run.0.cluster, id, "evershard_scrubbed_timestamp_seconds").await);
    }
    assert!(ended > 1.6e9, "a whole scrub is told by the time of its end: {ended}");
    run.0.assert_exact_on(VICTIM).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_difference_is_told_and_no_more_when_nothing_is_to_be_repaired() {
    let mut run = Run::start(false).await;
    let before = run.replica_of_the_victim().await;
    falsify(&mut run.0.cluster, VICTIM, 1.0).await;
    run.wait_scrubs("different", 3.0).await;
    assert!(run.somebody_told("scrubbed: replicas differ"));
    assert_eq!(run.scrubs("quarantined").await, 0.0);
    assert_eq!(run.replica_of_the_victim().await, before);
}

/// All rows are in memory, and nobody but a scrub reads them from the disk again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_bit_under_a_running_follower_is_found_and_repaired() {
    let run = Run::start(true).await;
    let before = run.replica_of_the_victim().await;
    run.wait_scrubs("equal", 1.0).await;
    let group = run.0.cluster.replica(VICTIM, 0).await.unwrap().group;
    let folder = run.0.cluster.node(VICTIM).data().join(format!("replicas/{group}-{before}"));
    let mut hurt = BTreeSet::new();
    eventually("the damage is found", || {
        // Another one when a compaction took the file away before it was read.
        if let Some(path) = biggest_table(&folder).filter(|path| hurt.insert(path.clone())) {
            flip(&path);
        }
        let replica = run.0.cluster.replica(VICTIM, 0);
        async {
            let replica = replica.await.ok_or("no answer")?;
            let is_lost = replica.role == "quarantined" || replica.replica != before;
            if is_lost { Ok(()) } else { Err(format!("{replica:?}")) }
        }
    })
    .await;
    run.wait_rebuilt(before).await;
    let node = run.0.cluster.node(VICTIM);
    assert!(node.log_contains("replica quarantined"), "{}", node.log_tail());
    run.wait_scrubs("equal", 2.0).await;
    run.0.assert_exact_on(VICTIM).await;
}

/// The SST with most rows under a folder.
fn biggest_table(folder: &Path) -> Option<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "sst") {
                found.push((entry.metadata().map_or(0, |of| of.len()), path));
            }
        }
    }
    found.into_iter().max().map(|(_, path)| path)
}

fn flip(path: &Path) {
    // Gone by now when a compaction was faster.
    let Ok(file) = std::fs::File::options().read(true).write(true).open(path) else { return };
    let offset = file.metadata().unwrap().len() / 2;
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
}
