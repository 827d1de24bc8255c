//! `evershardctl table get TABLE ID`: one row, as its leader has it.

use std::process::ExitCode;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use evershard_proto::key::key_of;
use evershard_proto::v1::{Consistency, PullReply, PullRequest, Routing, ShardDescription};
use serde::Serialize;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::Status;

use crate::cli::{Global, Output};
use crate::connection::{Connection, Node};
use crate::error::{CtlError, is_transient, words};
use crate::output;

const BACKOFF: Duration = Duration::from_millis(100);

/// Show one row, and whether it was ever pushed. Looking at a row never creates it.
#[derive(Debug, Args)]
#[command(
    after_help = "Every 64-bit number is an id: decimal, 0x hexadecimal, or negative (as its two's complement).

Examples:
  evershardctl table get items 42
  evershardctl table get items 0xffffffffffffffff --output json | jq .weights"
)]
pub(crate) struct GetArgs {
    /// The table's name.
    table: String,
    /// The row's id.
    #[arg(value_parser = parse_id, allow_negative_numbers = true)]
    id: u64,
}

fn parse_id(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None if text.starts_with('-') => text.parse::<i64>().ok().map(i64::cast_unsigned),
        None => text.parse().ok(),
    };
    parsed.ok_or_else(|| "not a 64-bit number".to_owned())
}

#[derive(Debug, Serialize)]
struct RowView {
    table: String,
    id: u64,
    exists: bool,
    shard: u32,
    /// The log index of the shard that the row reflects.
    index: u64,
    weights: Vec<f32>,
}

pub(crate) async fn run(global: &Global, args: &GetArgs) -> Result<ExitCode, CtlError> {
    let mut connection = Connection::open(global).await?;
    let (number, dim) = {
        let (description, definition) = super::find(&connection.routing, &args.table)?;
        (description.number, definition.dim as usize)
    };
    let key = key_of(number, args.id);
    loop {
        let shard = shard_of(&connection.routing, key)?.clone();
        let leader = connection.node(shard.leader_node);
        let Some(node) =
            leader.or_else(|| shard.replicas.first().and_then(|replica| connection.node(replica.node)))
        else {
            return Err(CtlError::BadReply {
                address: "the cluster".to_owned(),
                what: format!("shard {} has no replica", shard.shard),
            });
        };
        let problem = match timeout_at(connection.deadline(), pull(node, shard.group, number, key)).await {
            Ok(Ok(reply)) => {
                let row = decode(&node.address, args, &shard, dim, &reply)?;
                show(global, &row)?;
                return Ok(ExitCode::SUCCESS);
            }
            Ok(Err(status)) if is_transient(&status) => words(&status),
            Ok(Err(status)) => {
                let message = words(&status);
                return Err(CtlError::Refused {
                    address: node.address.clone(),
                    action: "read the row",
                    message,
                });
            }
            Err(_) => "no answer".to_owned(),
        };
        if Instant::now() + BACKOFF >= connection.deadline() {
            let tried = format!("  {}: {problem}", node.address);
            return Err(CtlError::Unavailable { seconds: connection.seconds(), tried });
        }
        // Leadership moved, or is about to: look again.
        sleep(BACKOFF).await;
        connection.refresh().await?;
    }
}

fn shard_of(routing: &Routing, key: u64) -> Result<&ShardDescription, CtlError> {
    let holds = |shard: &&ShardDescription| (shard.range_start..=shard.range_end).contains(&key);
    routing.shards.iter().find(holds).ok_or_else(|| CtlError::BadReply {
        address: "the cluster".to_owned(),
        what: format!("no shard holds the key {key:016x}"),
    })
}

async fn pull(node: &Node, group: u64, table: u32, key: u64) -> Result<PullReply, Status> {
    let request = PullRequest {
        group,
        table,
        consistency: Consistency::Leader.into(),
        keys: Bytes::copy_from_slice(&key.to_le_bytes()),
        want_exists: true,
        newer_than: 0,
    };
    node.parameters().pull(request).await.map(tonic::Response::into_inner)
}

fn decode(
    address: &str,
    args: &GetArgs,
    shard: &ShardDescription,
    dim: usize,
    reply: &PullReply,
) -> Result<RowView, CtlError> {
    let bad = |what: String| CtlError::BadReply { address: address.to_owned(), what };
    if reply.rows.len() != dim * 4 || reply.exists.len() != 1 {
        return Err(bad(format!("{} bytes of a row of {dim} floats", reply.rows.len())));
    }
    if crc32fast::hash(&reply.rows) != reply.rows_crc32 {
        return Err(bad("the row was damaged on its way (crc32)".to_owned()));
    }
    let weights = reply.rows.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let exists = reply.exists[0] != 0;
    Ok(RowView {
        table: args.table.clone(),
        id: args.id,
        exists,
        shard: shard.shard,
        index: reply.index,
        weights,
    })
}

fn show(global: &Global, row: &RowView) -> Result<(), CtlError> {
    if global.output == Output::Json {
        return output::json(row);
    }
    let exists = if row.exists { "yes" } else { "no: these are its initial values" };
    let weights: Vec<String> = row.weights.iter().map(f32::to_string).collect();
    output::text_line(&format!(
        "table    {}\nid       {}\nexists   {exists}\nshard    {} at index {}\nweights  [{}]",
        row.table,
        row.id,
        row.shard,
        row.index,
        weights.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_u64_is_an_id() {
        assert_eq!(parse_id("0"), Ok(0));
        assert_eq!(parse_id("18446744073709551615"), Ok(u64::MAX));
        assert_eq!(parse_id("0xFFFFFFFFFFFFFFFE"), Ok(u64::MAX - 1));
        assert_eq!(parse_id("-9223372036854775808"), Ok(1 << 63));
        assert_eq!(parse_id("-1"), Ok(u64::MAX));
        for wrong in ["", "x", "18446744073709551616", "0x", "1.5", "--1"] {
            assert!(parse_id(wrong).is_err(), "{wrong}");
        }
    }
}
