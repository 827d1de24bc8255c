//! Messages that the format tests write and read: one of each kind, with every field that matters.

use super::v1;

pub(super) fn lane_frame() -> v1::LaneFrame {
    v1::LaneFrame {
        id: 1,
        group: 2,
        replica: 3,
        kind: 4,
        body: bytes::Bytes::from_static(b"body"),
        body_crc32: crc32fast::hash(b"body"),
    }
}

pub(super) fn meta_state() -> v1::MetaState {
    v1::MetaState {
        cluster_id: "c".to_owned(),
        version: 2,
        nodes: vec![v1::NodeAddress { id: 1, address: "http://a:1".to_owned() }],
        groups: vec![v1::GroupPlacement {
            group: 1,
            shard: 0,
            range_start: 0,
            range_end: u64::MAX,
            replicas: vec![v1::ReplicaPlacement {
                replica: 5,
                node: 1,
                created: true,
                replaces: 4,
                making: 6,
            }],
        }],
        tables: vec![v1::MetaTable {
            number: 3,
            definition: Some(v1::TableDefinition { name: "items".to_owned(), dim: 4, ..Default::default() }),
            active: true,
            dropped: false,
            ..Default::default()
        }],
        sessions: vec![v1::MetaSession {
            session: 9,
            nonce: bytes::Bytes::from_static(b"nonce"),
            ..Default::default()
        }],
        next_session: 10,
        next_table: 4,
        next_group: 2,
        next_replica: 7,
        replicas: 3,
        ..Default::default()
    }
}

/// With a job, which the first states knew nothing of.
pub(super) fn meta_state_with_job() -> v1::MetaState {
    let worker = v1::WorkerIdentity { job: 1, rank: 0, epoch: 6 };
    let definition = v1::JobDefinition {
        name: "ml".to_owned(),
        workers: 1,
        staleness: 2,
        asynchronous: false,
        dead_worker: v1::DeadWorkerPolicy::Wait.into(),
        lease_ms: 10_000,
        ..Default::default()
    };
    let mut state = meta_state();
    state.sessions[0].worker = Some(worker);
    state.sessions[0].ending = true;
    state.jobs = vec![v1::MetaJob {
        number: 1,
        definition: Some(definition),
        workers: vec![v1::MetaWorker {
            state: v1::WorkerState::Live.into(),
            epoch: 6,
            clock: 7,
            barriers: 8,
            cursor: bytes::Bytes::from_static(b"cursor"),
            nonce: bytes::Bytes::from_static(b"0123456789abcdef"),
            name: "host 1".to_owned(),
            ..Default::default()
        }],
        next_epoch: 6,
        aborted: "why".to_owned(),
        ..Default::default()
    }];
    state.next_job = 1;
    state
}

/// A job that sums its steps, in the middle of one.
pub(super) fn meta_state_with_step() -> v1::MetaState {
    let mut state = meta_state_with_job();
    let contributors = vec![v1::StepContributor { rank: 0, epoch: 6 }];
    let job = &mut state.jobs[0];
    job.step = 11;
    job.publications = 13;
    job.last_contributors = vec![0, 2];
    let aggregation = v1::Aggregation::Mean.into();
    job.definition.get_or_insert_default().aggregation = aggregation;
    job.publication = Some(v1::StepPublication { job: 1, step: 11, number: 13, contributors, aggregation });
    job.workers[0].arrived = true;
    job.workers[0].arriving_cursor = bytes::Bytes::from_static(b"next");
    state
}

pub(super) fn tick_command() -> v1::MetaCommand {
    let command = v1::RecordTick {
        worker: Some(v1::WorkerIdentity { job: 1, rank: 2, epoch: 3 }),
        clock: 4,
        barriers: 5,
        cursor: bytes::Bytes::from_static(b"cursor"),
    };
    v1::MetaCommand { command: Some(v1::meta_command::Command::Tick(command)) }
}

pub(super) fn sgd() -> v1::Optimizer {
    let kind = v1::optimizer::Kind::Sgd(v1::Sgd { lr: 0.5 });
    v1::Optimizer { kind: Some(kind), ..Default::default() }
}

pub(super) fn set_optimizer_command() -> v1::MetaCommand {
    let command = v1::SetTableOptimizer {
        name: "items".to_owned(),
        number: 3,
        optimizer: Some(sgd()),
        expected_version: Some(0),
    };
    v1::MetaCommand { command: Some(v1::meta_command::Command::SetOptimizer(command)) }
}

/// With a definition that was changed, which the first states knew nothing of.
pub(super) fn meta_state_with_change() -> v1::MetaState {
    let mut state = meta_state();
    state.tables[0].definition_version = 2;
    state.tables[0].told_version = 1;
    state
}

/// With a table that has rules for its rows, which the first states knew nothing of.
pub(super) fn meta_state_with_rules() -> v1::MetaState {
    let mut state = meta_state();
    state.cluster_version = 1;
    state.tables[0].definition = table_with_rules().definition;
    state
}

pub(super) fn table_with_rules() -> v1::TableDescription {
    let admission = Some(v1::Admission { filter_freq: 3, admit_probability: 0.5, seed: 9 });
    let eviction = Some(v1::Eviction { expire_seconds: 4, steps_to_live: 5, min_l2: 0.5, max_rows: 1 << 40 });
    let name = "items".to_owned();
    let definition = v1::TableDefinition { name, dim: 16, admission, eviction, ..Default::default() };
    v1::TableDescription { number: 9, definition: Some(definition), definition_version: 1 }
}

pub(super) fn raise_command() -> v1::MetaCommand {
    let command = v1::RaiseClusterVersion { version: 1 };
    v1::MetaCommand { command: Some(v1::meta_command::Command::RaiseVersion(command)) }
}

/// The definition of a dense tensor, which the first builds knew nothing of.
pub(super) fn tensor_definition() -> v1::TableDefinition {
    let tensor = v1::TensorDefinition { shape: vec![300, 100], dtype: v1::TensorDtype::Bf16.into() };
    v1::TableDefinition {
        name: "net.weight".to_owned(),
        kind: v1::TableKind::Dense.into(),
        dim: 16_384,
        optimizer: Some(sgd()),
        tensor: Some(tensor),
        ..Default::default()
    }
}

pub(super) fn create_tensor_command() -> v1::MetaCommand {
    let command = v1::CreateTable { definition: Some(tensor_definition()) };
    v1::MetaCommand { command: Some(v1::meta_command::Command::CreateTensor(command)) }
}

pub(super) fn meta_state_with_tensor() -> v1::MetaState {
    let mut state = meta_state();
    state.tables[0].definition = Some(tensor_definition());
    state
}

pub(super) fn meta_command() -> v1::MetaCommand {
    let command = v1::MarkReplicaCreated { group: 1, replica: 2, making: 3 };
    v1::MetaCommand { command: Some(v1::meta_command::Command::MarkReplicaCreated(command)) }
}
