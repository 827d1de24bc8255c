//! `evershardctl checkpoint show`.

use std::collections::BTreeMap;
use std::process::ExitCode;

use evershard_checkpoint::manifest::Content;
use evershard_checkpoint::name::CheckpointName;
use evershard_checkpoint::target::Target;
use serde::Serialize;

use super::when;
use crate::cli::{Global, Output};
use crate::commands::status::bytes;
use crate::error::CtlError;
use crate::output;

#[derive(Debug, Serialize)]
struct ShowView<'a> {
    name: &'a str,
    created_ms: u64,
    cluster: &'a str,
    parent: Option<String>,
    bytes_total: u64,
    bytes_added: u64,
    hold_ms: f64,
    wait_ms: f64,
    metadata: &'a BTreeMap<String, String>,
    tables: Vec<TableView<'a>>,
    shards: Vec<ShardView>,
    jobs: Vec<JobView<'a>>,
}

#[derive(Debug, Serialize)]
struct TableView<'a> {
    name: &'a str,
    number: u32,
    rows: u64,
    digest: &'a str,
}

#[derive(Debug, Serialize)]
struct ShardView {
    id: u32,
    cut_index: u64,
    links: usize,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct JobView<'a> {
    name: &'a str,
    step: u64,
    clocks: Vec<u64>,
}

fn view(content: &Content) -> ShowView<'_> {
    ShowView {
        name: content.name.as_str(),
        created_ms: content.created_ms,
        cluster: &content.cluster,
        parent: content.parent.as_ref().map(ToString::to_string),
        bytes_total: content.bytes_total,
        bytes_added: content.bytes_added,
        hold_ms: content.hold_ms,
        wait_ms: content.wait_ms,
        metadata: &content.metadata,
        tables: content
            .tables
            .iter()
            .map(|table| TableView {
                name: &table.name,
                number: table.number,
                rows: table.rows,
                digest: &table.digest,
            })
            .collect(),
        shards: content
            .shards
            .iter()
            .map(|shard| ShardView {
                id: shard.shard,
                cut_index: shard.cut,
                links: shard.links.len(),
                bytes: shard.files().map(|file| file.bytes).sum(),
            })
            .collect(),
        jobs: content
            .jobs
            .iter()
            .map(|job| JobView {
                name: &job.name,
                step: job.step,
                clocks: job.workers.iter().map(|worker| worker.clock).collect(),
            })
            .collect(),
    }
}

pub(crate) async fn run(
    global: &Global,
    target: &Target,
    name: &CheckpointName,
) -> Result<ExitCode, CtlError> {
    let content = target.get_manifest(name).await?;
    let view = view(&content);
    if global.output == Output::Json {
        output::json(&view)?;
        return Ok(ExitCode::SUCCESS);
    }
    let parent = view.parent.as_deref().map_or(String::new(), |parent| format!(", builds upon {parent}"));
    output::text_line(&format!(
        "checkpoint {}  {} UTC  {}, {} added{parent}  of cluster {}\n",
        view.name,
        when(view.created_ms),
        bytes(view.bytes_total),
        bytes(view.bytes_added),
        view.cluster
    ))?;
    output::print(&output::table(
        ["table", "number", "rows", "digest"],
        view.tables.iter().map(|table| {
            [table.name.to_owned(), table.number.to_string(), table.rows.to_string(), table.digest.to_owned()]
        }),
    ))?;
    output::text_line("")?;
    output::print(&output::table(
        ["shard", "cut at", "links", "size"],
        view.shards.iter().map(|shard| {
            [shard.id.to_string(), shard.cut_index.to_string(), shard.links.to_string(), bytes(shard.bytes)]
        }),
    ))?;
    if !view.jobs.is_empty() {
        output::text_line("")?;
        output::print(&output::table(
            ["job", "step", "clocks"],
            view.jobs.iter().map(|job| {
                let clocks: Vec<String> = job.clocks.iter().map(u64::to_string).collect();
                [job.name.to_owned(), job.step.to_string(), clocks.join(" ")]
            }),
        ))?;
    }
    for (key, value) in view.metadata {
        output::text_line(&format!("{key} = {value}"))?;
    }
    Ok(ExitCode::SUCCESS)
}
