//! `evershardctl cluster ...`.

mod init;
mod raise_version;
mod unsafe_recover;

use std::process::ExitCode;

use clap::Subcommand;

use crate::cli::Global;
use crate::error::CtlError;

/// The cluster as a whole.
#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Create the cluster, exactly once.
    Init(init::InitArgs),
    /// After an upgrade of every node: let the cluster use what the new build brings.
    RaiseVersion(raise_version::RaiseVersionArgs),
    /// After the loss of most disks: go on with the node that is left.
    UnsafeRecover(unsafe_recover::UnsafeRecoverArgs),
}

pub(crate) async fn run(global: &Global, command: &ClusterCommand) -> Result<ExitCode, CtlError> {
    match command {
        ClusterCommand::Init(args) => init::run(global, args).await,
        ClusterCommand::RaiseVersion(args) => raise_version::run(global, args).await,
        ClusterCommand::UnsafeRecover(args) => unsafe_recover::run(global, args).await,
    }
}
