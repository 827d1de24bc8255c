//! The `evershard` program: a node (`server`), or a whole cluster on this machine (`dev`).

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use evershard_server::config::{self, cli::ServerArgs};
use evershard_server::dev::{self, DevArgs};
use evershard_server::{failpoints, open_files, server, telemetry};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A parameter server for distributed ML training that does not lose anything.
#[derive(Debug, Parser)]
#[command(name = "evershard", version, propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "Examples:
  evershard dev --dir /tmp/es                     a cluster of 3 nodes and 8 shards on this machine
  evershard server --node-id 1 --data /data/es    one node; `evershardctl cluster init` makes the cluster
  evershard server --print-config                 every setting and its default, as TOML

Settings: flags over environment (EVERSHARD_<FIELD>) over --config FILE over defaults.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run one node of a cluster.
    Server(Box<ServerArgs>),
    /// Run a whole cluster on this machine, as child processes.
    Dev(Box<DevArgs>),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command {
        Command::Server(args) => run_server(&args),
        Command::Dev(args) => run_dev(*args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("evershard: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_server(args: &ServerArgs) -> Result<(), Box<dyn std::error::Error>> {
    let config = config::load(args)?;
    if args.print_config {
        print!("{}", toml::to_string_pretty(&config)?);
        return Ok(());
    }
    failpoints::arm_from_environment()?;
    telemetry::init_logging();
    open_files::raise_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let stop = CancellationToken::new();
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut serving = std::pin::pin!(server::run(config, stop.clone()));
        tokio::select! {
            ended = &mut serving => return ended.map_err(Box::from),
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stop.cancel();
        serving.await.map_err(Box::from)
    })
}

fn run_dev(args: DevArgs) -> Result<(), Box<dyn std::error::Error>> {
    // One thread: children are tied to the thread that started them (PR_SET_PDEATHSIG), and this one lives as long as
    // the program.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(dev::run(args)).map_err(Box::from)
}
