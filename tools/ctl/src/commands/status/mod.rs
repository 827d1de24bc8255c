//! `evershardctl status`: asks one node for the routing table, every node for its replicas, and merges the answers.

mod print;
mod view;

use std::process::ExitCode;

use clap::Args;

use crate::cli::{Global, Output};
use crate::error::CtlError;
use crate::output;

pub(crate) use print::bytes;
pub(crate) use view::{ClusterView, TableView, TensorView};

/// Nodes, shards, replicas and tables in one look.
#[derive(Debug, Args)]
#[command(
    after_help = "Nodes that do not answer are shown as down; the exit code is 0 as long as one answers.
A digest is computed at each replica's applied index: under load compare them with `scrub` instead.

Examples:
  evershardctl status
  evershardctl status --output json | jq '.nodes[] | select(.state == \"down\") | .id'
  watch -n1 evershardctl status"
)]
pub(crate) struct StatusArgs {
    /// Compute the digest of every replica (reads all rows). JSON has it always, unless --no-digest is given.
    #[arg(long, conflicts_with = "no_digest")]
    digest: bool,
    /// Leave the digests out of the JSON.
    #[arg(long)]
    no_digest: bool,
}

pub(crate) async fn run(global: &Global, args: &StatusArgs) -> Result<ExitCode, CtlError> {
    let digest = args.digest || (global.output == Output::Json && !args.no_digest);
    let view = ClusterView::gather(global, digest).await?;
    match global.output {
        Output::Json => output::json(&view)?,
        Output::Table => output::text_line(&view.to_text(digest))?,
    }
    Ok(ExitCode::SUCCESS)
}
