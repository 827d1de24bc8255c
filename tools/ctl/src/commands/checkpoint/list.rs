//! `evershardctl checkpoint list`.

use std::process::ExitCode;

use evershard_checkpoint::target::{Target, TargetError};
use serde::Serialize;

use super::when;
use crate::cli::{Global, Output};
use crate::commands::status::bytes;
use crate::error::CtlError;
use crate::output;

#[derive(Debug, Serialize)]
struct ListView {
    checkpoints: Vec<CheckpointView>,
}

/// The newest last. Of one that cannot be read there is a problem, and nothing else.
#[derive(Debug, Serialize)]
struct CheckpointView {
    name: String,
    created_ms: u64,
    bytes_total: u64,
    bytes_added: u64,
    tables: usize,
    rows: u64,
    /// By job, the step that it has done.
    steps: std::collections::BTreeMap<String, u64>,
    hold_ms: f64,
    #[serde(skip_serializing_if = "String::is_empty")]
    problem: String,
}

pub(crate) async fn run(global: &Global, target: &Target) -> Result<ExitCode, CtlError> {
    let mut checkpoints = Vec::new();
    for listed in target.list().await? {
        let mut view = CheckpointView {
            name: listed.name.to_string(),
            created_ms: listed.created_ms,
            bytes_total: 0,
            bytes_added: 0,
            tables: 0,
            rows: 0,
            steps: std::collections::BTreeMap::new(),
            hold_ms: 0.0,
            problem: String::new(),
        };
        match target.get_manifest(&listed.name).await {
            Ok(content) => {
                view.created_ms = content.created_ms;
                (view.bytes_total, view.bytes_added) = (content.bytes_total, content.bytes_added);
                (view.tables, view.hold_ms) = (content.tables.len(), content.hold_ms);
                view.rows = content.tables.iter().map(|table| table.rows).sum();
                view.steps = content.jobs.iter().map(|job| (job.name.clone(), job.step)).collect();
            }
            // Removed since it was listed.
            Err(TargetError::Unknown { .. }) => continue,
            Err(error) if error.is_of_the_store() => return Err(error.into()),
            Err(error) => view.problem = error.to_string(),
        }
        checkpoints.push(view);
    }
    checkpoints.sort_by(|a, b| (a.created_ms, &a.name).cmp(&(b.created_ms, &b.name)));
    let is_bad = checkpoints.iter().any(|view| !view.problem.is_empty());
    let view = ListView { checkpoints };
    match global.output {
        Output::Json => output::json(&view)?,
        Output::Table if view.checkpoints.is_empty() => eprintln!("no checkpoints in {}", target.url()),
        Output::Table => output::print(&output::table(
            ["name", "created (utc)", "size", "added", "tables", "rows", "steps"],
            view.checkpoints.iter().map(|view| {
                if !view.problem.is_empty() {
                    let nothing = String::new;
                    return [
                        view.name.clone(),
                        when(view.created_ms),
                        nothing(),
                        nothing(),
                        nothing(),
                        nothing(),
                        format!("CANNOT BE READ: {}", view.problem),
                    ];
                }
                let steps: Vec<String> =
                    view.steps.iter().map(|(job, step)| format!("{job} {step}")).collect();
                [
                    view.name.clone(),
                    when(view.created_ms),
                    bytes(view.bytes_total),
                    bytes(view.bytes_added),
                    view.tables.to_string(),
                    view.rows.to_string(),
                    steps.join(", "),
                ]
            }),
        ))?,
    }
    Ok(if is_bad { ExitCode::from(1) } else { ExitCode::SUCCESS })
}
