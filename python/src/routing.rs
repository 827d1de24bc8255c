//! The routing table as a Python dict, for people and scripts.
//!
//! Not here: how requests are routed (tools/client).

use evershard::Routing;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::tensor_handle::dtype_name;

/// See `Cluster.routing` for the shape.
///
/// # Errors
/// Python is out of memory.
pub(crate) fn describe<'py>(py: Python<'py>, routing: &Routing) -> PyResult<Bound<'py, PyDict>> {
    let nodes = PyList::empty(py);
    for node in &routing.nodes {
        let entry = PyDict::new(py);
        entry.set_item("id", node.id)?;
        entry.set_item("address", &node.address)?;
        entry.set_item("state", &node.state)?;
        nodes.append(entry)?;
    }
    let shards = PyList::empty(py);
    for shard in &routing.shards {
        let replicas = PyList::empty(py);
        for replica in &shard.replicas {
            let entry = PyDict::new(py);
            entry.set_item("replica", replica.replica)?;
            entry.set_item("node", replica.node)?;
            replicas.append(entry)?;
        }
        let entry = PyDict::new(py);
        entry.set_item("id", shard.shard)?;
        entry.set_item("group", shard.group)?;
        entry.set_item("range_start", shard.range_start)?;
        entry.set_item("range_end", shard.range_end)?;
        entry.set_item("leader", shard.leader_node)?;
        entry.set_item("replicas", replicas)?;
        shards.append(entry)?;
    }
    let tables = PyList::empty(py);
    for table in &routing.tables {
        let entry = PyDict::new(py);
        entry.set_item("number", table.number)?;
        let definition = table.definition.clone().unwrap_or_default();
        let tensor = definition.tensor.as_ref();
        entry.set_item("kind", if tensor.is_some() { "dense" } else { "sparse" })?;
        if let Some(tensor) = tensor {
            entry.set_item("shape", &tensor.shape)?;
            entry.set_item("dtype", dtype_name(tensor.dtype()))?;
        }
        entry.set_item("name", definition.name)?;
        entry.set_item("dim", definition.dim)?;
        tables.append(entry)?;
    }
    let all = PyDict::new(py);
    all.set_item("cluster_id", &routing.cluster_id)?;
    all.set_item("version", routing.version)?;
    all.set_item("software_version", &routing.software_version)?;
    all.set_item("meta_leader", routing.meta_leader_node)?;
    all.set_item("nodes", nodes)?;
    all.set_item("shards", shards)?;
    all.set_item("tables", tables)?;
    Ok(all)
}
