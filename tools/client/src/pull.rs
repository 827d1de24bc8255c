//! Pulling rows: one request a shard and megabyte, each tried again until it is answered or the deadline is over.
//!
//! Invariant: a row of the output is written from one reply, whole.

use std::time::Instant;

use bytes::{BufMut, BytesMut};
use evershard_proto::limits::PULL_REPLY_BYTES_MAX;
use evershard_proto::v1::exchange_reply::Reply;
use evershard_proto::v1::exchange_request::Request;
use evershard_proto::v1::{Consistency, ErrorKind, PullReply, PullRequest};
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::Error;
use crate::batch::{Batch, Part, get_row};
use crate::client::{Client, Inner};
use crate::group_call::{GroupCall, To};

/// How to pull.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PullOptions {
    /// Who may answer.
    pub consistency: Consistency,
    /// Ask which ids exist.
    pub want_exists: bool,
    /// With [`Consistency::Any`]: this node's replica answers.
    pub node: Option<u64>,
}

/// What came beside the rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PullInfo {
    /// A byte an id, 1 when it was ever pushed and not removed; empty unless asked for.
    pub exists: Vec<u8>,
}

/// Pulls `ids` into `out` (`ids.len() x dim`).
pub(crate) async fn pull(
    inner: &Inner,
    table: u32,
    dim: usize,
    ids: &[u64],
    options: PullOptions,
    out: &mut [f32],
) -> Result<PullInfo, Error> {
    if out.len() != ids.len() * dim {
        let what = format!(
            "the output has {} floats, {} ids of dim {dim} need {}",
            out.len(),
            ids.len(),
            ids.len() * dim
        );
        return Err(Error::refused(ErrorKind::LengthMismatch, what));
    }
    let mut info = PullInfo { exists: vec![0; if options.want_exists { ids.len() } else { 0 }] };
    if ids.is_empty() {
        return Ok(info);
    }
    let since = Instant::now();
    let deadline = Client::deadline(inner);
    let routing = inner.routing.table(deadline).await?;
    let batch = Batch::new(table, ids);
    let mut parts = batch.split(&routing, dim * 4, PULL_REPLY_BYTES_MAX).into_iter();
    let mut asked = FuturesUnordered::new();
    loop {
        while asked.len() < inner.options.pulls_in_flight
            && let Some(part) = parts.next()
        {
            let request = lay_out(&batch, &part, table, options);
            asked.push(async move { (ask(inner, request, options, dim, deadline).await, part) });
        }
        let Some((reply, part)) = asked.next().await else { break };
        let reply = reply?;
        for (at, distinct) in part.distinct.iter().enumerate() {
            let row = &reply.rows[at * dim * 4..(at + 1) * dim * 4];
            for place in batch.rows(*distinct) {
                get_row(&mut out[place * dim..(place + 1) * dim], row);
                if options.want_exists {
                    info.exists[place] = reply.exists[at];
                }
            }
        }
    }
    inner.stats.pulled(ids.len() as u64);
    inner.stats.answered(since);
    Ok(info)
}

fn lay_out(batch: &Batch, part: &Part, table: u32, options: PullOptions) -> PullRequest {
    let mut keys = BytesMut::with_capacity(part.distinct.len() * 8);
    for distinct in &part.distinct {
        keys.put_u64_le(batch.key(*distinct));
    }
    PullRequest {
        group: part.group,
        table,
        consistency: options.consistency as i32,
        keys: keys.freeze(),
        want_exists: options.want_exists,
    }
}

async fn ask(
    inner: &Inner,
    request: PullRequest,
    options: PullOptions,
    dim: usize,
    deadline: Instant,
) -> Result<PullReply, Error> {
    let to = match options.node {
        Some(node) => To::Address(address_of(inner, node)?),
        None => To::Leader,
    };
    let (group, keys) = (request.group, request.keys.len() / 8);
    let call = GroupCall { operation: "pull from", group, to, deadline };
    call.ask(inner, Request::Pull(request), |reply| {
        let Reply::Pull(reply) = reply else { return Err("an answer to another question".into()) };
        if reply.rows.len() != keys * dim * 4 || (options.want_exists && reply.exists.len() != keys) {
            return Err(format!("{} bytes of rows for {keys} keys", reply.rows.len()));
        }
        if reply.rows_crc32 != crc32fast::hash(&reply.rows) {
            return Err("rows damaged on their way".into());
        }
        Ok(reply)
    })
    .await
}

fn address_of(inner: &Inner, node: u64) -> Result<String, Error> {
    let routing = inner.routing.known();
    let address =
        routing.and_then(|t| t.routing.nodes.iter().find(|n| n.id == node).map(|n| n.address.clone()));
    address.ok_or_else(|| Error::invalid(format!("there is no node {node}")))
}
