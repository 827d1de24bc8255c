//! `evershardctl cluster raise-version`: from now on the cluster may use what every node's build knows.

use std::process::ExitCode;

use clap::Args;
use evershard_proto::v1::RaiseVersionRequest;
use serde_json::json;

use crate::cli::{Global, Output};
use crate::confirm::confirm;
use crate::connection::Connection;
use crate::error::CtlError;
use crate::output;

/// Let the cluster use what a newer build brings, such as pushes with ids in the place of keys. Every node is asked whether it knows it.
#[derive(Debug, Args)]
#[command(
    after_help = "Run it when every node is upgraded and none will go back: nodes of an older build are not let in afterwards.
`evershardctl status --output json` shows `cluster.cluster_version`.

Example:
  evershardctl cluster raise-version --yes"
)]
pub(crate) struct RaiseVersionArgs {
    /// The cluster version; by default the highest that the nodes' build knows.
    #[arg(long, value_name = "N")]
    to: Option<u32>,
    /// Do not ask.
    #[arg(long)]
    yes: bool,
}

pub(crate) async fn run(global: &Global, args: &RaiseVersionArgs) -> Result<ExitCode, CtlError> {
    if !args.yes {
        eprintln!("no node can go back to an older build once the cluster version is raised");
        confirm("raise the cluster version?")?;
    }
    let connection = Connection::open(global).await?;
    let request = RaiseVersionRequest { version: args.to };
    let (reply, _) = connection
        .call("raise the cluster version", |node| async move { node.admin().raise_version(request).await })
        .await?;
    let version = reply.version;
    match global.output {
        Output::Json => output::json(&json!({ "cluster_version": version }))?,
        Output::Table => output::text_line(&format!("cluster version {version}"))?,
    }
    Ok(ExitCode::SUCCESS)
}
