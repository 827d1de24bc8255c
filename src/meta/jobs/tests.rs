//! Who waits for whom, who is fenced, and where a replacement goes on: the pure state, command by command.

use evershard_proto::v1::MetaCommand;
use evershard_proto::v1::meta_command::Command;

use super::*;
use crate::meta::state::apply;

fn run(state: &mut MetaState, command: Command) -> MetaOutcome {
    apply(state, MetaCommand { command: Some(command) })
}

fn definition(workers: u32, staleness: u32, policy: DeadWorkerPolicy) -> JobDefinition {
    JobDefinition {
        name: "ml".into(),
        workers,
        staleness,
        dead_worker: policy as i32,
        lease_ms: 10_000,
        ..Default::default()
    }
}

fn with_job(definition: JobDefinition) -> MetaState {
    let mut state = MetaState { next_session: 1, ..Default::default() };
    let create = Command::CreateJob(v1::CreateJob { definition: Some(definition) });
    assert_eq!(run(&mut state, create).error, "");
    state
}

fn join(state: &mut MetaState, rank: u32, nonce: u8) -> MetaOutcome {
    let nonce = vec![nonce; 16].into();
    run(state, Command::JoinJob(v1::JoinMetaJob { job: "ml".into(), rank, nonce, name: "w".into() }))
}

fn joined(state: &mut MetaState, rank: u32, nonce: u8) -> WorkerIdentity {
    let outcome = join(state, rank, nonce);
    assert_eq!(outcome.error, "");
    outcome.worker.expect("an identity")
}

fn tick(state: &mut MetaState, worker: WorkerIdentity, clock: u64) -> MetaOutcome {
    let cursor = format!("at {clock}").into();
    run(state, Command::Tick(v1::RecordTick { worker: Some(worker), clock, barriers: 0, cursor }))
}

fn end(state: &mut MetaState, worker: WorkerIdentity, left: bool) {
    run(state, Command::EndWorker(v1::EndWorker { worker: Some(worker), left }));
}

fn waiting(state: &MetaState, rank: u32) -> Vec<u32> {
    waits_for(&state.jobs[0], rank)
}

fn kind(outcome: &MetaOutcome) -> ErrorKind {
    ErrorKind::try_from(outcome.kind as i32).expect("a kind")
}

#[test]
fn nobody_is_further_ahead_than_the_staleness() {
    for staleness in [1, 2, 3] {
        let mut state = with_job(definition(2, staleness, DeadWorkerPolicy::Continue));
        let (fast, slow) = (joined(&mut state, 0, 1), joined(&mut state, 1, 2));
        for clock in 1..=u64::from(staleness) {
            assert_eq!(tick(&mut state, fast, clock).error, "");
            assert!(waiting(&state, 0).is_empty(), "{clock} with staleness {staleness}");
        }
        tick(&mut state, fast, u64::from(staleness) + 1);
        assert_eq!(waiting(&state, 0), [1], "staleness {staleness}");
        assert!(waiting(&state, 1).is_empty());
        tick(&mut state, slow, 1);
        assert!(waiting(&state, 0).is_empty());
    }
    let mut state =
        with_job(JobDefinition { asynchronous: true, ..definition(2, 0, DeadWorkerPolicy::Wait) });
    let fast = joined(&mut state, 0, 1);
    for clock in 1..100 {
        tick(&mut state, fast, clock);
    }
    assert!(waiting(&state, 0).is_empty(), "nobody waits for anybody");
}

#[test]
fn whose_rank_is_taken_is_fenced_and_so_are_its_sessions() {
    let mut state = with_job(definition(1, 1, DeadWorkerPolicy::Continue));
    let old = joined(&mut state, 0, 1);
    assert_eq!(joined(&mut state, 0, 1), old, "a call that is made again is the same worker");
    let open = |worker, nonce: &'static [u8]| {
        Command::OpenSession(v1::OpenMetaSession { nonce: nonce.into(), worker: Some(worker) })
    };
    assert_eq!(run(&mut state, open(old, b"a")).session, 1);
    assert_eq!(tick(&mut state, old, 1).error, "");
    let new = joined(&mut state, 0, 2);
    assert!(new.epoch > old.epoch);
    assert_eq!(kind(&tick(&mut state, old, 2)), ErrorKind::Fenced);
    assert_eq!(kind(&run(&mut state, open(old, b"b"))), ErrorKind::Fenced);
    assert!(state.sessions[0].ending);
    // The new one goes on where the rank was.
    let worker = &state.jobs[0].workers[0];
    assert_eq!((worker.clock, &worker.cursor[..]), (1, &b"at 1"[..]));
    assert_eq!(run(&mut state, open(new, b"c")).session, 2);
    assert!(!state.sessions[1].ending);
    // A lease of the old one that ends late ends nothing.
    end(&mut state, old, false);
    assert_eq!(tick(&mut state, new, 2).error, "");
}

#[test]
fn a_dead_worker_is_left_behind_waited_for_or_the_end() {
    for policy in [DeadWorkerPolicy::Continue, DeadWorkerPolicy::Wait, DeadWorkerPolicy::Abort] {
        let mut state = with_job(definition(2, 1, policy));
        let (dying, other) = (joined(&mut state, 0, 1), joined(&mut state, 1, 2));
        tick(&mut state, other, 1);
        tick(&mut state, other, 2);
        assert_eq!(waiting(&state, 1), [0]);
        end(&mut state, dying, false);
        assert_eq!(kind(&tick(&mut state, dying, 1)), ErrorKind::Fenced, "{policy:?}");
        match policy {
            DeadWorkerPolicy::Continue => assert!(waiting(&state, 1).is_empty()),
            DeadWorkerPolicy::Wait => assert_eq!(waiting(&state, 1), [0]),
            DeadWorkerPolicy::Abort => {
                assert_eq!(kind(&tick(&mut state, other, 2)), ErrorKind::JobAborted);
                assert_eq!(kind(&join(&mut state, 0, 3)), ErrorKind::JobAborted);
                continue;
            }
        }
        // Its replacement goes on from its clock, and is waited for again.
        let replacement = joined(&mut state, 0, 3);
        assert_eq!(waiting(&state, 1), [0], "{policy:?}");
        tick(&mut state, replacement, 1);
        assert!(waiting(&state, 1).is_empty());
    }
}

#[test]
fn who_has_left_is_not_waited_for_and_who_never_came_is() {
    let mut state = with_job(definition(3, 1, DeadWorkerPolicy::Continue));
    let (a, b) = (joined(&mut state, 0, 1), joined(&mut state, 1, 2));
    tick(&mut state, a, 1);
    tick(&mut state, a, 2);
    assert_eq!(waiting(&state, 0), [1, 2], "rank 2 is still to come");
    end(&mut state, b, true);
    assert_eq!(waiting(&state, 0), [2]);
    assert_eq!(kind(&tick(&mut state, b, 1)), ErrorKind::Fenced);
    let c = joined(&mut state, 2, 3);
    tick(&mut state, c, 1);
    assert!(waiting(&state, 0).is_empty());
}

#[test]
fn a_worker_that_is_added_begins_with_the_slowest() {
    let mut state = with_job(definition(2, 1, DeadWorkerPolicy::Continue));
    let (a, b) = (joined(&mut state, 0, 1), joined(&mut state, 1, 2));
    for clock in 1..=5 {
        tick(&mut state, a, clock);
        tick(&mut state, b, clock);
    }
    tick(&mut state, a, 6);
    assert!(join(&mut state, 3, 3).error.contains("next that may be added is 2"));
    let added = joined(&mut state, 2, 3);
    assert_eq!(state.jobs[0].workers[2].clock, 5);
    tick(&mut state, a, 7);
    assert_eq!(waiting(&state, 0), [1, 2]);
    tick(&mut state, b, 6);
    tick(&mut state, added, 6);
    assert!(waiting(&state, 0).is_empty());
}

#[test]
fn clocks_go_one_by_one_and_never_back() {
    let mut state = with_job(definition(1, 1, DeadWorkerPolicy::Continue));
    let worker = joined(&mut state, 0, 1);
    assert!(tick(&mut state, worker, 2).error.contains("it is at 0"));
    tick(&mut state, worker, 1);
    tick(&mut state, worker, 2);
    assert_eq!(tick(&mut state, worker, 1).error, "", "a late repetition");
    let known = &state.jobs[0].workers[0];
    assert_eq!((known.clock, &known.cursor[..]), (2, &b"at 2"[..]));
}

#[test]
fn all_come_to_a_barrier_before_anybody_leaves_it() {
    let mut state =
        with_job(JobDefinition { asynchronous: true, ..definition(2, 0, DeadWorkerPolicy::Continue) });
    let (a, b) = (joined(&mut state, 0, 1), joined(&mut state, 1, 2));
    let barrier = |state: &mut MetaState, worker| {
        let tick = v1::RecordTick { worker: Some(worker), clock: 0, barriers: 1, cursor: "x".into() };
        assert_eq!(run(state, Command::Tick(tick)).error, "");
    };
    barrier(&mut state, a);
    assert_eq!(waiting(&state, 0), [1]);
    barrier(&mut state, b);
    assert!(waiting(&state, 0).is_empty() && waiting(&state, 1).is_empty());
    assert!(
        state.jobs[0].workers[0].cursor.is_empty(),
        "a barrier is no step: the cursor is the last tick's"
    );
}

#[test]
fn a_job_is_made_once_removed_and_another_one_then() {
    let base = definition(2, 0, DeadWorkerPolicy::Continue);
    let mut state = with_job(base.clone());
    let create = |definition| Command::CreateJob(v1::CreateJob { definition: Some(definition) });
    assert_eq!(run(&mut state, create(base.clone())).error, "");
    let other = run(&mut state, create(JobDefinition { staleness: 1, ..base.clone() }));
    assert!(other.conflict && other.error.contains("staleness 0"), "{}", other.error);
    for (bad, field) in [
        (JobDefinition { name: String::new(), ..base.clone() }, "name"),
        (JobDefinition { workers: 0, ..base.clone() }, "workers"),
        (JobDefinition { lease_ms: 5, ..base.clone() }, "lease_ms"),
        (JobDefinition { dead_worker: 7, ..base.clone() }, "dead_worker"),
        (JobDefinition { asynchronous: true, staleness: 1, ..base.clone() }, "staleness"),
    ] {
        let error = run(&mut state, create(bad)).error;
        assert!(error.contains(field), "{error}");
    }
    let worker = joined(&mut state, 0, 1);
    let open = v1::OpenMetaSession { nonce: b"s".as_slice().into(), worker: Some(worker) };
    run(&mut state, Command::OpenSession(open));
    let remove = Command::RemoveJob(v1::RemoveMetaJob { name: "ml".into() });
    assert_eq!(run(&mut state, remove.clone()).error, "");
    assert!(state.sessions[0].ending);
    assert_eq!(kind(&run(&mut state, remove)), ErrorKind::UnknownJob);
    run(&mut state, create(base));
    assert_eq!(kind(&tick(&mut state, worker, 1)), ErrorKind::UnknownJob, "of the job that was");
}
