//! The meta group's state and what a meta command does to it: nodes, tables, the shard map, sessions. (Jobs: `jobs.rs`,
//! `steps.rs`.)
//!
//! Pure: no I/O, no clock, no randomness. Every number that is handed out (replica, table, session) comes from a counter
//! here and is never used again.
//!
//! Invariants:
//! - a group's placement names at most one replacement per lost replica;
//! - a table's number outlives its name: a dropped table's number never comes back;
//! - a table's definition changes in its hyper-parameters only, and under a growing version (`set_optimizer.rs`);
//! - `version` grows with every change that a routing table shows.

use evershard_proto::limits::TABLES_MAX;
use evershard_proto::v1::meta_command::Command;
use evershard_proto::v1::{
    self, GroupPlacement, MetaCommand, MetaOutcome, MetaSession, MetaState, MetaTable, ReplicaPlacement,
};

use super::{cluster_version, jobs, set_optimizer, steps};
use crate::model::TableSchema;

/// The shard number that stands for the meta group in a placement.
pub const META_SHARD: u32 = u32::MAX;
/// The meta group's number.
pub const META_GROUP: u64 = 0;

/// Applies one command. Total: what cannot be done is an outcome with an error, the same on every replica.
pub fn apply(state: &mut MetaState, command: MetaCommand) -> MetaOutcome {
    let Some(command) = command.command else {
        return refused("a meta command of a newer version");
    };
    match command {
        Command::Init(init) => apply_init(state, init),
        Command::RegisterNode(register) => apply_register(state, register),
        Command::CreateTable(create) => apply_create_table(state, without_tensor(create)),
        Command::CreateTensor(create) => apply_create_table(state, create),
        Command::ActivateTable(activate) => apply_activate_table(state, &activate),
        Command::RemoveTable(remove) => apply_remove_table(state, &remove),
        Command::SetOptimizer(set) => set_optimizer::apply(state, set),
        Command::RaiseVersion(raise) => cluster_version::apply_raise(state, &raise),
        Command::OpenSession(open) => apply_open_session(state, open),
        Command::ExpireSessions(expire) => {
            state.sessions.retain(|s| !expire.sessions.contains(&s.session));
            MetaOutcome::default()
        }
        Command::MarkReplicaCreated(mark) => apply_mark_created(state, &mark),
        Command::ReplaceReplica(replace) => apply_replace(state, &replace),
        Command::FinishReplacement(finish) => apply_finish_replacement(state, &finish),
        Command::CreateJob(create) => jobs::apply_create(state, create),
        Command::JoinJob(join) => jobs::apply_join(state, join),
        Command::Tick(tick) => jobs::apply_tick(state, tick),
        Command::EndWorker(end) => jobs::apply_end_worker(state, &end),
        Command::RemoveJob(remove) => jobs::apply_remove(state, &remove),
        Command::Arrive(arrive) => steps::apply_arrive(state, arrive),
        Command::StepDone(done) => steps::apply_step_done(state, &done),
    }
}

pub(super) fn refused(error: impl Into<String>) -> MetaOutcome {
    MetaOutcome { error: error.into(), ..MetaOutcome::default() }
}

pub(super) fn conflict(error: impl Into<String>) -> MetaOutcome {
    MetaOutcome { conflict: true, ..refused(error) }
}

fn apply_init(state: &mut MetaState, init: v1::InitMeta) -> MetaOutcome {
    if !state.cluster_id.is_empty() {
        if state.cluster_id == init.cluster_id {
            return MetaOutcome::default();
        }
        return conflict(format!("the cluster exists already: {}", state.cluster_id));
    }
    let replicas = init.groups.iter().flat_map(|g| &g.replicas);
    state.next_replica = replicas.map(|r| r.replica).max().unwrap_or(0) + 1;
    state.next_group = init.groups.iter().map(|g| g.group).max().unwrap_or(0) + 1;
    state.next_session = 1;
    state.next_table = 1;
    state.cluster_id = init.cluster_id;
    state.nodes = init.nodes;
    state.groups = init.groups;
    state.replicas = init.replicas;
    state.version += 1;
    MetaOutcome::default()
}

fn apply_register(state: &mut MetaState, register: v1::RegisterNode) -> MetaOutcome {
    let Some(node) = register.node else { return refused("register without a node") };
    match state.nodes.iter_mut().find(|n| n.id == node.id) {
        Some(known) if *known == node => return MetaOutcome::default(),
        Some(known) => *known = node,
        None => state.nodes.push(node),
    }
    state.version += 1;
    MetaOutcome::default()
}

/// As builds see the command that know no tensors: all must make the same of it.
fn without_tensor(mut create: v1::CreateTable) -> v1::CreateTable {
    if let Some(definition) = &mut create.definition {
        definition.tensor = None;
    }
    create
}

fn apply_create_table(state: &mut MetaState, create: v1::CreateTable) -> MetaOutcome {
    let Some(definition) = create.definition else { return refused("create_table without a definition") };
    if let Err(error) = TableSchema::new(0, &definition) {
        return refused(error.to_string());
    }
    if let Some(known) = find_table(state, &definition.name) {
        let known_definition = known.definition.clone().unwrap_or_default();
        if known_definition != definition {
            let differing = crate::model::differences(&known_definition, &definition);
            let name = &definition.name;
            let changed = known.definition_version > 0 && known_definition.optimizer != definition.optimizer;
            let how = if changed { " (its optimizer was changed by set_optimizer)" } else { "" };
            return conflict(format!("table {name:?} exists with another definition: {differing}{how}"));
        }
        return MetaOutcome { table: Some(description(known)), ..MetaOutcome::default() };
    }
    if let Some(refused) = cluster_version::check_definition(state, &definition) {
        return refused;
    }
    if state.tables.len() >= TABLES_MAX {
        return refused(format!("the cluster has {TABLES_MAX} tables already"));
    }
    let table = MetaTable { number: state.next_table, definition: Some(definition), ..MetaTable::default() };
    state.next_table += 1;
    state.version += 1;
    let described = description(&table);
    state.tables.push(table);
    MetaOutcome { table: Some(described), ..MetaOutcome::default() }
}

/// A table that takes pushes or is about to, by name.
#[must_use]
pub fn find_table<'a>(state: &'a MetaState, name: &str) -> Option<&'a MetaTable> {
    state.tables.iter().find(|t| !t.dropped && t.definition.as_ref().is_some_and(|d| d.name == name))
}

/// What clients see of a table.
#[must_use]
pub fn description(table: &MetaTable) -> v1::TableDescription {
    v1::TableDescription {
        number: table.number,
        definition: table.definition.clone(),
        definition_version: table.definition_version,
    }
}

fn apply_activate_table(state: &mut MetaState, activate: &v1::ActivateTable) -> MetaOutcome {
    let Some(at) = state.tables.iter().position(|t| t.number == activate.number) else {
        return MetaOutcome::default();
    };
    // The teller may be late: of a table that was dropped meanwhile, the shards are still to be told.
    if state.tables[at].dropped != activate.dropped {
        return MetaOutcome::default();
    }
    if activate.dropped {
        state.tables.remove(at);
    } else {
        let table = &mut state.tables[at];
        table.active = true;
        table.told_version = table.told_version.max(activate.definition_version);
    }
    state.version += 1;
    MetaOutcome::default()
}

fn apply_remove_table(state: &mut MetaState, remove: &v1::RemoveTable) -> MetaOutcome {
    let name = &remove.name;
    if remove.number == 0 {
        return match find_table(state, name) {
            Some(table) => MetaOutcome { table: Some(description(table)), ..MetaOutcome::default() },
            None => refused(format!("there is no table {name:?}")),
        };
    }
    // Gone already: an earlier try was applied after all.
    let Some(table) = state.tables.iter_mut().find(|t| t.number == remove.number) else {
        return MetaOutcome::default();
    };
    let changed = !table.dropped;
    table.dropped = true;
    table.active = false;
    let described = description(table);
    state.version += u64::from(changed);
    MetaOutcome { table: Some(described), ..MetaOutcome::default() }
}

fn apply_open_session(state: &mut MetaState, open: v1::OpenMetaSession) -> MetaOutcome {
    if let Some(known) = state.sessions.iter().find(|s| s.nonce == open.nonce) {
        return MetaOutcome { session: known.session, ..MetaOutcome::default() };
    }
    if let Some(worker) = &open.worker
        && let Err((kind, error)) = jobs::live_worker(state, worker)
    {
        return MetaOutcome { kind: kind as u32, ..refused(error) };
    }
    let session = state.next_session;
    state.next_session += 1;
    state.sessions.push(MetaSession { session, nonce: open.nonce, worker: open.worker, ending: false });
    MetaOutcome { session, ..MetaOutcome::default() }
}

/// A group's placement.
#[must_use]
pub fn find_group(state: &MetaState, group: u64) -> Option<&GroupPlacement> {
    state.groups.iter().find(|g| g.group == group)
}

/// Whether `replica` had a place in `group` once and has none any more. A state from before the replica was thought of says
/// no such thing: a new replica of the meta group sees every state of the past while it catches up, and would end itself.
#[must_use]
pub fn gave_away(state: &MetaState, group: u64, replica: u64) -> bool {
    let is_placed = |group: &GroupPlacement| group.replicas.iter().any(|r| r.replica == replica);
    replica < state.next_replica && find_group(state, group).is_some_and(|group| !is_placed(group))
}

fn find_group_mut(state: &mut MetaState, group: u64) -> Option<&mut GroupPlacement> {
    state.groups.iter_mut().find(|g| g.group == group)
}

fn apply_mark_created(state: &mut MetaState, mark: &v1::MarkReplicaCreated) -> MetaOutcome {
    let Some(group) = find_group_mut(state, mark.group) else {
        return refused(format!("unknown group {}", mark.group));
    };
    match group.replicas.iter_mut().find(|r| r.replica == mark.replica) {
        // Made twice: the second one is empty, and may have forgotten a vote of the first.
        Some(replica) if replica.created && replica.making != mark.making => {
            refused(format!("replica {} of group {} was made before, elsewhere", mark.replica, mark.group))
        }
        Some(replica) => {
            replica.created = true;
            replica.making = mark.making;
            MetaOutcome::default()
        }
        None => refused(format!("group {} has no replica {}", mark.group, mark.replica)),
    }
}

fn apply_replace(state: &mut MetaState, replace: &v1::ReplaceReplica) -> MetaOutcome {
    let next = state.next_replica;
    let Some(group) = find_group_mut(state, replace.group) else {
        return refused(format!("unknown group {}", replace.group));
    };
    if let Some(known) = group.replicas.iter().find(|r| r.replaces == replace.old) {
        return MetaOutcome { replica: known.replica, ..MetaOutcome::default() };
    }
    let Some(old) = group.replicas.iter().find(|r| r.replica == replace.old).cloned() else {
        return refused(format!("group {} has no replica {}", replace.group, replace.old));
    };
    // A replacement that was lost in its turn leaves its place to the new one: a group has one replacement per place.
    let replaces = if old.replaces == 0 { old.replica } else { old.replaces };
    group.replicas.retain(|r| r.replaces != replaces);
    group.replicas.push(ReplicaPlacement {
        replica: next,
        node: old.node,
        created: false,
        replaces,
        making: 0,
    });
    state.next_replica += 1;
    state.version += 1;
    MetaOutcome { replica: next, ..MetaOutcome::default() }
}

fn apply_finish_replacement(state: &mut MetaState, finish: &v1::FinishReplacement) -> MetaOutcome {
    let Some(group) = find_group_mut(state, finish.group) else {
        return refused(format!("unknown group {}", finish.group));
    };
    // Whoever proposed this saw `new` vote; when `new` was lost since, its successor does not vote yet.
    let is_successor = |r: &ReplicaPlacement| r.replica == finish.new && r.replaces == finish.old;
    let Some(at) = group.replicas.iter().position(is_successor) else {
        return MetaOutcome::default();
    };
    group.replicas[at].replaces = 0;
    group.replicas.retain(|r| r.replica != finish.old);
    state.version += 1;
    MetaOutcome::default()
}

/// The first entry of a cluster: the meta group on the first five nodes, the shards' key ranges equal, each shard's
/// replicas on consecutive nodes.
#[must_use]
pub fn plan_cluster(
    cluster_id: String,
    nodes: Vec<v1::NodeAddress>,
    shards: u32,
    replicas: u32,
) -> v1::InitMeta {
    let mut next_replica = 1;
    let mut place = |node: u64, created: bool| {
        let replica = ReplicaPlacement { replica: next_replica, node, created, replaces: 0, making: 0 };
        next_replica += 1;
        replica
    };
    let meta_nodes = nodes.iter().take(5).map(|n| place(n.id, true)).collect();
    let mut groups = vec![GroupPlacement {
        group: META_GROUP,
        shard: META_SHARD,
        range_start: 0,
        range_end: 0,
        replicas: meta_nodes,
    }];
    for shard in 0..shards {
        let held = replicas.min(nodes.len() as u32);
        let on = (0..held).map(|i| nodes[(shard + i) as usize % nodes.len()].id);
        groups.push(GroupPlacement {
            group: u64::from(shard) + 1,
            shard,
            range_start: range_start(shard, shards),
            range_end: if shard + 1 == shards { u64::MAX } else { range_start(shard + 1, shards) - 1 },
            replicas: on.map(|node| place(node, false)).collect(),
        });
    }
    v1::InitMeta { cluster_id, nodes, groups, replicas }
}

fn range_start(shard: u32, shards: u32) -> u64 {
    ((u128::from(shard) << 64) / u128::from(shards)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(n: u64) -> Vec<v1::NodeAddress> {
        (1..=n).map(|id| v1::NodeAddress { id, address: format!("http://node{id}:1") }).collect()
    }

    fn run(state: &mut MetaState, command: Command) -> MetaOutcome {
        apply(state, MetaCommand { command: Some(command) })
    }

    fn cluster(node_count: u64, shards: u32, replicas: u32) -> MetaState {
        let mut state = MetaState::default();
        let init = plan_cluster("c".into(), nodes(node_count), shards, replicas);
        assert_eq!(run(&mut state, Command::Init(init)).error, "");
        state
    }

    fn definition(name: &str, dim: u32) -> v1::TableDefinition {
        v1::TableDefinition { name: name.into(), dim, ..Default::default() }
    }

    #[test]
    fn ranges_cover_every_key_once() {
        for shards in [1, 2, 3, 7, 8, 64] {
            let state = cluster(3, shards, 3);
            let mut next = Some(0u64);
            for group in state.groups.iter().filter(|g| g.shard != META_SHARD) {
                assert_eq!(Some(group.range_start), next);
                next = group.range_end.checked_add(1);
            }
            assert_eq!(next, None, "the last range ends at u64::MAX");
        }
    }

    #[test]
    fn replicas_of_a_shard_are_on_different_nodes_and_never_share_an_id() {
        let state = cluster(5, 7, 3);
        let mut ids: Vec<u64> =
            state.groups.iter().flat_map(|g| g.replicas.iter().map(|r| r.replica)).collect();
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count);
        for group in &state.groups {
            let mut on: Vec<u64> = group.replicas.iter().map(|r| r.node).collect();
            on.sort_unstable();
            on.dedup();
            assert_eq!(on.len(), group.replicas.len());
        }
        assert!(state.next_replica > *ids.last().expect("some"));
    }

    #[test]
    fn create_table_is_idempotent_and_conflicts_are_said() {
        let mut state = cluster(3, 2, 3);
        let create = |d: v1::TableDefinition| Command::CreateTable(v1::CreateTable { definition: Some(d) });
        let first = run(&mut state, create(definition("a", 4)));
        let again = run(&mut state, create(definition("a", 4)));
        assert_eq!(first.table, again.table);
        let other = run(&mut state, create(definition("a", 8)));
        assert!(other.conflict && other.error.contains("another definition"));
        assert!(!run(&mut state, create(definition("", 8))).error.is_empty(), "a table needs a name");
        assert!(!run(&mut state, create(definition("b", 0))).error.is_empty(), "a row needs a width");
    }

    #[test]
    fn a_dropped_tables_number_never_comes_back() {
        let mut state = cluster(3, 2, 3);
        let create = Command::CreateTable(v1::CreateTable { definition: Some(definition("a", 4)) });
        let first = run(&mut state, create.clone()).table.expect("created").number;
        run(&mut state, Command::ActivateTable(v1::ActivateTable { number: first, ..Default::default() }));
        let remove = |number| Command::RemoveTable(v1::RemoveTable { name: "a".into(), number });
        assert_eq!(run(&mut state, remove(0)).table.expect("named").number, first);
        assert!(state.tables[0].active, "asking drops nothing");
        assert_eq!(run(&mut state, remove(first)).error, "");
        let second = run(&mut state, create).table.expect("created").number;
        assert_ne!(first, second);
        // A try that is made again drops the same table, and not the one that has its name now.
        assert_eq!(run(&mut state, remove(first)).error, "");
        assert!(!find_table(&state, "a").expect("the second").dropped);
        // Whoever told the shards of its creation is late: that it is dropped is still to be told.
        run(&mut state, Command::ActivateTable(v1::ActivateTable { number: first, ..Default::default() }));
        assert!(state.tables.iter().any(|t| t.number == first && t.dropped));
        run(
            &mut state,
            Command::ActivateTable(v1::ActivateTable { number: first, dropped: true, definition_version: 0 }),
        );
        assert!(state.tables.iter().all(|t| t.number == second));
        assert_eq!(run(&mut state, remove(first)).error, "", "gone is as good as dropped");
    }

    #[test]
    fn a_session_retried_with_its_nonce_is_the_same_session() {
        let mut state = cluster(3, 2, 3);
        let open = |nonce: &'static [u8]| {
            Command::OpenSession(v1::OpenMetaSession { nonce: nonce.into(), worker: None })
        };
        let first = run(&mut state, open(b"x")).session;
        assert_eq!(run(&mut state, open(b"x")).session, first);
        assert_eq!(run(&mut state, open(b"y")).session, first + 1);
    }

    #[test]
    fn a_lost_replica_is_replaced_under_a_new_id_once() {
        let mut state = cluster(3, 2, 3);
        let old = state.groups[1].replicas[0].replica;
        let replace = Command::ReplaceReplica(v1::ReplaceReplica { group: 1, old });
        let new = run(&mut state, replace.clone()).replica;
        assert_eq!(run(&mut state, replace).replica, new);
        assert!(new > old);
        run(&mut state, Command::FinishReplacement(v1::FinishReplacement { group: 1, old, new }));
        let group = find_group(&state, 1).expect("group 1");
        assert_eq!(group.replicas.len(), 3);
        assert!(group.replicas.iter().all(|r| r.replica != old && r.replaces == 0));
    }

    #[test]
    fn a_place_is_given_away_only_after_it_was_given() {
        let mut state = cluster(3, 2, 3);
        let old = state.groups[0].replicas[0].replica;
        let new = state.next_replica;
        assert!(!gave_away(&state, 0, new), "nobody has thought of it yet");
        run(&mut state, Command::ReplaceReplica(v1::ReplaceReplica { group: 0, old }));
        assert!(!gave_away(&state, 0, new) && !gave_away(&state, 0, old));
        run(&mut state, Command::FinishReplacement(v1::FinishReplacement { group: 0, old, new }));
        assert!(gave_away(&state, 0, old) && !gave_away(&state, 0, new));
        assert!(!gave_away(&state, 99, old), "a group that this state does not know");
    }

    #[test]
    fn a_replacement_that_is_lost_too_leaves_its_place_to_the_next() {
        let mut state = cluster(3, 2, 3);
        let old = state.groups[1].replicas[0].replica;
        let replace = |old| Command::ReplaceReplica(v1::ReplaceReplica { group: 1, old });
        let lost = run(&mut state, replace(old)).replica;
        let new = run(&mut state, replace(lost)).replica;
        let replicas = &find_group(&state, 1).expect("group 1").replicas;
        assert!(replicas.iter().all(|r| r.replica != lost));
        assert!(replicas.iter().any(|r| r.replica == new && r.replaces == old));
        // Whoever saw `lost` vote proposes this too late: `new` does not vote yet, and is still to be added.
        run(&mut state, Command::FinishReplacement(v1::FinishReplacement { group: 1, old, new: lost }));
        let replicas = &find_group(&state, 1).expect("group 1").replicas;
        assert!(replicas.iter().any(|r| r.replica == new && r.replaces == old));
    }

    #[test]
    fn an_id_is_made_once() {
        let mut state = cluster(3, 2, 3);
        let replica = state.groups[1].replicas[0].replica;
        let mark = |making| Command::MarkReplicaCreated(v1::MarkReplicaCreated { group: 1, replica, making });
        assert_eq!(run(&mut state, mark(5)).error, "");
        assert_eq!(run(&mut state, mark(5)).error, "", "asked again");
        assert!(run(&mut state, mark(6)).error.contains("made before"), "on another disk");
        assert_eq!(state.groups[1].replicas[0].making, 5);
    }
}
