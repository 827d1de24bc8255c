//! Jobs: made, looked at, joined.
//!
//! Not here: what a worker does in one (`worker`).

use std::time::{Duration, Instant};

use evershard_proto::v1::job_service_client::JobServiceClient;
use evershard_proto::v1::{
    CreateJobRequest, JobDefinition, JobDescription, JoinJobRequest, ListJobsRequest, RemoveJobRequest,
};
use tonic::{Response, Status};

pub use evershard_proto::v1::{Aggregation, DeadWorkerPolicy};

use crate::Error;
use crate::client::{Client, Inner};
use crate::unary::Asked;
use crate::worker::Worker;

/// How long one node is waited for, beyond what it was asked to wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(6);

/// How the workers of a job go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobOptions {
    /// Ranks are 0 to `workers - 1`.
    pub workers: u32,
    /// How many steps the fastest may be ahead of the slowest: `Some(0)` all step together, and what they push is summed before
    /// it is applied; `None` nobody waits.
    pub staleness: Option<u32>,
    /// What becomes of the others when a worker dies.
    pub dead_worker: DeadWorkerPolicy,
    /// A worker that was not heard of for this long is dead.
    pub lease: Duration,
    /// What becomes of a step's gradients. By default they are summed with a staleness of `Some(0)`, and applied apart otherwise.
    pub aggregation: Option<Aggregation>,
}

impl Default for JobOptions {
    fn default() -> Self {
        JobOptions {
            workers: 1,
            staleness: Some(0),
            dead_worker: DeadWorkerPolicy::Continue,
            lease: Duration::from_secs(10),
            aggregation: None,
        }
    }
}

/// A job of a cluster; cheap to clone.
#[derive(Debug, Clone)]
pub struct Job {
    client: Client,
    definition: JobDefinition,
}

impl Client {
    /// Creates a job, or finds it as defined.
    ///
    /// # Errors
    /// [`Error::Refused`]: CONFLICT when it exists with another definition, INVALID for one that makes no sense.
    pub async fn job(&self, name: &str, options: JobOptions) -> Result<Job, Error> {
        let lease_ms = u32::try_from(options.lease.as_millis())
            .map_err(|_| Error::invalid(format!("a lease of {:?} is too long", options.lease)))?;
        let by_default = if options.staleness == Some(0) { Aggregation::Sum } else { Aggregation::Apart };
        let definition = JobDefinition {
            name: name.into(),
            workers: options.workers,
            staleness: options.staleness.unwrap_or(0),
            asynchronous: options.staleness.is_none(),
            dead_worker: options.dead_worker as i32,
            lease_ms,
            aggregation: options.aggregation.unwrap_or(by_default) as i32,
        };
        call(&self.inner, "create a job", |mut client| {
            let request = CreateJobRequest { definition: Some(definition.clone()) };
            async move { client.create_job(request).await }
        })
        .await?;
        Ok(Job { client: self.clone(), definition })
    }

    /// The jobs there are, or the one of a name.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn jobs(&self, name: Option<&str>) -> Result<Vec<JobDescription>, Error> {
        let request = ListJobsRequest { name: name.unwrap_or_default().into(), with_cursors: true };
        let listed = call(&self.inner, "list jobs", |mut client| {
            let request = request.clone();
            async move { client.list_jobs(request).await }
        });
        Ok(listed.await?.jobs)
    }

    /// Removes a job; its workers are fenced.
    ///
    /// # Errors
    /// [`Error::Refused`] with UNKNOWN_JOB.
    pub async fn remove_job(&self, name: &str) -> Result<(), Error> {
        call(&self.inner, "remove a job", |mut client| {
            let request = RemoveJobRequest { name: name.into() };
            async move { client.remove_job(request).await }
        })
        .await
        .map(|_| ())
    }
}

impl Job {
    /// The job's definition.
    #[must_use]
    pub fn definition(&self) -> &JobDefinition {
        &self.definition
    }

    /// Takes a rank, as a new incarnation of its worker: whoever had it is fenced. `rank` may be one more than the ranks there
    /// are: then the job has one more worker.
    ///
    /// # Errors
    /// [`Error::Refused`]: UNKNOWN_JOB, JOB_ABORTED, INVALID; [`Error::Unavailable`].
    pub async fn worker(&self, rank: u32) -> Result<Worker, Error> {
        let nonce: [u8; 16] = rand::random();
        let request = JoinJobRequest {
            job: self.definition.name.clone(),
            rank,
            nonce: nonce.to_vec().into(),
            name: format!("process {}", std::process::id()),
        };
        let joined = call(&self.client.inner, "join a job", |mut client| {
            let request = request.clone();
            async move { client.join_job(request).await }
        });
        Worker::new(&self.client, joined.await?)
    }
}

/// Asks the job service of whichever node answers for it, within the client's deadline.
pub(crate) async fn call<T, F>(
    inner: &Inner,
    operation: &str,
    ask: impl Fn(JobServiceClient<Asked>) -> F,
) -> Result<T, Error>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let deadline = Instant::now() + inner.options.deadline;
    inner.jobs.ask(operation, deadline, PATIENCE, |channel| ask(JobServiceClient::new(channel))).await
}
