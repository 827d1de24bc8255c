//! `evershardctl shard transfer-leader SHARD --to NODE`: asks, then watches until it is so.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use evershard_proto::v1::{GetNodeStatusRequest, TransferLeaderRequest};
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::cli::{Global, Output};
use crate::connection::Connection;
use crate::error::CtlError;
use crate::output;

const POLL: Duration = Duration::from_millis(50);

/// Hand the leadership of a shard to another node. Pushes wait for the moment it takes; none is lost.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  evershardctl shard transfer-leader 3 --to 2")]
pub(crate) struct TransferLeaderArgs {
    /// The shard.
    shard: u32,
    /// The node that shall lead it; it must hold a replica.
    #[arg(long, value_name = "NODE")]
    to: u64,
}

pub(crate) async fn run(global: &Global, args: &TransferLeaderArgs) -> Result<ExitCode, CtlError> {
    let connection = Connection::open(global).await?;
    let shard = super::find(&connection.routing, args.shard)?;
    let holders: Vec<u64> = shard.replicas.iter().map(|replica| replica.node).collect();
    let Some(target) = connection.node(args.to).filter(|_| holders.contains(&args.to)) else {
        let existing = holders.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        return Err(CtlError::Unknown {
            what: "replica of this shard on node",
            name: args.to.to_string(),
            existing,
        });
    };
    let request = TransferLeaderRequest { shard: args.shard, to_node: args.to };
    connection
        .call("transfer the leadership", |node| async move { node.admin().transfer_leader(request).await })
        .await?;
    loop {
        let status = target.admin().get_node_status(GetNodeStatusRequest::default()).await;
        let leads = status.is_ok_and(|status| {
            let replicas = &status.get_ref().replicas;
            replicas.iter().any(|replica| replica.group == shard.group && replica.role == "leader")
        });
        if leads {
            break;
        }
        if Instant::now() >= connection.deadline() {
            let what = format!("node {} did not become the leader of shard {}", args.to, args.shard);
            return Err(CtlError::NotDone { what, seconds: connection.seconds() });
        }
        sleep(POLL).await;
    }
    match global.output {
        Output::Json => output::json(&json!({ "shard": args.shard, "leader": args.to }))?,
        Output::Table => output::text_line(&format!("node {} leads shard {}", args.to, args.shard))?,
    }
    Ok(ExitCode::SUCCESS)
}
