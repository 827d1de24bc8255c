//! Hyper-parameters change while clients push: every row was changed at exactly one learning rate, which never goes back on a
//! shard, and what begins after the change uses the new one; racing changes leave every shard with one definition; what
//! a node began and did not finish is finished by the others.
//!
//! Each row gets one gradient of 1 under SGD from zero, so its weight is the negated rate at which it was applied.

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use evershard::{Error, ErrorKind, Optimizer, definition};
use evershard_proto::key::key_of;
use evershard_proto::v1::SetOptimizerRequest;
use support::trainer::{Table, Trainer};
use support::{Cluster, Options, eventually};
use tokio::task::JoinHandle;

const DIM: usize = 2;
const SHARDS: u32 = 2;
const CLIENTS: u64 = 3;
/// Rows of a push: so many that every shard has some.
const ROWS: u64 = 16;
/// Each power of two once, so that a rate says which change it is of.
const RATES: [f32; 5] = [1.0, 2.0, 4.0, 8.0, 16.0];

fn sgd(lr: f32) -> Optimizer {
    definition::sgd(lr).unwrap()
}

/// Rows that no other push has.
fn fresh_ids(client: u64, push: u64) -> Vec<u64> {
    (0..ROWS).map(|row| client << 40 | (push * ROWS + row)).collect()
}

async fn push_ones(table: &Table, ids: &[u64]) -> Result<(), Error> {
    table.push(ids, &vec![1.0; ids.len() * DIM]).await
}

/// Pushes to fresh rows; answers the rate at which each was applied.
async fn rates_now(table: &Table, client: u64, push: u64) -> Vec<f32> {
    let ids = fresh_ids(client, push);
    push_ones(table, &ids).await.unwrap();
    table.pull(&ids).await.unwrap().iter().map(|weight| -weight).collect()
}

/// The changes of the learning rate, as the test makes them: places in `RATES`.
#[derive(Debug, Default)]
struct Changes {
    begun: AtomicUsize,
    returned: AtomicUsize,
}

/// What is known of one acknowledged push: its rates lie between these places, ends included.
#[derive(Debug)]
struct Pushed {
    ids: Vec<u64>,
    /// The last change that had returned before it began.
    first: usize,
    /// The last change that had begun before it was acknowledged.
    last: usize,
}

/// A client that pushes to fresh rows until it is told to stop.
struct Pusher {
    acknowledged: Arc<AtomicUsize>,
    task: JoinHandle<Vec<Pushed>>,
}

impl Pusher {
    fn start(endpoints: String, client: u64, changes: Arc<Changes>, stop: Arc<AtomicBool>) -> Self {
        let acknowledged = Arc::new(AtomicUsize::new(0));
        let counted = acknowledged.clone();
        let task = tokio::spawn(async move {
            let trainer = Trainer::connect(&endpoints).await;
            let table = trainer.table("items").await;
            let mut pushed = Vec::new();
            while !stop.load(Ordering::SeqCst) {
                let ids = fresh_ids(client, pushed.len() as u64);
                let first = changes.returned.load(Ordering::SeqCst);
                push_ones(&table, &ids).await.unwrap_or_else(|e| panic!("client {client}: {e}"));
                let last = changes.begun.load(Ordering::SeqCst);
                pushed.push(Pushed { ids, first, last });
                counted.store(pushed.len(), Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
            pushed
        });
        Pusher { acknowledged, task }
    }
}

async fn wait_progress(pushers: &[Pusher], more: usize) {
    let targets: Vec<usize> = pushers.iter().map(|p| p.acknowledged.load(Ordering::SeqCst) + more).collect();
    eventually("every client goes on", || async {
        for (pusher, target) in pushers.iter().zip(&targets) {
            let so_far = pusher.acknowledged.load(Ordering::SeqCst);
            if pusher.task.is_finished() || so_far < *target {
                return Err(format!("{so_far} of {target} pushes acknowledged"));
            }
        }
        Ok(())
    })
    .await;
}

/// The shard of every row: ends of the ranges, by shard.
struct Shards(Vec<(u64, u32)>);

impl Shards {
    async fn of(cluster: &Cluster) -> Self {
        let routing = cluster.routing(1).await.unwrap();
        Shards(routing.shards.iter().map(|shard| (shard.range_end, shard.shard)).collect())
    }

    fn find(&self, table: u32, id: u64) -> u32 {
        let key = key_of(table, id);
        self.0.iter().filter(|(end, _)| key <= *end).min().unwrap().1
    }
}

/// Every row of a client's pushes, in their order: one rate, within its push's bounds, never back on a shard.
async fn check(table: &Table, shards: &Shards, pushed: &[Pushed]) -> [usize; RATES.len()] {
    let mut reached = BTreeMap::<u32, usize>::new();
    let mut seen = [0; RATES.len()];
    for push in pushed {
        let rows = table.pull(&push.ids).await.unwrap();
        let mut message = BTreeMap::<u32, usize>::new();
        for (id, row) in push.ids.iter().zip(rows.chunks_exact(DIM)) {
            let place = RATES.iter().position(|rate| row.iter().all(|weight| *weight == -rate));
            let place = place.unwrap_or_else(|| panic!("row {id:#x} is of no rate: {row:?}"));
            let shard = shards.find(table.table.number(), *id);
            let floor = reached.get(&shard).copied().unwrap_or(0);
            assert!(place >= floor, "shard {shard} went back from {} to {}", RATES[floor], RATES[place]);
            assert!(
                (push.first..=push.last).contains(&place),
                "row {id:#x} has rate {}, of a push between {} and {}",
                RATES[place],
                RATES[push.first],
                RATES[push.last]
            );
            let first = *message.entry(shard).or_insert(place);
            assert_eq!(first, place, "one message was applied at two rates on shard {shard}");
            seen[place] += 1;
        }
        reached.extend(message);
    }
    seen
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pushes_race_a_change_and_every_one_is_applied_at_one_rate() {
    // Failover is a part of it: the default timers.
    let options = Options { shards: SHARDS, server_args: Vec::new(), ..Options::default() }
        .arg("--flush-interval-ms", 200);
    let mut cluster = Cluster::start(options).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("items", DIM).await;
    let changes = Arc::new(Changes::default());
    let stop = Arc::new(AtomicBool::new(false));
    let pushers: Vec<Pusher> = (0..CLIENTS)
        .map(|client| Pusher::start(cluster.endpoints(), client, changes.clone(), stop.clone()))
        .collect();
    wait_progress(&pushers, 5).await;

    for (place, rate) in RATES.iter().enumerate().skip(1) {
        let victim = cluster.leader_of(u32::try_from(place).unwrap() % SHARDS).await;
        changes.begun.store(place, Ordering::SeqCst);
        let set = tokio::spawn({
            let table = table.table.clone();
            let optimizer = sgd(*rate);
            async move { table.set_optimizer(optimizer).await }
        });
        // Somewhere in the middle of it, each time elsewhere.
        tokio::time::sleep(Duration::from_millis(4 * place as u64)).await;
        cluster.kill(victim);
        let changed = set.await.unwrap().unwrap();
        changes.returned.store(place, Ordering::SeqCst);
        assert_eq!(changed.definition().optimizer, Some(sgd(*rate)));
        assert_eq!(rates_now(&table, 100, place as u64).await, vec![*rate; ROWS as usize * DIM]);
        wait_progress(&pushers, 5).await;
        cluster.restart(victim);
        cluster.wait_ready().await;
        cluster.wait_caught_up().await;
    }
    stop.store(true, Ordering::SeqCst);
    let shards = Shards::of(&cluster).await;
    let mut seen = [0; RATES.len()];
    for pusher in pushers {
        let pushed = pusher.task.await.unwrap();
        let of_client = check(&table, &shards, &pushed).await;
        seen.iter_mut().zip(of_client).for_each(|(sum, rows)| *sum += rows);
    }
    eprintln!("rows at each rate: {seen:?}");
    assert!(seen.iter().all(|rows| *rows > 0), "{seen:?}");
    cluster.assert_replicas_equal().await;

    cluster.kill_all();
    cluster.start_all();
    cluster.wait_ready().await;
    let last = RATES[RATES.len() - 1];
    assert_eq!(rates_now(&table, 101, 0).await, vec![last; ROWS as usize * DIM]);
    let again = trainer.table("items").await;
    assert_eq!(again.table.definition().optimizer, Some(sgd(last)));
    cluster.assert_replicas_equal().await;
}

fn asking(rate: f32) -> SetOptimizerRequest {
    SetOptimizerRequest { name: "items".into(), optimizer: Some(sgd(rate)), ..Default::default() }
}

fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> (ErrorKind, String) {
    match result {
        Err(Error::Refused(refusal)) => (refusal.kind, refusal.message),
        other => panic!("must be refused: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn racing_changes_leave_every_shard_with_one_definition() {
    let cluster = Cluster::start(Options { shards: SHARDS, ..Options::default() }).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("items", DIM).await;
    for round in 0..10_u64 {
        // By a node each, which tells the shards.
        let mut setters = Vec::new();
        for (node, rate) in [(1, 2.0), (2, 4.0), (3, 8.0)] {
            let mut admin = cluster.admin(node);
            setters.push((rate, tokio::spawn(async move { admin.set_optimizer(asking(rate)).await })));
        }
        for (rate, setter) in setters {
            let described = setter.await.unwrap().unwrap().into_inner();
            assert_eq!(described.definition.unwrap().optimizer, Some(sgd(rate)));
        }
        let rates = rates_now(&table, 1, round).await;
        assert!(rates.iter().all(|rate| *rate == rates[0]), "round {round}: shards differ: {rates:?}");
        assert!([2.0, 4.0, 8.0].contains(&rates[0]), "round {round}: {rates:?}");
        // What every shard has is what the meta group has.
        let now = trainer.table("items").await.table.definition().optimizer;
        assert_eq!(now, Some(sgd(rates[0])), "round {round}");
        let known = cluster.admin(1).set_optimizer(asking(rates[0])).await.unwrap().into_inner();
        let again = cluster.admin(2).set_optimizer(asking(rates[0])).await.unwrap().into_inner();
        assert_eq!(known, again, "setting what is set changes nothing");
        assert_eq!(rates_now(&table, 2, round).await[0], rates[0]);
    }

    // What is not a hyper-parameter, and what makes no sense.
    let adagrad = definition::adagrad(0.5).unwrap();
    let (kind, message) = refusal(table.table.set_optimizer(adagrad).await);
    assert_eq!(kind, ErrorKind::Conflict, "{message}");
    assert!(message.contains("hyper-parameters only") && message.contains("Adagrad"), "{message}");
    let (kind, message) = refusal(table.table.set_optimizer(sgd(-1.0)).await);
    assert_eq!(kind, ErrorKind::Invalid, "{message}");
    assert!(message.contains("sgd.lr"), "{message}");
    table.table.set_optimizer(sgd(0.5)).await.unwrap();
    assert_eq!(rates_now(&table, 3, 0).await, vec![0.5; ROWS as usize * DIM]);

    // A script that is run again with what it once created the table with is told why not.
    let (kind, message) =
        refusal(trainer.client.create_table(support::trainer::integers("items", DIM)).await);
    assert_eq!(kind, ErrorKind::Conflict, "{message}");
    assert!(message.contains("SGD(lr=0.5") && message.contains("not SGD(lr=1"), "{message}");
    assert!(message.contains("set_optimizer"), "{message}");
    let as_it_is = definition::sparse("items", u32::try_from(DIM).unwrap(), definition::sgd(0.5));
    assert_eq!(trainer.create(as_it_is).await.table.number(), table.table.number());

    trainer.client.drop_table("items").await.unwrap();
    let new = trainer.integers("items", DIM).await;
    let (kind, message) = refusal(table.table.set_optimizer(sgd(2.0)).await);
    assert_eq!(kind, ErrorKind::UnknownTable, "{message}");
    assert_eq!(rates_now(&new, 4, 0).await[0], 1.0, "another table of that name is not meant");
    assert_eq!(refusal(trainer.client.set_optimizer("none", sgd(2.0)).await).0, ErrorKind::UnknownTable);
    cluster.assert_replicas_equal().await;
}

/// The node that recorded a change, and leads the meta group, dies before it told a shard.
#[cfg(feature = "failpoints")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_that_was_recorded_is_told_to_every_shard_by_whoever_is_left() {
    let options = Options { shards: SHARDS, server_args: Vec::new(), ..Options::default() };
    let mut cluster = Cluster::start(options).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let table = trainer.integers("items", DIM).await;
    assert_eq!(rates_now(&table, 1, 0).await, vec![1.0; ROWS as usize * DIM]);
    // Armed on every node, and passed by the one that is asked only.
    cluster.kill_all();
    for id in cluster.ids() {
        cluster.node_mut(id).start(Some("set_optimizer::before_telling=kill@1"));
    }
    cluster.wait_ready().await;
    let victim = eventually("a leader of the meta group", || async {
        match cluster.routing(1).await.map(|routing| routing.meta_leader_node) {
            Some(node) if node != 0 => Ok(node),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    let mut admin = cluster.admin(victim);
    let answer = tokio::time::timeout(support::PATIENCE, admin.set_optimizer(asking(2.0))).await.unwrap();
    assert!(answer.is_err(), "{answer:?}");

    // Nobody asks again.
    let mut push = 0;
    let other = cluster.ids().into_iter().find(|id| *id != victim).unwrap();
    let still_there = Trainer::connect(&cluster.node(other).address()).await;
    let table = still_there.table("items").await;
    loop {
        push += 1;
        assert!(push < 10_000, "the change is not told");
        let rates = rates_now(&table, 2, push).await;
        assert!(rates.iter().all(|rate| [1.0, 2.0].contains(rate)), "{rates:?}");
        if rates.iter().all(|rate| *rate == 2.0) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    cluster.node_mut(victim).kill();
    cluster.restart(victim);
    cluster.wait_ready().await;
    cluster.wait_caught_up().await;
    assert_eq!(rates_now(&table, 3, 0).await, vec![2.0; ROWS as usize * DIM]);
    cluster.assert_replicas_equal().await;
}
