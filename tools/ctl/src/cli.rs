//! The flags that every command shares, and the nouns.

use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::commands::{checkpoint, cluster, completions, job, node, scrub, shard, status, table};

/// Look at an Evershard cluster and change it.
#[derive(Debug, Parser)]
#[command(
    name = "evershardctl",
    version,
    after_help = "Examples:
  evershardctl status                                     everything in one look
  evershardctl --endpoints http://10.0.0.1:7400 status    of another cluster
  evershardctl shard list --output json | jq '.shards[].leader'
  evershardctl table get items 42                         one row
  evershardctl table set-optimizer items --lr 0.01        another learning rate
  evershardctl scrub                                      are all replicas bit-identical?

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 the cluster is unavailable."
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Flags of every command.
#[derive(Debug, Clone, Args)]
pub(crate) struct Global {
    /// Nodes to ask, comma-separated; one that answers is enough.
    #[arg(
        long,
        global = true,
        value_name = "URL,URL",
        env = "EVERSHARD_ENDPOINTS",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:7400"
    )]
    pub(crate) endpoints: Vec<String>,
    /// A table for people, or JSON for programs.
    #[arg(long, global = true, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
    /// Give up after this many seconds.
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) timeout: u64,
}

impl Global {
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}

/// How data is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// For people.
    Table,
    /// For programs: the fields of a release never change their names.
    Json,
}

/// What can be done.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Nodes, shards, replicas and tables in one look.
    Status(status::StatusArgs),
    /// The server processes.
    #[command(subcommand)]
    Node(node::NodeCommand),
    /// The ranges of keys, each a Raft group.
    #[command(subcommand)]
    Shard(shard::ShardCommand),
    /// The tables and their rows.
    #[command(subcommand)]
    Table(table::TableCommand),
    /// The training runs: workers, clocks, who waits for whom.
    #[command(subcommand)]
    Job(job::JobCommand),
    /// Checkpoints of the whole cluster, in a directory or a bucket.
    #[command(subcommand)]
    Checkpoint(checkpoint::CheckpointCommand),
    /// Compare the replicas of every shard, to the bit.
    Scrub(scrub::ScrubArgs),
    /// The cluster as a whole.
    #[command(subcommand)]
    Cluster(cluster::ClusterCommand),
    /// Print a completion script for a shell.
    Completions(completions::CompletionsArgs),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_may_stand_before_and_after_the_command() {
        let before = Cli::parse_from([
            "evershardctl",
            "--output",
            "json",
            "--endpoints",
            "http://a:1,http://b:2",
            "status",
        ]);
        let after = Cli::parse_from([
            "evershardctl",
            "status",
            "--output",
            "json",
            "--endpoints",
            "http://a:1,http://b:2",
        ]);
        for cli in [before, after] {
            assert_eq!(cli.global.output, Output::Json);
            assert_eq!(cli.global.endpoints, ["http://a:1", "http://b:2"]);
        }
    }
}
