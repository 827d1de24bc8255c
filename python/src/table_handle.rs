//! A table as the Python half holds it: the client's handle.
//!
//! Not here: operations, which all go through a connection.

use evershard::Table;
use pyo3::prelude::*;

use crate::process_bound::ProcessBound;

/// A table of one connection.
#[pyclass(frozen, module = "evershard._evershard")]
#[derive(Debug)]
pub(crate) struct TableHandle {
    #[pyo3(get)]
    name: String,
    #[pyo3(get)]
    dim: usize,
    #[pyo3(get)]
    number: u32,
    table: ProcessBound<Table>,
}

impl TableHandle {
    pub(crate) fn new(table: Table) -> Self {
        TableHandle {
            name: table.name().to_owned(),
            dim: table.dim(),
            number: table.number(),
            table: ProcessBound::new(table),
        }
    }

    /// # Errors
    /// This is a forked child.
    pub(crate) fn table(&self) -> PyResult<&Table> {
        self.table.get()
    }
}
