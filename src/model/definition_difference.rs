//! In what two definitions of one table differ, in words for whoever asked for the second.
//!
//! Not here: whether a definition is valid (`schema`).

use evershard_proto::v1::{
    NonFinitePolicy, TableDefinition, TableKind, TensorDtype, initializer, optimizer, schedule,
};

/// A field's name, and what a definition says there.
type Field = (&'static str, fn(&TableDefinition) -> String);

/// Field by field: what the table has, and what was asked for.
#[must_use]
pub fn differences(known: &TableDefinition, asked: &TableDefinition) -> String {
    let fields: [Field; 8] = [
        ("kind", kind_of),
        ("dim", |d| d.dim.to_string()),
        ("tensor", tensor_of),
        ("optimizer", optimizer_of),
        ("initializer", initializer_of),
        ("non_finite", non_finite_of),
        ("admission", admission_of),
        ("eviction", eviction_of),
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
    let own = ["TABLE_KIND_", "NON_FINITE_POLICY_", "TENSOR_DTYPE_"]
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix));
    own.unwrap_or(name).to_ascii_lowercase()
}

fn kind_of(definition: &TableDefinition) -> String {
    let kind = TableKind::try_from(definition.kind);
    kind.map_or_else(|_| definition.kind.to_string(), |kind| word(kind.as_str_name()))
}

fn tensor_of(definition: &TableDefinition) -> String {
    let Some(tensor) = &definition.tensor else { return "none".to_owned() };
    let dtype = TensorDtype::try_from(tensor.dtype);
    let dtype = dtype.map_or_else(|_| tensor.dtype.to_string(), |dtype| word(dtype.as_str_name()));
    format!("{dtype} of shape {:?}", tensor.shape)
}

fn non_finite_of(definition: &TableDefinition) -> String {
    let policy = NonFinitePolicy::try_from(definition.non_finite);
    policy.map_or_else(|_| definition.non_finite.to_string(), |policy| word(policy.as_str_name()))
}

fn admission_of(definition: &TableDefinition) -> String {
    let Some(rule) = &definition.admission else { return "none".to_owned() };
    let (frequency, probability) = (rule.filter_freq, rule.admit_probability);
    format!("Admission(filter_freq={frequency}, probability={probability}, seed={})", rule.seed)
}

fn eviction_of(definition: &TableDefinition) -> String {
    let Some(rule) = &definition.eviction else { return "none".to_owned() };
    format!(
        "Eviction(expire_seconds={}, steps_to_live={}, min_l2={}, max_rows={})",
        rule.expire_seconds, rule.steps_to_live, rule.min_l2, rule.max_rows
    )
}

fn optimizer_of(definition: &TableDefinition) -> String {
    let Some(optimizer) = &definition.optimizer else { return "none".to_owned() };
    let mut more = format!("weight_decay={}", optimizer.weight_decay);
    if optimizer.clip_value != 0.0 {
        more += &format!(", clip_value={}", optimizer.clip_value);
    }
    if optimizer.clip_norm != 0.0 {
        more += &format!(", clip_norm={}", optimizer.clip_norm);
    }
    if let Some(schedule) = &optimizer.schedule {
        more += &format!(", warmup_steps={}", schedule.warmup_steps);
        match &schedule.decay {
            Some(schedule::Decay::Step(d)) => more += &format!(", step_decay({}, {})", d.every, d.factor),
            Some(schedule::Decay::Cosine(d)) => more += &format!(", cosine_decay({}, {})", d.steps, d.floor),
            None => {}
        }
    }
    match &optimizer.kind {
        Some(optimizer::Kind::Sgd(o)) => format!("SGD(lr={}, {more})", o.lr),
        Some(optimizer::Kind::Adagrad(o)) => format!(
            "Adagrad(lr={}, eps={}, initial_accumulator={}, {more})",
            o.lr, o.eps, o.initial_accumulator
        ),
        Some(optimizer::Kind::Adam(o)) => {
            format!("Adam(lr={}, betas=({}, {}), eps={}, {more})", o.lr, o.beta1, o.beta2, o.eps)
        }
        Some(optimizer::Kind::Momentum(o)) => format!(
            "SGD(lr={}, momentum={}, dampening={}, nesterov={}, {more})",
            o.lr, o.momentum, o.dampening, o.nesterov
        ),
        Some(optimizer::Kind::RowwiseAdagrad(o)) => format!(
            "RowwiseAdagrad(lr={}, eps={}, initial_accumulator={}, {more})",
            o.lr, o.eps, o.initial_accumulator
        ),
        Some(optimizer::Kind::RmsProp(o)) => format!(
            "RMSprop(lr={}, alpha={}, eps={}, momentum={}, centered={}, {more})",
            o.lr, o.alpha, o.eps, o.momentum, o.centered
        ),
        Some(optimizer::Kind::AdamW(o)) => {
            format!("AdamW(lr={}, betas=({}, {}), eps={}, {more})", o.lr, o.beta1, o.beta2, o.eps)
        }
        Some(optimizer::Kind::Ftrl(o)) => {
            format!("FTRL(lr={}, beta={}, l1={}, l2={}, {more})", o.lr, o.beta, o.l1, o.l2)
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
        Some(initializer::Kind::Constant(i)) => format!("constant({})", i.value),
        Some(initializer::Kind::TruncatedNormal(i)) => {
            format!("truncated_normal({}, {}, [{}, {}], seed={seed})", i.mean, i.std, i.low, i.high)
        }
        Some(initializer::Kind::Glorot(i)) => {
            let shape = if i.normal { "normal" } else { "uniform" };
            format!("glorot_{shape}(fans=({}, {}), gain={}, seed={seed})", i.fan_in, i.fan_out, i.gain)
        }
        None => "unspecified".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use evershard_proto::v1::{Optimizer, Sgd};

    use super::*;

    #[test]
    fn names_what_differs_and_nothing_else() {
        let sgd = |lr| Optimizer {
            kind: Some(optimizer::Kind::Sgd(Sgd { lr })),
            weight_decay: 0.0,
            ..Default::default()
        };
        let known = TableDefinition { dim: 8, optimizer: Some(sgd(0.5)), ..TableDefinition::default() };
        let asked = TableDefinition { dim: 16, optimizer: None, non_finite: 1, ..known.clone() };
        assert_eq!(
            differences(&known, &asked),
            "dim is 8, not 16; optimizer is SGD(lr=0.5, weight_decay=0), not none; non_finite is reject, not skip_row"
        );
        assert_eq!(differences(&known, &known), "");
    }
}
