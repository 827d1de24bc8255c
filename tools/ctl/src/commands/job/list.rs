//! `evershardctl job list`.

use std::process::ExitCode;

use comfy_table::Table;
use serde_json::json;

use super::JobView;
use crate::cli::{Global, Output};
use crate::connection::Connection;
use crate::error::CtlError;
use crate::output;

pub(crate) async fn run(global: &Global) -> Result<ExitCode, CtlError> {
    let connection = Connection::open(global).await?;
    let jobs: Vec<JobView> = super::gather(&connection).await?.iter().map(JobView::of).collect();
    match global.output {
        Output::Json => output::json(&json!({ "jobs": jobs }))?,
        Output::Table => output::print(&jobs_table(&jobs))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// A line a job.
pub(crate) fn jobs_table(jobs: &[JobView]) -> Table {
    let clock = |clock: Option<u64>| clock.map_or_else(|| "-".to_owned(), |clock| clock.to_string());
    let rows = jobs.iter().map(|job| {
        let state = if job.aborted.is_some() { "aborted" } else { "runs" };
        let (slowest, fastest) = (clock(job.slowest), clock(job.fastest));
        [job.name.clone(), job.mode(), state.to_owned(), job.head_count(), slowest, fastest]
    });
    output::table(["job", "mode", "state", "workers", "slowest", "fastest"], rows)
}
