//! A table being read whole, as the Python half holds it.
//!
//! Invariant: one thread asks for the next piece at a time; another one that does so meanwhile is refused.

use std::sync::{Mutex, PoisonError};

use evershard::TableScan;
use numpy::PyArray1;
use pyo3::prelude::*;

use crate::errors::{InvalidArgument, exception};
use crate::process_bound::ProcessBound;
use crate::runtime::wait;

/// Ids and values.
type Piece<'py> = (Bound<'py, PyArray1<u64>>, Bound<'py, PyArray1<f32>>);

/// A scan of one connection.
#[pyclass(frozen, module = "evershard._evershard")]
#[derive(Debug)]
pub(crate) struct ScanHandle {
    /// `None` while a thread asks for the next piece.
    scan: ProcessBound<Mutex<Option<TableScan>>>,
}

#[pymethods]
impl ScanHandle {
    /// The next ids and values, or `None` at the end. After an error it goes on where it was.
    fn next_piece<'py>(&self, py: Python<'py>) -> PyResult<Option<Piece<'py>>> {
        let held = || self.scan.get().map(|scan| scan.lock().unwrap_or_else(PoisonError::into_inner));
        let mut scan = held()?.take().ok_or_else(|| {
            InvalidArgument::new_err("another thread reads from this scan, or was interrupted")
        })?;
        let read = wait(py, async {
            let piece = scan.next_piece().await;
            (scan, piece)
        });
        let (scan, piece) = read?;
        *held()? = Some(scan);
        let piece = piece.map_err(|error| exception(py, error))?;
        Ok(piece.map(|piece| (PyArray1::from_vec(py, piece.ids), PyArray1::from_vec(py, piece.values))))
    }
}

impl ScanHandle {
    pub(crate) fn new(scan: TableScan) -> Self {
        ScanHandle { scan: ProcessBound::new(Mutex::new(Some(scan))) }
    }
}
