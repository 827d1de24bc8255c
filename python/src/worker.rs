//! A worker of a job, as the Python half holds it.
//!
//! One call at a time: whoever ticks waits for pushes of other threads, and the other way round.
//!
//! Not here: context managers, ranks from the environment (python/evershard/job.py).

use evershard::{Aggregation, DeadWorkerPolicy, Error, Job, JobDescription, JobOptions, Worker, WorkerState};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use tokio::sync::Mutex;

use crate::errors::{InvalidArgument, exception};
use crate::parts::{OwnedPush, push_parts};
use crate::process_bound::ProcessBound;
use crate::runtime::wait;
use crate::table_handle::TableHandle;

/// How a job was asked for.
pub(crate) fn options(
    workers: u32,
    staleness: Option<u32>,
    dead_worker: &str,
    lease: std::time::Duration,
    aggregate: Option<&str>,
) -> PyResult<JobOptions> {
    let dead_worker = match dead_worker {
        "continue" => DeadWorkerPolicy::Continue,
        "wait" => DeadWorkerPolicy::Wait,
        "abort" => DeadWorkerPolicy::Abort,
        other => {
            let what = format!("on_dead_worker is 'continue', 'wait' or 'abort', not {other:?}");
            return Err(InvalidArgument::new_err(what));
        }
    };
    let aggregation = match aggregate {
        None => None,
        Some("sum") => Some(Aggregation::Sum),
        Some("mean") => Some(Aggregation::Mean),
        Some("apart") => Some(Aggregation::Apart),
        Some(other) => {
            let what = format!("aggregate is 'sum', 'mean', 'apart' or None, not {other:?}");
            return Err(InvalidArgument::new_err(what));
        }
    };
    Ok(JobOptions { workers, staleness, dead_worker, lease, aggregation })
}

/// A job as a dictionary.
pub(crate) fn describe<'py>(py: Python<'py>, job: &JobDescription) -> PyResult<Bound<'py, PyDict>> {
    let definition = job.definition.clone().unwrap_or_default();
    let all = PyDict::new(py);
    all.set_item("name", &definition.name)?;
    all.set_item("staleness", (!definition.asynchronous).then_some(definition.staleness))?;
    all.set_item("aborted", Some(&job.aborted).filter(|why| !why.is_empty()))?;
    let workers = PyList::empty(py);
    for worker in &job.workers {
        let one = PyDict::new(py);
        one.set_item("rank", worker.rank)?;
        let state = match worker.state() {
            WorkerState::Absent => "absent",
            WorkerState::Live => "live",
            WorkerState::Dead => "dead",
            WorkerState::Done => "done",
        };
        one.set_item("state", state)?;
        one.set_item("epoch", worker.epoch)?;
        one.set_item("clock", worker.clock)?;
        one.set_item("cursor", PyBytes::new(py, &worker.cursor))?;
        one.set_item("waits_for", &worker.waits_for)?;
        workers.append(one)?;
    }
    all.set_item("workers", workers)?;
    Ok(all)
}

/// An incarnation of a rank; taken when it left.
#[pyclass(frozen, module = "evershard._evershard")]
#[derive(Debug)]
pub(crate) struct WorkerHandle {
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    epoch: u64,
    worker: ProcessBound<Mutex<Option<Worker>>>,
}

impl WorkerHandle {
    pub(crate) fn join(py: Python<'_>, job: &Job, rank: u32) -> PyResult<Self> {
        let worker = wait(py, job.worker(rank))?.map_err(|error| exception(py, error))?;
        let (rank, epoch) = (worker.rank(), worker.epoch());
        Ok(WorkerHandle { rank, epoch, worker: ProcessBound::new(Mutex::new(Some(worker))) })
    }

    /// What the worker knows of itself.
    ///
    /// # Errors
    /// It has left.
    fn look<T: Send>(&self, py: Python<'_>, look: impl FnOnce(&Worker) -> T + Send) -> PyResult<T> {
        let worker = self.worker.get()?;
        wait(py, async { worker.lock().await.as_ref().map(look).ok_or(Error::Closed) })?
            .map_err(|error| exception(py, error))
    }
}

#[pymethods]
impl WorkerHandle {
    #[getter]
    fn clock(&self, py: Python<'_>) -> PyResult<u64> {
        self.look(py, Worker::clock)
    }

    #[getter]
    fn cursor<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let cursor = self.look(py, |worker| worker.cursor().to_vec())?;
        Ok(PyBytes::new(py, &cursor))
    }

    /// Gradients as part of this step; waits for the quorum, or leaves that to the next tick.
    fn push<'py>(
        &self,
        py: Python<'py>,
        table: &TableHandle,
        ids: PyReadonlyArray1<'py, u64>,
        grads: PyReadonlyArray1<'py, f32>,
        and_wait: bool,
    ) -> PyResult<()> {
        let worker = self.worker.get()?;
        let table = table.table()?;
        let (ids, grads) = (ids.as_slice()?, grads.as_slice()?);
        wait(py, async {
            let mut place = worker.lock().await;
            let worker = place.as_mut().ok_or(Error::Closed)?;
            if and_wait {
                worker.push(table, ids, grads).await.map(|_| ())
            } else {
                worker.push_begin(table, ids, grads).await
            }
        })?
        .map_err(|error| exception(py, error))
    }

    /// The same of several tables and tensors.
    fn push_many<'py>(&self, py: Python<'py>, items: Vec<OwnedPush<'py>>, and_wait: bool) -> PyResult<()> {
        let worker = self.worker.get()?;
        let parts = push_parts(&items)?;
        wait(py, async {
            let mut place = worker.lock().await;
            let worker = place.as_mut().ok_or(Error::Closed)?;
            if and_wait {
                worker.push_parts(&parts).await.map(|_| ())
            } else {
                worker.push_parts_begin(&parts).await
            }
        })?
        .map_err(|error| exception(py, error))
    }

    fn tick(&self, py: Python<'_>, cursor: &[u8]) -> PyResult<()> {
        let worker = self.worker.get()?;
        let cursor = cursor.to_vec();
        wait(py, async {
            let mut place = worker.lock().await;
            place.as_mut().ok_or(Error::Closed)?.tick(&cursor).await
        })?
        .map_err(|error| exception(py, error))
    }

    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        let worker = self.worker.get()?;
        wait(py, async {
            let mut place = worker.lock().await;
            place.as_mut().ok_or(Error::Closed)?.barrier().await
        })?
        .map_err(|error| exception(py, error))
    }

    /// Its part is done.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        let worker = self.worker.get()?;
        wait(py, async {
            match worker.lock().await.take() {
                Some(worker) => worker.leave().await,
                None => Ok(()),
            }
        })?
        .map_err(|error| exception(py, error))
    }

    /// It stops without a word: its lease ends by itself.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        let worker = self.worker.get()?;
        wait(py, async { drop(worker.lock().await.take()) })
    }
}
