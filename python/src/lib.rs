//! The native half of the Python package `evershard`: the Rust client behind numpy arrays.
//!
//! It takes flat, C-contiguous arrays and gives flat arrays; shapes, pickling, fork and every word a user meets are in
//! the Python half, `python/evershard/`.
//!
//! Invariant: nothing waits with the GIL held.
//!
//! Not here: retries, routing, sessions (tools/client).

mod connection;
mod definitions;
mod errors;
mod parts;
mod pending;
mod process_bound;
mod routing;
mod runtime;
mod scan;
mod table_handle;
mod tensor_handle;
mod worker;

use pyo3::prelude::*;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The module `evershard._evershard`.
#[pymodule]
fn _evershard(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<connection::Connection>()?;
    module.add_class::<table_handle::TableHandle>()?;
    module.add_class::<scan::ScanHandle>()?;
    module.add_class::<tensor_handle::TensorHandle>()?;
    module.add_class::<tensor_handle::TensorVersionHandle>()?;
    module.add_class::<worker::WorkerHandle>()?;
    module.add_class::<pending::PendingPush>()?;
    module.add_class::<pending::Resume>()
}
