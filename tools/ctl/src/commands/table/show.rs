//! `evershardctl table show TABLE`.

use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use evershard_proto::v1::{
    NonFinitePolicy, TableDefinition, TableDescription, TableKind, initializer, optimizer, schedule,
};
use serde_json::{Value, json};

use super::non_finite::{Counts, NonFiniteView};
use crate::cli::{Global, Output};
use crate::commands::status::{ClusterView, TableView, TensorView};
use crate::connection::Connection;
use crate::error::CtlError;
use crate::output;

pub(crate) async fn run(global: &Global, name: &str) -> Result<ExitCode, CtlError> {
    let connection = Connection::open(global).await?;
    let (description, definition) = super::find(&connection.routing, name)?;
    let view = ClusterView::gather(global, false).await?;
    // Dropped between the two looks: then there is nothing to count.
    let counted = view.tables.iter().find(|table| table.number == description.number);
    let non_finite = NonFiniteView::gather(&connection, description.number).await;
    let mut shown = describe(description, definition, counted);
    match global.output {
        Output::Json => {
            if let Value::Object(fields) = &mut shown {
                fields.insert("non_finite_counts".to_owned(), json!(non_finite));
            }
            output::json(&shown)?;
        }
        Output::Table => {
            let rows = shown.as_object().into_iter().flatten();
            let rows = rows.map(|(key, value)| [key.clone(), plain(value)]);
            output::print(&output::table(["field", "value"], rows))?;
            show_non_finite(&non_finite)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Nothing, as long as there is nothing to show.
fn show_non_finite(view: &NonFiniteView) -> Result<(), CtlError> {
    if view.total == Counts::default() {
        return Ok(());
    }
    let row = |name: String, counts: Counts| {
        let Counts { rejected, skipped, clipped } = counts;
        [name, rejected.to_string(), skipped.to_string(), clipped.to_string()]
    };
    let sources = view.sources.iter().map(|known| row(known.source.plain(), known.counts));
    let rows = std::iter::once(row("all".to_owned(), view.total)).chain(sources);
    output::text_line("\nNot finite, since the nodes were started:")?;
    output::print(&output::table(["who", "pushes rejected", "rows skipped", "rows clipped"], rows))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let last = view.last.iter().map(|offence| {
        [
            ago(now, offence.time_ms),
            offence.source.plain(),
            offence.action.to_owned(),
            offence.count.to_string(),
            offence.id.to_string(),
            offence.column.to_string(),
            if offence.of_sum { format!("{} (a sum)", offence.value) } else { offence.value.clone() },
        ]
    });
    output::text_line("\nThe last of them, and the first value of each:")?;
    output::print(&output::table(["when", "who", "action", "count", "id", "column", "value"], last))
}

/// The nodes' clocks and ours differ: what is yet to come is now.
fn ago(now: Duration, time_ms: u64) -> String {
    match now.saturating_sub(Duration::from_millis(time_ms)).as_secs() {
        seconds @ 0..120 => format!("{seconds} s ago"),
        seconds @ 120..7200 => format!("{} min ago", seconds / 60),
        seconds => format!("{} h ago", seconds / 3600),
    }
}

fn describe(
    description: &TableDescription,
    definition: &TableDefinition,
    counted: Option<&TableView>,
) -> Value {
    let non_finite = match definition.non_finite() {
        NonFinitePolicy::Reject => "reject",
        NonFinitePolicy::SkipRow => "skip_row",
        NonFinitePolicy::Clip => "clip",
    };
    let tensor = TensorView::of(definition);
    let kind = if definition.kind() == TableKind::Dense { "dense" } else { "sparse" };
    let mut shown = json!({
        "name": definition.name,
        "number": description.number,
        "kind": kind,
        "dim": definition.dim,
        "rows": counted.map(|table| table.rows),
        "rows_counted": counted.map(|table| table.counted),
        "rows_in_memory": counted.map(|table| table.resident),
        "memory_bytes": counted.map(|table| table.memory_bytes),
        "free_bytes": counted.map(|table| table.free_bytes),
        "overhead_bytes_per_row": counted.map(|table| (table.overhead_bytes_per_row * 10.0).round() / 10.0),
        "optimizer": optimizer_of(definition),
        "initializer": initializer_of(definition),
        "non_finite": non_finite,
        "admission": admission_of(definition),
        "eviction": eviction_of(definition),
        "definition_version": description.definition_version,
    });
    if let (Some(tensor), Some(fields)) = (tensor, shown.as_object_mut()) {
        fields.insert("shape".to_owned(), json!(tensor.shape));
        fields.insert("dtype".to_owned(), json!(tensor.dtype));
        fields.insert("blocks".to_owned(), json!(tensor.blocks));
    }
    shown
}

/// Which ids a gradient makes a row for; null when all.
fn admission_of(definition: &TableDefinition) -> Value {
    definition.admission.map_or(Value::Null, |rule| {
        json!({
            "filter_freq": rule.filter_freq,
            "admit_probability": rule.admit_probability,
            "seed": rule.seed,
        })
    })
}

/// Which rows go by themselves; null when none.
fn eviction_of(definition: &TableDefinition) -> Value {
    definition.eviction.map_or(Value::Null, |rule| {
        json!({
            "expire_seconds": rule.expire_seconds,
            "steps_to_live": rule.steps_to_live,
            "min_l2": rule.min_l2,
            "max_rows": rule.max_rows,
        })
    })
}

/// The optimizer's kind and numbers; null when the table has none.
pub(super) fn optimizer_of(definition: &TableDefinition) -> Value {
    let Some(optimizer) = &definition.optimizer else { return Value::Null };
    let weight_decay = optimizer.weight_decay;
    let mut shown = match &optimizer.kind {
        None => Value::Null,
        Some(optimizer::Kind::Sgd(sgd)) => {
            json!({ "kind": "sgd", "lr": sgd.lr, "weight_decay": weight_decay })
        }
        Some(optimizer::Kind::Adagrad(adagrad)) => json!({
            "kind": "adagrad",
            "lr": adagrad.lr,
            "eps": adagrad.eps,
            "initial_accumulator": adagrad.initial_accumulator,
            "weight_decay": weight_decay,
        }),
        Some(optimizer::Kind::Adam(adam)) => json!({
            "kind": "adam",
            "lr": adam.lr,
            "beta1": adam.beta1,
            "beta2": adam.beta2,
            "eps": adam.eps,
            "weight_decay": weight_decay,
        }),
        Some(optimizer::Kind::Momentum(momentum)) => json!({
            "kind": "momentum",
            "lr": momentum.lr,
            "momentum": momentum.momentum,
            "dampening": momentum.dampening,
            "nesterov": momentum.nesterov,
            "weight_decay": weight_decay,
        }),
        Some(optimizer::Kind::RowwiseAdagrad(adagrad)) => json!({
            "kind": "rowwise_adagrad",
            "lr": adagrad.lr,
            "eps": adagrad.eps,
            "initial_accumulator": adagrad.initial_accumulator,
            "weight_decay": weight_decay,
        }),
        Some(optimizer::Kind::RmsProp(rms_prop)) => json!({
            "kind": "rmsprop",
            "lr": rms_prop.lr,
            "alpha": rms_prop.alpha,
            "eps": rms_prop.eps,
            "momentum": rms_prop.momentum,
            "centered": rms_prop.centered,
            "weight_decay": weight_decay,
        }),
        Some(optimizer::Kind::AdamW(adam)) => json!({
            "kind": "adamw",
            "lr": adam.lr,
            "beta1": adam.beta1,
            "beta2": adam.beta2,
            "eps": adam.eps,
            "weight_decay": weight_decay,
        }),
        Some(optimizer::Kind::Ftrl(ftrl)) => json!({
            "kind": "ftrl", "lr": ftrl.lr, "beta": ftrl.beta, "l1": ftrl.l1, "l2": ftrl.l2,
        }),
    };
    if let Value::Object(fields) = &mut shown {
        for (name, bound) in [("clip_value", optimizer.clip_value), ("clip_norm", optimizer.clip_norm)] {
            if bound != 0.0 {
                fields.insert(name.to_owned(), json!(bound));
            }
        }
        if let Some(schedule) = &optimizer.schedule {
            fields.insert("warmup_steps".to_owned(), json!(schedule.warmup_steps));
            match &schedule.decay {
                None => {}
                Some(schedule::Decay::Step(decay)) => {
                    fields.insert("decay_every".to_owned(), json!(decay.every));
                    fields.insert("decay_factor".to_owned(), json!(decay.factor));
                }
                Some(schedule::Decay::Cosine(decay)) => {
                    fields.insert("cosine_steps".to_owned(), json!(decay.steps));
                    fields.insert("cosine_floor".to_owned(), json!(decay.floor));
                }
            }
        }
    }
    shown
}

fn initializer_of(definition: &TableDefinition) -> Value {
    let initializer = definition.initializer.unwrap_or_default();
    let seed = initializer.seed;
    match initializer.kind {
        None | Some(initializer::Kind::Zeros(_)) => json!({ "kind": "zeros" }),
        Some(initializer::Kind::Uniform(uniform)) => {
            json!({ "kind": "uniform", "low": uniform.low, "high": uniform.high, "seed": seed })
        }
        Some(initializer::Kind::Constant(constant)) => json!({ "kind": "constant", "value": constant.value }),
        Some(initializer::Kind::TruncatedNormal(normal)) => json!({
            "kind": "truncated_normal",
            "mean": normal.mean,
            "std": normal.std,
            "low": normal.low,
            "high": normal.high,
            "seed": seed,
        }),
        Some(initializer::Kind::Glorot(glorot)) => json!({
            "kind": if glorot.normal { "glorot_normal" } else { "glorot_uniform" },
            "fan_in": glorot.fan_in,
            "fan_out": glorot.fan_out,
            "gain": glorot.gain,
            "seed": seed,
        }),
        Some(initializer::Kind::Normal(normal)) => {
            json!({ "kind": "normal", "mean": normal.mean, "std": normal.std, "seed": seed })
        }
    }
}

/// `adagrad lr=0.05 eps=1e-10` instead of braces and quotes.
pub(super) fn plain(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Object(fields) => {
            let kind = fields.get("kind").map(plain);
            let rest = fields
                .iter()
                .filter(|(key, _)| *key != "kind")
                .map(|(key, value)| format!("{key}={}", plain(value)));
            kind.into_iter().chain(rest).collect::<Vec<_>>().join(" ")
        }
        other => other.to_string(),
    }
}
