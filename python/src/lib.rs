//! The native half of the Python package `evershard`: the Rust client behind numpy arrays.
//!
//! It takes flat, C-contiguous arrays and gives flat arrays; shapes, pickling, fork and every word a user meets are in
//! the Python half, `python/evershard/`.
//!
//! Not here: retries, routing, sessions (tools/client).

mod runtime;

use pyo3::prelude::*;

/// The module `evershard._evershard`.
#[pymodule]
fn _evershard(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    Ok(())
}
