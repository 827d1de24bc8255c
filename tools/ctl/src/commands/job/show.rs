//! `evershardctl job show JOB`.

use std::process::ExitCode;

use crate::cli::{Global, Output};
use crate::connection::Connection;
use crate::error::CtlError;
use crate::output;

pub(crate) async fn run(global: &Global, name: &str) -> Result<ExitCode, CtlError> {
    let connection = Connection::open(global).await?;
    let job = super::find(&connection, name).await?;
    match global.output {
        Output::Json => output::json(&job)?,
        Output::Table => {
            let state = job.aborted.as_ref().map_or_else(String::new, |why| format!(", aborted: {why}"));
            let lease = f64::from(job.lease_ms) / 1000.0;
            output::text_line(&format!(
                "{}: {}; when a worker dies: {}; a lease of {lease} s{state}",
                job.name,
                job.mode(),
                job.dead_worker
            ))?;
            let rows = job.workers.iter().map(|worker| {
                let waits: Vec<String> = worker.waits_for.iter().map(u32::to_string).collect();
                [
                    worker.rank.to_string(),
                    worker.state.to_owned(),
                    worker.clock.to_string(),
                    worker.lag.to_string(),
                    if waits.is_empty() { "-".to_owned() } else { waits.join(",") },
                    worker.epoch.to_string(),
                    worker.name.clone(),
                ]
            });
            let head = ["rank", "state", "clock", "lag", "waits for", "epoch", "name"];
            output::print(&output::table(head, rows))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
