//! `evershardctl cluster ...`.

mod init;

use std::process::ExitCode;

use clap::Subcommand;

use crate::cli::Global;
use crate::error::CtlError;

/// The cluster as a whole.
#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Create the cluster, exactly once.
    Init(init::InitArgs),
}

pub(crate) async fn run(global: &Global, command: &ClusterCommand) -> Result<ExitCode, CtlError> {
    match command {
        ClusterCommand::Init(args) => init::run(global, args).await,
    }
}
