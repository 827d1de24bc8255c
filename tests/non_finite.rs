//! Values that are not finite, under each policy and from several clients: rows are exact, whatever the others pushed; who sent
//! what is counted, by table and source, and the last of it is told; what was logged is still counted when its leader is gone; what
//! is large or tiny but finite passes; what clients tell is checked and bounded.
//!
//! Not here: every refusal's words (`bad_input.rs`), every encoding (unit tests of the client's packing).

mod support;

use std::collections::{BTreeMap, BTreeSet};

use evershard::{Aggregation, DeadWorkerPolicy, Error, ErrorKind, JobOptions, TableDefinition};
use evershard_proto::limits::{NON_FINITE_REPORT_COUNT_MAX, NON_FINITE_REPORT_ROWS_MAX};
use evershard_proto::v1::parameter_service_client::ParameterServiceClient;
use evershard_proto::v1::{
    GetNonFiniteRequest, NonFiniteAction, NonFiniteCounts, NonFiniteLedger, NonFiniteOffence,
    NonFinitePolicy, NonFiniteReport, NonFiniteRows, NonFiniteSource,
};
use support::metrics::metric;
use support::raw::{self, RawSession};
use support::trainer::{Table, Trainer, integers};
use support::{Cluster, eventually};

const DIM: usize = 2;
const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;
const MAX: f32 = f32::MAX;

/// Pushes rejected, rows skipped, rows clipped.
type Counts = [u64; 3];
/// Session, job and rank; whether it is a step's sum.
type Who = (u64, u64, u32, bool);

/// A table's, as the admin tool adds it up.
#[derive(Debug, Default)]
struct Counted {
    logged: Counts,
    heard: Counts,
    sources: BTreeMap<Who, Counts>,
    last: Vec<NonFiniteOffence>,
}

fn counts(of: Option<NonFiniteCounts>) -> Counts {
    let NonFiniteCounts { rejected, skipped, clipped } = of.unwrap();
    [rejected, skipped, clipped]
}

fn who(source: &NonFiniteSource) -> Who {
    (source.session, source.job, source.rank, source.is_step)
}

fn add(to: &mut Counts, more: Counts) {
    to.iter_mut().zip(more).for_each(|(to, more)| *to += more);
}

impl Counted {
    fn add(&mut self, ledger: &NonFiniteLedger, is_logged: bool) {
        add(if is_logged { &mut self.logged } else { &mut self.heard }, counts(ledger.total));
        for source in &ledger.sources {
            add(self.sources.entry(who(source)).or_default(), counts(source.counts));
        }
        self.last.extend(&ledger.last);
    }

    fn of(&self, who: Who) -> Counts {
        self.sources.get(&who).copied().unwrap_or_default()
    }
}

/// Of a shard's replicas, the one that counted most of what is logged stands for all; what was heard is added up.
async fn counted(cluster: &Cluster, table: &Table) -> Counted {
    let mut counted = Counted::default();
    let mut logged: BTreeMap<u32, NonFiniteLedger> = BTreeMap::new();
    for id in cluster.ids().into_iter().filter(|id| cluster.node(*id).is_running()) {
        let request = GetNonFiniteRequest { table: table.table.number() };
        let reply = cluster.admin(id).get_non_finite(request).await.unwrap().into_inner();
        for replica in reply.replicas {
            counted.add(&replica.heard.unwrap(), false);
            let own = replica.logged.unwrap();
            let most = logged.entry(replica.shard).or_insert_with(|| own.clone());
            if counts(own.total) > counts(most.total) {
                *most = own;
            }
        }
    }
    logged.values().for_each(|ledger| counted.add(ledger, true));
    counted
}

/// Reports of clients come when they come: waits until a table's counts are these.
async fn wait_counted(cluster: &Cluster, table: &Table, logged: Counts, heard: Counts) -> Counted {
    eventually("the counts", || async {
        let counted = counted(cluster, table).await;
        let is_there = (counted.logged, counted.heard) == (logged, heard);
        is_there.then_some(()).ok_or_else(|| format!("{counted:?}"))?;
        Ok(counted)
    })
    .await
}

async fn tables(trainer: &Trainer) -> [Table; 3] {
    let create = async |name: &str, policy: NonFinitePolicy| {
        let non_finite = policy.into();
        trainer.create(TableDefinition { non_finite, ..integers(name, DIM) }).await
    };
    [
        create("reject", NonFinitePolicy::Reject).await,
        create("skip", NonFinitePolicy::SkipRow).await,
        create("clip", NonFinitePolicy::Clip).await,
    ]
}

fn assert_rejected<T: std::fmt::Debug>(result: Result<T, Error>) {
    assert_eq!(result.expect_err("a value is not finite").kind(), ErrorKind::NonFinite);
}

/// Sources that are sessions.
fn sessions(counted: &Counted) -> BTreeSet<u64> {
    counted.sources.keys().map(|who| who.0).filter(|session| *session != 0).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_policy_keeps_rows_exact_and_says_who_pushed_what() {
    let mut cluster = Cluster::with_shards(2).await;
    let (one, other) =
        (Trainer::connect(&cluster.endpoints()).await, Trainer::connect(&cluster.endpoints()).await);
    let [reject, skip, clip] = tables(&one).await;
    let [reject_too, skip_too, clip_too] = tables(&other).await;

    // The rows of an id are summed by the client; 1 and 2 are good in one push each.
    for table in [&reject, &skip, &clip] {
        table.push(&[1, 2], &[-1.0, -1.0, -2.0, -2.0]).await.unwrap();
    }
    for (bad, table) in [(NAN, &reject), (INF, &reject), (-INF, &reject_too)] {
        assert_rejected(table.push(&[1, 2], &[-1.0, -1.0, bad, -1.0]).await);
        assert_rejected(table.set(&[1], &[9.0, bad]).await);
    }
    for (bad, table) in [(NAN, &skip), (INF, &skip), (-INF, &skip_too)] {
        table.push(&[1, 2, 3], &[-1.0, -1.0, bad, -1.0, 1.0, bad]).await.unwrap();
        table.set(&[4], &[9.0, bad]).await.unwrap();
    }
    // A bad row beside a good one of its id: only the client sees it.
    skip_too.push(&[1, 1], &[-1.0, -1.0, NAN, -1.0]).await.unwrap();
    clip.push(&[1, 3], &[NAN, -1.0, INF, -1.0]).await.unwrap();
    clip_too.push(&[1, 2], &[-1.0, -1.0, -INF, NAN]).await.unwrap();
    clip_too.set(&[4], &[INF, 9.0]).await.unwrap();

    assert_eq!(reject.pull(&[1, 2]).await.unwrap(), [1.0, 1.0, 2.0, 2.0]);
    assert_eq!(skip.pull(&[1, 2, 3, 4]).await.unwrap(), [5.0, 5.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]);
    // 2 - (-MAX) is MAX.
    assert_eq!(clip.pull(&[1, 2, 3, 4]).await.unwrap(), [2.0, 3.0, MAX, 2.0, -MAX, 1.0, MAX, 9.0]);

    let rejected = wait_counted(&cluster, &reject, [0; 3], [6, 0, 0]).await;
    let names = sessions(&rejected);
    assert_eq!(names.len(), 2, "{rejected:?}");
    let skipped = wait_counted(&cluster, &skip, [0, 9, 0], [0, 1, 0]).await;
    assert_eq!(sessions(&skipped), names, "by the names that their pushes have");
    // The set of id 4 is in the log of a clipping table as it was sent; gradients were clipped before.
    let clipped = wait_counted(&cluster, &clip, [0, 0, 1], [0, 0, 3]).await;
    let mut per_client: Vec<_> = names.iter().map(|s| rejected.of((*s, 0, 0, false))).collect();
    per_client.sort_unstable();
    assert_eq!(per_client, [[2, 0, 0], [4, 0, 0]]);
    let mut per_client: Vec<_> = names.iter().map(|s| skipped.of((*s, 0, 0, false))).collect();
    per_client.sort_unstable();
    assert_eq!(per_client, [[0, 4, 0], [0, 6, 0]]);
    let mut per_client: Vec<_> = names.iter().map(|s| clipped.of((*s, 0, 0, false))).collect();
    per_client.sort_unstable();
    assert_eq!(per_client, [[0, 0, 2], [0, 0, 2]]);

    let told = |counted: &Counted, bad: fn(f32) -> bool| {
        let is_it = |offence: &&NonFiniteOffence| bad(offence.rows.unwrap().value);
        counted.last.iter().find(is_it).copied().expect("an offence")
    };
    let nan = told(&skipped, f32::is_nan);
    assert!(nan.time_ms > 0 && names.contains(&nan.source.unwrap().session));
    assert_eq!(nan.rows.unwrap().action(), NonFiniteAction::Skipped);
    told(&skipped, |value| value == INF);
    told(&skipped, |value| value == -INF);
    assert_eq!(told(&rejected, |value| value == -INF).rows.unwrap().action(), NonFiniteAction::Rejected);

    // Its leaders die one after the other; a replica that runs on has counted what they counted.
    for shard in cluster.shards() {
        cluster.wait_caught_up().await;
        let victim = cluster.leader_of(shard).await;
        cluster.kill(victim);
        let left = counted(&cluster, &skip).await;
        assert_eq!(left.logged, [0, 9, 0], "shard {shard}");
        cluster.restart(victim);
        cluster.wait_ready().await;
    }
    skip.push(&[1, 3], &[-1.0, -1.0, NAN, -1.0]).await.unwrap();
    assert_eq!(skip.pull(&[1, 3]).await.unwrap(), [6.0, 6.0, 0.0, 0.0]);
    cluster.wait_caught_up().await;
    let after = counted(&cluster, &skip).await;
    assert_eq!(after.logged[1], 10, "{after:?}");
    let leader = cluster.leader_of(raw::shard_of(&cluster, skip.table.number(), 3).await.shard).await;
    eventually("the metric", || async {
        match metric(&cluster, leader, "evershard_non_finite_total").await {
            0.0 => Err("0".to_owned()),
            _ => Ok(()),
        }
    })
    .await;
    cluster.assert_replicas_equal().await;
}

/// What no client of ours sends: the servers do the same to it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_servers_apply_the_policy_to_what_comes_as_it_is() {
    let cluster = Cluster::with_shards(1).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let [reject, skip, clip] = tables(&trainer).await;
    let mut sessions = [RawSession::open(&cluster).await, RawSession::open(&cluster).await];
    for session in &mut sessions {
        for table in [&reject, &skip, &clip] {
            let number = table.table.number();
            let group = raw::shard_of(&cluster, number, 1).await.group;
            let leader = cluster.leader_of(0).await;
            // What is refused at the door leaves its number free.
            let seq = session.seqs.get(&group).copied().unwrap_or_default() + 1;
            let gradients = [-1.0, NAN, INF, -1.0, -INF, -1.0, -1.0, -1.0];
            let body = raw::body(session.number, seq, number, 2, &[1, 2, 3, 3], &gradients);
            let pushed = raw::push(&cluster, leader, group, body.clone()).await;
            if number == reject.table.number() {
                assert_eq!(raw::kind(&pushed.unwrap_err()), ErrorKind::NonFinite);
                continue;
            }
            pushed.unwrap();
            session.next(group);
            // Again, as after a lost reply: counted once.
            raw::push(&cluster, leader, group, body).await.unwrap();
        }
    }
    assert_eq!(reject.pull(&[1, 2, 3]).await.unwrap(), [0.0; 6]);
    assert_eq!(skip.pull(&[1, 2, 3]).await.unwrap(), [0.0, 0.0, 0.0, 0.0, 2.0, 2.0]);
    let rows = clip.pull(&[1, 2, 3]).await.unwrap();
    assert_eq!(rows[..2], [2.0, 0.0]);
    assert_eq!(rows[3], 2.0);
    // Twice -MAX: what a row becomes is its optimizer's affair.
    assert_eq!((rows[2], rows[4], rows[5]), (-INF, INF, 4.0));
    for (table, logged, heard) in
        [(&reject, [0, 0, 0], [2, 0, 0]), (&skip, [0, 6, 0], [0; 3]), (&clip, [0, 0, 6], [0; 3])]
    {
        let counted = wait_counted(&cluster, table, logged, heard).await;
        for session in &sessions {
            let mut half = logged;
            add(&mut half, heard);
            assert_eq!(counted.of((session.number, 0, 0, false)), half.map(|count| count / 2));
        }
    }
    cluster.assert_replicas_equal().await;
}

/// A step's gradients go by the policy before they are summed, its sums when they are applied; both say whose they were.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn summed_steps_say_which_rank_contributed_what() {
    let cluster = Cluster::with_shards(2).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let [reject, skip, clip] = tables(&trainer).await;
    let options = JobOptions {
        workers: 2,
        staleness: Some(0),
        dead_worker: DeadWorkerPolicy::Wait,
        lease: std::time::Duration::from_secs(60),
        aggregation: Some(Aggregation::Sum),
    };
    let job = trainer.client.job("ml", options).await.unwrap();
    let (mut first, mut second) = (job.worker(0).await.unwrap(), job.worker(1).await.unwrap());
    assert_rejected(first.push(&reject.table, &[1], &[NAN, 1.0]).await);
    // Finite, and their sum is not.
    for worker in [&first, &second] {
        worker.push(&reject.table, &[1, 2], &[MAX, 1.0, -1.0, -1.0]).await.unwrap();
        worker.push(&skip.table, &[1], &[-1.0, -1.0]).await.unwrap();
    }
    second.push(&skip.table, &[2, 3], &[NAN, 1.0, -INF, 1.0]).await.unwrap();
    first.push(&clip.table, &[1], &[NAN, -1.0]).await.unwrap();
    let (one, other) = tokio::join!(first.tick(b""), second.tick(b""));
    one.unwrap();
    other.unwrap();

    assert_eq!(reject.pull(&[1, 2]).await.unwrap(), [0.0, 0.0, 2.0, 2.0]);
    assert_eq!(skip.pull(&[1, 2, 3]).await.unwrap(), [2.0, 2.0, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(clip.pull(&[1]).await.unwrap(), [0.0, 1.0]);

    let rejected = wait_counted(&cluster, &reject, [0, 1, 0], [1, 0, 0]).await;
    let job = rejected.sources.keys().map(|who| who.1).max().unwrap();
    assert_ne!(job, 0);
    assert_eq!(rejected.of((0, job, 0, false)), [1, 0, 0]);
    assert_eq!(rejected.of((0, job, 0, true)), [0, 1, 0], "a step's sum is nobody's");
    let skipped = wait_counted(&cluster, &skip, [0; 3], [0, 2, 0]).await;
    assert_eq!(skipped.of((0, job, 1, false)), [0, 2, 0]);
    let clipped = wait_counted(&cluster, &clip, [0; 3], [0, 0, 1]).await;
    assert_eq!(clipped.of((0, job, 0, false)), [0, 0, 1]);
    cluster.assert_replicas_equal().await;
}

/// Large values, denormals and zeros of either sign are finite: they go through client, log and rows under every policy, and nobody
/// is counted for them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn extreme_but_finite_gradients_pass_and_are_not_counted() {
    let cluster = Cluster::with_shards(1).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let tiny = f32::from_bits(1);
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let tables = tables(&trainer).await;
    for table in &tables {
        // The rows of an id are summed by the client.
        table
            .push(&[1, 2, 3, 4, 4], &[1e38, -1e38, tiny, -1e-40, -0.0, 0.0, 1e38, -0.0, 1e38, -0.0])
            .await
            .unwrap();
        table.set(&[5], &[-0.0, -tiny]).await.unwrap();
        let rows = table.pull(&[1, 2, 3, 4, 5]).await.unwrap();
        let expected = [-1e38, 1e38, -tiny, 1e-40, 0.0, 0.0, -1e38 - 1e38, 0.0, -0.0, -tiny];
        assert_eq!(bits(&rows), bits(&expected));
    }
    // Four times 1e38 is not: the client refuses it, and leaves it to the servers where they may skip it.
    let [reject, skip, clip] = &tables;
    let four = [1e38; 4 * DIM];
    assert_rejected(reject.push(&[1; 4], &four).await);
    skip.push(&[1; 4], &four).await.unwrap();
    assert_eq!(skip.pull(&[1]).await.unwrap(), [-1e38, 1e38]);
    wait_counted(&cluster, reject, [0; 3], [1, 0, 0]).await;
    let counted = wait_counted(&cluster, skip, [0, 1, 0], [0; 3]).await;
    assert_eq!(counted.last[0].rows.unwrap().value, INF);
    wait_counted(&cluster, clip, [0; 3], [0; 3]).await;
    cluster.assert_replicas_equal().await;
}

/// Whoever tells a replica what it found is not trusted to tell it well, or seldom.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_that_cannot_be_meant_count_nothing_and_many_take_little() {
    let cluster = Cluster::with_shards(1).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    let [_, skip, _] = tables(&trainer).await;
    let table = skip.table.number();
    let group = raw::shard_of(&cluster, table, 1).await.group;
    let mut client = ParameterServiceClient::new(cluster.channel(cluster.leader_of(0).await));
    let rows = NonFiniteRows {
        table,
        action: NonFiniteAction::Skipped.into(),
        count: 1,
        id: 1,
        column: 0,
        value: NAN,
        of_sum: false,
    };
    let report = |session, rows: &[NonFiniteRows]| NonFiniteReport {
        group,
        session,
        worker: None,
        rows: rows.to_vec(),
    };
    for bad in [
        NonFiniteRows { action: 3, ..rows },
        NonFiniteRows { action: -1, ..rows },
        NonFiniteRows { count: 0, ..rows },
        NonFiniteRows { count: u64::MAX, ..rows },
        NonFiniteRows { column: DIM as u32, ..rows },
    ] {
        // The good one beside it is not counted either.
        let refused = client.report_non_finite(report(1, &[rows, bad])).await.unwrap_err();
        assert_eq!(raw::kind(&refused), ErrorKind::Invalid, "{refused}");
    }
    let many = vec![rows; NON_FINITE_REPORT_ROWS_MAX + 1];
    let refused = client.report_non_finite(report(1, &many)).await.unwrap_err();
    assert_eq!(raw::kind(&refused), ErrorKind::Invalid, "{refused}");
    let elsewhere = NonFiniteReport { group: u64::MAX, ..report(1, &[rows]) };
    client.report_non_finite(elsewhere).await.unwrap_err();
    // Of a table that there is not.
    client.report_non_finite(report(1, &[NonFiniteRows { table: 4000, ..rows }])).await.unwrap();
    let none = counted(&cluster, &skip).await;
    assert_eq!((none.logged, none.heard), ([0; 3], [0; 3]), "{none:?}");

    let sessions = 200;
    let most = NonFiniteRows { count: NON_FINITE_REPORT_COUNT_MAX, ..rows };
    for session in 1..=sessions {
        client.report_non_finite(report(session, &[most])).await.unwrap();
    }
    let all = counted(&cluster, &skip).await;
    assert_eq!(all.heard, [0, sessions * NON_FINITE_REPORT_COUNT_MAX, 0], "the total keeps everybody");
    assert_eq!((all.sources.len(), all.last.len()), (64, 16));
    assert_eq!(all.of((sessions, 0, 0, false)), [0, NON_FINITE_REPORT_COUNT_MAX, 0], "the last are known");
    assert_eq!(skip.pull(&[1]).await.unwrap(), [0.0, 0.0], "and rows are what they were");
}
