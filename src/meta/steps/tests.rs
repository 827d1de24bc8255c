//! Steps in the meta group's state: who arrives, dies, is replaced or comes late, and whose gradients count then.

use evershard_proto::v1::meta_command::Command;
use evershard_proto::v1::{
    self, DeadWorkerPolicy, ErrorKind, MetaCommand, MetaJob, MetaState, WorkerIdentity,
};

use crate::meta::state::apply;

fn does(state: &mut MetaState, command: Command) -> v1::MetaOutcome {
    apply(state, MetaCommand { command: Some(command) })
}

fn state(workers: u32, policy: DeadWorkerPolicy) -> MetaState {
    let mut state = MetaState { next_session: 1, ..MetaState::default() };
    let definition = v1::JobDefinition {
        name: "ml".into(),
        workers,
        lease_ms: 10_000,
        dead_worker: policy.into(),
        aggregation: v1::Aggregation::Sum.into(),
        ..Default::default()
    };
    let created = does(&mut state, Command::CreateJob(v1::CreateJob { definition: Some(definition) }));
    assert_eq!(created.error, "");
    state
}

fn join(state: &mut MetaState, rank: u32, nonce: u8) -> WorkerIdentity {
    let nonce = vec![nonce; 16].into();
    let join = v1::JoinMetaJob { job: "ml".into(), rank, nonce, name: String::new() };
    does(state, Command::JoinJob(join)).worker.expect("joined")
}

fn arrive(
    state: &mut MetaState,
    worker: &WorkerIdentity,
    step: u64,
    cursor: &'static str,
) -> v1::MetaOutcome {
    let arrival = v1::RecordArrival { worker: Some(*worker), step, cursor: cursor.into(), stuck: false };
    does(state, Command::Arrive(arrival))
}

/// Some shard lacks what others contribute.
fn stuck(state: &mut MetaState, worker: &WorkerIdentity, step: u64) {
    let arrival = v1::RecordArrival { worker: Some(*worker), step, cursor: "other".into(), stuck: true };
    assert_eq!(does(state, Command::Arrive(arrival)).error, "");
}

fn done(state: &mut MetaState, step: u64) -> v1::MetaOutcome {
    does(state, Command::StepDone(v1::RecordStepDone { job: 1, step }))
}

fn die(state: &mut MetaState, worker: &WorkerIdentity) {
    does(state, Command::EndWorker(v1::EndWorker { worker: Some(*worker), left: false }));
}

fn job(state: &MetaState) -> &MetaJob {
    &state.jobs[0]
}

/// (number, contributors) of what is published.
fn published(state: &MetaState) -> Option<(u64, Vec<(u32, u64)>)> {
    let publication = job(state).publication.as_ref()?;
    let contributors = publication.contributors.iter().map(|one| (one.rank, one.epoch)).collect();
    Some((publication.number, contributors))
}

fn cursors(state: &MetaState) -> Vec<&[u8]> {
    job(state).workers.iter().map(|worker| &worker.cursor[..]).collect()
}

#[test]
fn a_step_is_published_when_all_have_arrived_and_cursors_advance_when_it_is_over() {
    let mut state = state(2, DeadWorkerPolicy::Continue);
    let first = join(&mut state, 0, 1);
    assert_eq!(arrive(&mut state, &first, 0, "a1").error, "");
    assert_eq!(published(&state), None, "rank 1 is still to come");
    assert!(done(&mut state, 0).error.contains("was not published"));
    let second = join(&mut state, 1, 2);
    arrive(&mut state, &second, 0, "b1");
    let both = Some((1, vec![(0, first.epoch), (1, second.epoch)]));
    assert_eq!(published(&state), both);
    arrive(&mut state, &second, 0, "b1");
    assert_eq!(published(&state), both, "a repetition");
    assert_eq!(cursors(&state), [b"", b""]);
    assert_eq!(done(&mut state, 0).error, "");
    assert_eq!(done(&mut state, 0).error, "", "the other saw it, too");
    assert_eq!((job(&state).step, cursors(&state)), (1, vec![&b"a1"[..], b"b1"]));
    assert_eq!(published(&state), None);
    assert_eq!(arrive(&mut state, &first, 0, "a1").error, "", "a call whose answer was lost");
    assert!(!job(&state).workers[0].arrived);
    assert!(arrive(&mut state, &first, 2, "a3").error.contains("is at 1"));
    assert_eq!(job(&state).workers.iter().map(|worker| worker.clock).collect::<Vec<_>>(), [1, 1]);
}

#[test]
fn the_dead_are_left_out_or_waited_for_when_shards_lack_their_parts() {
    for policy in [DeadWorkerPolicy::Continue, DeadWorkerPolicy::Wait] {
        let mut state = state(2, policy);
        let (first, second) = (join(&mut state, 0, 1), join(&mut state, 1, 2));
        arrive(&mut state, &first, 0, "a1");
        arrive(&mut state, &second, 0, "b1");
        stuck(&mut state, &first, 0);
        assert_eq!(published(&state).map(|known| known.0), Some(1), "everybody is there: it will pass");
        // It dies after the step was published: the shards may have its gradients, or lose them.
        die(&mut state, &second);
        assert_eq!(published(&state).map(|known| known.0), Some(1), "they may have applied it");
        stuck(&mut state, &first, 0);
        if policy == DeadWorkerPolicy::Continue {
            assert_eq!(published(&state), Some((2, vec![(0, first.epoch)])));
            done(&mut state, 0);
            assert_eq!(cursors(&state), [&b"a1"[..], b""], "its first call said where it goes on");
            arrive(&mut state, &first, 1, "a2");
            assert_eq!(published(&state), Some((3, vec![(0, first.epoch)])));
            let third = join(&mut state, 1, 3);
            assert_eq!(job(&state).workers[1].clock, 1, "it begins where the job is");
            done(&mut state, 1);
            arrive(&mut state, &first, 2, "a3");
            assert_eq!(published(&state), None, "it is waited for again");
            // It had begun with the step that went on without it.
            arrive(&mut state, &third, 1, "b1");
            assert_eq!((published(&state), cursors(&state)[1]), (None, &b""[..]));
            arrive(&mut state, &third, 2, "b1");
            assert_eq!(published(&state), Some((4, vec![(0, first.epoch), (1, third.epoch)])));
        } else {
            assert_eq!(published(&state).map(|known| known.0), Some(1), "its replacement is still to come");
            let third = join(&mut state, 1, 3);
            arrive(&mut state, &third, 0, "b1");
            assert_eq!(published(&state).map(|known| known.0), Some(1), "what is published stays");
            stuck(&mut state, &first, 0);
            assert_eq!(published(&state), Some((2, vec![(0, first.epoch), (1, third.epoch)])));
        }
    }
}

#[test]
fn a_contributor_that_dies_before_the_end_of_its_step_keeps_its_place_in_it() {
    let mut state = state(2, DeadWorkerPolicy::Continue);
    let (first, second) = (join(&mut state, 0, 1), join(&mut state, 1, 2));
    arrive(&mut state, &first, 0, "a1");
    arrive(&mut state, &second, 0, "b1");
    die(&mut state, &second);
    // Every shard has applied it, with both: its batch must not come again.
    done(&mut state, 0);
    assert_eq!(cursors(&state), [&b"a1"[..], b"b1"]);
}

#[test]
fn another_publication_of_a_step_has_nobody_who_was_not_in_the_first() {
    let mut state = state(2, DeadWorkerPolicy::Continue);
    let (first, second) = (join(&mut state, 0, 1), join(&mut state, 1, 2));
    arrive(&mut state, &first, 0, "a1");
    arrive(&mut state, &second, 0, "b1");
    let late = join(&mut state, 2, 3);
    arrive(&mut state, &late, 0, "c1");
    die(&mut state, &second);
    stuck(&mut state, &first, 0);
    assert_eq!(published(&state), Some((2, vec![(0, first.epoch)])), "a shard may have applied 0 and 1");
    done(&mut state, 0);
    assert_eq!(job(&state).last_contributors, [0], "rank 2 hears that it was not counted");
    assert_eq!(cursors(&state)[2], b"");
}

#[test]
fn a_step_whose_contributors_are_all_gone_goes_on_with_whoever_comes() {
    for policy in [DeadWorkerPolicy::Continue, DeadWorkerPolicy::Wait] {
        let mut state = state(1, policy);
        let first = join(&mut state, 0, 1);
        arrive(&mut state, &first, 0, "a1");
        die(&mut state, &first);
        let second = join(&mut state, 0, 2);
        arrive(&mut state, &second, 0, "a1");
        assert_eq!(published(&state), Some((2, vec![(0, second.epoch)])), "{policy:?}");
    }
    let mut state = state(1, DeadWorkerPolicy::Continue);
    let first = join(&mut state, 0, 1);
    arrive(&mut state, &first, 0, "a1");
    let other = join(&mut state, 1, 2);
    arrive(&mut state, &other, 0, "b1");
    assert_eq!(published(&state).map(|known| known.0), Some(1));
    die(&mut state, &first);
    assert_eq!(published(&state), Some((2, vec![(1, other.epoch)])), "nobody of them is left to carry it");
}

#[test]
fn a_rank_that_is_taken_over_while_its_gradients_are_applied_counts_once() {
    let mut state = state(2, DeadWorkerPolicy::Wait);
    let (first, second) = (join(&mut state, 0, 1), join(&mut state, 1, 2));
    arrive(&mut state, &first, 0, "a1");
    arrive(&mut state, &second, 0, "b1");
    let third = join(&mut state, 1, 3);
    assert_eq!(arrive(&mut state, &second, 0, "b1").kind, ErrorKind::Fenced as u32);
    assert_eq!(published(&state).map(|known| known.0), Some(1), "shards may be at it");
    done(&mut state, 0);
    assert_eq!(cursors(&state), [&b"a1"[..], b"b1"], "its batch is in the step");
    // It did the same batch again, and hears that it counted.
    assert_eq!(arrive(&mut state, &third, 0, "b1 again").error, "");
    assert_eq!(cursors(&state)[1], b"b1");
    assert!(job(&state).last_contributors.contains(&1));
    assert_eq!((job(&state).step, published(&state)), (1, None));
}

#[test]
fn a_worker_that_leaves_is_not_waited_for() {
    let mut state = state(2, DeadWorkerPolicy::Wait);
    let (first, second) = (join(&mut state, 0, 1), join(&mut state, 1, 2));
    arrive(&mut state, &first, 0, "a1");
    does(&mut state, Command::EndWorker(v1::EndWorker { worker: Some(second), left: true }));
    assert_eq!(published(&state), Some((1, vec![(0, first.epoch)])));
}

#[test]
fn ticks_of_such_a_job_are_barriers_alone() {
    let mut state = state(1, DeadWorkerPolicy::Continue);
    let joined = join(&mut state, 0, 1);
    let worker = Some(joined);
    let mut tick = |clock, barriers| {
        does(&mut state, Command::Tick(v1::RecordTick { worker, clock, barriers, cursor: "x".into() }))
    };
    assert!(tick(1, 0).error.contains("ArriveAtStep"));
    assert_eq!(tick(0, 1).error, "");
    arrive(&mut state, &joined, 0, "one");
    done(&mut state, 0);
    // It has not heard yet that its step is over.
    let late = v1::RecordTick { worker, clock: 0, barriers: 2, cursor: "x".into() };
    assert_eq!(does(&mut state, Command::Tick(late)).error, "");
    assert_eq!((job(&state).workers[0].barriers, job(&state).workers[0].clock), (2, 1));
    assert_eq!(cursors(&state), [b"one"]);
}
