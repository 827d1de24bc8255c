//! The commands: a folder per noun, a file per verb.

pub(crate) mod checkpoint;
pub(crate) mod cluster;
pub(crate) mod completions;
pub(crate) mod job;
pub(crate) mod node;
pub(crate) mod scrub;
pub(crate) mod shard;
pub(crate) mod status;
pub(crate) mod table;

use std::process::ExitCode;

use crate::cli::{Cli, Command};
use crate::error::CtlError;

/// Carries out the command line.
pub(crate) async fn run(cli: Cli) -> Result<ExitCode, CtlError> {
    let global = &cli.global;
    match &cli.command {
        Command::Status(args) => status::run(global, args).await,
        Command::Node(command) => node::run(global, command).await,
        Command::Shard(command) => shard::run(global, command).await,
        Command::Table(command) => table::run(global, command).await,
        Command::Job(command) => job::run(global, command).await,
        Command::Checkpoint(command) => checkpoint::run(global, command).await,
        Command::Scrub(args) => scrub::run(global, args).await,
        Command::Cluster(command) => cluster::run(global, command).await,
        Command::Completions(args) => completions::run(args),
    }
}
