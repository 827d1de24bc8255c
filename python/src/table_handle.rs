//! A table as the Python half holds it: the client's handle.
//!
//! Not here: operations, which all go through a connection.

use evershard::{Encoding, Table};
use pyo3::prelude::*;

use crate::errors::InvalidArgument;
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
    /// How gradients pushed through it travel.
    #[pyo3(get)]
    encoding: &'static str,
    table: ProcessBound<Table>,
}

#[pymethods]
impl TableHandle {
    /// The same table; gradients pushed through this handle travel as `encoding`.
    fn with_encoding(&self, encoding: &str) -> PyResult<TableHandle> {
        let Some(encoding) = Encoding::ALL.into_iter().find(|known| known.name() == encoding) else {
            let names = Encoding::ALL.map(Encoding::name).join(", ");
            return Err(InvalidArgument::new_err(format!("encoding is one of {names}, not {encoding:?}")));
        };
        let table = self.table()?.clone().with_encoding(encoding);
        Ok(TableHandle { encoding: encoding.name(), ..TableHandle::new(table) })
    }
}

impl TableHandle {
    pub(crate) fn new(table: Table) -> Self {
        TableHandle {
            name: table.name().to_owned(),
            dim: table.dim(),
            number: table.number(),
            encoding: Encoding::F32.name(),
            table: ProcessBound::new(table),
        }
    }

    /// # Errors
    /// This is a forked child.
    pub(crate) fn table(&self) -> PyResult<&Table> {
        self.table.get()
    }
}
