//! `evershardctl cluster unsafe-recover`: the majority of a cluster's replicas is lost for good, and the node that is left goes
//! on alone. It is asked of that node only.

use std::process::ExitCode;

use clap::Args;
use evershard_proto::v1::UnsafeRecoverRequest;
use serde_json::json;
use tokio::time::timeout;

use crate::cli::{Global, Output};
use crate::confirm::confirm;
use crate::connection::Node;
use crate::error::{CtlError, is_transient, words};
use crate::output;

/// Give up lost replicas and go on with the one that is left. LOSES what only the lost nodes had acknowledged.
#[derive(Debug, Args)]
#[command(
    after_help = "Only when the disks of most nodes are gone for good. A node that can be started again must be started instead.
Every push that was acknowledged by the lost nodes and had not reached the survivor is lost, and nobody can say which.
The lost nodes must never be started with their old data again: wipe them, and start them empty; they are filled again.

Example, with node 1 left of three:
  evershardctl cluster unsafe-recover --survivor http://10.0.0.1:7400 --lost-nodes 2,3 --cluster-id 6f1c...-..."
)]
pub(crate) struct UnsafeRecoverArgs {
    /// The node that is left.
    #[arg(long, value_name = "URL")]
    survivor: String,
    /// The nodes whose replicas are given up.
    #[arg(long, value_name = "N,N", value_delimiter = ',', required = true)]
    lost_nodes: Vec<u64>,
    /// The cluster's id, as `evershardctl status` shows it: typed out, it says that this cluster is meant.
    #[arg(long, value_name = "UUID")]
    cluster_id: String,
    /// Do not ask.
    #[arg(long)]
    yes: bool,
}

pub(crate) async fn run(global: &Global, args: &UnsafeRecoverArgs) -> Result<ExitCode, CtlError> {
    let node = Node::new(&args.survivor)?;
    let lost: Vec<String> = args.lost_nodes.iter().map(u64::to_string).collect();
    if !args.yes {
        eprintln!(
            "what only nodes {} had acknowledged will be lost, and they must never start with their old data",
            lost.join(", ")
        );
        confirm("go on with the replicas of the survivor alone?")?;
    }
    let request =
        UnsafeRecoverRequest { cluster_id: args.cluster_id.clone(), lost_nodes: args.lost_nodes.clone() };
    let answer = timeout(global.timeout(), async { node.admin().unsafe_recover(request).await }).await;
    let unavailable = |problem: String| CtlError::Unavailable {
        seconds: global.timeout,
        tried: format!("  {}: {problem}", node.address),
    };
    let groups = match answer {
        Ok(Ok(reply)) => reply.into_inner().groups,
        Ok(Err(status)) if is_transient(&status) => return Err(unavailable(words(&status))),
        Ok(Err(status)) => {
            let message = words(&status);
            return Err(CtlError::Refused { address: node.address.clone(), action: "recover", message });
        }
        Err(_) => {
            return Err(unavailable("no answer; ask again, what was done is not done twice".to_owned()));
        }
    };
    match global.output {
        Output::Json => {
            let groups: Vec<_> = groups
                .iter()
                .map(|g| json!({ "group": g.group, "replica": g.replica, "last_index": g.last_index }))
                .collect();
            output::json(&json!({ "groups": groups }))?;
        }
        Output::Table => output::print(&output::table(
            ["group", "replica", "last index"],
            groups.iter().map(|g| [g.group.to_string(), g.replica.to_string(), g.last_index.to_string()]),
        ))?,
    }
    eprintln!(
        "{} groups go on with one voter each; start the lost nodes with EMPTY data directories, and they are filled again",
        groups.len()
    );
    Ok(ExitCode::SUCCESS)
}
