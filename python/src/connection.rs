//! A connection to a cluster: every operation of the Python package ends here.
//!
//! Arrays are borrowed for the length of a call, through numpy's own bookkeeping of borrows: two calls may read one array
//! at the same time, and none may write to an array in use.
//!
//! Not here: shapes and argument checks (python/evershard/table.py).

use std::time::Duration;

use evershard::{
    Absent, Client, ClientOptions, Consistency, Error, PullOptions, PushHandle, PushOptions, ScanOptions,
    TableDefinition,
};
use numpy::{PyArray1, PyArrayMethods, PyReadwriteArray1};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::definitions::{self, Kind};
use crate::errors::{InvalidArgument, Unavailable, exception};
use crate::parts::{Floats, Ids, OwnedPull, OwnedPush, Rows, Span, push_parts};
use crate::pending::PendingPush;
use crate::process_bound::ProcessBound;
use crate::routing;
use crate::runtime::wait;
use crate::scan::ScanHandle;
use crate::table_handle::TableHandle;
use crate::tensor_handle::{TensorHandle, TensorVersionHandle};
use crate::worker::{self, WorkerHandle};

type Exists<'py> = Bound<'py, PyArray1<bool>>;

/// The client of one Python `Cluster` in one process.
#[pyclass(frozen, module = "evershard._evershard")]
#[derive(Debug)]
pub(crate) struct Connection {
    client: ProcessBound<Client>,
}

impl Connection {
    /// Runs an operation of the client with the GIL released.
    fn run<F, T>(&self, py: Python<'_>, operation: F) -> PyResult<T>
    where
        F: Future<Output = Result<T, Error>> + Send,
        T: Send,
    {
        wait(py, operation)?.map_err(|error| exception(py, error))
    }
}

#[pymethods]
impl Connection {
    #[new]
    #[pyo3(signature = (endpoints, timeout = 30.0, connect_timeout = 10.0))]
    fn connect(py: Python<'_>, endpoints: Vec<String>, timeout: f64, connect_timeout: f64) -> PyResult<Self> {
        let options = ClientOptions { deadline: seconds("timeout", timeout)?, ..ClientOptions::default() };
        let limit = seconds("connect_timeout", connect_timeout)?;
        let addresses = endpoints.join(",");
        let connected = wait(py, tokio_timeout(limit, Client::connect(&addresses, options)))?;
        match connected {
            Some(Ok(client)) => Ok(Connection { client: ProcessBound::new(client) }),
            Some(Err(error)) => Err(exception(py, error)),
            None => {
                Err(Unavailable::new_err(format!("no node answered within {limit:.1?}; tried {addresses}")))
            }
        }
    }

    #[pyo3(signature = (name, dim, kinds, rules, non_finite))]
    fn create_table(
        &self,
        py: Python<'_>,
        name: String,
        dim: i64,
        kinds: (Option<Kind>, Option<Kind>),
        rules: (Option<Kind>, Option<Kind>),
        non_finite: &str,
    ) -> PyResult<TableHandle> {
        let dim = u32::try_from(dim)
            .map_err(|_| InvalidArgument::new_err(format!("table {name:?}: dim cannot be {dim}")))?;
        let kinds = (kinds.0.as_ref(), kinds.1.as_ref());
        let rules = (rules.0.as_ref(), rules.1.as_ref());
        let definition = definitions::sparse(name, dim, kinds, rules, non_finite)?;
        let client = self.client.get()?;
        self.run(py, client.create_table(definition)).map(TableHandle::new)
    }

    fn table(&self, py: Python<'_>, name: &str) -> PyResult<TableHandle> {
        let client = self.client.get()?;
        self.run(py, client.table(name)).map(TableHandle::new)
    }

    /// Several tensors: name, shape, dtype, optimizer and initialiser of each.
    #[allow(clippy::type_complexity)] // As Python calls it.
    fn create_tensors(
        &self,
        py: Python<'_>,
        tensors: Vec<(String, Vec<u64>, String, Option<Kind>, Option<Kind>)>,
    ) -> PyResult<Vec<TensorHandle>> {
        let definitions: Vec<TableDefinition> = tensors
            .iter()
            .map(|(name, shape, dtype, optimizer, initializer)| {
                definitions::dense(name, shape, dtype, optimizer.as_ref(), initializer.as_ref())
            })
            .collect::<PyResult<_>>()?;
        let client = self.client.get()?;
        let created = self.run(py, client.create_tensors(definitions))?;
        Ok(created.into_iter().map(TensorHandle::new).collect())
    }

    fn tensor(&self, py: Python<'_>, name: &str) -> PyResult<TensorHandle> {
        let client = self.client.get()?;
        self.run(py, client.tensor(name)).map(TensorHandle::new)
    }

    fn set_tensor_optimizer(&self, py: Python<'_>, tensor: &TensorHandle, optimizer: Kind) -> PyResult<()> {
        let optimizer = definitions::optimizer_of(&optimizer)?;
        self.run(py, tensor.tensor()?.set_optimizer(optimizer)).map(|_| ())
    }

    /// Sets rows of a tensor, or adds to them.
    fn store_tensor<'py>(
        &self,
        py: Python<'py>,
        tensor: &TensorHandle,
        span: Span,
        values: Floats<'py>,
        is_added: bool,
    ) -> PyResult<()> {
        let tensor = tensor.tensor()?;
        let (rows, values) = (span.0..span.1, values.as_slice()?);
        self.run(py, async move {
            match is_added {
                true => tensor.add_rows(rows, values).await,
                false => tensor.assign_rows(rows, values).await,
            }
        })
        .map(|_| ())
    }

    fn set_optimizer(&self, py: Python<'_>, table: &TableHandle, optimizer: Kind) -> PyResult<()> {
        let optimizer = definitions::optimizer_of(&optimizer)?;
        self.run(py, table.table()?.set_optimizer(optimizer)).map(|_| ())
    }

    fn drop_table(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        let client = self.client.get()?;
        self.run(py, client.drop_table(name))
    }

    /// Rows into `out`, or into a new array; and which exist, when asked. `zeros`: rows that do not exist read as zeros.
    #[pyo3(signature = (table, ids, out, want_exists, zeros, consistency, max_staleness_ms, node))]
    #[allow(clippy::too_many_arguments)] // As Python calls it.
    fn pull<'py>(
        &self,
        py: Python<'py>,
        table: &TableHandle,
        ids: Ids<'py>,
        out: Option<Rows<'py>>,
        want_exists: bool,
        zeros: bool,
        consistency: &str,
        max_staleness_ms: u32,
        node: Option<u64>,
    ) -> PyResult<(Rows<'py>, Option<Exists<'py>>)> {
        let consistency = consistency_of(consistency)?;
        let absent = if zeros { Absent::Zeros } else { Absent::Initial };
        let table = table.table()?;
        let ids = ids.as_slice()?;
        let rows = match out {
            Some(out) => out,
            None => PyArray1::zeros(py, ids.len() * table.dim(), false),
        };
        let mut target = rows.try_readwrite()?;
        let options = PullOptions { consistency, max_staleness_ms, want_exists, absent, node };
        let info = self.run(py, table.pull_with(ids, options, target.as_slice_mut()?))?;
        drop(target);
        let exists = want_exists
            .then(|| PyArray1::from_vec(py, info.exists.into_iter().map(|byte| byte != 0).collect()));
        Ok((rows, exists))
    }

    /// Rows of several tables and tensors; all requests travel at the same time.
    fn pull_many<'py>(&self, py: Python<'py>, requests: Vec<OwnedPull<'py>>) -> PyResult<Vec<Rows<'py>>> {
        let client = self.client.get()?;
        let results: Vec<Rows<'py>> =
            requests.iter().map(|request| request.target(py)).collect::<PyResult<_>>()?;
        let mut targets: Vec<PyReadwriteArray1<'py, f32>> =
            results.iter().map(PyArrayMethods::try_readwrite).collect::<Result<_, _>>()?;
        let mut parts = Vec::with_capacity(requests.len());
        for (request, target) in requests.iter().zip(&mut targets) {
            parts.push(request.part(target.as_slice_mut()?)?);
        }
        self.run(py, client.pull_parts(&mut parts))?;
        drop(parts);
        drop(targets);
        Ok(results)
    }

    /// Brings an array that holds a tensor as of `version` up to date.
    #[pyo3(signature = (tensor, version, out))]
    fn pull_if_newer<'py>(
        &self,
        py: Python<'py>,
        tensor: &TensorHandle,
        version: Option<&TensorVersionHandle>,
        out: Rows<'py>,
    ) -> PyResult<TensorVersionHandle> {
        let mut target = out.try_readwrite()?;
        let since = version.map(|version| &version.0);
        let pulled = tensor.tensor()?.pull_if_newer(since, target.as_slice_mut()?);
        self.run(py, pulled).map(TensorVersionHandle)
    }

    /// Gradients of several tables and tensors, none twice; waits for the quorum.
    #[pyo3(signature = (items, lr))]
    fn push_many<'py>(&self, py: Python<'py>, items: Vec<OwnedPush<'py>>, lr: Option<f32>) -> PyResult<()> {
        let handle = self.begin(py, &items, lr)?;
        self.run(py, handle.wait()).map(|_| ())
    }

    /// The same in groups of one learning rate each, without waiting.
    #[allow(clippy::type_complexity)] // As Python calls it.
    fn push_begin<'py>(
        &self,
        py: Python<'py>,
        groups: Vec<(Vec<OwnedPush<'py>>, Option<f32>)>,
    ) -> PyResult<PendingPush> {
        // All groups before any of them is sent: a refusal changes nothing.
        for (items, _) in &groups {
            self.client.get()?.check_push_parts(&push_parts(items)?).map_err(|error| exception(py, error))?;
        }
        let mut handles = Vec::with_capacity(groups.len());
        for (items, lr) in &groups {
            handles.push(self.begin(py, items, *lr)?);
        }
        PendingPush::new(handles)
    }

    /// The rows as they were, then the push.
    fn push_pull<'py>(
        &self,
        py: Python<'py>,
        table: &TableHandle,
        ids: Ids<'py>,
        grads: Floats<'py>,
        lr: Option<f32>,
    ) -> PyResult<Rows<'py>> {
        let table = table.table()?;
        let (ids, grads) = (ids.as_slice()?, grads.as_slice()?);
        let rows = PyArray1::zeros(py, ids.len() * table.dim(), false);
        let mut target = rows.readwrite();
        let out = target.as_slice_mut()?;
        self.run(py, async move {
            table.pull(ids, out).await?;
            table.push_with(ids, grads, PushOptions { lr, ..PushOptions::default() }).await
        })?;
        drop(target);
        Ok(rows)
    }

    fn assign<'py>(
        &self,
        py: Python<'py>,
        table: &TableHandle,
        ids: Ids<'py>,
        values: Floats<'py>,
    ) -> PyResult<()> {
        let table = table.table()?;
        self.run(py, table.assign(ids.as_slice()?, values.as_slice()?)).map(|_| ())
    }

    fn add<'py>(
        &self,
        py: Python<'py>,
        table: &TableHandle,
        ids: Ids<'py>,
        values: Floats<'py>,
    ) -> PyResult<()> {
        let table = table.table()?;
        self.run(py, table.add(ids.as_slice()?, values.as_slice()?)).map(|_| ())
    }

    fn remove<'py>(&self, py: Python<'py>, table: &TableHandle, ids: Ids<'py>) -> PyResult<()> {
        let table = table.table()?;
        self.run(py, table.remove(ids.as_slice()?)).map(|_| ())
    }

    /// Removes all rows.
    fn clear(&self, py: Python<'_>, table: &TableHandle) -> PyResult<()> {
        let table = table.table()?;
        self.run(py, table.clear()).map(|_| ())
    }

    /// How many rows exist.
    #[pyo3(signature = (table, consistency, max_staleness_ms, node))]
    fn size(
        &self,
        py: Python<'_>,
        table: &TableHandle,
        consistency: &str,
        max_staleness_ms: u32,
        node: Option<u64>,
    ) -> PyResult<u64> {
        let consistency = consistency_of(consistency)?;
        let options = ScanOptions { consistency, max_staleness_ms, node, rows_max: 0 };
        self.run(py, table.table()?.size(options))
    }

    /// Begins to read a whole table.
    #[pyo3(signature = (table, consistency, max_staleness_ms, node))]
    fn scan(
        &self,
        table: &TableHandle,
        consistency: &str,
        max_staleness_ms: u32,
        node: Option<u64>,
    ) -> PyResult<ScanHandle> {
        let consistency = consistency_of(consistency)?;
        let options = ScanOptions { consistency, max_staleness_ms, node, rows_max: 0 };
        Ok(ScanHandle::new(table.table()?.scan(options)))
    }

    /// A worker of a job, which is made when it is not there.
    #[pyo3(signature = (job, rank, workers, staleness, dead_worker, lease, aggregate))]
    #[allow(clippy::too_many_arguments)] // As Python calls it.
    fn join_job(
        &self,
        py: Python<'_>,
        job: &str,
        rank: u32,
        workers: u32,
        staleness: Option<u32>,
        dead_worker: &str,
        lease: f64,
        aggregate: Option<&str>,
    ) -> PyResult<WorkerHandle> {
        let lease = seconds("lease", lease)?;
        let options = worker::options(workers, staleness, dead_worker, lease, aggregate)?;
        let client = self.client.get()?;
        let job = self.run(py, client.job(job, options))?;
        WorkerHandle::join(py, &job, rank)
    }

    fn jobs<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let client = self.client.get()?;
        let jobs = self.run(py, client.jobs(None))?;
        jobs.iter().map(|job| worker::describe(py, job)).collect()
    }

    fn remove_job(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        let client = self.client.get()?;
        self.run(py, client.remove_job(name))
    }

    fn routing<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let client = self.client.get()?;
        let routing = self.run(py, client.routing())?;
        routing::describe(py, &routing)
    }

    #[pyo3(signature = (reset_gap = false))]
    fn stats<'py>(&self, py: Python<'py>, reset_gap: bool) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.client.get()?.stats(reset_gap);
        let all = PyDict::new(py);
        all.set_item("messages_acked", stats.messages_acked)?;
        all.set_item("rows_pushed", stats.rows_pushed)?;
        all.set_item("rows_pulled", stats.rows_pulled)?;
        all.set_item("retries", stats.retries)?;
        all.set_item("longest_gap_us", stats.longest_gap_us)?;
        Ok(all)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let client = self.client.get()?;
        wait(py, client.close())
    }
}

impl Connection {
    fn begin<'py>(&self, py: Python<'py>, items: &[OwnedPush<'py>], lr: Option<f32>) -> PyResult<PushHandle> {
        let client = self.client.get()?;
        let parts = push_parts(items)?;
        self.run(py, client.push_parts_begin(&parts, PushOptions { lr, ..PushOptions::default() }))
    }
}

fn consistency_of(name: &str) -> PyResult<Consistency> {
    match name {
        "leader" => Ok(Consistency::Leader),
        "any" => Ok(Consistency::Any),
        "bounded" => Ok(Consistency::Bounded),
        "linearizable" => Ok(Consistency::Linearizable),
        other => {
            let names = "'leader', 'linearizable', 'bounded' or 'any'";
            Err(InvalidArgument::new_err(format!("consistency is {names}, not {other:?}")))
        }
    }
}

async fn tokio_timeout<F: Future>(limit: Duration, future: F) -> Option<F::Output> {
    tokio::time::timeout(limit, future).await.ok()
}

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    match Duration::try_from_secs_f64(value) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => {
            Err(InvalidArgument::new_err(format!("{name} must be a positive number of seconds, not {value}")))
        }
    }
}
