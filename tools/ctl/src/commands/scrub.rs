//! `evershardctl scrub`: every replica computes a digest of its rows, sessions and schemas at the same log index; equal
//! digests mean equal bits. With `--repair` a replica that differs twice from an equal majority is rebuilt from its peers.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use evershard_proto::v1::{ScrubReply, ScrubRequest};
use indicatif::ProgressBar;
use serde::Serialize;

use crate::cli::{Global, Output};
use crate::confirm::confirm;
use crate::connection::Connection;
use crate::error::CtlError;
use crate::output;

/// Compare the replicas of every shard, to the bit. Exit code 1 when any differ, or give no digest.
#[derive(Debug, Args)]
#[command(
    after_help = "Training goes on meanwhile. A replica that is down gives no digest: the shard says so.

--repair quarantines a replica that differs twice from an equal majority of its shard: it is rebuilt from the others under a
new id. Without such a majority nothing is touched: nobody knows who is right.

Examples:
  evershardctl scrub
  evershardctl scrub --shard 3 --shard 4
  evershardctl scrub --repair --yes
  evershardctl scrub --output json | jq '.shards[] | select(.equal | not)'"
)]
pub(crate) struct ScrubArgs {
    /// Only these shards (may be given several times).
    #[arg(long = "shard", value_name = "ID")]
    shards: Vec<u32>,
    /// Rebuild replicas that differ from an equal majority.
    #[arg(long)]
    repair: bool,
    /// Do not ask before a repair.
    #[arg(long, requires = "repair")]
    yes: bool,
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
    /// Nodes whose replica is being rebuilt.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    quarantined: Vec<u64>,
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
                quarantined: shard.quarantined,
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
    let mut view = scrub(&connection, &args.shards, false).await?;
    let mut differ = not_equal(&view);
    if args.repair && !differ.is_empty() {
        if !args.yes {
            eprintln!("shards whose replicas differ, or gave no digest: {}", list(&differ));
            confirm("quarantine and rebuild the replicas that differ twice from an equal majority?")?;
        }
        let repaired = scrub(&connection, &differ, true).await?;
        view.shards.retain(|shard| !differ.contains(&shard.id));
        view.shards.extend(repaired.shards);
        view.shards.sort_by_key(|shard| shard.id);
        differ = not_equal(&view);
    }
    match global.output {
        Output::Json => output::json(&view)?,
        Output::Table => output::print(&output::table(
            ["shard", "index", "verdict", "digests"],
            view.shards
                .iter()
                .map(|shard| [shard.id.to_string(), shard.index.to_string(), verdict(shard), digests(shard)]),
        ))?,
    }
    if differ.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let rebuilt = |id: &u32| view.shards.iter().any(|shard| shard.id == *id && !shard.quarantined.is_empty());
    let (repaired, left): (Vec<u32>, Vec<u32>) = differ.into_iter().partition(rebuilt);
    if !repaired.is_empty() {
        eprintln!(
            "evershardctl: replicas are being rebuilt in shards {}; scrub again when `evershardctl status` shows them",
            list(&repaired)
        );
    }
    if left.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("evershardctl: not proven equal: shards {}", list(&left));
    Ok(ExitCode::from(1))
}

async fn scrub(connection: &Connection, shards: &[u32], repair: bool) -> Result<ScrubView, CtlError> {
    // Shown on a terminal only.
    let spinner = ProgressBar::new_spinner().with_message("comparing the replicas");
    spinner.enable_steady_tick(Duration::from_millis(100));
    let request = ScrubRequest { shards: shards.to_vec(), repair };
    let result = connection
        .call("scrub", |node| {
            let request = request.clone();
            async move { node.admin().scrub(request).await }
        })
        .await;
    spinner.finish_and_clear();
    Ok(ScrubView::from(result?.0))
}

fn not_equal(view: &ScrubView) -> Vec<u32> {
    view.shards.iter().filter(|shard| !shard.equal).map(|shard| shard.id).collect()
}

fn list(shards: &[u32]) -> String {
    shards.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

fn verdict(shard: &ShardView) -> String {
    if !shard.quarantined.is_empty() {
        let nodes: Vec<String> = shard.quarantined.iter().map(u64::to_string).collect();
        return format!("DIFFERED: being rebuilt on node {}", nodes.join(", "));
    }
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
            shards: vec![ShardDigests { shard: 3, index: 9, digests, equal: true, ..Default::default() }],
        };
        let json = serde_json::to_string(&ScrubView::from(reply)).unwrap();
        assert_eq!(json, r#"{"shards":[{"id":3,"index":9,"digests":{"2":"ab","10":"ab"},"equal":true}]}"#);
    }
}
