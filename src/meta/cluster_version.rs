//! The cluster version: which log entries and which kinds of rows may be used, because every node's build knows them
//! (design 14.13).
//!
//! Invariants:
//! - it never goes down;
//! - what needs a version is refused while the cluster is of a lower one;
//! - a build that does not know a version halts where it is raised.
//!
//! Not here: finding out what the nodes' builds know (`cluster/cluster_version.rs`).

use evershard_proto::v1::meta_command::Command;
use evershard_proto::v1::{MetaOutcome, MetaState, RaiseClusterVersion, TableDefinition};

use super::state::refused;
use crate::model::{CLUSTER_VERSION_MAX, needed_cluster_version};

/// Applies one raise. The answer is the same from every build that knows the command.
pub(super) fn apply_raise(state: &mut MetaState, raise: &RaiseClusterVersion) -> MetaOutcome {
    if raise.version > state.cluster_version {
        state.cluster_version = raise.version;
        state.version += 1;
    }
    MetaOutcome::default()
}

/// Why a table may not be created yet, if it may not.
pub(super) fn check_definition(state: &MetaState, definition: &TableDefinition) -> Option<MetaOutcome> {
    let needed = needed_cluster_version(definition);
    (needed > state.cluster_version).then(|| {
        refused(format!(
            "table {:?}: admission and eviction need cluster version {needed}, the cluster is of version {}",
            definition.name, state.cluster_version
        ))
    })
}

/// Why this build must halt at a command, if it must: what follows may be what it does not know.
pub(super) fn beyond_this_build(command: &Command) -> Option<String> {
    match command {
        Command::RaiseVersion(raise) if raise.version > CLUSTER_VERSION_MAX => Some(format!(
            "the cluster is of version {} from here on, this build knows versions up to {CLUSTER_VERSION_MAX}",
            raise.version
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use evershard_proto::v1::{Admission, CreateTable, MetaCommand};

    use super::*;
    use crate::meta::state::apply;

    #[test]
    fn a_table_with_rules_waits_for_the_cluster_version_that_knows_them() {
        let mut state = MetaState { next_table: 1, ..Default::default() };
        let mut run = |command| apply(&mut state, MetaCommand { command: Some(command) });
        let raise = |version| Command::RaiseVersion(RaiseClusterVersion { version });
        let create = |admission| {
            let definition =
                TableDefinition { name: format!("{admission:?}"), dim: 1, admission, ..Default::default() };
            Command::CreateTable(CreateTable { definition: Some(definition) })
        };
        assert_eq!(run(create(None)).error, "");
        let rules = Some(Admission { filter_freq: 3, ..Default::default() });
        let refused = run(create(rules));
        assert!(refused.table.is_none() && refused.error.contains("cluster version 1"), "{}", refused.error);
        assert_eq!(run(raise(1)), MetaOutcome::default());
        assert_eq!(run(raise(0)), MetaOutcome::default(), "it does not go down");
        assert_eq!(run(create(rules)).error, "");
        assert_eq!(beyond_this_build(&raise(CLUSTER_VERSION_MAX)), None);
        assert!(beyond_this_build(&raise(CLUSTER_VERSION_MAX + 1)).is_some());
    }
}
