//! Damage to every kind of file of a node: it is noticed and repaired from the peers, or the node refuses to start and says
//! what to do, or it does no harm. Never is a wrong value served, and nothing acknowledged is lost.
//!
//! One cluster for all cases of a table. After each the node that was hurt leads every shard, and every row must be exact.
//!
//! Not here: every bit of a log on a simulated disk (`storage/tests/log/damage.rs`), a store alone
//! (`storage/src/rocks/tests/damage.rs`).

mod support;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use support::ledger::Ledger;
use support::trainer::{Table, Trainer};
use support::{Cluster, Options, eventually};

const DIM: usize = 64;
const VICTIM: u64 = 3;

/// What may come of a case.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Outcome {
    /// At least one replica was quarantined, and has a successor that votes.
    Replaced,
    /// The node does not start: its log names the file, and says what to do. The operator does it.
    Refused,
    /// Everything is as it was.
    Unharmed,
}
use Outcome::{Refused, Replaced, Unharmed};

/// What is done to a file.
#[derive(Debug, Clone, Copy)]
enum Hurt {
    /// A bit at so many thousandths of what is used of it.
    Flip(u64),
    /// A bit of this byte; the version is at 8.
    FlipByte(u64),
    /// The file is cut at so many thousandths.
    Cut(u64),
}
use Hurt::{Cut, Flip, FlipByte};

impl Hurt {
    fn apply(self, path: &Path) {
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let used = used_bytes(path);
        assert!(used > 0, "{} is empty", path.display());
        match self {
            Flip(_) | FlipByte(_) => {
                let offset = match self {
                    FlipByte(offset) => offset,
                    Flip(place) | Cut(place) => (used * place / 1000).min(used - 1),
                };
                let mut byte = [0];
                file.read_exact_at(&mut byte, offset).unwrap();
                file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
            }
            Cut(place) => file.set_len((used * place / 1000).min(used - 1)).unwrap(),
        }
    }
}

/// Without the zeros at the end: segments are made in advance.
fn used_bytes(path: &Path) -> u64 {
    let bytes = std::fs::read(path).unwrap();
    bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last as u64 + 1)
}

/// A file of a node.
#[derive(Debug, Clone, Copy)]
enum File {
    FirstSegment,
    MiddleSegment,
    /// The last one that holds records.
    LastSegment,
    Floor,
    Identity,
    MetaState,
    /// A store's record of how far it reaches.
    StoreRecord,
    Rocks(&'static str),
}

impl File {
    fn path(self, data: &Path) -> PathBuf {
        let segments = || {
            let mut found =
                files(&data.join("log"), |name| name.ends_with(".log") && !name.contains("spare"));
            found.retain(|path| used_bytes(path) > 32);
            found
        };
        let of_replicas = |matches: &dyn Fn(&str) -> bool| {
            let mut found = files(&data.join("replicas"), |name| matches(name));
            // The biggest: of SSTs the one with most rows.
            found.sort_by_key(|path| std::fs::metadata(path).unwrap().len());
            found.pop()
        };
        let found = match self {
            File::FirstSegment => segments().into_iter().next(),
            File::MiddleSegment => {
                let all = segments();
                assert!(all.len() >= 3, "three segments: {all:?}");
                all.get(all.len() / 2).cloned()
            }
            File::LastSegment => segments().pop(),
            File::Floor => Some(data.join("log/floor")),
            File::Identity => Some(data.join("identity")),
            File::MetaState => of_replicas(&|name| name == "meta-state"),
            File::StoreRecord => of_replicas(&|name| name == "meta"),
            File::Rocks(kind) => of_replicas(&|name| match kind {
                "sst" => name.ends_with(".sst"),
                prefix => name.starts_with(prefix),
            }),
        };
        found.unwrap_or_else(|| panic!("no {self:?} under {}", data.display()))
    }
}

/// Files under a folder whose names match, sorted.
fn files(folder: &Path, matches: impl Fn(&str) -> bool + Copy) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, matches));
        } else if matches(&path.file_name().unwrap().to_string_lossy()) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// A file, what happens to it, and what may come of it.
type Case = (File, Hurt, &'static [Outcome]);

struct Run {
    cluster: Cluster,
    table: Table,
    ledger: Ledger,
    random: StdRng,
}

impl Run {
    async fn start() -> Self {
        // Small segments and a long log: damage finds entries that are still needed.
        let options = Options { shards: 2, ..Options::default() }
            .arg("--flush-interval-ms", 100)
            .arg("--log-segment-bytes", 1 << 20);
        let cluster = Cluster::start(options).await;
        let trainer = Trainer::connect(&cluster.endpoints()).await;
        let table = trainer.integers("audit", DIM).await;
        let random = StdRng::seed_from_u64(7);
        Run { cluster, table, ledger: Ledger::default(), random }
    }

    /// About 250 KiB a push.
    async fn push(&mut self, pushes: usize) {
        for _ in 0..pushes {
            let ids: Vec<u64> = (0..1000).map(|_| self.random.random_range(0..4096)).collect();
            let gradients: Vec<i64> = ids.iter().map(|_| self.random.random_range(1..=3)).collect();
            let floats: Vec<f32> =
                gradients.iter().flat_map(|g| std::iter::repeat_n(*g as f32, DIM)).collect();
            self.table.push(&ids, &floats).await.unwrap();
            self.ledger.acknowledge(&ids, &gradients);
        }
    }

    /// Everything is flushed on the victim: its files are about all that was pushed.
    async fn wait_flushed(&self) {
        for shard in self.cluster.shards() {
            eventually("the victim has flushed", || async {
                let replica = self.cluster.replica(VICTIM, shard).await.ok_or("no replica")?;
                if replica.flushed >= replica.committed { Ok(()) } else { Err(format!("{replica:?}")) }
            })
            .await;
        }
    }

    /// The replica ids on the victim, by group.
    async fn replicas(&self) -> BTreeMap<u64, u64> {
        let Some(status) = self.cluster.status(VICTIM).await else { return BTreeMap::new() };
        status
            .replicas
            .into_iter()
            .filter(|r| r.role != "quarantined")
            .map(|r| (r.group, r.replica))
            .collect()
    }

    /// Every replica on the victim takes part; which ones it has now.
    async fn settled(&self) -> BTreeMap<u64, u64> {
        eventually("every replica of the victim takes part", || async {
            let status = self.cluster.status(VICTIM).await.ok_or("no answer")?;
            let takes_part =
                |r: &evershard_proto::v1::ReplicaStatus| matches!(&*r.role, "leader" | "follower");
            if status.ready && status.replicas.len() == 3 && status.replicas.iter().all(takes_part) {
                Ok(())
            } else {
                Err(format!("{status:?}"))
            }
        })
        .await;
        self.replicas().await
    }

    /// The rows as the victim alone gives them.
    async fn assert_exact_on_the_victim(&self) {
        for shard in self.cluster.shards() {
            self.cluster.transfer(shard, VICTIM).await;
        }
        self.ledger.assert_matches(&self.table.pull(&self.ledger.ids()).await.unwrap(), DIM);
        self.cluster.assert_replicas_equal().await;
    }

    async fn play(&mut self, case: &Case) -> Outcome {
        let (file, hurt, allowed) = case;
        self.push(6).await;
        self.cluster.wait_caught_up().await;
        self.wait_flushed().await;
        let before = self.settled().await;
        if matches!(file, File::MetaState) {
            let data = self.cluster.node(VICTIM).data();
            eventually("the meta group's state is flushed", || async {
                let found = files(&data.join("replicas"), |name| name == "meta-state");
                if found.is_empty() { Err("not yet".to_owned()) } else { Ok(()) }
            })
            .await;
        }
        self.cluster.kill(VICTIM);
        // The others go on meanwhile.
        self.push(2).await;
        let path = file.path(&self.cluster.node(VICTIM).data());
        hurt.apply(&path);
        let told_before = log_of(&self.cluster).len();
        self.cluster.restart(VICTIM);
        let outcome = self.outcome(&before).await;
        let told = log_of(&self.cluster)[told_before..].to_owned();
        assert!(allowed.contains(&outcome), "{case:?} {}: {outcome:?}\n{told}", path.display());
        match outcome {
            Refused => {
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                assert!(
                    told.contains(&name) && told.contains("wipe"),
                    "{case:?}: it says what to do:\n{told}"
                );
                // The operator does it.
                std::fs::remove_dir_all(self.cluster.node(VICTIM).data()).unwrap();
                self.cluster.restart(VICTIM);
            }
            Replaced => {
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                assert!(told.contains("quarantined"), "{case:?}:\n{told}");
                assert!(told.contains(&name), "{case:?}: it names {name}:\n{told}");
            }
            Unharmed => {}
        }
        let after = self.settled().await;
        if outcome != Unharmed {
            let lost = before.iter().filter(|(group, id)| after.get(group) != Some(id)).count();
            assert!(lost > 0, "{case:?}: {before:?} {after:?}");
        }
        self.assert_exact_on_the_victim().await;
        outcome
    }

    /// Waits until the damage shows. What shows neither when files are opened nor when rows are read and compared did no harm.
    async fn outcome(&mut self, before: &BTreeMap<u64, u64>) -> Outcome {
        let cluster = &mut self.cluster;
        for _ in 0..1200 {
            if cluster.node_mut(VICTIM).has_ended() {
                let status = cluster.node_mut(VICTIM).poll_end().unwrap();
                assert_eq!(status.code(), Some(1), "{}", cluster.node(VICTIM).log_tail());
                return Refused;
            }
            if let Some(status) = cluster.status(VICTIM).await {
                let is_new = |r: &evershard_proto::v1::ReplicaStatus| {
                    r.role == "quarantined" || before.get(&r.group) != Some(&r.replica)
                };
                if status.replicas.iter().any(is_new) {
                    return Replaced;
                }
                if status.ready && status.replicas.len() == before.len() {
                    break;
                }
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        // A store that reads lazily finds it now.
        let _differs_or_not = cluster.scrub().await;
        let after = self.settled().await;
        if after == *before { Unharmed } else { Replaced }
    }
}

fn log_of(cluster: &Cluster) -> String {
    String::from_utf8_lossy(&std::fs::read(cluster.node(VICTIM).log()).unwrap()).into_owned()
}

async fn play(cases: &[Case]) {
    let mut run = Run::start().await;
    run.push(12).await;
    for case in cases {
        let outcome = run.play(case).await;
        eprintln!("{:?} {:?}: {outcome:?}", case.0, case.1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_to_the_log_is_noticed() {
    // Each on a cluster of its own: what a replaced replica has left in the middle of the log is nobody's.
    play(&[(File::MiddleSegment, Flip(300), &[Replaced])]).await;
    play(&[(File::MiddleSegment, Cut(500), &[Replaced])]).await;
    play(&[
        (File::FirstSegment, Flip(500), &[Replaced]),
        // Below what the floor proves to have been synced.
        (File::LastSegment, Flip(200), &[Replaced]),
        (File::LastSegment, Cut(400), &[Replaced]),
        (File::FirstSegment, Cut(100), &[Replaced]),
        // Of two copies one is left; without any nobody knows what is missing.
        (File::Floor, Flip(1), &[Unharmed]),
        (File::Floor, Flip(990), &[Unharmed, Replaced]),
        (File::Floor, Cut(0), &[Replaced]),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_to_a_store_is_noticed() {
    play(&[
        (File::Rocks("sst"), Flip(300), &[Replaced]),
        (File::Rocks("sst"), Cut(500), &[Replaced]),
        (File::Rocks("MANIFEST"), Flip(300), &[Replaced]),
        (File::Rocks("MANIFEST"), Cut(500), &[Replaced]),
        // RocksDB alone takes these for what a crash leaves.
        (File::Rocks("MANIFEST"), Cut(950), &[Replaced]),
        (File::Rocks("MANIFEST"), Cut(999), &[Replaced]),
        (File::Rocks("CURRENT"), Flip(0), &[Replaced]),
        (File::Rocks("CURRENT"), Cut(500), &[Replaced]),
        // RocksDB writes it for people; we give it all options when we open it.
        (File::Rocks("OPTIONS"), Flip(500), &[Unharmed, Replaced]),
        (File::Rocks("OPTIONS"), Cut(500), &[Unharmed, Replaced]),
        (File::StoreRecord, Flip(500), &[Replaced]),
        (File::StoreRecord, FlipByte(8), &[Replaced]),
        (File::StoreRecord, Cut(500), &[Replaced]),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_to_what_says_whose_data_it_is_is_noticed() {
    play(&[
        (File::MetaState, Flip(500), &[Replaced]),
        (File::MetaState, Cut(500), &[Replaced]),
        (File::Identity, Flip(500), &[Refused]),
        (File::Identity, Cut(500), &[Refused]),
    ])
    .await;
}
