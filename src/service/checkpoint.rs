//! The checkpoint door: whoever is asked asks the meta group's leader.

use std::pin::Pin;
use std::sync::Arc;

use evershard_proto::v1::checkpoint_service_server::CheckpointService;
use evershard_proto::v1::{CreateCheckpointEvent, CreateCheckpointRequest};
use futures_util::{FutureExt, Stream, StreamExt, stream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::RequestError;
use crate::cluster::node::Node;

/// Events that wait for the caller.
const EVENTS_WAITING: usize = 16;

pub(super) type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What a future tells, as a stream: it is polled with it, and dropped with it. An error of it is the last event.
pub(super) fn events_of<T: Send + 'static, F>(
    work: impl FnOnce(mpsc::Sender<Result<T, Status>>) -> F,
) -> Events<T>
where
    F: Future<Output = Result<(), RequestError>> + Send + 'static,
{
    let (events, receiver) = mpsc::channel(EVENTS_WAITING);
    let failed = events.clone();
    let work = work(events);
    let work = async move {
        if let Err(error) = work.await {
            // The caller may be gone.
            let _ = failed.send(Err(error.into())).await;
        }
    };
    let told = ReceiverStream::new(receiver).map(Some);
    let worked = work.into_stream().map(|()| None);
    Box::pin(stream::select(told, worked).filter_map(std::future::ready))
}

/// The checkpoint service.
#[derive(Clone)]
pub struct CheckpointDoor {
    node: Arc<Node>,
}

impl CheckpointDoor {
    /// A door to `node`.
    #[must_use]
    pub fn new(node: Arc<Node>) -> Self {
        CheckpointDoor { node }
    }
}

#[tonic::async_trait]
impl CheckpointService for CheckpointDoor {
    type CreateCheckpointStream = Events<CreateCheckpointEvent>;

    async fn create_checkpoint(
        &self,
        request: Request<CreateCheckpointRequest>,
    ) -> Result<Response<Self::CreateCheckpointStream>, Status> {
        self.node.require_cluster()?;
        let mut request = request.into_inner();
        if let Some(leader) = self.node.meta_leader_elsewhere().filter(|_| !request.forwarded) {
            request.forwarded = true;
            let asked = self.node.peers.checkpoints(&leader)?.create_checkpoint(request).await?;
            return Ok(Response::new(Box::pin(asked.into_inner())));
        }
        let node = self.node.clone();
        let events = events_of(|events| async move { node.create_checkpoint_here(request, &events).await });
        Ok(Response::new(events))
    }
}
