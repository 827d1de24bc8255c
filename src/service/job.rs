//! The job door: workers join, tick and leave; people look.
//!
//! What needs the meta group's leader is answered NOT_LEADER by the other nodes, with its address: a call that waits for other
//! workers is not forwarded.
//!
//! Not here: what a call means (`cluster::jobs`).

use std::sync::Arc;

use evershard_proto::v1::job_service_server::JobService;
use evershard_proto::v1::{
    ArriveAtStepReply, ArriveAtStepRequest, CompleteStepReply, CompleteStepRequest, CreateJobRequest,
    ErrorKind, JobDescription, JoinJobReply, JoinJobRequest, LeaveJobReply, LeaveJobRequest, ListJobsReply,
    ListJobsRequest, RemoveJobReply, RemoveJobRequest, RenewWorkerReply, RenewWorkerRequest, TickReply,
    TickRequest,
};
use tonic::{Request, Response, Status};

use super::RequestError;
use crate::cluster::node::Node;

/// The job service.
#[derive(Clone)]
pub struct JobDoor {
    node: Arc<Node>,
}

impl JobDoor {
    /// A door to `node`.
    #[must_use]
    pub fn new(node: Arc<Node>) -> Self {
        JobDoor { node }
    }
}

#[tonic::async_trait]
impl JobService for JobDoor {
    async fn create_job(
        &self,
        request: Request<CreateJobRequest>,
    ) -> Result<Response<JobDescription>, Status> {
        let definition = request
            .into_inner()
            .definition
            .ok_or_else(|| RequestError::new(ErrorKind::Invalid, "create_job needs a definition"))?;
        self.node.create_job(definition.clone()).await?;
        Ok(Response::new(JobDescription { definition: Some(definition), ..Default::default() }))
    }

    async fn join_job(&self, request: Request<JoinJobRequest>) -> Result<Response<JoinJobReply>, Status> {
        Ok(Response::new(self.node.join_job_here(request.into_inner()).await?))
    }

    async fn tick(&self, request: Request<TickRequest>) -> Result<Response<TickReply>, Status> {
        Ok(Response::new(self.node.tick_here(request.into_inner()).await?))
    }

    async fn arrive_at_step(
        &self,
        request: Request<ArriveAtStepRequest>,
    ) -> Result<Response<ArriveAtStepReply>, Status> {
        Ok(Response::new(self.node.arrive_here(request.into_inner()).await?))
    }

    async fn complete_step(
        &self,
        request: Request<CompleteStepRequest>,
    ) -> Result<Response<CompleteStepReply>, Status> {
        self.node.complete_step_here(request.into_inner()).await?;
        Ok(Response::new(CompleteStepReply {}))
    }

    async fn renew_worker(
        &self,
        request: Request<RenewWorkerRequest>,
    ) -> Result<Response<RenewWorkerReply>, Status> {
        self.node.renew_worker_here(&RequestError::need_worker(request.into_inner().worker)?)?;
        Ok(Response::new(RenewWorkerReply {}))
    }

    async fn leave_job(&self, request: Request<LeaveJobRequest>) -> Result<Response<LeaveJobReply>, Status> {
        self.node.leave_job_here(RequestError::need_worker(request.into_inner().worker)?).await?;
        Ok(Response::new(LeaveJobReply {}))
    }

    async fn list_jobs(&self, request: Request<ListJobsRequest>) -> Result<Response<ListJobsReply>, Status> {
        let ListJobsRequest { name, with_cursors } = request.into_inner();
        let jobs = self.node.jobs_here(&name, with_cursors)?;
        Ok(Response::new(ListJobsReply { jobs }))
    }

    async fn remove_job(
        &self,
        request: Request<RemoveJobRequest>,
    ) -> Result<Response<RemoveJobReply>, Status> {
        self.node.remove_job(request.into_inner().name).await?;
        Ok(Response::new(RemoveJobReply {}))
    }
}
