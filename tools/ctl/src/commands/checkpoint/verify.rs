//! `evershardctl checkpoint verify`.

use std::process::ExitCode;

use evershard_checkpoint::name::CheckpointName;
use evershard_checkpoint::target::Target;
use evershard_checkpoint::verify::{Verified, verify};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::cli::{Global, Output};
use crate::commands::status::bytes;
use crate::error::CtlError;
use crate::output;

#[derive(Debug, Serialize)]
struct VerifyView<'a> {
    name: &'a str,
    whole: bool,
    files: u64,
    bytes: u64,
    tables: Vec<TableView<'a>>,
    problems: &'a [String],
}

#[derive(Debug, Serialize)]
struct TableView<'a> {
    name: &'a str,
    rows: u64,
    non_finite: u64,
    digest: &'a str,
}

fn view<'a>(name: &'a CheckpointName, found: &'a Verified) -> VerifyView<'a> {
    let table = |table: &'a evershard_checkpoint::verify::VerifiedTable| TableView {
        name: &table.name,
        rows: table.rows,
        non_finite: table.non_finite,
        digest: &table.digest,
    };
    VerifyView {
        name: name.as_str(),
        whole: found.is_whole(),
        files: found.files,
        bytes: found.bytes,
        tables: found.tables.iter().map(table).collect(),
        problems: &found.problems,
    }
}

pub(crate) async fn run(
    global: &Global,
    target: &Target,
    name: &CheckpointName,
) -> Result<ExitCode, CtlError> {
    let content = target.get_manifest(name).await?;
    // Shown on a terminal only.
    let bar = ProgressBar::new(content.bytes_total);
    if let Ok(style) =
        ProgressStyle::with_template("{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left")
    {
        bar.set_style(style);
    }
    let found = verify(target, &content, |bytes| bar.set_position(bytes)).await;
    bar.finish_and_clear();
    let view = view(name, &found);
    match global.output {
        Output::Json => output::json(&view)?,
        Output::Table => {
            output::print(&output::table(
                ["table", "rows", "not finite", "digest"],
                view.tables.iter().map(|table| {
                    [
                        table.name.to_owned(),
                        table.rows.to_string(),
                        table.non_finite.to_string(),
                        table.digest.to_owned(),
                    ]
                }),
            ))?;
        }
    }
    for problem in &found.problems {
        eprintln!("evershardctl: {problem}");
    }
    if found.store_failed {
        eprintln!("evershardctl: the target failed on the way: the checkpoint may be whole, try again");
        return Ok(ExitCode::from(3));
    }
    if !found.is_whole() {
        return Err(CtlError::NotWhole { name: name.to_string(), problems: found.problems.len() });
    }
    if global.output == Output::Table {
        eprintln!("checkpoint {name} is whole: {} files, {}", found.files, bytes(found.bytes));
    }
    Ok(ExitCode::SUCCESS)
}
