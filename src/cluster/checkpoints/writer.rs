//! Who writes a shard's part, as the coordinator hears of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use evershard_proto::v1::write_part_event::Event;
use evershard_proto::v1::{
    CreateCheckpointRequest, ErrorKind, GroupPlacement, MetaState, PartDone, WritePartEvent, WritePartRequest,
};
use tonic::Streaming;

use super::writers_of;
use crate::cluster::node::Node;
use crate::service::RequestError;

/// For a replica to say that it waits for the cut.
const BEGIN_WITHIN: Duration = Duration::from_secs(5);
/// Between two runs of a part: a target may be slow.
const SILENT_MAX: Duration = Duration::from_secs(120);

/// A replica that writes. Dropping it gives the part up.
pub(super) struct Writer {
    group: u64,
    node: u64,
    remembered: u64,
    events: Streaming<WritePartEvent>,
}

impl Writer {
    /// Asks the replicas of a group in turn, and answers the first that waits for the cut.
    pub(super) async fn begin(
        node: &Arc<Node>,
        state: &MetaState,
        group: &GroupPlacement,
        checkpoint: u64,
        request: &CreateCheckpointRequest,
    ) -> Result<Self, RequestError> {
        let leader = node.leaders().get(&group.group).copied();
        let mut last = format!("group {} has no replica", group.group);
        for (id, address) in writers_of(state, group, leader) {
            let ask = WritePartRequest {
                cluster_id: state.cluster_id.clone(),
                group: group.group,
                checkpoint,
                url: request.url.clone(),
                name: request.name.clone(),
            };
            let begun = tokio::time::timeout(BEGIN_WITHIN, Self::ask(node, (id, &address), ask)).await;
            match begun {
                Ok(Ok(writer)) => return Ok(writer),
                // The target is the same for all.
                Ok(Err(error)) if error.kind() == ErrorKind::Invalid => return Err(error),
                Ok(Err(error)) => last = format!("node {id}: {error}"),
                Err(_) => last = format!("node {id} did not answer in time"),
            }
        }
        let what = format!("nobody can write the part of group {}: {last}", group.group);
        Err(RequestError::new(ErrorKind::Unavailable, what).in_group(group.group))
    }

    async fn ask(
        node: &Node,
        (id, address): (u64, &str),
        ask: WritePartRequest,
    ) -> Result<Self, RequestError> {
        let group = ask.group;
        let mut client = node.peers.node(address)?;
        let reply = client.write_part(ask).await.map_err(|status| RequestError::from_status(&status))?;
        let mut writer = Writer { group, node: id, remembered: 0, events: reply.into_inner() };
        match writer.next().await? {
            Event::Ready(ready) => writer.remembered = ready.builds_upon,
            _ => return Err(writer.out_of_turn()),
        }
        Ok(writer)
    }

    pub(super) fn node(&self) -> u64 {
        self.node
    }

    /// The lowest cut since which the replica remembers what was removed.
    pub(super) fn remembered(&self) -> Option<u64> {
        Some(self.remembered).filter(|index| *index > 0)
    }

    fn error(&self, what: &str) -> RequestError {
        let what = format!("node {}, which writes the part of group {}, {what}", self.node, self.group);
        RequestError::new(ErrorKind::Unavailable, what).in_group(self.group)
    }

    fn out_of_turn(&self) -> RequestError {
        self.error("answered out of turn: its build is another")
    }

    async fn next(&mut self) -> Result<Event, RequestError> {
        match self.events.message().await {
            Ok(Some(WritePartEvent { event: Some(event) })) => Ok(event),
            Ok(Some(_)) => Err(self.out_of_turn()),
            Ok(None) => Err(self.error("ended without a part")),
            Err(status) => {
                let error = RequestError::from_status(&status);
                Err(RequestError::new(error.kind(), format!("node {}: {error}", self.node))
                    .in_group(self.group))
            }
        }
    }

    /// The cut's index, once the replica has applied it.
    pub(super) async fn cut_index(&mut self, deadline: Instant) -> Result<u64, RequestError> {
        match tokio::time::timeout_at(deadline.into(), self.next()).await {
            Ok(Ok(Event::Begun(begun))) => Ok(begun.index),
            Ok(Ok(_)) => Err(self.out_of_turn()),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(self.error("did not come to the cut in time")),
        }
    }

    /// The part, once it is whole.
    pub(super) async fn part(&mut self, mut tell: impl FnMut(u64, u64)) -> Result<PartDone, RequestError> {
        loop {
            match tokio::time::timeout(SILENT_MAX, self.next()).await {
                Ok(event) => match event? {
                    Event::Progress(progress) => tell(progress.rows, progress.bytes),
                    Event::Done(done) => return Ok(done),
                    _ => return Err(self.out_of_turn()),
                },
                Err(_) => return Err(self.error(&format!("was silent for {SILENT_MAX:?}"))),
            }
        }
    }
}
