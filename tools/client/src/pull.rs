//! Pulling rows: one request a shard and megabyte, each tried again until it is answered or the deadline is over.
//!
//! Invariant: a row of the output is written from one reply, whole.

use std::collections::BTreeMap;
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
use crate::replica_call::{AskedTerms, ReadTerms, ReplicaCall};

/// What a row that does not exist reads as.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Absent {
    /// As the table's initialiser makes it: what its first push would begin with.
    #[default]
    Initial,
    /// Zeros, whatever the initialiser.
    Zeros,
}

/// How to pull.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PullOptions {
    /// Who may answer. [`Consistency::Any`] and [`Consistency::Bounded`] are asked of the followers in turn, and of the leader
    /// when no follower answers.
    pub consistency: Consistency,
    /// With [`Consistency::Bounded`]: what was acknowledged longer ago than this, in milliseconds, before the pull began is in
    /// the rows, and so is everything that was acknowledged to this client.
    pub max_staleness_ms: u32,
    /// Ask which ids exist.
    pub want_exists: bool,
    /// What rows read as that do not exist.
    pub absent: Absent,
    /// With [`Consistency::Any`] or [`Consistency::Bounded`]: this node's replicas answer, and no others.
    pub node: Option<u64>,
}

/// What came beside the rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PullInfo {
    /// A byte an id, 1 when it was ever pushed and not removed; empty unless asked for.
    pub exists: Vec<u8>,
    /// By group that was asked: the log index that all of its rows reflect, at least.
    pub indexes: BTreeMap<u64, u64>,
}

/// Rows of one table, to be pulled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub(crate) table: u32,
    pub(crate) dim: usize,
    pub(crate) ids: &'a [u64],
    /// By group: only rows that entries behind this log index changed. Of other groups every row.
    pub(crate) newer_than: Option<&'a BTreeMap<u64, u64>>,
}

/// What came beside the rows, and how current they are.
#[derive(Debug, Default)]
pub(crate) struct Pulled {
    pub(crate) info: PullInfo,
    /// By group: every row of the group reflects at least this log index.
    pub(crate) indexes: BTreeMap<u64, u64>,
    /// Distinct rows that travelled.
    pub(crate) rows: usize,
}

/// Pulls `ids` into `out` (`ids.len() x dim`).
pub(crate) async fn pull(
    inner: &Inner,
    wanted: Wanted<'_>,
    options: PullOptions,
    out: &mut [f32],
) -> Result<PullInfo, Error> {
    let (ids, dim) = (wanted.ids, wanted.dim);
    if out.len() != ids.len() * dim {
        let what = format!(
            "the output has {} floats, {} ids of dim {dim} need {}",
            out.len(),
            ids.len(),
            ids.len() * dim
        );
        return Err(Error::refused(ErrorKind::LengthMismatch, what));
    }
    let take = |place: usize, row: &[u8]| get_row(&mut out[place * dim..(place + 1) * dim], row);
    pull_each(inner, wanted, options, take).await.map(|pulled| pulled.info)
}

/// Pulls rows; `take` is given the place among the ids and the little-endian floats of each that travels.
pub(crate) async fn pull_each(
    inner: &Inner,
    wanted: Wanted<'_>,
    options: PullOptions,
    mut take: impl FnMut(usize, &[u8]),
) -> Result<Pulled, Error> {
    let terms = options.terms();
    terms.check()?;
    let Wanted { table, dim, ids, newer_than } = wanted;
    let mut pulled = Pulled::default();
    pulled.info.exists = vec![0; if options.want_exists { ids.len() } else { 0 }];
    if ids.is_empty() {
        return Ok(pulled);
    }
    let (since, mut taken) = (Instant::now(), 0);
    let deadline = Client::deadline(inner);
    let routing = inner.routing.table(deadline).await?;
    let batch = Batch::new(table, ids);
    let mut parts = batch.split(&routing, dim * 4, PULL_REPLY_BYTES_MAX).into_iter();
    let mut asked = FuturesUnordered::new();
    loop {
        while asked.len() < inner.options.pulls_in_flight
            && let Some(part) = parts.next()
        {
            let mut request = lay_out(&batch, &part, table, options);
            request.newer_than =
                newer_than.and_then(|indexes| indexes.get(&part.group)).copied().unwrap_or_default();
            asked.push(async move { (ask(inner, request, terms, dim, deadline).await, part) });
        }
        let Some((reply, part)) = asked.next().await else { break };
        let reply = reply?;
        let index = pulled.info.indexes.entry(part.group).or_insert(reply.index);
        *index = reply.index.min(*index);
        let mut rows = reply.rows.chunks_exact(dim * 4);
        let zeros = vec![0; dim * 4];
        for (at, distinct) in part.distinct.iter().enumerate() {
            if !reply.changed.is_empty() && reply.changed[at] == 0 {
                continue;
            }
            let Some(row) = rows.next() else { break };
            let is_zeros = options.absent == Absent::Zeros && reply.exists[at] == 0;
            let row = if is_zeros { &zeros[..] } else { row };
            pulled.rows += 1;
            for place in batch.rows(*distinct) {
                take(place, row);
                taken += 1;
                if options.want_exists {
                    pulled.info.exists[place] = reply.exists[at];
                }
            }
        }
        let index = pulled.indexes.entry(part.group).or_insert(reply.index);
        *index = reply.index.min(*index);
    }
    inner.stats.pulled(taken);
    inner.stats.answered(since);
    Ok(pulled)
}

fn lay_out(batch: &Batch, part: &Part, table: u32, options: PullOptions) -> PullRequest {
    let mut keys = BytesMut::with_capacity(part.distinct.len() * 8);
    for distinct in &part.distinct {
        keys.put_u64_le(batch.key(*distinct));
    }
    PullRequest {
        group: part.group,
        table,
        keys: keys.freeze(),
        want_exists: options.want_exists || options.absent == Absent::Zeros,
        // Who is asked makes a difference: `ask`.
        ..Default::default()
    }
}

impl PullOptions {
    fn terms(&self) -> ReadTerms {
        let PullOptions { consistency, max_staleness_ms, node, .. } = *self;
        ReadTerms { consistency, max_staleness_ms, node, min_index: 0 }
    }
}

async fn ask(
    inner: &Inner,
    request: PullRequest,
    terms: ReadTerms,
    dim: usize,
    deadline: Instant,
) -> Result<PullReply, Error> {
    let (group, keys, want_exists) = (request.group, request.keys.len() / 8, request.want_exists);
    let call = ReplicaCall { operation: "pull from", group, terms, deadline };
    let under = |asked: AskedTerms| {
        let AskedTerms { consistency, max_staleness_ms, min_index } = asked;
        Request::Pull(PullRequest { consistency, max_staleness_ms, min_index, ..request.clone() })
    };
    let may_be_partial = request.newer_than > 0;
    call.ask(inner, under, |reply| {
        let Reply::Pull(reply) = reply else { return Err("an answer to another question".into()) };
        // A node that knows of no partial replies sends every row.
        let rows = match reply.changed.len() {
            0 => keys,
            marks if may_be_partial && marks == keys => {
                reply.changed.iter().filter(|mark| **mark != 0).count()
            }
            marks => return Err(format!("{marks} marks for {keys} keys")),
        };
        if reply.rows.len() != rows * dim * 4 || (want_exists && reply.exists.len() != keys) {
            return Err(format!("{} bytes of rows for {keys} keys", reply.rows.len()));
        }
        if reply.rows_crc32 != crc32fast::hash(&reply.rows) {
            return Err("rows damaged on their way".into());
        }
        Ok(reply)
    })
    .await
}
