//! `evershardctl job ...`.

pub(crate) mod list;
mod remove;
mod show;
mod view;

use std::process::ExitCode;

use clap::Subcommand;
use evershard_proto::v1::{JobDescription, ListJobsRequest};

use crate::cli::Global;
use crate::connection::Connection;
use crate::error::CtlError;

pub(crate) use view::JobView;

/// The training runs: their workers, clocks, and who waits for whom.
#[derive(Debug, Subcommand)]
pub(crate) enum JobCommand {
    /// Show every job.
    #[command(
        after_help = "Example:\n  evershardctl job list --output json | jq '.jobs[] | {name, slowest, fastest}'"
    )]
    List,
    /// Show one job: each worker's clock, and whom it waits for.
    #[command(after_help = "Example:\n  evershardctl job show ml")]
    Show {
        /// The job's name.
        job: String,
    },
    /// Forget a job. Its workers are fenced: what they push from then on is refused. Tables stay as they are.
    #[command(after_help = "Example:\n  evershardctl job remove ml --yes")]
    Remove {
        /// The job's name.
        job: String,
        /// Do not ask.
        #[arg(long)]
        yes: bool,
    },
}

pub(crate) async fn run(global: &Global, command: &JobCommand) -> Result<ExitCode, CtlError> {
    match command {
        JobCommand::List => list::run(global).await,
        JobCommand::Show { job } => show::run(global, job).await,
        JobCommand::Remove { job, yes } => remove::run(global, job, *yes).await,
    }
}

/// All jobs, as the node says that answers for them.
pub(crate) async fn gather(connection: &Connection) -> Result<Vec<JobDescription>, CtlError> {
    let (reply, _) = connection
        .call("list the jobs", |node| async move { node.jobs().list_jobs(ListJobsRequest::default()).await })
        .await?;
    Ok(reply.jobs)
}

/// The job of this name.
async fn find(connection: &Connection, name: &str) -> Result<JobView, CtlError> {
    let jobs: Vec<JobView> = gather(connection).await?.iter().map(JobView::of).collect();
    let names: Vec<&str> = jobs.iter().map(|job| job.name.as_str()).collect();
    let existing = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let found = jobs.into_iter().find(|job| job.name == name);
    found.ok_or_else(|| CtlError::Unknown { what: "job", name: name.to_owned(), existing })
}
