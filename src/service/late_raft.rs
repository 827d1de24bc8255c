//! The lanes' door before the node belongs to a cluster: it answers UNAVAILABLE until the raft crate's service is there.

use std::convert::Infallible;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use evershard_proto::v1::raft_service_server::{RaftService, RaftServiceServer};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;

/// A [`RaftServiceServer`] that comes once, when the node learns its cluster.
pub struct LateRaftService<S>(Arc<OnceLock<RaftServiceServer<S>>>);

impl<S> Clone for LateRaftService<S> {
    fn clone(&self) -> Self {
        LateRaftService(self.0.clone())
    }
}

impl<S> Default for LateRaftService<S> {
    fn default() -> Self {
        LateRaftService(Arc::new(OnceLock::new()))
    }
}

impl<S> LateRaftService<S> {
    /// Opens the door. Answers false when it was open already.
    pub fn open(&self, server: RaftServiceServer<S>) -> bool {
        self.0.set(server).is_ok()
    }
}

impl<S> NamedService for LateRaftService<S> {
    const NAME: &'static str = <RaftServiceServer<S> as NamedService>::NAME;
}

impl<S: RaftService> Service<http::Request<Body>> for LateRaftService<S> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match self.0.get() {
            Some(server) => server.clone().call(request),
            None => {
                let refused = Status::unavailable("this node does not belong to a cluster yet").into_http();
                Box::pin(std::future::ready(Ok(refused)))
            }
        }
    }
}
