//! Other hyper-parameters for a table: which change is taken, and under which version.
//!
//! Invariants:
//! - a change that is taken raises the definition's version by one: of two that race, the one that is applied here later has
//!   the higher version, and that is the one which every shard ends with;
//! - the shape and the meaning of the rows' state stay: another kind of optimizer is a conflict.
//!
//! Not here: telling the shards (`cluster/tables.rs`), what a shard does with it (`apply/schema.rs`).

use evershard_proto::v1::{ErrorKind, MetaOutcome, MetaState, MetaTable, SetTableOptimizer, TableDefinition};

use super::state::{conflict, description, refused};
use crate::model::{TableSchema, differences};

/// Applies one change. Setting what is set already changes nothing, so that a call may be made again.
pub(super) fn apply(state: &mut MetaState, set: SetTableOptimizer) -> MetaOutcome {
    let Some(table) = state.tables.iter_mut().find(|table| is_meant(table, &set)) else {
        let which = match set.number {
            0 => format!("there is no table {:?}", set.name),
            number => format!("table {:?} (number {number}) was dropped", set.name),
        };
        return MetaOutcome { kind: ErrorKind::UnknownTable as u32, ..refused(which) };
    };
    let known = table.definition.clone().unwrap_or_default();
    let Some(optimizer) = set.optimizer else {
        return refused(format!("table {:?}: set_optimizer needs an optimizer", known.name));
    };
    let asked = TableDefinition { optimizer: Some(optimizer), ..known.clone() };
    if asked == known {
        return MetaOutcome { table: Some(description(table)), ..MetaOutcome::default() };
    }
    let version = table.definition_version;
    if set.expected_version.is_some_and(|expected| expected != version) {
        let what = "was changed meanwhile: read its definition again";
        return conflict(format!("table {:?} {what} (it is of version {version} now)", known.name));
    }
    let schemas = (TableSchema::new(table.number, &known), TableSchema::new(table.number, &asked));
    match schemas {
        (_, Err(error)) | (Err(error), _) => return refused(error.to_string()),
        (Ok(known_schema), Ok(asked_schema))
            if !known_schema.differs_in_hyper_parameters_only(&asked_schema) =>
        {
            let differing = differences(&known, &asked);
            return conflict(format!(
                "table {:?}: {differing}: set_optimizer changes hyper-parameters only, another kind of optimizer keeps other \
                 state in the rows",
                known.name
            ));
        }
        (Ok(_), Ok(_)) => {}
    }
    table.definition = Some(asked);
    table.definition_version = version + 1;
    let described = description(table);
    state.version += 1;
    MetaOutcome { table: Some(described), ..MetaOutcome::default() }
}

fn is_meant(table: &MetaTable, set: &SetTableOptimizer) -> bool {
    let named = || table.definition.as_ref().is_some_and(|definition| definition.name == set.name);
    !table.dropped && if set.number == 0 { named() } else { table.number == set.number }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::state;
    use evershard_proto::v1::{
        self, ActivateTable, CreateTable, MetaCommand, RemoveTable, meta_command::Command, optimizer,
    };

    fn run(state: &mut MetaState, command: Command) -> MetaOutcome {
        state::apply(state, MetaCommand { command: Some(command) })
    }

    fn optimizer(kind: optimizer::Kind) -> v1::Optimizer {
        v1::Optimizer { kind: Some(kind), ..Default::default() }
    }

    fn sgd(lr: f32) -> v1::Optimizer {
        optimizer(optimizer::Kind::Sgd(v1::Sgd { lr }))
    }

    fn items(optimizer: v1::Optimizer) -> Command {
        let definition = TableDefinition {
            name: "items".into(),
            dim: 4,
            optimizer: Some(optimizer),
            ..TableDefinition::default()
        };
        Command::CreateTable(CreateTable { definition: Some(definition) })
    }

    /// A state with table 1, told to all shards.
    fn with_items(optimizer: v1::Optimizer) -> MetaState {
        let mut state = MetaState { next_table: 1, ..MetaState::default() };
        assert_eq!(run(&mut state, items(optimizer)).error, "");
        run(&mut state, activate(0));
        state
    }

    fn activate(definition_version: u64) -> Command {
        Command::ActivateTable(ActivateTable { number: 1, dropped: false, definition_version })
    }

    fn set(optimizer: v1::Optimizer) -> SetTableOptimizer {
        SetTableOptimizer {
            name: "items".into(),
            number: 1,
            optimizer: Some(optimizer),
            expected_version: None,
        }
    }

    fn versions(state: &MetaState) -> (u64, u64) {
        (state.tables[0].definition_version, state.tables[0].told_version)
    }

    #[test]
    fn the_version_grows_with_every_change_and_with_nothing_else() {
        let mut state = with_items(sgd(1.0));
        let shown = state.version;
        assert_eq!(versions(&state), (0, 0));
        assert_eq!(run(&mut state, Command::SetOptimizer(set(sgd(1.0)))).error, "");
        assert_eq!((versions(&state), state.version), ((0, 0), shown), "as it is already");
        let changed = run(&mut state, Command::SetOptimizer(set(sgd(2.0)))).table.expect("described");
        assert_eq!((changed.number, changed.definition_version), (1, 1));
        assert_eq!(changed.definition.expect("whole").optimizer, Some(sgd(2.0)));
        assert_eq!((versions(&state), state.version), ((1, 0), shown + 1), "still to be told");
        let again = run(&mut state, Command::SetOptimizer(set(sgd(2.0)))).table.expect("described");
        assert_eq!(again.definition_version, 1, "asked again");
        let by_name = SetTableOptimizer { number: 0, ..set(sgd(1.0)) };
        assert_eq!(run(&mut state, Command::SetOptimizer(by_name)).error, "");
        assert_eq!(versions(&state), (2, 0), "back to what it was is a change");
        // Whoever told the shards of version 1 is late, and version 2 is still to be told.
        run(&mut state, activate(1));
        assert_eq!(versions(&state), (2, 1));
        run(&mut state, activate(2));
        run(&mut state, activate(1));
        assert_eq!(versions(&state), (2, 2));
    }

    #[test]
    fn another_kind_of_optimizer_is_a_conflict_that_says_both() {
        let rms_prop = |momentum, centered| {
            let (lr, alpha, eps) = (0.1, 0.9, 1e-8);
            optimizer(optimizer::Kind::RmsProp(v1::RmsProp { lr, alpha, eps, momentum, centered }))
        };
        let adam = v1::Adam { lr: 0.1, beta1: 0.9, beta2: 0.99, eps: 1e-8 };
        let adam_w = v1::AdamW { lr: 0.1, beta1: 0.9, beta2: 0.99, eps: 1e-8 };
        for (known, asked) in [
            (sgd(1.0), optimizer(optimizer::Kind::Adam(adam))),
            // As many floats, of another meaning.
            (optimizer(optimizer::Kind::Adam(adam)), optimizer(optimizer::Kind::AdamW(adam_w))),
            (rms_prop(0.5, false), rms_prop(0.0, true)),
            (rms_prop(0.0, false), rms_prop(0.5, false)),
        ] {
            let mut state = with_items(known);
            let before = state.clone();
            let refused = run(&mut state, Command::SetOptimizer(set(asked)));
            assert!(refused.conflict && refused.error.contains("hyper-parameters only"), "{refused:?}");
            assert_eq!(state, before);
        }
        let mut state = with_items(sgd(1.0));
        let refused = run(&mut state, Command::SetOptimizer(set(optimizer(optimizer::Kind::Adam(adam)))));
        assert!(refused.error.contains("SGD(lr=1") && refused.error.contains("not Adam("), "{refused:?}");
        let mut state = with_items(rms_prop(0.5, false));
        assert_eq!(run(&mut state, Command::SetOptimizer(set(rms_prop(0.9, false)))).error, "");
    }

    #[test]
    fn what_makes_no_sense_is_refused_and_names_the_field() {
        let mut state = with_items(sgd(1.0));
        let before = state.clone();
        let refused = run(&mut state, Command::SetOptimizer(set(sgd(-1.0))));
        assert!(!refused.conflict && refused.error.contains("sgd.lr"), "{refused:?}");
        let refused =
            run(&mut state, Command::SetOptimizer(SetTableOptimizer { optimizer: None, ..set(sgd(1.0)) }));
        assert!(refused.error.contains("needs an optimizer"), "{refused:?}");
        assert_eq!(state, before);
        // A table without an optimizer has no state for one.
        let mut state = MetaState { next_table: 1, ..MetaState::default() };
        let definition = TableDefinition { name: "items".into(), dim: 4, ..TableDefinition::default() };
        run(&mut state, Command::CreateTable(CreateTable { definition: Some(definition) }));
        assert!(run(&mut state, Command::SetOptimizer(set(sgd(1.0)))).conflict);
    }

    #[test]
    fn who_changes_what_was_read_is_told_that_it_changed() {
        let mut state = with_items(sgd(1.0));
        let expecting = |lr, version| {
            Command::SetOptimizer(SetTableOptimizer { expected_version: Some(version), ..set(sgd(lr)) })
        };
        assert_eq!(run(&mut state, expecting(2.0, 0)).error, "");
        assert_eq!(run(&mut state, expecting(2.0, 0)).error, "", "a second try of the same");
        let refused = run(&mut state, expecting(3.0, 0));
        assert!(refused.conflict && refused.error.contains("version 1"), "{refused:?}");
        assert_eq!(run(&mut state, expecting(3.0, 1)).error, "");
        assert_eq!(versions(&state), (2, 0));
    }

    #[test]
    fn a_table_is_meant_by_its_number_and_never_another_of_its_name() {
        let mut state = with_items(sgd(1.0));
        run(&mut state, Command::RemoveTable(RemoveTable { name: "items".into(), number: 1 }));
        run(&mut state, items(sgd(1.0)));
        let refused = run(&mut state, Command::SetOptimizer(set(sgd(2.0))));
        assert_eq!(refused.kind, ErrorKind::UnknownTable as u32);
        assert!(state.tables.iter().all(|table| table.definition_version == 0));
        let unknown = SetTableOptimizer { name: "users".into(), number: 0, ..set(sgd(2.0)) };
        assert_eq!(run(&mut state, Command::SetOptimizer(unknown)).kind, ErrorKind::UnknownTable as u32);
    }

    #[test]
    fn a_creation_is_compared_with_the_definition_as_it_is_now() {
        let mut state = with_items(sgd(1.0));
        run(&mut state, Command::SetOptimizer(set(sgd(2.0))));
        let refused = run(&mut state, items(sgd(1.0)));
        assert!(refused.conflict && refused.error.contains("set_optimizer"), "{refused:?}");
        assert!(refused.error.contains("SGD(lr=2") && refused.error.contains("not SGD(lr=1"), "{refused:?}");
        let found = run(&mut state, items(sgd(2.0))).table.expect("as it is");
        assert_eq!((found.number, found.definition_version), (1, 1));
    }
}
