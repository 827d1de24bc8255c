//! `evershardctl node ...`.

mod list;

use std::process::ExitCode;

use clap::Subcommand;

use crate::cli::Global;
use crate::error::CtlError;

/// The server processes.
#[derive(Debug, Subcommand)]
pub(crate) enum NodeCommand {
    /// Show every node, whether it answers, and what it holds.
    #[command(
        after_help = "Example:\n  evershardctl node list --output json | jq '.nodes[] | select(.state != \"up\")'"
    )]
    List,
}

pub(crate) async fn run(global: &Global, command: &NodeCommand) -> Result<ExitCode, CtlError> {
    match command {
        NodeCommand::List => list::run(global).await,
    }
}
