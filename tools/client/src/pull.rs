//! Pulling rows: one request a shard and megabyte, each tried again until it is answered or the deadline is over.
//!
//! Invariant: a row of the output is written from one reply, whole.

use std::time::Instant;

use bytes::{BufMut, BytesMut};
use evershard_proto::limits::PULL_REPLY_BYTES_MAX;
use evershard_proto::v1::exchange_reply::Reply;
use evershard_proto::v1::exchange_request::Request;
use evershard_proto::v1::{Consistency, ErrorDetail, ErrorKind, PullReply, PullRequest};
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::Error;
use crate::backoff::Backoff;
use crate::batch::{Batch, Part, get_row};
use crate::client::{Client, Inner};
use crate::error::is_passing;
use crate::node_channel::passing;

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
    let started = Instant::now();
    let group = request.group;
    let mut backoff = Backoff::default();
    let mut tried: Vec<String> = Vec::new();
    loop {
        let address = match options.node {
            Some(node) => address_of(inner, node)?,
            None => inner.routing.leader(group).unwrap_or_default(),
        };
        let detail = if address.is_empty() {
            passing(format!("no replica of group {group} is known"))
        } else {
            if !tried.contains(&address) {
                tried.push(address.clone());
            }
            match attempt(inner, &address, &request, dim, options.want_exists, deadline).await {
                Ok(reply) => return Ok(reply),
                Err(detail) => detail,
            }
        };
        let kind = detail.kind();
        if !is_passing(kind) && kind != ErrorKind::Corrupt {
            return Err(Error::refused(kind, detail.message));
        }
        inner.stats.retried();
        // A full queue is no reason to look for another leader.
        if !inner.routing.hear_of_recovery(&detail) && kind != ErrorKind::Exhausted {
            inner.routing.hint(group, &address, Some(&detail.leader_address));
        }
        let pause = backoff.pause(detail.retry_after_ms);
        if Instant::now() + pause >= deadline {
            return Err(Error::Unavailable {
                operation: format!("pull from group {group}"),
                tried,
                last: detail.message,
                elapsed: started.elapsed(),
            });
        }
        tokio::time::sleep(pause).await;
        if kind != ErrorKind::Exhausted && detail.leader_address.is_empty() {
            // Whoever answers knows more than we do; nobody answering is known at the next try.
            let _ = inner.routing.refresh(deadline).await;
        }
    }
}

async fn attempt(
    inner: &Inner,
    address: &str,
    request: &PullRequest,
    dim: usize,
    want_exists: bool,
    deadline: Instant,
) -> Result<PullReply, ErrorDetail> {
    let left = deadline.saturating_duration_since(Instant::now()).min(inner.options.attempt_timeout);
    let exchanged = async {
        let pending = inner.channels.send(address, Request::Pull(request.clone())).await;
        pending.await.unwrap_or_else(|_| Err(passing(format!("{address}: the connection broke"))))
    };
    let reply = match tokio::time::timeout(left, exchanged).await {
        Ok(reply) => reply?,
        Err(_) => return Err(passing(format!("{address}: no answer within {left:.1?}"))),
    };
    let Reply::Pull(reply) = reply else {
        return Err(passing(format!("{address}: an answer to another question")));
    };
    let keys = request.keys.len() / 8;
    if reply.rows.len() != keys * dim * 4 || (want_exists && reply.exists.len() != keys) {
        return Err(passing(format!("{address}: {} bytes of rows for {keys} keys", reply.rows.len())));
    }
    if reply.rows_crc32 != crc32fast::hash(&reply.rows) {
        return Err(passing(format!("{address}: rows damaged on their way")));
    }
    Ok(reply)
}

fn address_of(inner: &Inner, node: u64) -> Result<String, Error> {
    let routing = inner.routing.known();
    let address =
        routing.and_then(|t| t.routing.nodes.iter().find(|n| n.id == node).map(|n| n.address.clone()));
    address.ok_or_else(|| Error::invalid(format!("there is no node {node}")))
}
