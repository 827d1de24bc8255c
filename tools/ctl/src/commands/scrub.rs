//! `evershardctl scrub`: every replica computes a digest of its rows, sessions and schemas at the same log index; equal
//! digests mean equal bits.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use evershard_proto::v1::{ScrubReply, ScrubRequest};
use indicatif::ProgressBar;
use serde::Serialize;

use crate::cli::{Global, Output};
use crate::connection::Connection;
use crate::error::CtlError;
use crate::output;

/// Compare the replicas of every shard, to the bit. Exit code 1 when any differ, or give no digest.
#[derive(Debug, Args)]
#[command(
    after_help = "Training goes on meanwhile. A replica that is down gives no digest: the shard says so.

Examples:
  evershardctl scrub
  evershardctl scrub --shard 3 --shard 4
  evershardctl scrub --output json | jq '.shards[] | select(.equal | not)'"
)]
pub(crate) struct ScrubArgs {
    /// Only these shards (may be given several times).
    #[arg(long = "shard", value_name = "ID")]
    shards: Vec<u32>,
}

#[derive(Debug, Serialize, PartialEq)]
struct ScrubView {
    shards: Vec<ShardView>,
}

#[derive(Debug, Serialize, PartialEq)]
struct ShardView {
    id: u32,
    index: u64,
    digests: BTreeMap<u64, String>,
    equal: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    problem: String,
}

impl From<ScrubReply> for ScrubView {
    fn from(reply: ScrubReply) -> Self {
        let mut shards: Vec<ShardView> = reply
            .shards
            .into_iter()
            .map(|shard| ShardView {
                id: shard.shard,
                index: shard.index,
                digests: shard.digests.into_iter().map(|digest| (digest.node, digest.digest)).collect(),
                equal: shard.equal,
                problem: shard.problem,
            })
            .collect();
        shards.sort_by_key(|shard| shard.id);
        ScrubView { shards }
    }
}

pub(crate) async fn run(global: &Global, args: &ScrubArgs) -> Result<ExitCode, CtlError> {
    let connection = Connection::open(global).await?;
    for shard in &args.shards {
        super::shard::find(&connection.routing, *shard)?;
    }
    // Shown on a terminal only.
    let spinner = ProgressBar::new_spinner().with_message("comparing the replicas");
    spinner.enable_steady_tick(Duration::from_millis(100));
    let request = ScrubRequest { shards: args.shards.clone() };
    let result = connection
        .call("scrub", |node| {
            let request = request.clone();
            async move { node.admin().scrub(request).await }
        })
        .await;
    spinner.finish_and_clear();
    let view = ScrubView::from(result?.0);
    match global.output {
        Output::Json => output::json(&view)?,
        Output::Table => output::print(&output::table(
            ["shard", "index", "verdict", "digests"],
            view.shards
                .iter()
                .map(|shard| [shard.id.to_string(), shard.index.to_string(), verdict(shard), digests(shard)]),
        ))?,
    }
    let differ: Vec<String> =
        view.shards.iter().filter(|shard| !shard.equal).map(|shard| shard.id.to_string()).collect();
    if differ.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("evershardctl: not proven equal: shards {}", differ.join(", "));
    Ok(ExitCode::from(1))
}

fn verdict(shard: &ShardView) -> String {
    match (shard.equal, shard.problem.is_empty()) {
        (true, true) => "equal".to_owned(),
        (true, false) => format!("equal; {}", shard.problem),
        (false, true) => "DIFFER".to_owned(),
        (false, false) => format!("NOT EQUAL: {}", shard.problem),
    }
}

fn digests(shard: &ShardView) -> String {
    let mut distinct: Vec<&String> = shard.digests.values().collect();
    distinct.dedup();
    match distinct.as_slice() {
        [one] => format!("{one} on {} nodes", shard.digests.len()),
        _ => shard
            .digests
            .iter()
            .map(|(node, digest)| format!("node {node}: {digest}"))
            .collect::<Vec<_>>()
            .join("  "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evershard_proto::v1::{ReplicaDigest, ShardDigests};

    #[test]
    fn the_json_has_the_stable_shape() {
        let digests = vec![
            ReplicaDigest { node: 2, digest: "ab".into() },
            ReplicaDigest { node: 10, digest: "ab".into() },
        ];
        let reply = ScrubReply {
            shards: vec![ShardDigests { shard: 3, index: 9, digests, equal: true, problem: String::new() }],
        };
        let json = serde_json::to_string(&ScrubView::from(reply)).unwrap();
        assert_eq!(json, r#"{"shards":[{"id":3,"index":9,"digests":{"2":"ab","10":"ab"},"equal":true}]}"#);
    }
}
