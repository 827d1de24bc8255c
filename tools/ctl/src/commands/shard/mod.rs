//! `evershardctl shard ...`.

mod list;
mod transfer_leader;

use std::process::ExitCode;

use clap::Subcommand;
use evershard_proto::v1::{Routing, ShardDescription};

use crate::cli::Global;
use crate::error::CtlError;

/// The ranges of keys, each a Raft group.
#[derive(Debug, Subcommand)]
pub(crate) enum ShardCommand {
    /// Show every shard: its range, leader and replicas.
    #[command(
        after_help = "Example:\n  evershardctl shard list --output json | jq '.shards[] | {id, leader}'"
    )]
    List,
    /// Hand the leadership of a shard to another node.
    TransferLeader(transfer_leader::TransferLeaderArgs),
}

pub(crate) async fn run(global: &Global, command: &ShardCommand) -> Result<ExitCode, CtlError> {
    match command {
        ShardCommand::List => list::run(global).await,
        ShardCommand::TransferLeader(args) => transfer_leader::run(global, args).await,
    }
}

/// The shard of this number.
pub(crate) fn find(routing: &Routing, shard: u32) -> Result<&ShardDescription, CtlError> {
    routing.shards.iter().find(|description| description.shard == shard).ok_or_else(|| {
        let last = routing.shards.iter().map(|description| description.shard).max();
        let existing = last.map_or_else(|| "none".to_owned(), |last| format!("0 to {last}"));
        CtlError::Unknown { what: "shard", name: shard.to_string(), existing }
    })
}
