//! A dense tensor as the Python half holds it: the client's handle; and how current a copy of one is.
//!
//! Not here: operations, which all go through a connection.

use evershard::{Encoding, Tensor, TensorDtype, TensorVersion};
use pyo3::prelude::*;

use crate::errors::{InvalidArgument, exception};
use crate::parts::{Span, out_of_range};
use crate::process_bound::ProcessBound;

/// A tensor of one connection.
#[pyclass(frozen, module = "evershard._evershard")]
#[derive(Debug)]
pub(crate) struct TensorHandle {
    #[pyo3(get)]
    name: String,
    #[pyo3(get)]
    number: u32,
    #[pyo3(get)]
    shape: Vec<u64>,
    #[pyo3(get)]
    dtype: &'static str,
    #[pyo3(get)]
    blocks: u64,
    /// Rows that begin and end with a block.
    #[pyo3(get)]
    aligned_rows: u64,
    /// How gradients pushed through it travel.
    #[pyo3(get)]
    encoding: &'static str,
    tensor: ProcessBound<Tensor>,
}

#[pymethods]
impl TensorHandle {
    /// The same tensor; gradients pushed through this handle travel as `encoding`.
    fn with_encoding(&self, encoding: &str) -> PyResult<TensorHandle> {
        let Some(encoding) = Encoding::ALL.into_iter().find(|known| known.name() == encoding) else {
            let names = Encoding::ALL.map(Encoding::name).join(", ");
            return Err(InvalidArgument::new_err(format!("encoding is one of {names}, not {encoding:?}")));
        };
        Ok(TensorHandle::new(self.tensor()?.clone().with_encoding(encoding)))
    }
}

impl TensorHandle {
    pub(crate) fn new(tensor: Tensor) -> Self {
        TensorHandle {
            name: tensor.name().to_owned(),
            number: tensor.number(),
            shape: tensor.shape().to_vec(),
            dtype: dtype_name(tensor.dtype()),
            blocks: tensor.layout().blocks(),
            aligned_rows: tensor.layout().aligned_rows(),
            encoding: tensor.encoding().name(),
            tensor: ProcessBound::new(tensor),
        }
    }

    /// # Errors
    /// This is a forked child.
    pub(crate) fn tensor(&self) -> PyResult<&Tensor> {
        self.tensor.get()
    }

    /// How many elements some rows have.
    ///
    /// # Errors
    /// The tensor does not have them; a forked child.
    pub(crate) fn elements_of(&self, py: Python<'_>, span: Span) -> PyResult<usize> {
        let tensor = self.tensor()?;
        let elements = tensor
            .layout()
            .elements_of(&(span.0..span.1))
            .map_err(|why| exception(py, out_of_range(tensor.name(), why)))?;
        usize::try_from(elements.end - elements.start)
            .map_err(|_| InvalidArgument::new_err(format!("tensor {:?} does not fit memory", self.name)))
    }
}

/// Its name in Python.
pub(crate) fn dtype_name(dtype: TensorDtype) -> &'static str {
    match dtype {
        TensorDtype::F32 => "float32",
        TensorDtype::F16 => "float16",
        TensorDtype::Bf16 => "bfloat16",
    }
}

/// As of when a tensor was pulled.
#[pyclass(frozen, module = "evershard._evershard", name = "TensorVersion")]
#[derive(Debug)]
pub(crate) struct TensorVersionHandle(pub(crate) TensorVersion);

#[pymethods]
impl TensorVersionHandle {
    /// Blocks that travelled with the pull that gave this version.
    #[getter]
    fn changed(&self) -> usize {
        self.0.changed_blocks()
    }

    fn __repr__(&self) -> String {
        format!("evershard.TensorVersion(changed={})", self.0.changed_blocks())
    }
}
