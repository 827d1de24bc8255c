//! Reading a table whole: piece by piece, shard after shard; and counting its rows.
//!
//! Invariants:
//! - a piece is as of one index of its shard, and never of a lower one than the piece before;
//! - a row that exists from the beginning of the scan to its end is in exactly one piece; one that is made, removed or made
//!   again meanwhile is in one or none;
//! - one piece is in memory at a time. Whoever answers, the next one may be another's: a scan outlives leaders.

use std::collections::VecDeque;
use std::sync::Arc;

use evershard_proto::key::id_of;
use evershard_proto::v1::exchange_reply::Reply;
use evershard_proto::v1::exchange_request::Request;
use evershard_proto::v1::{Consistency, ScanReply, ScanRequest, SizeReply, SizeRequest};
use futures_util::future::try_join_all;

use crate::Error;
use crate::client::{Client, Inner};
use crate::replica_call::{AskedTerms, ReadTerms, ReplicaCall};

/// How to read a table as a whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ScanOptions {
    /// Who may answer, for each piece: as of a pull ([`crate::PullOptions`]).
    pub consistency: Consistency,
    /// With [`Consistency::Bounded`].
    pub max_staleness_ms: u32,
    /// With [`Consistency::Any`] or [`Consistency::Bounded`]: this node's replicas answer, and no others.
    pub node: Option<u64>,
    /// Rows of a piece at the most; 0: about a megabyte of them.
    pub rows_max: u32,
}

impl ScanOptions {
    fn terms(&self, min_index: u64) -> ReadTerms {
        let ScanOptions { consistency, max_staleness_ms, node, .. } = *self;
        ReadTerms { consistency, max_staleness_ms, node, min_index }
    }
}

/// Some rows of a table.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ScanPiece {
    /// The shard's group.
    pub group: u64,
    /// The log index of the group that the rows are as of.
    pub index: u64,
    /// Ids, in no particular order.
    pub ids: Vec<u64>,
    /// `ids.len() x dim` weights.
    pub values: Vec<f32>,
}

/// A table being read; see the module.
#[derive(Debug)]
pub struct TableScan {
    inner: Arc<Inner>,
    table: u32,
    dim: usize,
    options: ScanOptions,
    /// Groups to read still; `None` before the first piece.
    groups: Option<VecDeque<u64>>,
    from_key: u64,
    index: u64,
}

impl TableScan {
    pub(crate) fn new(inner: Arc<Inner>, table: u32, dim: usize, options: ScanOptions) -> Self {
        TableScan { inner, table, dim, options, groups: None, from_key: 0, index: 0 }
    }

    /// The next rows; `None` at the end. After an error it may be called again, and goes on where it was.
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::Unavailable`].
    pub async fn next_piece(&mut self) -> Result<Option<ScanPiece>, Error> {
        loop {
            let deadline = Client::deadline(&self.inner);
            let group = match &self.groups {
                Some(groups) => groups.front().copied(),
                None => {
                    self.options.terms(0).check()?;
                    let routing = self.inner.routing.table(deadline).await?;
                    let groups: VecDeque<u64> = routing.shards.iter().map(|shard| shard.group).collect();
                    self.groups.insert(groups).front().copied()
                }
            };
            let Some(group) = group else { return Ok(None) };
            let terms = self.options.terms(self.index);
            let call = ReplicaCall { operation: "read a table at", group, terms, deadline };
            let (table, from_key, rows_max) = (self.table, self.from_key, self.options.rows_max);
            let under = |asked: AskedTerms| {
                let AskedTerms { consistency, max_staleness_ms, min_index } = asked;
                Request::Scan(ScanRequest {
                    group,
                    table,
                    consistency,
                    max_staleness_ms,
                    min_index,
                    from_key,
                    rows_max,
                })
            };
            let (reply, piece) = call.ask(&self.inner, under, |reply| self.take(group, reply)).await?;
            match reply.next_key {
                Some(next_key) => (self.from_key, self.index) = (next_key, reply.index),
                None => {
                    if let Some(groups) = &mut self.groups {
                        groups.pop_front();
                    }
                    (self.from_key, self.index) = (0, 0);
                }
            }
            if !piece.ids.is_empty() {
                self.inner.stats.pulled(piece.ids.len() as u64);
                return Ok(Some(piece));
            }
        }
    }

    fn take(&self, group: u64, reply: Reply) -> Result<(ScanReply, ScanPiece), String> {
        let Reply::Scan(reply) = reply else { return Err("an answer to another question".into()) };
        let count = reply.keys.len() / 8;
        if !reply.keys.len().is_multiple_of(8) || reply.rows.len() != count * self.dim * 4 {
            return Err(format!("{} bytes of rows for {} of keys", reply.rows.len(), reply.keys.len()));
        }
        let mut crc32 = crc32fast::Hasher::new();
        crc32.update(&reply.keys);
        crc32.update(&reply.rows);
        if crc32.finalize() != reply.crc32 {
            return Err("rows damaged on their way".into());
        }
        if reply.next_key.is_some_and(|next_key| next_key <= self.from_key) {
            return Err("a piece that leads nowhere".into());
        }
        let (keys, _) = reply.keys.as_chunks::<8>();
        let ids = keys.iter().map(|key| id_of(self.table, u64::from_le_bytes(*key))).collect();
        let (floats, _) = reply.rows.as_chunks::<4>();
        let values = floats.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
        let piece = ScanPiece { group, index: reply.index, ids, values };
        Ok((reply, piece))
    }
}

/// Rows of a table that exist, over all shards: of each as of some moment of the call.
pub(crate) async fn size(inner: &Inner, table: u32, options: ScanOptions) -> Result<u64, Error> {
    let terms = options.terms(0);
    terms.check()?;
    let deadline = Client::deadline(inner);
    let routing = inner.routing.table(deadline).await?;
    let counted = routing.shards.iter().map(|shard| {
        let group = shard.group;
        let call = ReplicaCall { operation: "count a table at", group, terms, deadline };
        let under = move |asked: AskedTerms| {
            let AskedTerms { consistency, max_staleness_ms, min_index } = asked;
            Request::Size(SizeRequest { group, table, consistency, max_staleness_ms, min_index })
        };
        async move {
            call.ask(inner, under, |reply| match reply {
                Reply::Size(SizeReply { rows, .. }) => Ok(rows),
                _ => Err("an answer to another question".into()),
            })
            .await
        }
    });
    Ok(try_join_all(counted).await?.into_iter().sum())
}
