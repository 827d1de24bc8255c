//! Writing a shard's part of a checkpoint, on the node that was asked to.
//!
//! Invariant: whoever asked hears that this replica waits before the cut is proposed, so the cut cannot go by unseen.
//!
//! Not here: the part itself (`crate::checkpoint`), who is asked (`checkpoints`).

use std::sync::Arc;
use std::time::Duration;

use evershard_proto::v1::write_part_event::Event;
use evershard_proto::v1::{
    ErrorKind, PartBegun, PartDone, PartProgress, PartReady, PartTable, WritePartEvent, WritePartRequest,
};
use tokio::sync::mpsc;

use super::checkpoints::{open_target, target_error};
use super::node::Node;
use crate::checkpoint::{Part, PartError, write_part};
use crate::service::RequestError;

/// From the time that the replica is ready until it has applied the cut: workers are waited for meanwhile.
const CUT_WITHIN: Duration = Duration::from_secs(600);

/// Where the events go.
pub(crate) type PartEvents = mpsc::Sender<Result<WritePartEvent, tonic::Status>>;

async fn tell(events: &PartEvents, event: Event) -> Result<(), RequestError> {
    let sent = events.send(Ok(WritePartEvent { event: Some(event) })).await;
    sent.map_err(|_| RequestError::new(ErrorKind::Withdrawn, "whoever asked for the part is gone"))
}

impl Node {
    /// Waits for a cut of the group, and writes the shard's part.
    ///
    /// # Errors
    /// UNKNOWN_GROUP, INVALID for the target, UNAVAILABLE when the replica or the target cannot.
    pub(crate) async fn write_part_here(
        self: &Arc<Self>,
        request: WritePartRequest,
        events: &PartEvents,
    ) -> Result<(), RequestError> {
        let WritePartRequest { group, checkpoint, url, name, .. } = request;
        let replica = self.replicas.shard(group)?;
        let unavailable = |what: String| {
            RequestError::new(ErrorKind::Unavailable, format!("group {group}: {what}")).in_group(group)
        };
        if !replica.machine.ready() {
            return Err(unavailable("the replica still replays its log".into()));
        }
        let target = open_target(&url).await?;
        let mut ticket = replica.machine.await_cut(checkpoint);
        let builds_upon = replica.machine.remembered_above().unwrap_or(0);
        tell(events, Event::Ready(PartReady { builds_upon })).await?;
        let begun = tokio::select! {
            begun = tokio::time::timeout(CUT_WITHIN, ticket.begun()) => begun,
            () = events.closed() => return Ok(()),
        };
        let begun = begun
            .map_err(|_| unavailable(format!("no cut of checkpoint {name} within {CUT_WITHIN:?}")))?
            .map_err(|reason| unavailable(format!("the replica {reason}")))?;
        tell(events, Event::Begun(PartBegun { index: begun.index })).await?;
        let progress = |written: crate::checkpoint::Written| {
            let progress = PartProgress { rows: written.rows, bytes: written.bytes };
            // Who does not take them in time does without, and who is gone is noticed below.
            let _ = events.try_send(Ok(WritePartEvent { event: Some(Event::Progress(progress)) }));
        };
        let part = tokio::select! {
            part = write_part(ticket, begun, &target, progress) => part,
            () = events.closed() => return Ok(()),
        };
        let part = part.map_err(|error| match error {
            PartError::Target(error) => target_error(&error),
            other => unavailable(other.to_string()),
        })?;
        tell(events, Event::Done(done(part)?)).await
    }
}

fn done(part: Part) -> Result<PartDone, RequestError> {
    let json = |encoded: Result<Vec<u8>, serde_json::Error>| {
        encoded.map_err(|error| RequestError::new(ErrorKind::Internal, format!("a part as JSON: {error}")))
    };
    let table = |table: &crate::shard::CutTable| PartTable {
        table: table.table,
        rows: table.rows,
        digest: table.digest.to_u128().to_le_bytes().to_vec().into(),
    };
    Ok(PartDone {
        link: json(serde_json::to_vec(&part.link))?.into(),
        state: json(serde_json::to_vec(&part.state))?.into(),
        bytes_added: part.bytes_added,
        tables: part.tables.iter().map(table).collect(),
        term: part.term,
    })
}
