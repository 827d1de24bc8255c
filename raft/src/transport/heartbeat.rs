//! One question, one answer, on the control lane: heartbeats, votes, pre-votes, leadership transfer.
//!
//! Invariant: nothing here ever shares a connection or a queue with entries or snapshots.
//!
//! Not here: when to send (openraft's timers), what the receiver answers (`router`).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use openraft::RPCTypes;
use openraft::errors::{RPCError, Timeout};

use super::network::rpc_error;
use super::{Body, FrameKind, Lane, Target, Transport, TransportError};
use crate::cursor::DecodeError;
use crate::type_config::{Runtime, TypeConfig};

/// Asks and waits for at most `within`.
pub(crate) struct Question<'a> {
    pub(crate) transport: &'a Arc<dyn Transport>,
    pub(crate) sender: u64,
    pub(crate) target: &'a Target,
    pub(crate) lane: Lane,
    pub(crate) within: Duration,
}

impl Question<'_> {
    /// Sends `body` and decodes what comes back.
    pub(crate) async fn ask<RT, T>(
        &self,
        kind: FrameKind,
        body: Bytes,
        decode: impl FnOnce(Bytes) -> Result<T, DecodeError>,
    ) -> Result<T, RPCError<TypeConfig<RT>>>
    where
        RT: Runtime,
    {
        let call = self.transport.call(self.target, self.lane, kind, Body::ready(body));
        let answer = RT::timeout(self.within, call).await.map_err(|_| {
            RPCError::Timeout(Timeout {
                action: action(kind),
                id: self.sender,
                target: self.target.replica,
                timeout: self.within,
            })
        })?;
        let body = answer.map_err(rpc_error)?;
        decode(body).map_err(|error| {
            rpc_error(TransportError::Damaged { peer: self.target.peer.clone(), reason: error.to_string() })
        })
    }
}

fn action(kind: FrameKind) -> RPCTypes {
    match kind {
        FrameKind::Vote | FrameKind::PreVote => RPCTypes::Vote,
        FrameKind::TransferLeader => RPCTypes::TransferLeader,
        FrameKind::SnapshotBegin
        | FrameKind::SnapshotChunk
        | FrameKind::SnapshotFinish
        | FrameKind::SnapshotAbort
        | FrameKind::SnapshotForget => RPCTypes::InstallSnapshot,
        FrameKind::Append | FrameKind::Reply | FrameKind::Refused => RPCTypes::AppendEntries,
    }
}
