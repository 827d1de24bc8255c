//! `evershard dev`: a whole cluster on this machine, as child processes of one parent, under one directory.
//!
//! The parent creates the cluster once, says `ready` on stdout when every shard has a leader, and then watches. It
//! restarts nothing by itself: a killed node stays dead until `evershard dev --dir D start-node <id>`.
//!
//! Invariants:
//! - the children never outlive the parent, however it ends (`PR_SET_PDEATHSIG`);
//! - a cluster is created only in a directory that never held one: later starts reuse its data;
//! - data on stdout (`ready`), talk on stderr.
//!
//! Not here: what a node does (`server`), admin commands (`tools/ctl`).

mod boot;
pub mod cli;
mod control;
mod error;
mod layout;
mod node_process;
mod supervisor;

pub use cli::DevArgs;
pub use error::DevError;

use cli::NodeCommand;
use layout::Layout;

/// Runs `evershard dev` until it is told to end, or carries out one of its node commands.
///
/// Must be awaited by `block_on` of the runtime (as `#[tokio::main]` does): the kernel ties a child's life to the
/// *thread* that started it, and that one lives as long as the process.
///
/// # Errors
/// When the directory or a port is taken, when a node ends while the cluster starts, or when no cluster comes about.
pub async fn run(args: DevArgs) -> Result<(), DevError> {
    let layout = Layout::new(&args.dir)?;
    match args.command {
        None => supervisor::run(layout, &args).await,
        Some(NodeCommand::StartNode { id }) => control::start_node(&layout, id).await,
        Some(NodeCommand::StopNode { id }) => control::signal_node(&layout, id, control::Signal::Stop).await,
        Some(NodeCommand::KillNode { id }) => control::signal_node(&layout, id, control::Signal::Kill).await,
    }
}
