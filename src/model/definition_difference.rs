//! In what two definitions of one table differ, in words for whoever asked for the second.
//!
//! Not here: whether a definition is valid (`schema`).

use evershard_proto::v1::{NonFinitePolicy, TableDefinition, TableKind, initializer, optimizer};

/// A field's name, and what a definition says there.
type Field = (&'static str, fn(&TableDefinition) -> String);

/// Field by field: what the table has, and what was asked for.
#[must_use]
pub fn differences(known: &TableDefinition, asked: &TableDefinition) -> String {
    let fields: [Field; 5] = [
        ("kind", kind_of),
        ("dim", |d| d.dim.to_string()),
        ("optimizer", optimizer_of),
        ("initializer", initializer_of),
        ("non_finite", non_finite_of),
    ];
    let differing: Vec<String> = fields
        .iter()
        .map(|(name, of)| (name, of(known), of(asked)))
        .filter(|(_, known, asked)| known != asked)
        .map(|(name, known, asked)| format!("{name} is {known}, not {asked}"))
        .collect();
    differing.join("; ")
}

/// What a name in capitals says beyond that of its enumeration.
fn word(name: &str) -> String {
    let own = ["TABLE_KIND_", "NON_FINITE_POLICY_"].iter().find_map(|prefix| name.strip_prefix(prefix));
    own.unwrap_or(name).to_ascii_lowercase()
}

fn kind_of(definition: &TableDefinition) -> String {
    let kind = TableKind::try_from(definition.kind);
    kind.map_or_else(|_| definition.kind.to_string(), |kind| word(kind.as_str_name()))
}

fn non_finite_of(definition: &TableDefinition) -> String {
    let policy = NonFinitePolicy::try_from(definition.non_finite);
    policy.map_or_else(|_| definition.non_finite.to_string(), |policy| word(policy.as_str_name()))
}

fn optimizer_of(definition: &TableDefinition) -> String {
    let Some(optimizer) = &definition.optimizer else { return "none".to_owned() };
    let decay = optimizer.weight_decay;
    match &optimizer.kind {
        Some(optimizer::Kind::Sgd(o)) => format!("SGD(lr={}, weight_decay={decay})", o.lr),
        Some(optimizer::Kind::Adagrad(o)) => format!(
            "Adagrad(lr={}, eps={}, initial_accumulator={}, weight_decay={decay})",
            o.lr, o.eps, o.initial_accumulator
        ),
        Some(optimizer::Kind::Adam(o)) => {
            format!(
                "Adam(lr={}, betas=({}, {}), eps={}, weight_decay={decay})",
                o.lr, o.beta1, o.beta2, o.eps
            )
        }
        None => "unspecified".to_owned(),
    }
}

fn initializer_of(definition: &TableDefinition) -> String {
    let Some(initializer) = &definition.initializer else { return "none".to_owned() };
    let seed = initializer.seed;
    match &initializer.kind {
        Some(initializer::Kind::Zeros(_)) => format!("zeros(seed={seed})"),
        Some(initializer::Kind::Uniform(i)) => format!("uniform({}, {}, seed={seed})", i.low, i.high),
        Some(initializer::Kind::Normal(i)) => format!("normal({}, {}, seed={seed})", i.mean, i.std),
        None => "unspecified".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use evershard_proto::v1::{Optimizer, Sgd};

    use super::*;

    #[test]
    fn names_what_differs_and_nothing_else() {
        let sgd = |lr| Optimizer { kind: Some(optimizer::Kind::Sgd(Sgd { lr })), weight_decay: 0.0 };
        let known = TableDefinition { dim: 8, optimizer: Some(sgd(0.5)), ..TableDefinition::default() };
        let asked = TableDefinition { dim: 16, optimizer: None, non_finite: 1, ..known.clone() };
        assert_eq!(
            differences(&known, &asked),
            "dim is 8, not 16; optimizer is SGD(lr=0.5, weight_decay=0), not none; non_finite is reject, not skip_row"
        );
        assert_eq!(differences(&known, &known), "");
    }
}
