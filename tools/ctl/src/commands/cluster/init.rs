//! `evershardctl cluster init`: gives running, empty nodes a cluster id, the meta group and the shards.
//!
//! It is asked of the first node only, so that two nodes can never create a cluster each.

use std::process::ExitCode;

use clap::Args;
use evershard_proto::v1::{GetRoutingRequest, InitClusterRequest, NodeAddress};
use serde_json::json;
use tokio::time::timeout;

use crate::cli::{Global, Output};
use crate::connection::Node;
use crate::error::{CtlError, is_transient, words};
use crate::output;

/// Create the cluster, exactly once. The nodes must run already, with empty data directories.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  evershardctl cluster init --shards 8 --replicas 3 \\
    --node 1=http://10.0.0.1:7400 --node 2=http://10.0.0.2:7400 --node 3=http://10.0.0.3:7400")]
pub(crate) struct InitArgs {
    /// A node's number (its --node-id) and address, once for each.
    #[arg(long = "node", value_name = "ID=URL", required = true, value_parser = parse_node)]
    nodes: Vec<NodeAddress>,
    /// Shards of the cluster, each a Raft group.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    shards: u32,
    /// Copies of each shard; at most as many as nodes.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=7))]
    replicas: u32,
    /// The cluster version to begin with; by default the highest that all nodes know. Lower, older builds may join.
    #[arg(long, value_name = "N")]
    cluster_version: Option<u32>,
}

fn parse_node(text: &str) -> Result<NodeAddress, String> {
    let (id, address) = text.split_once('=').ok_or("expected ID=URL, like 1=http://10.0.0.1:7400")?;
    let id: u64 = id.parse().map_err(|error| format!("{id:?} is not a node number: {error}"))?;
    if id == 0 {
        return Err("node numbers start at 1".to_owned());
    }
    if !address.starts_with("http://") {
        return Err(format!("{address:?} must begin with http://"));
    }
    Ok(NodeAddress { id, address: address.trim_end_matches('/').to_owned() })
}

pub(crate) async fn run(global: &Global, args: &InitArgs) -> Result<ExitCode, CtlError> {
    let node = Node::new(&args.nodes[0].address)?;
    let request = InitClusterRequest {
        nodes: args.nodes.clone(),
        shards: args.shards,
        replicas: args.replicas,
        cluster_version: args.cluster_version,
    };
    let unavailable = |problem: String| CtlError::Unavailable {
        seconds: global.timeout,
        tried: format!("  {}: {problem}", node.address),
    };
    let answer = timeout(global.timeout(), async { node.admin().init_cluster(request).await }).await;
    let cluster = match answer {
        Ok(Ok(reply)) => reply.into_inner().cluster_id,
        Ok(Err(status)) if is_transient(&status) => return Err(unavailable(words(&status))),
        Ok(Err(status)) => {
            let message = words(&status);
            return Err(CtlError::Refused {
                address: node.address.clone(),
                action: "create a cluster",
                message,
            });
        }
        Err(_) => {
            let created = node
                .admin()
                .get_routing(GetRoutingRequest::default())
                .await
                .is_ok_and(|r| !r.get_ref().cluster_id.is_empty());
            let what = if created { "the cluster was created, but the answer was lost" } else { "no answer" };
            return Err(unavailable(what.to_owned()));
        }
    };
    match global.output {
        Output::Json => output::json(&json!({ "cluster": { "id": cluster } }))?,
        Output::Table => output::text_line(&cluster)?,
    }
    eprintln!(
        "cluster created: {} nodes, {} shards, {} replicas each; `evershardctl status` shows it",
        args.nodes.len(),
        args.shards,
        args.replicas
    );
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_a_number_and_a_url() {
        assert_eq!(parse_node("2=http://a:1/").unwrap(), NodeAddress { id: 2, address: "http://a:1".into() });
        for wrong in ["http://a:1", "0=http://a:1", "x=http://a:1", "1=a:1", "1"] {
            assert!(parse_node(wrong).is_err(), "{wrong}");
        }
    }
}
